"""The window of a source's requests against a model of the gateway: requests and answers that are lost, late, doubled
and reordered.

What must hold after each step: everything up to what the writer calls recorded is stored, nothing above what it calls
unknown is. At the end: what was put is stored once, in order, unless another writer took the source over.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from logferry.client.transport.source_request import Outcome
from logferry.client.writing.send_window import Limits, SendJob

from tests.support.sender import Sender

FATES = ("", "", "", "cut after", "cut before", "500 after", "500 before", "503", "429")


class Requests(RuleBasedStateMachine):
    """``moving``: those that are on their way to the gateway; ``answered``: on their way back."""

    @initialize(in_flight=st.integers(1, 5), batch_bytes=st.sampled_from((1, 300, 1000)), limit=st.booleans())
    def begin(self, in_flight: int, batch_bytes: int, limit: bool) -> None:
        self.sender = Sender(Limits(batch_bytes=batch_bytes, in_flight=in_flight))
        self.sender.gateway.largest_request_chunks = 2 if limit else None
        self.moving: list[SendJob] = []
        self.answered: list[tuple[SendJob, Outcome]] = []
        self.copies: list[SendJob] = []  # of requests, that arrive once more
        self.has_rival = False  # another session was opened

    @precondition(lambda self: self.sender.window.session is not None and self.sender.window.failure is None)
    @rule(count=st.integers(1, 4))
    def chunks_are_put(self, count: int) -> None:
        self.sender.write(*[None] * count)

    @rule(sent=st.booleans())
    def a_request_begins(self, sent: bool) -> None:
        job = self.sender.window.next_job(self.sender.now)
        if job is not None:
            self.moving.append(job)
            if sent:
                self.sender.window.sent(job)

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def a_body_leaves(self, data: st.DataObject) -> None:
        self.sender.window.sent(data.draw(st.sampled_from(self.moving)))

    @precondition(lambda self: self.moving)
    @rule(data=st.data(), fate=st.sampled_from(FATES), again=st.booleans())
    def a_request_arrives(self, data: st.DataObject, fate: str, again: bool) -> None:
        job = self.moving.pop(data.draw(st.integers(0, len(self.moving) - 1)))
        self.sender.window.sent(job)
        self.answered.append((job, self.sender.arrive(job, fate)))
        if again:
            self.copies.append(job)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def a_copy_arrives_late(self, data: st.DataObject) -> None:
        """Nobody hears its answer. That of an opening ends the session."""
        job = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        self.sender.arrive(job)
        self.has_rival = self.has_rival or job.slot is None

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def the_writer_gives_a_request_up(self, data: st.DataObject) -> None:
        """It arrives all the same, later."""
        job = self.moving.pop(data.draw(st.integers(0, len(self.moving) - 1)))
        lost = self.sender.lost(job)
        self.copies.append(job)
        self.answered.append((job, lost))

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def an_answer_comes(self, data: st.DataObject) -> None:
        job, outcome = self.answered.pop(data.draw(st.integers(0, len(self.answered) - 1)))
        self.sender.window.take(job, outcome, self.sender.now)

    @precondition(lambda self: self.sender.window.session is not None)
    @rule()
    def another_writer_takes_over(self) -> None:
        self.has_rival = True
        Sender(gateway=self.sender.gateway).turn()

    @rule(later_s=st.sampled_from((0.05, 1.0, 30.0)))
    def time_passes(self, later_s: float) -> None:
        self.sender.now += later_s

    @invariant()
    def the_reports_are_true(self) -> None:
        if hasattr(self, "sender"):
            self.sender.check()
            stored = self.sender.stored.content()
            assert b"".join(self.sender.written).startswith(stored)

    def teardown(self) -> None:
        if not hasattr(self, "sender"):
            return
        for job in self.moving:
            self.sender.window.take(job, self.sender.arrive(job), self.sender.now)
        for job, outcome in self.answered:
            self.sender.window.take(job, outcome, self.sender.now)
        self.sender.drain()
        failure = self.sender.window.failure
        if failure is None:
            self.sender.assert_exact()
        else:
            assert self.has_rival
            assert failure.type == "superseded"
        self.sender.check()


TestRequests = Requests.TestCase
TestRequests.settings = settings(
    max_examples=300,
    derandomize=True,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
