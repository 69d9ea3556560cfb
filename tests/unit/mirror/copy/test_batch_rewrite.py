"""Batches on their way: what is left out, what goes as it is, and what has to be encoded again."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from logferry.gateway.kafka.record_batch import CorruptBatch, Stamp, committed_records
from logferry.mirror.copy.batch_rewrite import CopiedBatch, SourceRange, coalesced, committed_batches

Record = tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes]]]
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_CRC_AT, _ATTRIBUTES_AT, _HEADER_BYTES = 17, 21, 61
_APPEND_TIME = 0x08


def record(number: int) -> Record:
    """(offset, timestamp, key, value, headers)."""
    rng = random.Random(number)
    key = None if number % 5 == 0 else b"key-%d" % number
    value = None if number % 7 == 3 else b"line %d " % number * rng.choice((0, 1, 50))
    return number, 1_700_000_000_000 + number, key, value, [("seqno", struct.pack(">q", number))][: number % 2]


def encoded(base: int, records: list[Record], codec: str = "none", producer: int = -1, **changes: int) -> bytes:
    """A batch as a broker stores it, its records at their offsets."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=CODECS[codec],
        is_transactional=producer >= 0,
        producer_id=producer,
        producer_epoch=0,
        base_sequence=0,
        batch_size=1 << 24,
    )
    for offset, stamp, key, value, headers in records:
        builder.append(offset - base, stamp, key, value, headers)
    raw = bytearray(builder.build())
    struct.pack_into(">q", raw, 0, base)
    struct.pack_into(">i", raw, 12, changes.get("epoch", 0))
    if "attributes" in changes:
        (attributes,) = struct.unpack_from(">h", raw, _ATTRIBUTES_AT)
        struct.pack_into(">h", raw, _ATTRIBUTES_AT, attributes | changes["attributes"])
        seal(raw)
    return bytes(raw)


def seal(raw: bytearray) -> None:
    from crc32c import crc32c

    struct.pack_into(">I", raw, _CRC_AT, crc32c(memoryview(raw)[_ATTRIBUTES_AT:]))


def control(offset: int, producer: int, *, commit: bool) -> bytes:
    raw = bytearray(
        encoded(offset, [(offset, 1, struct.pack(">hh", 0, commit), b"\0\0\0\0\0\0", [])], "none", producer)
    )
    struct.pack_into(">h", raw, _ATTRIBUTES_AT, 0x30)
    seal(raw)
    return bytes(raw)


def read(batches: list[CopiedBatch], limit_bytes: int = 0) -> list[Record]:
    """What a reader of the copy finds; offsets are those of the original, by the runs."""
    found: list[Record] = []
    for written in coalesced(batches, limit_bytes):
        raw = b"".join(written.pieces(Stamp(77, 3, written.first)))
        batch = MemoryRecords(raw).next_batch()
        assert batch.validate_crc()
        assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (77, 3, written.first)
        assert batch.is_transactional
        offsets = [
            run.source + step
            for moved_batch in written.batches
            for run in moved_batch.ranges
            for step in range(run.size)
        ]
        for index, (offset, one) in enumerate(zip(offsets, batch, strict=True)):
            assert one.offset == index, "the copy is dense"
            found.append((offset, one.timestamp, one.key, one.value, list(one.headers)))
    return found


def moved(raw: bytes, position: int = 0, aborted: list[tuple[int, int]] | None = None) -> tuple[list[Record], int]:
    found = committed_batches(memoryview(raw), aborted or [], position)
    return read(found.batches), found.next_offset


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, 10, 10_000])
def test_a_batch_goes_as_it_is(codec: str, size: int) -> None:
    records = [record(number) for number in range(100, 100 + size)]
    raw = encoded(100, records, codec)
    assert moved(raw, 100) == (records, 100 + size)
    [batch] = committed_batches(memoryview(raw), [], 100).batches
    assert bytes(batch.body) == raw[61:], "it was decoded on the way"


def test_control_batches_and_aborted_ones_are_left_out() -> None:
    kept = [record(number) for number in range(30)]
    raw = b"".join(
        (
            encoded(0, kept[0:5], producer=1),
            encoded(5, kept[5:10], producer=2),
            control(10, 1, commit=True),
            encoded(11, kept[11:15], producer=2),
            control(15, 2, commit=False),
            encoded(16, kept[16:20], producer=2),
            control(20, 2, commit=True),
        )
    )
    assert moved(raw, 0, [(2, 5)]) == (kept[0:5] + kept[16:20], 21)


def test_an_abort_that_began_in_an_earlier_fetch_is_left_out() -> None:
    raw = encoded(50, [record(50)], producer=2) + control(51, 2, commit=False) + encoded(52, [record(52)], producer=2)
    assert moved(raw, 50, [(2, 5)]) == ([record(52)], 53)


def test_a_batch_that_is_cut_off_is_for_the_next_fetch() -> None:
    whole, cut = encoded(0, [record(0)]), encoded(1, [record(1), record(2)])
    for missing in (1, 10, len(cut) - 1):
        assert moved(whole + cut[:-missing]) == ([record(0)], 1)


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_that_begins_before_the_position_is_cut(codec: str) -> None:
    records = [record(number) for number in range(20)]
    assert moved(encoded(0, records, codec), 5) == (records[5:], 20)


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_with_holes_is_made_dense(codec: str) -> None:
    records = [record(number) for number in (3, 4, 7, 8, 9, 12)]
    raw = bytearray(encoded(2, records, codec))
    struct.pack_into(">i", raw, 23, 12)  # compaction keeps the last offset: 14
    seal(raw)
    assert moved(bytes(raw), 2) == (records, 15)
    [batch] = committed_batches(memoryview(bytes(raw)), [], 2).batches
    assert batch.ranges == (SourceRange(3, 2), SourceRange(7, 3), SourceRange(12, 1))


def test_a_batch_whose_records_are_all_compacted_away_is_passed() -> None:
    raw = bytearray(encoded(2, [record(2)]))
    struct.pack_into(">i", raw, 23, 7)
    struct.pack_into(">i", raw, 57, 0)
    del raw[61:]
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    seal(raw)
    assert moved(bytes(raw), 2) == ([], 10)


def test_the_time_that_a_broker_set_is_kept() -> None:
    records = [record(number) for number in range(4)]
    stamps = {stamp for _, stamp, *_ in moved(encoded(0, records, attributes=_APPEND_TIME))[0]}
    assert stamps == {records[-1][1]}


def test_a_wrong_byte_is_found_before_it_is_sealed_again() -> None:
    raw = bytearray(encoded(1, [record(1), record(2)], "zstd"))
    raw[-3] ^= 1
    before = [record(0)]
    found = committed_batches(memoryview(encoded(0, before) + bytes(raw)), [], 0)
    assert read(found.batches) == before
    assert (found.next_offset, found.wrong) == (1, "the batch at offset 1 has a wrong checksum")


def test_an_older_format_is_named() -> None:
    raw = bytearray(encoded(9, [record(9)]))
    raw[16] = 1
    assert (
        committed_batches(memoryview(raw), [], 9).wrong == "the batch at offset 9 has format 1; only 2 can be mirrored"
    )


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_that_cannot_be_decoded_is_named_and_nothing_else_fails(codec: str) -> None:
    """Its checksum is right: a producer with a defect wrote it. The batches before it are copied."""
    before, rng, wrong = encoded(0, [record(0)]), random.Random(11), 0
    whole = encoded(1, [record(number) for number in range(1, 9)], codec, attributes=_APPEND_TIME)
    for _ in range(500):
        raw = bytearray(whole)
        for _ in range(rng.choice((1, 3, 20))):
            raw[rng.randrange(_HEADER_BYTES, len(raw))] = rng.randrange(256)
        seal(raw)
        found = committed_batches(memoryview(before + bytes(raw)), [], 0)
        assert read(found.batches[:1]) == [record(0)]
        if found.wrong is not None:
            wrong += 1
            assert (found.next_offset, len(found.batches)) == (1, 1)
            assert "the batch at offset 1 cannot be decoded" in found.wrong
        with suppress(CorruptBatch):
            committed_records(bytes(raw), [], 1)
    assert wrong > 50


def test_a_control_batch_that_cannot_be_decoded_is_named() -> None:
    raw = bytearray(control(1, 7, commit=False))
    del raw[_HEADER_BYTES + 3 :]
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    seal(raw)
    found = committed_batches(memoryview(encoded(0, [record(0)]) + bytes(raw)), [(7, 0)], 0)
    assert (found.next_offset, read(found.batches)) == (1, [record(0)])
    assert "the control batch at offset 1 cannot be decoded" in str(found.wrong)
    with pytest.raises(CorruptBatch, match="the batch at offset 1 cannot be decoded"):
        committed_records(bytes(raw), [(7, 0)], 0)
