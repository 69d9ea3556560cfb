"""What a transaction is put together from, the answer to each request, and what a replay says of a lost answer."""

from __future__ import annotations

import pytest
from logferry.gateway.contract.chunk import Chunk, chunk_of_record
from logferry.gateway.contract.names import partition_of
from logferry.gateway.contract.source_state import Heartbeat, SourceIdentity, SourceState
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import Refusal, SourceTable
from logferry.gateway.lanes.resolution import resolve
from logferry.gateway.lanes.transaction import (
    Draft,
    ForgetOutcome,
    ForgetSource,
    HeartbeatOutcome,
    OpenSession,
    Outcome,
    RecordHeartbeat,
    SessionOutcome,
    WriteChunks,
    WriteOutcome,
)
from logferry.gateway.limits import FairShare

from tests.support.lane_requests import NOW, TOPIC, committed, write

ID = TOPIC.id
OTHER_ID = bytes(16)
A = SourceIdentity("dc1.t", None, "a")
B = SourceIdentity("dc1.t", None, "b")


def written(outcome: Outcome) -> tuple[int | None, int, int]:
    assert isinstance(outcome, WriteOutcome)
    return outcome.state.recorded, outcome.written, outcome.duplicates


# ---- the number of sources ---------------------------------------------------------------------------------


def test_no_more_sources_than_allowed() -> None:
    """The known ones are served as before, also in a new incarnation of their topic; what is forgotten makes room."""
    table = SourceTable(FairShare(2))
    committed(table, write(A, (1, None)))
    draft = Draft(table, NOW)
    assert written(draft.add(write(B, (1, None)))[0]) == (1, 1, 0)
    c = SourceIdentity("dc1.t", None, "c")
    for request in (write(c, (1, None)), OpenSession(TOPIC, c), RecordHeartbeat(TOPIC, c, None, Heartbeat(NOW))):
        refused, must_wait = draft.add(request)
        assert isinstance(refused, Refusal)
        assert (refused.kind, must_wait) == ("overloaded", False)
    assert not draft.touches(c)
    for known in (A, B):
        assert written(draft.add(write(known, (2, 1)))[0]) == (2, 1, 0)
    recreated = TOPIC._replace(id=OTHER_ID)
    committed(table, write(B, (1, None)))
    assert written(Draft(table, NOW).add(write(A, (1, None), topic=recreated))[0]) == (1, 1, 0)
    assert isinstance(Draft(table, NOW).add(write(c, (1, None)))[0], Refusal)
    committed(table, ForgetSource(TOPIC, A))
    assert written(Draft(table, NOW).add(write(c, (1, None)))[0]) == (1, 1, 0)


def test_a_token_leaves_room_for_the_sources_of_others() -> None:
    """And a long key counts as several sources, since it is kept in memory as long as the source."""
    table = SourceTable(FairShare(10))

    def opening(number: int, token: str | None, key: str | None = None) -> OpenSession:
        return OpenSession(TOPIC, SourceIdentity("dc1.t", key, f"{token}-{number}"), token=token)

    outcomes = [committed(table, opening(number, "greedy"))[0] for number in range(10)]
    taken = sum(isinstance(outcome, SessionOutcome) for outcome in outcomes)
    assert 7 <= taken < 10
    refused = next(outcome for outcome in outcomes if isinstance(outcome, Refusal))
    assert (refused.kind, f"{taken} of this token" in refused.detail) == ("overloaded", True)
    assert isinstance(committed(table, opening(0, "other"))[0], SessionOutcome)
    # An administrator takes a source over: it counts for that token now.
    committed(table, OpenSession(TOPIC, SourceIdentity("dc1.t", None, "greedy-0"), token="other", is_admin=True))
    assert (table.shares.of_token("greedy"), table.shares.of_token("other")) == (taken - 1, 2)
    committed(table, *(ForgetSource(TOPIC, SourceIdentity("dc1.t", None, f"greedy-{n}")) for n in range(10)))
    committed(table, ForgetSource(TOPIC, SourceIdentity("dc1.t", None, "other-0")))
    assert table.shares.used == 0
    committed(table, opening(1, "long", "k" * 512), opening(2, "long", "k" * 512))
    assert (len(table), table.shares.used) == (2, 6)


# ---- what is in a draft ------------------------------------------------------------------------------------


def test_records_and_states_stand_in_the_draft_together() -> None:
    draft = Draft(SourceTable(), NOW)
    chunk = Chunk(7, 5, 123, {"level": "warn"}, b"line\n")
    assert draft.is_empty()
    outcome, must_wait = draft.add(WriteChunks(TOPIC, A, None, [chunk], 5))
    assert isinstance(outcome, WriteOutcome)
    assert must_wait
    partition = partition_of("a", 4)
    state = SourceState(ID, partition, 7, 5, 0, NOW)
    assert outcome.state == state
    assert draft.states == {A.state_key(): state.encode()}
    [(key, value, headers)] = draft.records(("dc1.t", partition))
    assert key == b"a"
    assert chunk_of_record(value or b"", headers) == chunk
    assert (draft.size_bytes, draft.topics, draft.is_empty()) == (5, {"dc1.t": TOPIC}, False)


def test_created_defaults_to_the_time_of_recording() -> None:
    draft = Draft(SourceTable(), NOW)
    draft.add(write(A, (7, None)))
    [[(_, value, headers)]] = map(draft.records, draft.chunks)
    assert chunk_of_record(value or b"", headers).created_ms == NOW


def test_spans_count_the_records_of_one_partition() -> None:
    one_partition = TOPIC._replace(partitions=1)
    draft = Draft(SourceTable(), NOW)
    outcomes = [
        draft.add(write(A, (1, None), (2, 1), topic=one_partition))[0],
        draft.add(write(B, (1, None), topic=one_partition))[0],
        draft.add(write(A, (2, 1), topic=one_partition))[0],
        draft.add(write(A, (2, 1), (3, 2), topic=one_partition))[0],
    ]
    assert [one.span for one in outcomes if isinstance(one, WriteOutcome)] == [(0, 1), (2, 2), None, (3, 3)]
    assert [value for _, value, _ in draft.records(("dc1.t", 0))] == [b"1", b"2", b"1", b"3"]


def test_later_requests_are_judged_by_what_was_drafted_before() -> None:
    draft = Draft(SourceTable(), NOW)
    assert written(draft.add(write(A, (5, None)))[0]) == (5, 1, 0)
    assert written(draft.add(write(A, (9, 5)))[0]) == (9, 1, 0)
    gap, must_wait = draft.add(write(A, (20, 15)))
    assert gap == Refusal("gap", "chunk 0: prev 15, but 9 is recorded", 9)
    assert must_wait, "it rests on what may still be undone"


def test_a_duplicate_of_what_is_under_way_waits_for_it() -> None:
    draft = Draft(SourceTable(), NOW)
    draft.add(write(A, (5, None)))
    outcome, must_wait = draft.add(write(A, (5, None)))
    assert written(outcome) == (5, 0, 1)
    assert must_wait


def test_what_rests_on_committed_states_alone_need_not_wait() -> None:
    table = SourceTable()
    committed(table, write(A, (5, None)))
    draft = Draft(table, NOW)
    draft.add(write(B, (1, None)))
    outcome, must_wait = draft.add(write(A, (5, None)))
    assert (written(outcome), must_wait) == ((5, 0, 1), False)
    refusal, must_wait = draft.add(write(A, (20, 15)))
    assert isinstance(refusal, Refusal)
    assert not must_wait
    assert (draft.touches(A), draft.touches(B)) == (False, True)


def test_a_refused_or_duplicate_request_leaves_no_trace() -> None:
    table = SourceTable()
    committed(table, write(A, (5, 3)))
    draft = Draft(table, NOW)
    for request in (write(A, (20, 15)), write(A, (5, 3)), write(A, (2, None)), write(A, (6, None), session=1)):
        draft.add(request)
    assert draft.is_empty()
    assert (draft.chunks, draft.topics, draft.size_bytes) == ({}, {}, 0)


def test_a_session_opened_in_the_draft_refuses_the_older_one_behind_it() -> None:
    table = SourceTable()
    [opened] = committed(table, OpenSession(TOPIC, A))
    assert isinstance(opened, SessionOutcome)
    draft = Draft(table, NOW)
    assert written(draft.add(write(A, (1, None), session=opened.state.session))[0]) == (1, 1, 0)
    newer, must_wait = draft.add(OpenSession(TOPIC, A))
    assert isinstance(newer, SessionOutcome)
    assert must_wait
    assert (newer.state.session, newer.state.recorded) == (opened.state.session + 1, 1)
    refusal, must_wait = draft.add(write(A, (2, 1), session=opened.state.session))
    assert isinstance(refusal, Refusal)
    assert (refusal.kind, must_wait) == ("superseded", True)


# ---- heartbeats, and sources that are forgotten ------------------------------------------------------------


def test_a_heartbeat_is_recorded_with_the_chunks_of_its_transaction() -> None:
    draft = Draft(SourceTable(), NOW)
    draft.add(write(A, (5, 3)))
    outcome, must_wait = draft.add(RecordHeartbeat(TOPIC, A, None, Heartbeat(NOW, position=5)))
    assert isinstance(outcome, HeartbeatOutcome)
    assert must_wait
    assert SourceState.decode(draft.states[A.state_key()] or b"") == outcome.state
    assert (outcome.state.recorded, outcome.state.base) == (5, 3)


def test_a_heartbeat_pins_a_source_that_was_not_known_and_records_nothing() -> None:
    table = SourceTable()
    [outcome] = committed(table, RecordHeartbeat(TOPIC, A, None, Heartbeat(NOW)))
    assert isinstance(outcome, HeartbeatOutcome)
    assert (outcome.state.recorded, outcome.state.partition) == (None, partition_of("a", 4))
    [outcome] = committed(table, write(A, (5, 3), topic=GROWN))
    assert isinstance(outcome, WriteOutcome)
    assert (outcome.state.base, outcome.state.partition) == (3, partition_of("a", 4))


def test_a_heartbeat_of_an_older_session_is_refused() -> None:
    draft = Draft(SourceTable(), NOW)
    refusal, must_wait = draft.add(RecordHeartbeat(TOPIC, A, 7, Heartbeat(NOW)))
    assert isinstance(refusal, Refusal)
    assert (refusal.kind, must_wait, draft.is_empty()) == ("superseded", False, True)


def test_a_forgotten_source_starts_again() -> None:
    table = SourceTable()
    committed(table, write(A, (9, 5)))
    outcome, again, first = committed(table, ForgetSource(TOPIC, A), ForgetSource(TOPIC, A), write(A, (3, 2)))
    assert isinstance(outcome, ForgetOutcome)
    assert outcome.before is not None
    assert outcome.before.recorded == 9
    assert again == ForgetOutcome(None)
    assert isinstance(first, WriteOutcome)
    assert (first.state.recorded, first.state.base) == (3, 2)
    assert table.get(A, ID) == first.state


def test_forgetting_an_unknown_source_writes_nothing() -> None:
    draft = Draft(SourceTable(), NOW)
    assert draft.add(ForgetSource(TOPIC, A)) == (ForgetOutcome(None), False)
    assert draft.is_empty()


def test_a_silent_source_expires_unless_the_transaction_has_news_of_it() -> None:
    table = SourceTable()
    committed(table, write(A, (1, None)), write(B, (1, None)), write(KEYED, (1, None)))
    draft = Draft(table, NOW + 10)
    draft.add(write(A, (2, 1)))
    for source in (A, B):
        draft.expire(source.state_key(), NOW + 1)
    draft.expire(KEYED.state_key(), NOW)
    draft.expire(b"sdc1.t\0nobody", NOW + 1)
    assert set(draft.states) == {A.state_key(), B.state_key()}
    assert draft.states[B.state_key()] is None
    assert draft.touches(B), "a later chunk of it must not be judged by what is being forgotten"
    outcome, must_wait = draft.add(write(B, (1, None)))
    assert isinstance(outcome, WriteOutcome)
    assert (outcome.written, must_wait) == (1, True)


# ---- pins --------------------------------------------------------------------------------------------------

KEYED = SourceIdentity("dc1.t", "a", "x")
KEYED_TOO = SourceIdentity("dc1.t", "a", "y")
GROWN = TOPIC._replace(partitions=5)


def test_growth_moves_unknown_keys_only() -> None:
    assert partition_of("a", 4) != partition_of("a", 5), "the test needs a key that growth would move"
    table = SourceTable()
    committed(table, write(A, (1, None)))
    outcome, fresh = committed(table, write(A, (2, None), topic=GROWN), write(B, (1, None), topic=GROWN))
    assert isinstance(outcome, WriteOutcome)
    assert isinstance(fresh, WriteOutcome)
    assert outcome.state.partition == partition_of("a", 4)
    assert fresh.state.partition == partition_of("b", 5)


@pytest.mark.parametrize("first", [A, KEYED])
@pytest.mark.parametrize("second", [A, KEYED, KEYED_TOO])
@pytest.mark.parametrize("in_one_draft", [True, False])
def test_sources_with_one_key_are_pinned_together(
    first: SourceIdentity, second: SourceIdentity, in_one_draft: bool
) -> None:
    """Keyed or not, whichever came first, before or after the topic grew."""
    table = SourceTable()
    requests = [write(first, (1, None)), write(second, (2, None), topic=GROWN)]
    if in_one_draft:
        outcomes = committed(table, *requests)
    else:
        outcomes = [outcome for request in requests for outcome in committed(table, request)]
    assert [outcome.state.partition for outcome in outcomes if isinstance(outcome, WriteOutcome)] == [
        partition_of("a", 4)
    ] * 2


def test_a_session_pins() -> None:
    table = SourceTable()
    committed(table, OpenSession(TOPIC, KEYED))
    [outcome] = committed(table, write(A, (1, None), topic=GROWN))
    assert isinstance(outcome, WriteOutcome)
    assert outcome.state.partition == partition_of("a", 4)


# ---- a recreated topic ----------------------------------------------------------------------------------

RECREATED = TopicFacts("dc1.t", OTHER_ID, 5, 1 << 20)


def test_a_recreated_topic_begins_empty() -> None:
    table = SourceTable()
    committed(table, OpenSession(TOPIC, A), write(A, (9, 5)))
    [refusal] = committed(table, write(A, (9, 5), session=NOW, topic=RECREATED))
    assert isinstance(refusal, Refusal), "sessions of the older topic are not known"
    [outcome] = committed(table, write(A, (3, 2), topic=RECREATED))
    assert isinstance(outcome, WriteOutcome)
    assert outcome.state == SourceState(OTHER_ID, partition_of("a", 5), 3, 2, 0, NOW)


def test_one_draft_never_mixes_two_incarnations_of_a_topic() -> None:
    """Facts of requests may differ in age: whatever the topic is at the commit, one of them must fail the check."""
    alone = Draft(SourceTable(), NOW)
    alone.add(write(A, (1, None)))
    assert alone.changed_topic({"dc1.t": ID}) is None
    assert alone.changed_topic({}) == "dc1.t"
    for order in ([TOPIC, RECREATED], [RECREATED, TOPIC]):
        draft = Draft(SourceTable(), NOW)
        draft.add(write(A, (1, None), topic=order[0]))
        draft.add(write(B, (1, None), topic=order[1]))
        for now in (ID, OTHER_ID):
            assert draft.changed_topic({"dc1.t": now}) == "dc1.t"


# ---- unknown outcomes --------------------------------------------------------------------------------------


def state(recorded: int | None, base: int | None = None, session: int = 0, topic_id: bytes = ID) -> SourceState:
    return SourceState(topic_id, 3, recorded, base, session, NOW)


WRITE = WriteOutcome(state(9), 1, 0, (0, 0))
OPENED = SessionOutcome(state(9, session=7))

RESOLVED = [
    (WRITE, None, False),
    (WRITE, state(None), False),
    (WRITE, state(8), False),
    (WRITE, state(9), True),
    (WRITE, state(12), True),
    (WRITE, state(9, topic_id=OTHER_ID), False),
    # Another transaction recorded the first chunk: this one did not, though more is recorded by now.
    (WRITE, state(12, base=8), False),
    # A newer session wrote past it, by its own cut or by this one.
    (WRITE, state(9, session=7), None),
    (WRITE, state(8, session=7), False),
    (OPENED, None, False),
    (OPENED, state(9, session=6), False),
    # A number may have been given twice by two workers, and opening once more does no harm.
    (OPENED, state(9, session=7), None),
    (OPENED, state(9, session=8), None),
    (OPENED, state(9, session=7, topic_id=OTHER_ID), False),
    (HeartbeatOutcome(state(9)._replace(heartbeat=Heartbeat(5))), state(9), False),
    (HeartbeatOutcome(state(9)._replace(heartbeat=Heartbeat(5))), state(12)._replace(heartbeat=Heartbeat(5)), True),
    (ForgetOutcome(state(9)), None, True),
    (ForgetOutcome(state(9)), state(9), False),
]


@pytest.mark.parametrize(("outcome", "replayed", "is_recorded"), RESOLVED)
def test_the_replay_says_whether_it_was_recorded(
    outcome: Outcome, replayed: SourceState | None, is_recorded: bool | None
) -> None:
    assert resolve(outcome, replayed) is is_recorded


def test_a_refusal_that_rested_on_an_unknown_transaction_is_not_given() -> None:
    """It names a recorded seqno that may not be recorded; the request wrote nothing, so trying again is safe."""
    refusal = Refusal("overlap", "chunk 0: prev 3, but 5 is recorded", 5)
    assert not resolve(refusal, state(3))
    assert not resolve(refusal, state(5))


def test_a_lost_answer_of_forgetting_is_not_guessed() -> None:
    """A source that is known again, but otherwise, may have been forgotten in between."""
    before = SourceState(ID, 0, 7, None, 5, NOW)
    outcome = ForgetOutcome(before)
    assert resolve(outcome, None) is True
    assert resolve(outcome, before) is False
    assert resolve(outcome, before._replace(recorded=1)) is None


def test_a_lost_answer_of_a_heartbeat_is_not_guessed() -> None:
    state = SourceState(ID, 0, 7, None, 5, NOW)
    outcome = HeartbeatOutcome(state._replace(heartbeat=Heartbeat(NOW)))
    assert resolve(outcome, outcome.state) is True
    assert resolve(outcome, state) is False
    assert resolve(outcome, state._replace(heartbeat=Heartbeat(NOW - 1))) is False
    assert resolve(outcome, state._replace(heartbeat=Heartbeat(NOW + 1))) is None
    assert resolve(outcome, state._replace(session=6)) is None
