"""Record batches: what aiokafka's reader finds in them, and where they are cut."""

from __future__ import annotations

import random

import cramjam
import pytest
from aiokafka.record.memory_records import MemoryRecords
from logferry.gateway.kafka.record_batch import CODECS, Stamp, batches
from logferry.gateway.kafka.types import Record
from logferry.ops.bench.harness.kafka import chunks

_HEADER_BYTES = 61
_NOW_MS = 1_700_000_000_000
_SEQNO = ("lf.seqno", bytes(8))


def read(raw: bytes) -> list[Record]:
    found: list[Record] = []
    left = MemoryRecords(raw)
    while left.has_next():
        batch = left.next_batch()
        assert batch is not None
        assert batch.validate_crc()
        assert batch.is_transactional
        assert not batch.is_control_batch
        for record in batch:
            assert record.timestamp == _NOW_MS
            found.append((record.key or b"", record.value, list(record.headers)))
    return found


def some_records(count: int) -> list[Record]:
    rng = random.Random(7)
    found: list[Record] = []
    for number in range(count):
        value = None if number % 7 == 3 else b"line %d\r\n" % number * rng.choice((0, 1, 10, 900))
        headers = [_SEQNO, ("lf-attr-naïve", "é".encode()), ("empty", b"")][: rng.randrange(4)]
        found.append((rng.randbytes(rng.choice((1, 63, 64, 300))), value, headers))
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_a_reader_finds_every_record_as_it_was_given(codec: str) -> None:
    records = some_records(500)
    found: list[Record] = []
    for batch in batches(records, 1 << 16, _NOW_MS, CODECS[codec]):
        raw = b"".join(batch.pieces(Stamp(5, 2, batch.first)))
        assert len(raw) <= 1 << 16
        found += read(raw)
    assert found == records


@pytest.mark.parametrize("length", [0, 1, 63, 64, 4095, 4096, 8191, 8192, 1_048_575, 1_048_576])
def test_lengths_on_both_sides_of_a_byte_more(length: int) -> None:
    records: list[Record] = [(b"k", bytes(length), [])]
    [batch] = batches(records, 1 << 20, _NOW_MS, CODECS["none"])
    assert read(b"".join(batch.pieces(Stamp(1, 0, 0)))) == records


def test_a_batch_is_cut_before_the_limit_and_says_where_it_begins() -> None:
    records: list[Record] = [(b"k", bytes(100), []) for _ in range(10)]
    [whole] = batches(records, 1 << 20, 0, CODECS["none"])
    size = _HEADER_BYTES + len(whole.records)
    assert [(b.first, b.size) for b in batches(records, size, 0, CODECS["none"])] == [(0, 10)]
    assert [(b.first, b.size) for b in batches(records, size - 1, 0, CODECS["none"])] == [(0, 9), (9, 1)]


def test_a_record_over_the_limit_has_a_batch_of_its_own() -> None:
    records: list[Record] = [(b"k", b"a", []), (b"k", bytes(5000), []), (b"k", b"b", [])]
    assert [(b.first, b.size) for b in batches(records, 1000, 0, CODECS["none"])] == [(0, 1), (1, 1), (2, 1)]


def test_what_does_not_get_smaller_is_not_compressed() -> None:
    records: list[Record] = [(b"k", random.Random(1).randbytes(1000), [])]
    [packed] = batches(records, 1 << 20, 1, CODECS["zstd"])
    [plain] = batches(records, 1 << 20, 1, CODECS["none"])
    assert b"".join(packed.pieces(Stamp(1, 0, 0))) == b"".join(plain.pieces(Stamp(1, 0, 0)))


def test_log_lines_get_as_small_as_by_the_usual_level() -> None:
    [batch] = batches([(b"k", chunk, []) for chunk in chunks(8, 65_536)], 1 << 20, 1, CODECS["zstd"])
    ours = len(b"".join(batch.pieces(Stamp(1, 0, 0))))
    assert ours < 1.05 * len(cramjam.zstd.compress(batch.records, level=3))
