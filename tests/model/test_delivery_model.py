"""Push delivery as a model: workers that die between any two steps, receivers that lie, operators who change things.

A batch is its place and shape. A transaction writes the state from when it began, late as it may be; meanwhile the
worker continues. The receiver keeps what it took by token, per replay. Held, whatever happens:

* the same token always has the same place and shape, so the same bytes;
* within a replay what was taken covers the log once, in order, without a gap, up to the committed position.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from logferry.gateway.contract.delivery_state import DeliveryState
from logferry.gateway.delivery import progress

SHAPES = ("ndjson", "msgpack")


class DeliveryWorld(RuleBasedStateMachine):
    """``log``: the state records of the unit, the last one holds. ``sent``: replay and place → shape. ``writing``: the
    state that a transaction under way writes."""

    @initialize()
    def begin(self) -> None:
        self.shape, self.end, self.replay = SHAPES[0], 8, 0
        self.log = [progress.begun("id", b"t" * 16, 0, now_ms=1, created_ms=0, resumed=0)]
        self.wanted = progress.taken_over(self.log[-1])
        self.committed = self.log[-1]
        self.writing: DeliveryState | None = None
        self.sent: dict[tuple[int, int, int], str] = {}
        self.taken: dict[int, dict[tuple[int, int], str]] = {0: {}}
        self.starts = {0: 0}
        self.resumed = 0

    # ---- the worker -------------------------------------------------------------------------------------------------

    @rule(more=st.integers(1, 5))
    def chunks_are_written(self, more: int) -> None:
        self.end += more

    @precondition(lambda self: progress.may_plan(self.wanted, self.shape))
    @rule(size=st.integers(1, 6))
    def plan(self, size: int) -> None:
        start = progress.next_start(self.wanted)
        if start < self.end:
            self.wanted = progress.planned(self.wanted, min(self.end, start + size), self.shape)

    @precondition(lambda self: self.writing is None)
    @rule()
    def a_transaction_begins(self) -> None:
        self.writing = self.wanted

    @precondition(lambda self: self.writing is not None)
    @rule()
    def commit(self) -> None:
        assert self.writing is not None
        self.log.append(self.writing)
        self.committed, self.writing = self.writing, None

    @rule()
    def drop_plans(self) -> None:
        """As where the topic's id is another one."""
        self.wanted = progress.unplanned(self.wanted, self.committed)

    @precondition(lambda self: progress.is_sendable(self.wanted, self.committed))
    @rule(size=st.integers(1, 6))
    def the_subscription_changes_while_a_batch_is_retried(self, size: int) -> None:
        self.attempt(False, "again", "answers")
        self.shape = SHAPES[SHAPES[0] == self.shape]
        if progress.may_plan(self.wanted, self.shape):
            self.plan(size)
        self.writing = self.wanted
        self.commit()
        self.attempt(False, "again", "answers")

    @precondition(lambda self: progress.is_sendable(self.wanted, self.committed))
    @rule(
        arrives=st.booleans(),
        answer=st.sampled_from(("done", "again", "rejected", "split")),
        then=st.sampled_from(("answers", "dies", "replaced meanwhile")),
    )
    def attempt(self, arrives: bool, answer: str, then: str) -> None:
        """A receiver may not answer; it says done for what it takes alone, and rejects none of it."""
        state = self.wanted
        key = (state.replay, state.position, state.ends[0])
        assert self.sent.setdefault(key, state.shape) == state.shape, "the same token with other bytes"
        if then == "replaced meanwhile":
            self.the_worker_dies()
        if arrives or answer == "done":
            self._take(state)
        is_taken = (state.position, state.ends[0]) in self.taken[state.replay]
        if then == "dies":
            self.the_worker_dies()
        if then != "answers":
            return
        if answer == "done":
            self.wanted = progress.delivered(self.wanted)
        elif answer == "again":
            self.wanted = progress.failed(self.wanted, "500", 1)
        elif answer == "split" and not is_taken and self.wanted.ends[0] - self.wanted.position > 1:
            self.wanted = progress.halved(self.wanted, (self.wanted.position + self.wanted.ends[0] + 1) // 2)
        elif not is_taken:
            self.wanted = progress.stopped(self.wanted, "rejected", "422", 1)

    def _take(self, state: DeliveryState) -> None:
        """By the rule: what was taken is not taken twice."""
        taken, place = self.taken[state.replay], (state.position, state.ends[0])
        if place in taken:
            return
        reached = max((end for _, end in taken), default=self.starts[state.replay])
        assert place[0] == reached, f"{place} follows what is taken up to {reached}"
        taken[place] = state.shape

    @rule()
    def the_worker_dies(self) -> None:
        """The next one continues by the log."""
        self.wanted = progress.taken_over(self.log[-1])
        self.committed, self.writing = self.log[-1], None

    # ---- operators --------------------------------------------------------------------------------------------------

    @rule(shape=st.sampled_from(SHAPES))
    def the_subscription_changes(self, shape: str) -> None:
        self.shape = shape

    @precondition(lambda self: self.wanted.stop is not None)
    @rule()
    def resume(self) -> None:
        self.resumed = max(self.resumed, self.wanted.resumed) + 1
        self.wanted = progress.resumed(self.wanted, self.resumed)

    @precondition(lambda self: self.replay < 3 and self.committed.replay == self.replay)
    @rule(data=st.data())
    def replay_from(self, data: st.DataObject) -> None:
        self.replay += 1
        position = data.draw(st.integers(0, self.end))
        self.starts[self.replay], self.taken[self.replay] = position, {}
        self.wanted = progress.replayed(self.wanted, self.replay, b"t" * 16, position)
        self.log.append(self.wanted)
        self.committed, self.writing = self.wanted, None

    # ---- what holds -------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        """All before the committed position was taken, in one piece."""
        if not hasattr(self, "log"):
            return
        state = self.log[-1]
        taken = self.taken[state.replay]
        reached = max((end for _, end in taken), default=self.starts[state.replay])
        assert state.position <= reached

    @invariant()
    def states_survive_their_encoding(self) -> None:
        if hasattr(self, "log"):
            assert DeliveryState.decode(self.wanted.encode()) == self.wanted


TestDelivery = DeliveryWorld.TestCase
TestDelivery.settings = settings(max_examples=300, stateful_step_count=40)
