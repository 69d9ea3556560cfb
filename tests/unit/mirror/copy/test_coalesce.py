"""Small batches written as one: a reader finds the same records, and what was written knows what it is made of."""

from __future__ import annotations

import itertools
import struct

from aiokafka.record.memory_records import MemoryRecords
from hypothesis import given, settings
from hypothesis import strategies as st
from logferry.gateway.kafka.record_batch import Stamp
from logferry.mirror.copy.batch_rewrite import CoalescedBatch, CopiedBatch, coalesced, committed_batches

from tests.unit.mirror.copy.test_batch_rewrite import Record, encoded, seal

_MIB = 1 << 20
_VALUES = st.one_of(
    st.none(), st.binary(max_size=200), st.sampled_from((63, 64, 4095, 4096, 8192, 70_000)).map(lambda n: b"v" * n)
)
_HEADERS = st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=70)), max_size=2)
# Times that go back, too.
_TIMES = st.one_of(st.integers(0, 2**41), st.integers(1_700_000_000_000, 1_700_000_000_100))
_RECORDS = st.tuples(_TIMES, st.none() | st.binary(max_size=70), _VALUES, _HEADERS)
_BATCHES = st.lists(
    st.tuples(
        st.lists(_RECORDS, min_size=1, max_size=20),
        st.sampled_from(("none", "none", "none", "zstd")),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


def stored(
    shapes: list[tuple[list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes]]]], str, int]],
) -> tuple[list[Record], list[CopiedBatch]]:
    """The records and the batches of a partition; before each batch a few offsets are taken by something else."""
    records: list[Record] = []
    raw, offset = b"", 0
    for shape, codec, hole in shapes:
        base = offset + hole
        batch: list[Record] = [(base + index, *fields) for index, fields in enumerate(shape)]
        raw += encoded(base, batch, codec)
        records += batch
        offset = base + len(batch)
    return records, committed_batches(memoryview(raw), [], 0).batches


def read(written: list[CoalescedBatch]) -> list[Record]:
    """As a reader of the copy finds them, with the offsets of the original."""
    found: list[Record] = []
    for batch in written:
        raw = b"".join(batch.pieces(Stamp(7, 1, batch.first)))
        decoded = MemoryRecords(raw).next_batch()
        assert decoded is not None
        assert decoded.validate_crc()
        assert (decoded.base_sequence, decoded.is_transactional) == (len(found), True)
        offsets = [run.source + step for moved in batch.batches for run in moved.ranges for step in range(run.size)]
        stamps = []
        for index, (offset, one) in enumerate(zip(offsets, decoded, strict=True)):
            assert one.offset == index
            stamps.append(one.timestamp)
            found.append((offset, one.timestamp, one.key, one.value, list(one.headers)))
        assert batch.size == len(stamps)
        assert batch.head[3] == max(stamps)
    return found


@settings(deadline=None)
@given(_BATCHES, st.sampled_from((0, 300, 5000, 100_000, _MIB)))
def test_the_records_are_the_same(shapes: list[tuple[list[Record], str, int]], limit_bytes: int) -> None:
    records, batches = stored(shapes)  # type: ignore[arg-type]
    written = list(coalesced(batches, limit_bytes))
    assert read(written) == records
    assert list(itertools.chain.from_iterable(one.batches for one in written)) == batches
    for one in written:
        size = sum(map(len, one.pieces(Stamp(7, 1, one.first))))
        assert len(one.batches) == 1 or size <= limit_bytes
        assert len({batch.head[0] & 0x07 for batch in one.batches}) == 1


def test_records_in_a_batch_each_go_together_and_where_they_are_kept() -> None:
    records: list[Record] = [(number, 1_000_000 + number, None, b"x" * 65_536, []) for number in range(40)]
    raw = memoryview(b"".join(encoded(record[0], [record]) for record in records))
    batches = committed_batches(raw, [], 0).batches
    written = list(coalesced(batches, _MIB))
    assert [one.size for one in written] == [15, 15, 10]
    large = [piece for one in written for piece in one.body if len(piece) > 1000]
    assert len(large) == 40
    kept = {id(batch.body.obj) for batch in batches}
    assert all(isinstance(piece, memoryview) and id(piece.obj) in kept for piece in large)


def test_batches_of_many_records_go_as_they_are() -> None:
    _, batches = stored([([(5, None, b"v", [])] * 17, "none", 0)] * 3)
    assert [one.batches for one in coalesced(batches, _MIB)] == [(batch,) for batch in batches]


def test_what_is_not_as_it_should_be_goes_as_it_is() -> None:
    first = encoded(0, [(0, 5, None, b"abc", [])])
    for at, value in ((61, 2), (61, 0x7E), (64, 4)):  # the record's length: less, more; its offset delta
        wrong = bytearray(encoded(1, [(1, 5, None, b"abc", [])]))
        struct.pack_into("B", wrong, at, value)
        seal(wrong)
        batches = committed_batches(memoryview(first + bytes(wrong)), [], 0).batches
        written = list(coalesced(batches, _MIB))
        assert [len(one.batches) for one in written] == [1, 1]
        assert bytes(written[1].body[0]) == bytes(wrong[61:])


def test_what_is_marked_as_compressed_is_not_looked_into() -> None:
    raw = b"".join(encoded(number, [(number, 5, None, b"abc", [])], attributes=4) for number in range(2))
    written = list(coalesced(committed_batches(memoryview(raw), [], 0).batches, _MIB))
    assert [len(one.batches) for one in written] == [1, 1]


def test_that_a_record_grows_is_counted() -> None:
    _, batches = stored([([(0, None, b"v", [])], "none", 0), ([(2**41, None, b"v", [])], "none", 0)])
    limits = range(sum(len(batch.body) for batch in batches), 200)
    sizes = {
        limit_bytes: max(sum(map(len, one.pieces(Stamp(7, 1, 0)))) for one in coalesced(batches, limit_bytes))
        for limit_bytes in limits
    }
    together = {limit_bytes: size for limit_bytes, size in sizes.items() if size > batches[0].size_bytes}
    assert together
    assert all(size <= limit_bytes for limit_bytes, size in together.items())
