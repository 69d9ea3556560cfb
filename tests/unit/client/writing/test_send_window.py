"""The decisions of a writer against a reference of the gateway: every order of arrivals and answers, and every fate."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from logferry.client.transport.source_request import Outcome
from logferry.client.writing.send_window import Limits, SendJob

from tests.support.sender import Sender, opened

FATES = ("", "cut after", "cut before", "503")


@pytest.mark.parametrize("fates", list(itertools.product(FATES, repeat=3)), ids="-".join)
def test_three_requests_in_every_order_of_arrival_and_answer(fates: tuple[str, ...]) -> None:
    for arrivals, answers in itertools.product(itertools.permutations(range(3)), repeat=2):
        sender = opened()
        sender.write(None)
        sender.turn()
        sender.write(None, None, None)
        jobs = [job for job in (sender.begin() for _ in range(3)) if job is not None]
        assert len(jobs) == 3
        outcomes = {}
        for number in arrivals:
            outcomes[number] = sender.arrive(jobs[number], fates[number])
        for number in answers:
            sender.window.take(jobs[number], outcomes[number], sender.now)
            sender.check()
        sender.drain()
        sender.assert_exact()


def test_one_request_alone_until_the_first_is_acknowledged() -> None:
    sender = opened()
    sender.write(None, None, None)
    first = sender.begin()
    assert first is not None
    assert sender.begin() is None
    sender.window.take(first, sender.arrive(first), sender.now)
    assert sender.begin() is not None
    assert sender.begin() is not None


def test_a_request_begins_when_the_one_before_it_has_left() -> None:
    sender = opened()
    sender.write(None)
    sender.turn()
    sender.write(None, None)
    first = sender.window.next_job(sender.now)
    assert first is not None
    assert sender.window.next_job(sender.now) is None
    sender.window.sent(first)
    assert sender.window.next_job(sender.now) is not None


def test_small_chunks_gather_while_a_request_is_under_way() -> None:
    sender = opened(Limits(batch_bytes=1000))
    sender.write(None)
    first = sender.begin()
    sender.write(None, None)
    assert first is not None
    assert sender.begin() is None
    sender.window.take(first, sender.arrive(first), sender.now)
    second = sender.begin()
    assert second is not None
    assert second.batch is not None
    assert [chunk.seqno for chunk in second.batch.chunks] == [2, 3]


def test_what_has_an_unknown_outcome_goes_again_alone_with_the_same_bytes() -> None:
    sender = opened()
    sender.write(None)
    sender.turn()
    sender.write(None, None)
    first, second = sender.begin(), sender.begin()
    assert first is not None
    assert second is not None
    assert first.batch is not None
    body = first.batch.body()
    sender.window.take(first, sender.arrive(first, "cut before"), sender.now)
    sender.window.take(second, sender.arrive(second), sender.now)
    sender.write(None)
    sender.now += 60
    again = sender.begin()
    assert again is not None
    assert again.batch is not None
    assert again.batch.body() == body
    assert sender.begin() is None
    sender.window.take(again, sender.arrive(again), sender.now)
    sender.drain()
    sender.assert_exact()


def test_retry_after_is_waited_for() -> None:
    sender = opened()
    sender.write(None)
    sender.turn("429")
    due = sender.window.due()
    assert due is not None
    assert due >= sender.now + 1
    assert sender.window.next_job(sender.now + 0.9) is None
    sender.drain()
    sender.assert_exact()


# ---- seqnos -----------------------------------------------------------------------------------------------------


def test_seqnos_count_on_from_what_is_recorded() -> None:
    sender = opened()
    sender.write(None, None)
    sender.drain()
    assert [(chunk.seqno, chunk.prev) for chunk in sender.stored.chunks] == [(1, None), (2, 1)]
    again = Sender(gateway=sender.gateway)
    again.turn()
    assert again.window.recorded == 2
    again.write(None)
    again.write(40)
    again.write(None)
    again.drain()
    assert [(chunk.seqno, chunk.prev) for chunk in sender.stored.chunks[2:]] == [(3, 2), (40, 3), (41, 40)]


def test_what_was_recorded_before_is_a_duplicate() -> None:
    sender = opened()
    sender.write(10, 20, 30)
    sender.drain()
    again = Sender(gateway=sender.gateway)
    again.turn()
    again.write(10, 20, 30, 40)
    again.drain()
    assert [chunk.seqno for chunk in sender.stored.chunks] == [10, 20, 30, 40]
    assert again.window.settled_count == 4


@pytest.mark.parametrize("after", [None, 41])
def test_a_new_chunk_after_one_that_was_recorded_before_names_what_is_recorded(after: int | None) -> None:
    sender = opened()
    sender.write(10, 20, 30)
    sender.drain()
    again = Sender(gateway=sender.gateway)
    again.turn()
    again.write(10, after, None)
    again.drain()
    found = [(chunk.seqno, chunk.prev) for chunk in sender.stored.chunks[3:]]
    assert found == [(after or 31, 30), ((after or 31) + 1, after or 31)]


@pytest.mark.parametrize("seqno", [5, 4, -1, 2**63, "7"])
def test_a_seqno_that_cannot_be(seqno: int) -> None:
    sender = opened()
    sender.write(5)
    with pytest.raises(ValueError, match="seqno"):
        sender.write(seqno)
    sender.drain()
    assert sender.stored.recorded == 5


def test_the_buffer_is_bounded_and_takes_one_large_chunk_alone() -> None:
    sender = opened(Limits(buffer_bytes=10_000))
    assert sender.window.has_room(1_000_000)
    sender.window.put(b"x" * 5000, None, 0, {})
    assert sender.window.has_room(4000)
    assert not sender.window.has_room(5000)
    sender.drain()
    assert sender.window.has_room(5000)


@pytest.mark.parametrize("seed", range(300))
def test_any_course_of_events(seed: int) -> None:
    """Requests arrive and are answered in any order, late, or never; the reference keeps the rule of a chunk."""
    rng = random.Random(seed)
    sender = Sender(Limits(batch_bytes=rng.choice((1, 300, 1000)), in_flight=rng.randint(1, 4)))
    flying: list[Callable[[], None]] = []

    def fly(job: SendJob) -> None:
        fate = rng.choice(("", "", "", "", "503", "500 after", "cut after", "cut before", "late"))
        if fate == "late":
            sender.window.take(job, sender.arrive(job, "cut before"), sender.now)
            flying.append(lambda: sender.arrive(job) and None)
        else:
            flying.append(lambda: answer(job, sender.arrive(job, fate)))

    def answer(job: SendJob, outcome: Outcome) -> None:
        flying.append(lambda: sender.window.take(job, outcome, sender.now))

    for _ in range(400):
        if rng.random() < 0.4 and sender.window.session is not None and len(sender.written) < 60:
            sender.write(None)
        job = sender.begin() if rng.random() < 0.6 else None
        if job is not None:
            fly(job)
        if flying and rng.random() < 0.5:
            flying.pop(rng.randrange(len(flying)))()
        sender.now += rng.choice((0.0, 0.01, 0.5))
        if sender.window.failure is None:
            sender.check()
    while flying:
        flying.pop(0)()
    assert sender.window.failure is None or sender.window.failure.type == "superseded"
    sender.check()
    sender.drain()
    if sender.window.failure is None:
        sender.assert_exact()
    stored = sender.stored.content()
    assert stored == b"".join(sender.written[: len(sender.stored.chunks)])
