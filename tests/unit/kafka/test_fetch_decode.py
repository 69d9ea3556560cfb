"""Committed records out of fetched batches: aborted data, control batches, holes, and the position after them."""

from __future__ import annotations

import struct

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from hypothesis import example, given
from hypothesis import strategies as st
from logferry.gateway.kafka.record_batch import CorruptBatch, FetchedRecords, committed_records

ABORT, COMMIT = b"\0\0\0\0", b"\0\0\0\1"

_CRC_AT, _ATTRIBUTES_AT, _LAST_DELTA_AT, _COUNT_AT, _HEADER_BYTES = 17, 21, 23, 57, 61
_CONTROL, _TRANSACTIONAL = 0x20, 0x10


def batch(base: int, values: list[bytes | None], producer: int | None = None, codec: int = 0, last: int = -1) -> bytes:
    """A batch at an offset. A None among the values is an offset that compaction took; ``last``: its last delta."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=producer is not None,
        producer_id=-1 if producer is None else producer,
        producer_epoch=0,
        base_sequence=0,
        batch_size=1 << 20,
    )
    for delta, value in enumerate(values):
        if value is not None:
            builder.append(delta, timestamp=1000 + base + delta, key=b"key", value=value, headers=[("h", value)])
    raw = bytearray(builder.build())
    struct.pack_into(">q", raw, 0, base)
    struct.pack_into(">i", raw, _LAST_DELTA_AT, len(values) - 1 if last < 0 else last)
    return sealed(raw)


def sealed(raw: bytearray) -> bytes:
    struct.pack_into(">I", raw, _CRC_AT, calc_crc32c(bytes(raw[_ATTRIBUTES_AT:])))
    return bytes(raw)


def marker(base: int, producer: int, kind: bytes) -> bytes:
    """A control batch: its one record's key is the version and the type of the marker."""
    builder = DefaultRecordBatchBuilder(2, 0, True, producer, 0, -1, 1 << 20)
    builder.append(0, timestamp=1000 + base, key=kind, value=b"\0" * 6, headers=[])
    raw = bytearray(builder.build())
    struct.pack_into(">q", raw, 0, base)
    struct.pack_into(">h", raw, _ATTRIBUTES_AT, _CONTROL | _TRANSACTIONAL)
    return sealed(raw)


def emptied_marker(base: int, producer: int) -> bytes:
    """What compaction leaves of a control batch: the header alone, without a record."""
    raw = bytearray(marker(base, producer, ABORT))[:_HEADER_BYTES]
    struct.pack_into(">i", raw, 8, _HEADER_BYTES - 12)
    struct.pack_into(">i", raw, _COUNT_AT, 0)
    return sealed(raw)


def read(*parts: bytes, aborted: list[tuple[int, int]] | None = None, offset: int = 0) -> tuple[list[bytes], int]:
    records, position = committed_records(b"".join(parts), aborted or [], offset)
    return [record.value or b"" for record in records], position


def test_records_come_with_everything_and_the_offset_after_them() -> None:
    records, position = committed_records(batch(5, [b"a", b"b"]), [], 5)
    assert [tuple(record) for record in records] == [
        (5, 1005, b"key", b"a", [("h", b"a")]),
        (6, 1006, b"key", b"b", [("h", b"b")]),
    ]
    assert position == 7


def test_nothing_fetched_stays_where_it_was() -> None:
    assert read(offset=42) == ([], 42)


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_every_codec_is_undone(codec: int) -> None:
    assert read(batch(0, [b"x" * 1000, b"y" * 1000], codec=codec)) == ([b"x" * 1000, b"y" * 1000], 2)


def test_control_batches_take_offsets_and_give_nothing() -> None:
    assert read(batch(0, [b"a"], 7), marker(1, 7, COMMIT)) == ([b"a"], 2)
    assert read(marker(1, 7, COMMIT), offset=1) == ([], 2)
    assert read(marker(1, 7, COMMIT), marker(2, 8, ABORT), batch(3, [b"a"]), offset=1) == ([b"a"], 4)


def test_aborted_transactions_are_left_out() -> None:
    log = [batch(0, [b"a"], 7), marker(1, 7, ABORT), batch(2, [b"b"], 7), marker(3, 7, COMMIT)]
    assert read(*log, aborted=[(7, 0)]) == ([b"b"], 4)
    assert read(*log) == ([b"a", b"b"], 4), "without the list nothing is known to be aborted"


def test_a_range_of_aborted_data_only_still_moves_on() -> None:
    assert read(batch(0, [b"a", b"b"], 7), marker(2, 7, ABORT), aborted=[(7, 0)]) == ([], 3)
    assert read(batch(0, [b"a", b"b"], 7), aborted=[(7, 0)]) == ([], 2)


def test_interleaved_transactions_are_kept_apart_by_their_producer() -> None:
    log = [
        batch(0, [b"a0"], 7),
        batch(1, [b"b0"], 8),
        batch(2, [b"plain"]),
        batch(3, [b"a1"], 7),
        marker(4, 8, COMMIT),
        marker(5, 7, ABORT),
        batch(6, [b"a2"], 7),
        batch(7, [b"b1"], 8),
        marker(8, 8, ABORT),
        marker(9, 7, COMMIT),
    ]
    assert read(*log, aborted=[(8, 7), (7, 0)]) == ([b"b0", b"plain", b"a2"], 10)


def test_one_producer_may_abort_twice_in_a_range() -> None:
    log = [
        batch(0, [b"a"], 7),
        marker(1, 7, ABORT),
        batch(2, [b"b"], 7),
        marker(3, 7, COMMIT),
        batch(4, [b"c"], 7),
        marker(5, 7, ABORT),
    ]
    assert read(*log, aborted=[(7, 0), (7, 4)]) == ([b"b"], 6)


def test_a_transaction_that_was_aborted_before_the_range_began() -> None:
    """The list names its first offset, which lies below the fetched one."""
    assert read(batch(10, [b"a"], 7), marker(11, 7, ABORT), aborted=[(7, 3)], offset=10) == ([], 12)


def test_a_control_batch_without_a_record_is_passed() -> None:
    """Compaction leaves such ones in a state topic; a lane must still be replayed past them."""
    assert read(batch(0, [b"a"]), emptied_marker(1, 7), batch(2, [b"b"])) == ([b"a", b"b"], 3)
    assert read(emptied_marker(1, 7), offset=1) == ([], 2)


def test_an_emptied_marker_ends_the_transaction_it_ended() -> None:
    log = [batch(0, [b"a"], 7), emptied_marker(1, 7), batch(2, [b"b"], 7), marker(3, 7, COMMIT)]
    assert read(*log, aborted=[(7, 0)]) == ([b"b"], 4)


def test_a_fetch_from_the_middle_of_a_batch_begins_there() -> None:
    """Kafka answers with whole batches."""
    assert read(batch(0, [b"a", b"b", b"c"]), offset=2) == ([b"c"], 3)
    assert read(batch(0, [b"a", b"b", b"c"]), offset=3) == ([], 3)
    assert read(batch(0, [b"a", b"b"], 7), marker(2, 7, ABORT), aborted=[(7, 0)], offset=1) == ([], 3)


def test_holes_of_compaction_are_passed() -> None:
    assert read(batch(0, [b"a", None, b"c", None]), batch(9, [b"d"])) == ([b"a", b"c", b"d"], 10)
    assert read(batch(0, [b"a"], last=5)) == ([b"a"], 6), "the last offset of a batch is retained"


def test_a_batch_cut_off_at_the_end_is_left_for_the_next_fetch() -> None:
    whole, cut = batch(0, [b"a"]), batch(1, [b"b"])
    for size in (1, 12, 30, len(cut) - 1):
        assert read(whole, cut[:size]) == ([b"a"], 1)


@pytest.mark.parametrize(
    ("stop_bytes", "values", "position"),
    [
        (None, 4, 5),
        (1, 1, 1),
        (83, 1, 1),
        (84, 2, 2),
        (166, 2, 2),
        (167, 3, 4),  # past the marker, which is read before the third record
        (332, 4, 5),
        (1000, 4, 5),
    ],
)
def test_stop_bytes_end_with_the_record_that_reaches_them(stop_bytes: int | None, values: int, position: int) -> None:
    raw = batch(0, [b"x" * 10] * 2, 7) + marker(2, 7, COMMIT) + batch(3, [b"x" * 10] * 2)
    records, after = committed_records(raw, [], 0, stop_bytes)
    assert (len(records), after) == (values, position)
    rest, end = committed_records(raw, [], after)
    assert (len(records) + len(rest), end) == (4, 5), "the next fetch continues without loss or repetition"


@pytest.mark.parametrize("flipped", [_CRC_AT, _HEADER_BYTES, -1])
def test_a_wrong_checksum_is_an_error_and_not_data(flipped: int) -> None:
    raw = bytearray(batch(3, [b"some value"]))
    raw[flipped] ^= 0x01
    with pytest.raises(CorruptBatch, match="offset 3"):
        committed_records(bytes(raw), [], 0)


@pytest.mark.parametrize("before", [batch(0, [b"a", b"b", b"c"]), marker(2, 7, COMMIT)])
def test_what_lies_before_a_damaged_batch_is_given_first(before: bytes) -> None:
    bad = bytearray(batch(3, [b"some value"]))
    bad[-1] ^= 0x01
    records, position = committed_records(before + bytes(bad), [], 0)
    assert [record.value for record in records] == ([b"a", b"b", b"c"] if b"a" in before else [])
    assert position == 3
    with pytest.raises(CorruptBatch, match="offset 3"):
        committed_records(bytes(bad), [], position)


def test_at_end_is_the_position_against_the_last_stable_offset() -> None:
    assert FetchedRecords([], 7, last_stable=7).at_end
    assert FetchedRecords([], 8, last_stable=7).at_end
    assert not FetchedRecords([], 6, last_stable=7).at_end


# ---- any log, read in any steps, against a reference ---------------------------------------------------------

events = st.lists(
    st.tuples(st.sampled_from(["write", "commit", "abort", "plain"]), st.integers(1, 3), st.integers(1, 3)), max_size=25
)


@given(events, st.integers(1, 60))
@example([("write", 1, 1), ("abort", 1, 1), ("write", 1, 1), ("write", 1, 1), ("commit", 1, 1)], 1)
def test_any_log_is_read_exactly_in_any_steps(happened: list[tuple[str, int, int]], stop_bytes: int) -> None:
    """Reads repeatedly, each time from a batch boundary as Kafka answers, until the last stable offset."""
    log: list[tuple[int, int, bytes]] = []  # (base offset, next offset, bytes)
    running: dict[int, int] = {}
    aborted: list[tuple[int, int, int]] = []  # producer, first offset, that of the marker
    values: dict[int, tuple[int | None, bytes]] = {}
    end = 0
    undone: set[int] = set()
    for kind, producer, count in happened:
        if kind in ("write", "plain"):
            owner = producer if kind == "write" else None
            raw = batch(end, [b"%d" % (end + i) for i in range(count)], owner)
            if owner is not None:
                running.setdefault(owner, end)
            values.update({end + i: (owner, b"%d" % (end + i)) for i in range(count)})
        elif producer in running:
            count = 1
            first = running.pop(producer)
            raw = marker(end, producer, COMMIT if kind == "commit" else ABORT)
            if kind == "abort":
                aborted.append((producer, first, end))
                undone.update(o for o, (owner, _) in values.items() if owner == producer and o >= first)
        else:
            continue
        log.append((end, end + count, raw))
        end += count
    stable = min(running.values(), default=end)
    expected = [value for offset, (_, value) in sorted(values.items()) if offset < stable and offset not in undone]
    found: list[bytes] = []
    position = 0
    while position < stable:
        raw = b"".join(part for base, after, part in log if after > position and base < stable)
        # Kafka tells of those that reach into what it answers with.
        told = [(producer, first) for producer, first, last in aborted if last >= position]
        records, after = committed_records(raw, told, position, stop_bytes)
        assert after > position
        found += [record.value or b"" for record in records]
        position = after
    assert found == expected
