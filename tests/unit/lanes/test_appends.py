"""Requests without seqnos: the lane gives the seqnos, and a receipt makes the same request again a duplicate."""

from __future__ import annotations

import pytest
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import (
    Receipt,
    SourceIdentity,
    SourceState,
    receipt_key,
    source_of_record,
)
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import Refusal, SourceTable
from logferry.gateway.lanes.resolution import resolve
from logferry.gateway.lanes.transaction import (
    AppendChunks,
    Draft,
    ForgetSource,
    OpenSession,
    Outcome,
    WriteOutcome,
)
from logferry.gateway.limits import FairShare

from tests.support.lane_requests import NOW, TOPIC, committed, write
from tests.unit.lanes.test_lane_draft import serving_lane

A = SourceIdentity("dc1.t", None, "otlp/web/a")
START = NOW * 1000
WINDOW_MS = 3_600_000


def append(
    *data: bytes,
    key: str | None = None,
    source: SourceIdentity = A,
    token: str | None = None,
    topic: TopicFacts = TOPIC,
    digest: bytes | None = None,
) -> AppendChunks:
    chunks = [Chunk(0, None, None, {}, one) for one in data]
    return AppendChunks(topic, source, chunks, 100, digest or b"".join(data).ljust(16, b"-"), key, token)


def of(outcome: Outcome) -> tuple[int, int, int, int]:
    """First and last seqno above the beginning, written, duplicates."""
    assert isinstance(outcome, WriteOutcome), outcome
    assert outcome.receipt is not None
    first, last = outcome.receipt.first_seqno - START, outcome.receipt.last_seqno - START
    return first, last, outcome.written, outcome.duplicates


def kind(outcome: Outcome) -> str:
    assert isinstance(outcome, Refusal), outcome
    return outcome.kind


def test_the_lane_gives_the_next_seqnos_each_with_prev() -> None:
    table = SourceTable()
    draft = Draft(table, NOW)
    assert [of(draft.add(append(b"a", b"b"))[0]), of(draft.add(append(b"c"))[0])] == [(1, 2, 2, 0), (3, 3, 1, 0)]
    places = [(chunk.seqno - START, (chunk.prev or 0) - START) for _, chunk in next(iter(draft.chunks.values()))]
    assert places == [(1, 0), (2, 1), (3, 2)]


def test_a_source_that_was_forgotten_gets_no_seqno_again() -> None:
    table = SourceTable()
    committed(table, append(b"a", b"b"))
    committed(table, ForgetSource(TOPIC, A), now_ms=NOW + 1)
    (outcome,) = committed(table, append(b"c"), now_ms=NOW + 2)
    assert of(outcome) == (2001, 2001, 1, 0)


def test_a_source_that_is_forgotten_and_appended_to_at_once_gets_no_seqno_again() -> None:
    outcomes = committed(SourceTable(), append(b"a", b"b"), ForgetSource(TOPIC, A), append(b"c"))
    assert (of(outcomes[0]), of(outcomes[2])) == ((1, 2, 2, 0), (3, 3, 1, 0))


def test_a_source_is_written_with_seqnos_or_without() -> None:
    table = SourceTable()
    other = SourceIdentity("dc1.t", None, "b")
    committed(table, append(b"a"), write(other, (1, None)))
    assert kind(committed(table, write(A, (START + 2, START + 1)))[0]) == "conflict"
    assert kind(committed(table, OpenSession(TOPIC, A, is_admin=True))[0]) == "conflict"
    assert kind(committed(table, append(b"a", source=other))[0]) == "conflict"
    opened = SourceIdentity("dc1.t", None, "c")
    committed(table, OpenSession(TOPIC, opened, token="own"))
    assert kind(committed(table, append(b"a", source=opened, token="own"))[0]) == "conflict"


def test_the_same_key_again_is_a_duplicate_with_the_same_answer() -> None:
    table = SourceTable()
    draft = Draft(table, NOW)
    first, again = draft.add(append(b"a", key="k")), draft.add(append(b"a", key="k"))
    assert (of(first[0]), of(again[0]), again[1]) == ((1, 1, 1, 0), (1, 1, 0, 1), True)
    committed(table, append(b"a", key="k"), append(b"b"))
    later, must_wait = Draft(table, NOW + WINDOW_MS).add(append(b"a", key="k"))
    assert (of(later), must_wait) == ((1, 1, 0, 1), False)
    assert of(committed(table, append(b"a", key="other"))[0]) == (3, 3, 1, 0)


def test_a_duplicate_stays_one_after_its_source_was_forgotten() -> None:
    table = SourceTable()
    committed(table, append(b"a", key="k"))
    committed(table, ForgetSource(TOPIC, A))
    assert of(committed(table, append(b"a", key="k"))[0]) == (1, 1, 0, 1)


def test_a_key_with_another_content_is_refused() -> None:
    table = SourceTable()
    committed(table, append(b"a", key="k"))
    assert kind(committed(table, append(b"b", key="k"))[0]) == "key-reused"
    assert of(committed(table, append(b"b", key="k", source=A._replace(source_id="other")))[0])[2] == 1


def test_a_key_counts_for_its_window_and_its_topic() -> None:
    table = SourceTable()
    committed(table, append(b"a", key="k"))
    outcome, _ = Draft(table, NOW + 1).add(append(b"a", key="k", topic=TOPIC._replace(id=b"n" * 16)))
    assert isinstance(outcome, WriteOutcome)
    assert outcome.written == 1
    late = Draft(table, NOW + WINDOW_MS + 1)
    assert of(late.add(append(b"b", key="k"))[0]) == (2, 2, 1, 0)
    while_clocks_differ = Draft(table, NOW + 10 * WINDOW_MS, repeat_window_ms=None)
    assert of(while_clocks_differ.add(append(b"a", key="k"))[0]) == (1, 1, 0, 1)


def test_receipts_are_forgotten_the_oldest_first_and_a_few_at_once() -> None:
    table = SourceTable()
    for number in range(10):
        committed(table, append(b"a", key=str(number)), now_ms=NOW + number)
    draft = Draft(table, NOW + WINDOW_MS + 5)
    draft.expire_receipts(3)
    assert list(draft.states) == [receipt_key(A, str(number)) for number in range(3)]
    assert set(draft.states.values()) == {None}
    for number in range(4):
        draft.add(append(b"b", key=f"new {number}"))
    draft.states = {key: raw for key, raw in draft.states.items() if raw is not None}
    draft.expire_receipts(3)
    # Twice as many as it adds, so that they do not pile up; those in their window stay.
    assert sum(raw is None for raw in draft.states.values()) == 5
    # A key that is used again in the same transaction is not forgotten.
    draft = Draft(table, NOW + WINDOW_MS + 5)
    draft.add(append(b"b", key="0"))
    draft.expire_receipts(3)
    assert draft.states[receipt_key(A, "0")] is not None


def test_a_token_leaves_room_for_the_receipts_of_others() -> None:
    table = SourceTable()
    table.receipts.shares = FairShare(10)
    outcomes = [committed(table, append(b"a", key=str(number), token="greedy"))[0] for number in range(10)]
    taken = sum(isinstance(outcome, WriteOutcome) for outcome in outcomes)
    assert 7 <= taken < 10
    assert kind(outcomes[-1]) == "overloaded"
    # Without a key, and to others, it serves as before; a refused request leaves nothing behind.
    assert of(committed(table, append(b"a", token="greedy"))[0])[2] == 1
    assert of(committed(table, append(b"a", key="x", token="other"))[0])[2] == 1
    for key in [receipt_key(A, str(number)) for number in range(taken)]:
        table.apply(key, None)
    assert table.receipts.shares.of_token("greedy") == 0


def test_receipts_are_no_sources() -> None:
    table = SourceTable()
    committed(table, append(b"a", key="k"))
    assert (len(table), table.state_keys(), len(table.receipts)) == (1, [A.state_key()], 1)


def test_bytes_of_a_receipt() -> None:
    """A worker of an earlier version stops its lane at a key of this kind."""
    key = receipt_key(A, "k")
    assert key == b"rsdc1.t\0otlp/web/a\0" + b"61f5dc14830084d8dc2d1ebc02ef3dec"
    assert source_of_record(key) == A
    receipt = Receipt(bytes(range(16)), 3, 1, 2, 4, b"d" * 16, "own")
    raw = b"\x01\0\0\0\x03" + bytes(range(16)) + b"".join(n.to_bytes(8, "big") for n in (1, 2, 4)) + b"d" * 16 + b"own"
    assert receipt.encode() == raw
    assert Receipt.decode(raw) == receipt
    for broken in (b"", b"\x02" + raw[1:], raw[:40]):
        with pytest.raises(ValueError, match="receipt of"):
            Receipt.decode(broken)
    with pytest.raises(ValueError, match="cannot be decoded"):
        SourceTable().apply(b"rzdc1.t\0a\0k", raw)


def test_a_replay_keeps_order_and_content() -> None:
    table, again = SourceTable(), SourceTable()
    records: list[tuple[bytes, bytes | None]] = []
    for number in range(5):
        draft = Draft(table, NOW + number)
        draft.add(append(b"a", key=str(number % 4)))
        records += draft.states.items()
        for key, raw in draft.states.items():
            table.apply(key, raw)
    for key, raw in records:
        again.apply(key, raw)
    assert list(again.receipts.expired(NOW + 100)) == list(table.receipts.expired(NOW + 100))
    assert again.get(A, TOPIC.id) == table.get(A, TOPIC.id)


def outcome_of(key: str | None = None) -> WriteOutcome:
    outcome, _ = Draft(SourceTable(), NOW, number=7).add(append(b"a", key=key))
    assert isinstance(outcome, WriteOutcome)
    return outcome


AFTER = outcome_of().state
RECEIPT = outcome_of("k").receipt


@pytest.mark.parametrize(
    ("replayed", "receipt", "is_recorded"),
    [
        (AFTER, None, True),
        # Another transaction gave the same seqno to another chunk, or wrote behind this one.
        (AFTER._replace(appended_by=8), None, None),
        (AFTER._replace(appended_by=8, recorded=START + 9), None, None),
        (AFTER._replace(appended_by=8, recorded=START + 9), RECEIPT, True),
        (None, RECEIPT, True),
        (None, None, None),
        (AFTER._replace(appended_by=6, recorded=START), None, False),
        (AFTER._replace(topic_id=b"n" * 16), None, False),
    ],
)
def test_a_lost_answer(replayed: SourceState | None, receipt: Receipt | None, is_recorded: bool | None) -> None:
    assert resolve(outcome_of("k"), replayed, receipt) is is_recorded


async def test_a_lane_that_rests_forgets_receipts_too() -> None:
    lane = serving_lane()
    lane.kafka.clock.answered(NOW, lane.kafka.clock.boot_s())
    lane.kafka.clock._wall_s = lambda: NOW / 1000
    key = receipt_key(A, "k")
    lane.table.apply(key, Receipt(bytes(16), 0, 1, 1, 5, bytes(16)).encode())
    assert not lane.has_work
    await lane.find_expired(lane.kafka.clock.now_ms())
    assert lane.has_work
    draft = await lane._draft()
    assert draft.states == {key: None}
    lane.table.apply(key, None)
    assert (await lane._draft()).is_empty()
    assert not lane.has_work
