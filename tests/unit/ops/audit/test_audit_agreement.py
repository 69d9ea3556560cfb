"""States against log: each way in which they can disagree is named, and no other."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.gateway.contract.lane_count import LaneCount
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.log.agreement import RecordedState, SourceStates, TopicAgreement
from logferry.ops.audit.log.partition import AuditSpan, ExpectedSources, PartitionLog
from logferry.ops.audit.records.batches import StoredRecord
from logferry.ops.audit.records.formats import StoredSource, StoredState

TOPIC, ID, OTHER_ID = "dc1.nginx", b"i" * 16, b"o" * 16

# (offset, seqno, prev)
Records = list[tuple[int, int, int | None]]
WHOLE: Records = [(0, 10, 0), (1, 20, 10), (2, 30, 20)]


def record(offset: int, seqno: int, prev: int | None, source_id: str = "s") -> StoredRecord:
    headers = record_headers(Chunk(seqno, prev, 1, {}, b""))
    return StoredRecord(offset, 1, source_id.encode(), b"line\n", headers)


def log(records: Records, partition: int = 0, start: int = 0, fence: int = 100, end: int = 200) -> PartitionLog:
    found = PartitionLog(TOPIC, partition, AuditSpan(start, fence, end), Findings())
    found.take(record(*one) for one in records)
    assert not len(found.findings), "these tests are about the states"
    return found


def state(
    recorded: int | None, base: int | None = 0, partition: int = 0, topic_id: bytes = ID, key: str | None = None
) -> RecordedState:
    return RecordedState(StoredSource(TOPIC, key, "s"), StoredState(topic_id, partition, recorded, base))


def encoded(one: RecordedState) -> bytes:
    """As the gateway stores it."""
    return SourceState(*one.state, 0, 1).encode()


def judged(
    logs: Iterable[PartitionLog], known: Iterable[RecordedState], forgotten: Iterable[str] = (), expired_ms: int = 0
) -> list[Finding]:
    findings = Findings()
    by_partition = {one.partition: one for one in logs}
    TopicAgreement(TOPIC, by_partition, set(forgotten), expired_ms, findings).compare(ID, known)
    return list(findings)


def kinds(found: Iterable[Finding]) -> list[str]:
    """Notes in brackets."""
    return sorted(one.kind if one.refutes else f"({one.kind})" for one in found)


@pytest.mark.parametrize(
    ("logs", "known", "expected"),
    [
        pytest.param([log(WHOLE)], [state(30)], [], id="agree"),
        pytest.param([log([])], [state(None)], [], id="a session, no chunk yet"),
        pytest.param([log(WHOLE)], [state(40)], ["state-ahead"], id="the last chunk is lost"),
        pytest.param([log([])], [state(30)], ["state-ahead"], id="all is lost"),
        pytest.param([log(WHOLE[1:])], [state(30)], ["head-missing"], id="the first chunk is lost"),
        pytest.param([log(WHOLE)], [state(20)], ["state-behind"], id="the log is ahead"),
        pytest.param([log(WHOLE)], [state(None)], ["state-behind"], id="nothing recorded"),
        pytest.param([log(WHOLE)], [state(25)], ["state-behind"], id="a seqno that the log does not have"),
        pytest.param([log(WHOLE)], [], ["state-missing"], id="no state"),
        pytest.param(
            [log(WHOLE)], [state(30, topic_id=OTHER_ID)], ["(state-of-older-topic)", "state-missing"], id="old"
        ),
        pytest.param([log([])], [state(30, topic_id=OTHER_ID)], ["(state-of-older-topic)"], id="recreated"),
        # while the log grows: 10 is below the fence, 20 and 30 came later
        pytest.param([log(WHOLE, fence=1)], [state(10)], [], id="read before the rest came"),
        pytest.param([log(WHOLE, fence=1)], [state(20)], [], id="read in between"),
        pytest.param([log(WHOLE, fence=1)], [state(30)], [], id="read after"),
        pytest.param([log(WHOLE, fence=1)], [state(40)], ["state-ahead"], id="yet ahead"),
        pytest.param([log(WHOLE, fence=2)], [state(10)], ["state-behind"], id="yet behind"),
        pytest.param([log(WHOLE, fence=0)], [], [], id="a source that came after the states were read"),
        pytest.param([log(WHOLE, fence=0)], [state(None)], [], id="a session before, the chunks after"),
        # retention
        pytest.param([log(WHOLE[1:], start=1)], [state(30)], [], id="cut"),
        pytest.param([log([], start=5)], [state(30)], ["(removed-by-retention)"], id="all removed"),
        pytest.param([log(WHOLE[1:], start=1)], [state(40)], ["state-ahead"], id="cut, and the last one lost"),
        pytest.param([log(WHOLE[2:], start=2, fence=2)], [state(20)], [], id="removed, then one came"),
        # partitions and keys
        pytest.param([log([]), log(WHOLE, 1)], [state(30)], ["source-in-wrong-partition"], id="wrong partition"),
        pytest.param(
            [log(WHOLE), log([(0, 40, 30)], 1)], [state(40)], ["source-in-two-partitions", "state-ahead"], id="two"
        ),
        pytest.param(
            [log(WHOLE), log([(0, 7, 0)], 1)],
            [state(30, key="a"), state(7, partition=1, key="b")],
            ["(source-under-two-keys)"],
            id="two keys, each whole",
        ),
        pytest.param(
            [log(WHOLE), log([(0, 7, 0)], 1)],
            [state(30, key="a"), state(9, partition=1, key="b")],
            ["(source-under-two-keys)", "state-ahead"],
            id="two keys, one of them lost a chunk",
        ),
    ],
)
def test_states_against_log(logs: list[PartitionLog], known: list[RecordedState], expected: list[str]):
    assert kinds(judged(logs, known)) == expected


def test_a_state_that_was_dropped_on_purpose_refutes_nothing():
    assert kinds(judged([log(WHOLE)], [], forgotten=["s"])) == ["(state-forgotten)"]


def test_a_source_that_was_forgotten_and_only_opened_a_session_since():
    assert kinds(judged([log(WHOLE)], [state(None)], forgotten=["s"])) == ["(state-forgotten)"]
    assert kinds(judged([log(WHOLE)], [state(40)], forgotten=["s"])) == ["state-ahead"], "what it has now must hold"


def test_a_source_that_was_silent_for_the_retention_may_have_been_forgotten():
    assert kinds(judged([log(WHOLE)], [], expired_ms=1)) == ["state-missing"], "heard of at 1 ms"
    assert kinds(judged([log(WHOLE)], [], expired_ms=2)) == ["(state-forgotten)"]


def test_the_head_may_be_further_on():
    """A recreated state names a base in the middle of the log."""
    known = [state(30, base=10)]
    assert kinds(judged([log(WHOLE)], known)) == ["head-missing"]
    logs = PartitionLog(TOPIC, 0, AuditSpan(0, 100, 200), Findings(), expected=ExpectedSources({"s": 10}, {}))
    logs.take(record(*one) for one in WHOLE)
    assert kinds(judged([logs], known)) == []


def test_loss_says_what_is_lost():
    (found,) = judged([log(WHOLE, 3)], [state(40, partition=3)])
    assert str(found) == (
        "state-ahead: dc1.nginx-3 s: recorded up to seqno 40, but the log ends with 30: acknowledged and lost"
    )


# ---- reading the state topic -----------------------------------------------------------------------------


def read_states(topics: frozenset[str] | None = None, lanes: int = 1) -> SourceStates:
    return SourceStates("st", lanes, topics, Findings())


def test_the_last_state_of_a_key_counts():
    states = read_states()
    source = SourceIdentity(TOPIC, None, "s")
    for offset, recorded in enumerate((10, 20)):
        states.apply(0, offset, source.state_key(), encoded(state(recorded)))
    assert [one.state.recorded for one in states.by_topic[TOPIC].values()] == [20]
    states.apply(0, 2, source.state_key(), None)
    assert not any(states.by_topic.values())
    assert states.forgotten == {(TOPIC, "s")}


def test_what_is_recorded_after_a_tombstone_is_a_new_beginning():
    states = read_states()
    key = SourceIdentity(TOPIC, None, "s").state_key()
    values = [state(10), None, state(None), state(20, base=7), state(30, base=7), None, state(5, base=None)]
    for offset, one in enumerate(values):
        states.apply(0, offset, key, one and encoded(one))
    assert states.reborn == {(TOPIC, "s"): [7, None]}
    assert states.forgotten == {(TOPIC, "s")}


def test_states_of_other_topics_are_passed_over():
    states = read_states(frozenset({"dc1.other"}))
    states.apply(0, 0, SourceIdentity(TOPIC, None, "s").state_key(), encoded(state(1)))
    assert not any(states.by_topic.values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"?", b""),
        (b"s" + TOPIC.encode(), b""),
        (SourceIdentity(TOPIC, None, "s").state_key(), b"\xff" * 60),
        (b"s\0s", b""),
    ],
)
def test_a_state_that_cannot_be_read_is_a_finding(key: bytes, value: bytes):
    states = read_states()
    states.apply(0, 7, key, value)
    assert kinds(states.findings) == ["state-unreadable"]
    assert next(iter(states.findings)).span == "offset 7"


def test_a_state_in_the_wrong_lane_is_a_finding():
    states = read_states(lanes=8)
    source = SourceIdentity(TOPIC, None, "s")
    for lane in range(8):
        states.apply(lane, 0, source.state_key(), encoded(state(1)))
    states.finish()
    assert kinds(states.findings) == ["state-in-wrong-lane"] * 7
    assert [len(found) for found in states.by_topic.values()] == [1]


# ---- another number of lanes -----------------------------------------------------------------------------------------


def moved_states(lanes: int, *, with_tombstones: bool = True) -> SourceStates:
    """As after a change from 2 to 3 lanes, read by a number of lanes."""
    states = read_states(lanes=lanes)
    count = LaneCount(3, 2, 2).encode()
    sources = [SourceIdentity(TOPIC, None, f"s{number}") for number in range(30)]
    for lane in range(3):
        here = [source for source in sources if lane_of(source.key, 2) == lane]
        for source in here:
            states.apply(lane, 0, source.state_key(), encoded(state(1)))
        states.apply(lane, 1, b"lanes", count)
        for source in here if with_tombstones else []:
            if lane_of(source.key, 3) != lane:
                states.apply(lane, 2, source.state_key(), None, is_moved=True)
        for source in sources:
            if lane_of(source.key, 3) == lane != lane_of(source.key, 2):
                states.apply(lane, 3, source.state_key(), encoded(state(1)))
    return states


def test_states_that_moved_are_where_they_belong_and_are_not_forgotten():
    assert moved_states(lanes=4).other_number() == 3
    states = moved_states(lanes=3)
    assert states.other_number() is None
    states.finish()
    assert kinds(states.findings) == []
    assert (len(states.by_topic[TOPIC]), states.forgotten, states.reborn) == (30, set(), {})


def test_a_state_that_was_left_in_its_lane_before_is_a_finding():
    states = moved_states(lanes=3, with_tombstones=False)
    states.finish()
    assert len(kinds(states.findings)) > 10
    assert set(kinds(states.findings)) == {"state-in-wrong-lane"}


def test_partitions_that_were_read_before_and_after_a_change_are_read_again():
    states = moved_states(lanes=3)
    states.apply(1, 9, b"lanes", LaneCount(5, 3, 3).encode())
    assert states.other_number() == 5
