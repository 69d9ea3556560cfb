"""Any interleaving of requests, failures, lost answers and take-overs keeps the promise; without a guard one does not.

A step is (name, number, number); what the numbers mean and what must hold is in `lane_world`. The last tests turn
one guard off each and want a counter-example: a model that finds nothing then would prove nothing now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import Receipt, SourceState
from logferry.gateway.lanes import dedup, resolution, transaction
from logferry.gateway.lanes.dedup import Advance, Refusal, SourceTable, decide_write, open_session
from logferry.gateway.lanes.group_commit import PendingRequests
from logferry.gateway.lanes.receipts import ReceiptTable
from logferry.gateway.lanes.transaction import Draft, Outcome, WriteOutcome

from tests.model.lane_clients import Log, Violated
from tests.model.lane_world import World

OFTEN = ("send_and_deliver", "gather_and_commit", "send", "deliver", "gather", "commit")
FAULTS = (
    "cut",
    "fail",
    "fail",
    "late_commit",
    "open",
    "open",
    "give_away",
    "expire",
    "learn",
    "grow",
    "recreate",
    "restart_client",
    "beat",
    "forget",
    "pass_time",
    "steal",
    "outside",
)
Step = tuple[str, int, int]


def parsed(faults: set[str], clients: set[int], raw: bytes) -> tuple[list[int], list[Step]]:
    """Two bytes a step: a byte string is drawn fast, evenly, and shrinks well.

    Each example has some of the faults and clients only: so a rare chain of a few steps is not drowned by the rest.
    """
    names = [*OFTEN * 2, *(name for name in FAULTS * 2 if name in faults)]
    happened = [(names[x % len(names)], y % 16, y // 16) for x, y in zip(raw[::2], raw[1::2], strict=False)]
    return sorted(clients), happened


def worlds_of(first: int, last: int) -> st.SearchStrategy[tuple[list[int], list[Step]]]:
    return st.builds(
        parsed,
        st.sets(st.sampled_from(FAULTS)),
        st.sets(st.integers(first, last), min_size=1),
        st.binary(min_size=100, max_size=600),
    )


worlds = worlds_of(0, 3)
# A source of single chunks, and two that are appended to, one of them with the same partition key.
worlds_of_appends = worlds_of(3, 5)


def run(clients: list[int], happened: list[Step]) -> World:
    world = World(clients)
    for name, a, b in happened:
        getattr(world, name)(a, b)
    return world


@settings(max_examples=2000)
@given(worlds)
def test_the_promise_holds_whatever_happens(of: tuple[list[int], list[Step]]) -> None:
    world = run(*of)
    # When everything comes to rest, a last take-over finds the log and the states agree.
    for worker in world.workers:
        worker.finish("commit")
    world.open(0, 0)
    assert world.workers[0].is_open


@settings(max_examples=2000)
@given(worlds_of_appends)
def test_what_is_appended_is_recorded_once(of: tuple[list[int], list[Step]]) -> None:
    """An acknowledged request is in the log, a refused one is not, and a key is there once in its window."""
    world = run(*of)
    for worker in world.workers:
        worker.finish("commit")
    world.open(0, 0)


def test_without_failures_everything_is_recorded_and_acknowledged() -> None:
    """The reference is no excuse for a lane that records nothing."""
    requests = [step for client in range(4) for step in (("send_and_deliver", client, 0), ("gather_and_commit", 0, 0))]
    world = run([0, 1, 2, 3], requests * 20)
    recorded = [source.source_id for source, _, _ in world.log.incarnations[0]]
    assert sorted({source_id: recorded.count(source_id) for source_id in recorded}.values()) == [19, 20, 20, 20]
    assert not any(client.flying or client.todo for client in world.clients)


# ---- chains too rare to be drawn ------------------------------------------------------------------------------

A, B = 0, 1
ADD, RESOLVE = Draft.add, resolution.resolve

# Worker A's commit is fenced by B, and A takes the lane back unaware that another transaction was the first one in
# the topic that was recreated meanwhile.
BASE_MOVED = [
    ("send_and_deliver", 0, A),
    ("gather_and_commit", A, 0),
    ("recreate", 0, 0),
    ("learn", A, 0),
    ("learn", B, 0),
    ("send_and_deliver", 0, A),
    ("gather", A, 0),
    ("open", B, 0),
    ("commit", A, 0),
    ("send_and_deliver", 0, B),
    ("gather_and_commit", B, 0),
    ("open", A, 0),
]
# The same, and meanwhile a new session of the source, opened at B, wrote past what A had under way.
SESSION_WROTE_PAST = [
    ("send_and_deliver", 0, A),
    ("gather_and_commit", A, 0),
    ("send_and_deliver", 0, A),
    ("gather", A, 0),
    ("open", B, 0),
    ("commit", A, 0),
    ("restart_client", 0, 0),
    *[("send_and_deliver", 0, B), ("gather_and_commit", B, 0)] * 2,
    ("send_and_deliver", 0, B),
    ("gather_and_commit", B, 0),
    ("open", A, 0),
]


def no_base_in_replay(outcome: Outcome, replayed: SourceState | None, _: object = None) -> bool | None:
    if isinstance(outcome, WriteOutcome) and replayed is not None:
        replayed = replayed._replace(base=outcome.state.base)
    return RESOLVE(outcome, replayed)


def no_session_in_replay(outcome: Outcome, replayed: SourceState | None, _: object = None) -> bool | None:
    return RESOLVE(outcome, replayed) is not False


@pytest.mark.parametrize(
    ("client", "happened", "without"),
    [(0, BASE_MOVED, no_base_in_replay), (1, SESSION_WROTE_PAST, no_session_in_replay)],
)
def test_a_replay_is_not_taken_for_more_than_it_says(
    monkeypatch: pytest.MonkeyPatch, client: int, happened: list[Step], without: Callable[..., object]
) -> None:
    run([client], happened)
    monkeypatch.setattr(resolution, "resolve", without)
    with pytest.raises(Violated, match="acknowledged and lost"):
        run([client], happened)


# ---- the test of the test ------------------------------------------------------------------------------------


def no_base(state: SourceState, chunks: list[Chunk], session: int | None, *rest: Any) -> Advance | Refusal:
    return decide_write(state._replace(base=None), chunks, session, *rest)


def no_deduplication(state: SourceState, chunks: list[Chunk], session: int | None, *rest: Any) -> Advance | Refusal:
    verdict = decide_write(state, chunks, session, *rest)
    if isinstance(verdict, Advance) and verdict.duplicates:
        after = verdict.state._replace(recorded=max(chunks[-1].seqno, state.recorded or 0))
        return Advance(after, chunks, 0)
    return verdict


def any_session(state: SourceState, chunks: list[Chunk], session: int | None, *rest: Any) -> Advance | Refusal:
    return decide_write(state, chunks, None, *rest)


def same_session(state: SourceState, now_ms: int, token: str | None) -> SourceState:
    return open_session(state, now_ms, token)._replace(session=1)


def last_incarnation_only(draft: Draft, ids: dict[str, bytes]) -> str | None:
    return next((name for name, facts in draft.topics.items() if ids.get(name) != facts.id), None)


def refusals_stand(outcome: Outcome, replayed: SourceState | None, _: object = None) -> bool | None:
    return True if isinstance(outcome, Refusal) else RESOLVE(outcome, replayed)


def never_wait(draft: Draft, request: transaction.Request) -> tuple[Outcome, bool]:
    outcome, must_wait = ADD(draft, request)
    return outcome, must_wait and outcome.__class__ is not Refusal and bool(getattr(outcome, "written", True))


GUARDS: list[Any] = [
    (transaction, "decide_write", no_base),
    (transaction, "decide_write", no_deduplication),
    (transaction, "decide_write", any_session),
    (transaction, "open_session", same_session),
    (dedup, "_is_foreign", lambda state, token: False),
    (transaction, "refuse_opening", lambda *state, **admin: None),
    (dedup, "refuse_outside", lambda *state: None),
    (dedup, "use_session", lambda state: state),
    (resolution, "resolve", refusals_stand),
    (resolution, "resolve", lambda outcome, replayed, receipt: True),
    (resolution, "resolve", lambda outcome, replayed, receipt: False),
    (Draft, "touches", lambda draft, source: False),
    (Draft, "changed_topic", lambda draft, ids: None),
    (Draft, "changed_topic", last_incarnation_only),
    (Draft, "add", never_wait),
    (SourceTable, "pinned", lambda table, topic, key, topic_id: None),
    (Log, "fences", lambda log, epoch: False),
    # Its search takes most of a minute.
    pytest.param(PendingRequests, "fail_queued", lambda pending, touches: None, marks=pytest.mark.long),
]


def by_seqno(outcome: Outcome, replayed: SourceState | None, receipt: Receipt | None = None) -> bool | None:
    """As if a seqno meant one chunk, as it does where the writer gives it."""
    if isinstance(outcome, WriteOutcome) and outcome.receipt is not None and replayed is not None:
        return (replayed.recorded or 0) >= outcome.receipt.last_seqno
    return RESOLVE(outcome, replayed, receipt)


def from_one(state: SourceState, chunks: list[Chunk], now_ms: int, number: int, above: int = 0) -> Advance | Refusal:
    return dedup.decide_append(state, chunks, 0, number, above)


def same_number(state: SourceState, chunks: list[Chunk], now_ms: int, number: int, above: int = 0) -> Advance | Refusal:
    return dedup.decide_append(state, chunks, now_ms, 1, above)


APPEND_GUARDS: list[Any] = [
    (Draft, "_keep_receipt", lambda draft, request, receipt: None),
    (Draft, "_receipt", lambda draft, request: None),
    (resolution, "resolve", by_seqno),
    (resolution, "resolve", lambda outcome, replayed, receipt: False),
    (transaction, "decide_append", from_one),
    (transaction, "decide_append", same_number),
    (ReceiptTable, "expired", lambda table, before_ms: list(table._kept)),
    (Draft, "touches", lambda draft, source: False),
]


def search_for_a_counter_example(of: st.SearchStrategy[tuple[list[int], list[Step]]]) -> None:
    @settings(max_examples=40_000, derandomize=True, database=None, phases=[Phase.generate])
    @given(of)
    def search(of: tuple[list[int], list[Step]]) -> None:
        run(*of)

    with pytest.raises(Violated):
        search()


@pytest.mark.parametrize(("owner", "name", "without"), GUARDS)
def test_without_a_guard_a_counter_example_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, without: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, without)
    search_for_a_counter_example(worlds)


@pytest.mark.parametrize(("owner", "name", "without"), APPEND_GUARDS)
def test_without_a_guard_of_appends_a_counter_example_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, without: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, without)
    search_for_a_counter_example(worlds_of_appends)
