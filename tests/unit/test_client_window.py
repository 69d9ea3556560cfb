"""The decisions of a writer against a reference of the gateway: every order of arrivals and answers, and every fate."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from logferry.client.errors import Rejected, Superseded
from logferry.client.transport.cluster import Cluster
from logferry.client.transport.connections import NoAnswer
from logferry.client.transport.redirects import Outcome
from logferry.client.transport.responses import Answer
from logferry.client.writing.requests import Target, target
from logferry.client.writing.send_window import OWN_OPENING_S, Job, Limits, Window
from model.fake_gateway import FakeGateway, Stored

ONE_A_BATCH = Limits(batch_bytes=1, in_flight=4)


class Line:
    """A window and the gateway that its requests go to; ``now`` goes on as far as it has to wait."""

    def __init__(self, limits: Limits = ONE_A_BATCH, gateway: FakeGateway | None = None, name: str = "s") -> None:
        self.gateway = gateway or FakeGateway()
        self.gateway.prev_always = False
        self.window = Window(limits)
        self.target: Target = target(Cluster(["http://gw"], None), "t", name, None, False, {})
        self.name = name
        self.now = 0.0
        self.written: list[bytes] = []

    @property
    def stored(self) -> Stored:
        return self.gateway.sources.get(self.name, Stored())

    def write(self, *seqnos: int | None) -> None:
        for seqno in seqnos:
            data = b"chunk %d\n" % len(self.written)
            self.window.put(data, seqno, 0, {})
            self.written.append(data)

    def begin(self) -> Job | None:
        """The next request, its body sent."""
        job = self.window.next_job(self.now)
        if job is not None:
            self.window.sent(job)
        else:
            due = self.window.due()
            assert due is None or due > self.now, "whoever asks again when it is due would ask without end"
        return job

    def arrive(self, job: Job, fault: str = "") -> Outcome:
        """What becomes of the request at the gateway."""
        self.gateway.faults.clear()
        self.gateway.faults.append(fault)
        trip, headers, body = self.target.request(job)
        try:
            outcome = trip.answered(self.gateway(trip.url, headers, body))
        except NoAnswer as error:
            return trip.unanswered(str(error))
        assert outcome is not None
        return self.target.learned(job, outcome)

    def turn(self, fault: str = "") -> Job:
        """One request, from its beginning to its answer; waits for it as long as it has to be waited for."""
        job = self.begin()
        if job is None:
            due = self.window.due()
            assert due is not None, "it waits for nothing"
            self.now = max(self.now, due)
            job = self.begin()
        assert job is not None
        self.window.take(job, self.arrive(job, fault), self.now)
        return job

    def drain(self) -> None:
        """Until all is acknowledged, or the writer has failed."""
        for _ in range(1000):
            if self.window.failure is not None or self.window.settled_count == self.window.put_count:
                return
            self.turn()
        raise AssertionError("it does not come to an end")

    def check(self) -> None:
        """What is told is true: all up to ``recorded`` is stored, nothing above what may be."""
        stored = [chunk.seqno for chunk in self.stored.chunks]
        recorded = self.window.recorded or 0
        assert recorded <= (self.stored.recorded or 0)
        above = [seqno for seqno in stored if seqno > recorded]
        unknown_to = self.window.unknown_to()
        assert not above or (unknown_to is not None and max(above) <= unknown_to)

    def assert_exact(self) -> None:
        assert self.stored.content() == b"".join(self.written)
        assert self.window.recorded == self.stored.recorded
        assert self.window.unknown_to() is None
        assert self.window.buffered_bytes == 0


def opened(limits: Limits = ONE_A_BATCH) -> Line:
    line = Line(limits)
    line.turn()
    return line


FATES = ("", "cut after", "cut before", "503")


@pytest.mark.parametrize("fates", list(itertools.product(FATES, repeat=3)), ids="-".join)
def test_three_requests_in_every_order_of_arrival_and_answer(fates: tuple[str, ...]) -> None:
    for arrivals, answers in itertools.product(itertools.permutations(range(3)), repeat=2):
        line = opened()
        line.write(None)
        line.turn()
        line.write(None, None, None)
        jobs = [line.begin() for _ in range(3)]
        assert all(jobs)
        outcomes = {}
        for number in arrivals:
            outcomes[number] = line.arrive(jobs[number], fates[number])
        for number in answers:
            line.window.take(jobs[number], outcomes[number], line.now)
            line.check()
        line.drain()
        line.assert_exact()


def test_one_request_alone_until_the_first_is_acknowledged() -> None:
    line = opened()
    line.write(None, None, None)
    first = line.begin()
    assert first is not None
    assert line.begin() is None
    line.window.take(first, line.arrive(first), line.now)
    assert line.begin() is not None
    assert line.begin() is not None


def test_a_request_begins_when_the_one_before_it_has_left() -> None:
    line = opened()
    line.write(None)
    line.turn()
    line.write(None, None)
    first = line.window.next_job(line.now)
    assert first is not None
    assert line.window.next_job(line.now) is None
    line.window.sent(first)
    assert line.window.next_job(line.now) is not None


def test_small_chunks_gather_while_a_request_is_under_way() -> None:
    line = opened(Limits(batch_bytes=1000))
    line.write(None)
    first = line.begin()
    line.write(None, None)
    assert first is not None
    assert line.begin() is None
    line.window.take(first, line.arrive(first), line.now)
    second = line.begin()
    assert second is not None
    assert second.batch is not None
    assert [chunk.seqno for chunk in second.batch.chunks] == [2, 3]


def test_what_has_an_unknown_outcome_goes_again_alone_with_the_same_bytes() -> None:
    line = opened()
    line.write(None)
    line.turn()
    line.write(None, None)
    first, second = line.begin(), line.begin()
    assert first is not None
    assert second is not None
    assert first.batch is not None
    body = first.batch.body()
    line.window.take(first, line.arrive(first, "cut before"), line.now)
    line.window.take(second, line.arrive(second), line.now)
    line.write(None)
    line.now += 60
    again = line.begin()
    assert again is not None
    assert again.batch is not None
    assert again.batch.body() == body
    assert line.begin() is None
    line.window.take(again, line.arrive(again), line.now)
    line.drain()
    line.assert_exact()


def test_retry_after_is_waited_for() -> None:
    line = opened()
    line.write(None)
    line.turn("429")
    due = line.window.due()
    assert due is not None
    assert due >= line.now + 1
    assert line.window.next_job(line.now + 0.9) is None
    line.drain()
    line.assert_exact()


# ---- seqnos -----------------------------------------------------------------------------------------------------


def test_seqnos_count_on_from_what_is_recorded() -> None:
    line = opened()
    line.write(None, None)
    line.drain()
    assert [(chunk.seqno, chunk.prev) for chunk in line.stored.chunks] == [(1, None), (2, 1)]
    again = Line(gateway=line.gateway)
    again.turn()
    assert again.window.recorded == 2
    again.write(None)
    again.write(40)
    again.write(None)
    again.drain()
    assert [(chunk.seqno, chunk.prev) for chunk in line.stored.chunks[2:]] == [(3, 2), (40, 3), (41, 40)]


def test_what_was_recorded_before_is_a_duplicate() -> None:
    line = opened()
    line.write(10, 20, 30)
    line.drain()
    again = Line(gateway=line.gateway)
    again.turn()
    again.write(10, 20, 30, 40)
    again.drain()
    assert [chunk.seqno for chunk in line.stored.chunks] == [10, 20, 30, 40]
    assert again.window.settled_count == 4


@pytest.mark.parametrize("seqno", [5, 4, -1, 2**63, "7"])
def test_a_seqno_that_cannot_be(seqno: int) -> None:
    line = opened()
    line.write(5)
    with pytest.raises(ValueError, match="seqno"):
        line.write(seqno)
    line.drain()
    assert line.stored.recorded == 5


def test_the_buffer_is_bounded_and_takes_one_large_chunk_alone() -> None:
    line = opened(Limits(buffer_bytes=10_000))
    assert line.window.has_room(1_000_000)
    line.window.put(b"x" * 5000, None, 0, {})
    assert line.window.has_room(4000)
    assert not line.window.has_room(5000)
    line.drain()
    assert line.window.has_room(5000)


# ---- the end ----------------------------------------------------------------------------------------------------


def test_a_refused_chunk_ends_it_when_all_before_it_is_acknowledged() -> None:
    line = opened()
    line.gateway.largest_chunk_bytes = 100
    line.write(None)
    line.turn()
    line.write(None)
    line.window.put(b"x" * 200, None, 0, {})
    line.write(None)
    good, bad = line.begin(), line.begin()
    assert good is not None
    assert bad is not None
    answered = line.arrive(good)
    line.window.take(bad, line.arrive(bad), line.now)
    assert line.window.failure is None
    line.window.take(good, answered, line.now)
    error = line.window.error()
    assert isinstance(error, Rejected)
    assert (error.kind, error.status, error.recorded_seqno, error.unknown_to) == ("too-large", 413, 2, None)
    assert line.window.next_job(line.now) is None
    assert line.stored.recorded == 2


def test_a_request_that_is_too_large_is_cut_in_two() -> None:
    line = opened(Limits(batch_bytes=100_000))
    line.write(*[None] * 40)
    job = line.begin()
    assert job is not None
    too_large = Answer(413, "too-large", "over the limit of a request")
    line.window.take(job, Outcome(too_large, None), line.now)
    line.drain()
    line.assert_exact()
    assert sum(url.endswith("chunks?session=1") for url, _ in line.gateway.requests) > 1


def test_superseded_by_another_writer() -> None:
    line = opened()
    line.write(None)
    line.drain()
    other = Line(gateway=line.gateway)
    other.turn()
    line.write(None, None)
    line.drain()
    error = line.window.error()
    assert isinstance(error, Superseded)
    assert (error.recorded_seqno, error.unknown_to) == (1, None)
    other.write(None)
    other.drain()
    assert [chunk.seqno for chunk in line.stored.chunks] == [1, 2]


def test_superseded_with_an_answer_lost_says_what_is_not_known() -> None:
    line = opened()
    line.write(None)
    line.drain()
    line.write(None, None)
    line.turn("cut after")
    other = Line(gateway=line.gateway)
    other.turn()
    assert other.window.recorded == 2
    line.drain()
    error = line.window.error()
    assert isinstance(error, Superseded)
    assert (error.recorded_seqno, error.unknown_to) == (1, 2)


def late_opening(at: float) -> Line:
    """Superseded by an opening of its own that the gateway carried out ``at`` that time."""
    line = Line()
    lost = line.begin()
    assert lost is not None
    line.window.take(lost, line.arrive(lost, "cut before"), line.now)
    line.turn()
    line.write(None)
    line.turn("cut after")
    line.now += at
    line.arrive(lost)
    return line


def test_its_own_opening_that_comes_late_does_not_supersede_it() -> None:
    line = late_opening(1)
    line.write(None)
    line.drain()
    assert line.window.failure is None
    line.assert_exact()


def test_opened_once_more_it_begins_with_one_request_again() -> None:
    line = late_opening(1)
    line.write(None, None)
    while line.gateway.sources["s"].session != line.window.session:
        line.turn()
    line.gateway.sources["s"].recorded = None
    first = line.begin()
    assert first is not None
    assert line.begin() is None


def test_an_opening_that_comes_very_late_is_another_s() -> None:
    line = late_opening(OWN_OPENING_S + 10)
    line.drain()
    assert isinstance(line.window.error(), Superseded)


def test_what_others_wrote_meanwhile_is_not_taken_for_its_own() -> None:
    line = late_opening(1)
    other = Line(gateway=line.gateway)
    other.turn()
    other.write(50)
    other.drain()
    line.write(None)
    line.drain()
    error = line.window.error()
    assert isinstance(error, Superseded)
    assert [chunk.seqno for chunk in line.stored.chunks] == [1, 50]


@pytest.mark.parametrize("seed", range(300))
def test_any_course_of_events(seed: int) -> None:
    """Requests arrive and are answered in any order, late, or never; the reference keeps the rule of a chunk."""
    rng = random.Random(seed)
    line = Line(Limits(batch_bytes=rng.choice((1, 300, 1000)), in_flight=rng.randint(1, 4)))
    flying: list[Callable[[], None]] = []

    def fly(job: Job) -> None:
        fate = rng.choice(("", "", "", "", "503", "500 after", "cut after", "cut before", "late"))
        if fate == "late":
            line.window.take(job, line.arrive(job, "cut before"), line.now)
            flying.append(lambda: line.arrive(job) and None)
        else:
            flying.append(lambda: answer(job, line.arrive(job, fate)))

    def answer(job: Job, outcome: Outcome) -> None:
        flying.append(lambda: line.window.take(job, outcome, line.now))

    for _ in range(400):
        if rng.random() < 0.4 and line.window.session is not None and len(line.written) < 60:
            line.write(None)
        job = line.begin() if rng.random() < 0.6 else None
        if job is not None:
            fly(job)
        if flying and rng.random() < 0.5:
            flying.pop(rng.randrange(len(flying)))()
        line.now += rng.choice((0.0, 0.01, 0.5))
        if line.window.failure is None:
            line.check()
    while flying:
        flying.pop(0)()
    assert line.window.failure is None or line.window.failure.type == "superseded"
    line.check()
    line.drain()
    if line.window.failure is None:
        line.assert_exact()
    stored = line.stored.content()
    assert stored == b"".join(line.written[: len(line.stored.chunks)])
