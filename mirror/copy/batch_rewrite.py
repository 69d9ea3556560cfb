"""Record batches on their way from one cluster to another: moved as they are, without decoding a record. Pure.

Of a batch only the producer's id, epoch and sequence, the transactional bit and the checksum are written anew. Control
batches and those of aborted transactions are left out. Three kinds are decoded and encoded again, because a broker
would refuse them or a reader would see something else: one that begins before the offset that was asked for (records
were deleted into it), one with holes (its topic is compacted), and one whose timestamps its broker set.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from crc32c import crc32c
from logferry.gateway.kafka.broker_connection import Piece
from logferry.gateway.kafka.record_batch import Stamp

# Base offset, length, leader epoch, magic, checksum.
_HEAD: Final = struct.Struct(">qiibI")
# Attributes, last offset delta, first and last timestamp, producer id and epoch, base sequence, number of records.
_TAIL: Final = struct.Struct(">hiqqqhii")
_BODY: Final = _HEAD.size + _TAIL.size
# Base offset and length, which the length does not count.
_BEFORE_LENGTH: Final = 12
_MAGIC: Final = 2
CODEC: Final = 0x07
TRANSACTIONAL: Final = 0x10
_APPEND_TIME, _CONTROL, _DELETE_HORIZON = 0x08, 0x20, 0x40
_ABORT: Final = 0


class Run(NamedTuple):
    """So many records with consecutive offsets, from ``source`` on in the original partition."""

    source: int
    size: int


class MovedBatch(NamedTuple):
    """One batch to be written.

    ``base``: its first offset in the original partition, ``end``: the offset after it. ``epoch``, ``crc``: of the
    original. ``head``: attributes, last offset delta, timestamps; ``body``: the records as they are.
    """

    base: int
    end: int
    epoch: int
    crc: int
    last_ms: int
    runs: tuple[Run, ...]
    size: int
    head: tuple[int, int, int, int]
    body: memoryview

    @property
    def size_bytes(self) -> int:
        return _BODY + len(self.body)


def header(head: tuple[int, int, int, int], size: int, stamp: Stamp, body: Iterable[Piece]) -> bytes:
    """Of a batch as a part of a transaction. ``head``: as in a `MovedBatch`; ``size``: the records in the ``body``."""
    attributes, last_delta, first_ms, last_ms = head
    tail = _TAIL.pack(attributes | TRANSACTIONAL, last_delta, first_ms, last_ms, *stamp, size)
    length, checksum = _BODY - _BEFORE_LENGTH, crc32c(tail)
    for piece in body:
        length += len(piece)
        checksum = crc32c(piece, checksum)
    return _HEAD.pack(0, length, -1, _MAGIC, checksum) + tail


class Moved(NamedTuple):
    """What one fetch brought. ``next_offset``: past everything that was left out, too.

    ``epoch``: of the last batch before it, whatever that was; None: there was none. ``wrong``: why the batch there
    cannot be moved, None: it is only not there yet.
    """

    batches: list[MovedBatch]
    next_offset: int
    epoch: int | None = None
    wrong: str | None = None


def committed_batches(raw: memoryview, aborted: Iterable[tuple[int, int]], offset: int) -> Moved:
    """The batches with committed records from ``offset`` on.

    ``aborted``: (producer id, first offset) of the aborted transactions in the range, as the fetch answered; one that
    began in an earlier fetch is among them. A last batch that was cut off is for the next fetch.
    """
    pending = sorted(aborted, key=lambda transaction: transaction[1])
    open_aborts: set[int] = set()
    found: list[MovedBatch] = []
    position, at, end = offset, 0, len(raw)
    passed: int | None = None
    while end - at >= _BODY:
        base, length, epoch, magic, crc = _HEAD.unpack_from(raw, at)
        after = at + _BEFORE_LENGTH + length
        if after > end:
            break
        if magic != _MAGIC:
            wrong = f"the batch at offset {base} is of format {magic}; {_MAGIC} can be mirrored"
            return Moved(found, position, passed, wrong)
        attributes, last_delta, first_ms, last_ms, producer, _, _, count = _TAIL.unpack_from(raw, at + _HEAD.size)
        batch, at = raw[at:after], after
        next_offset = base + last_delta + 1
        while pending and pending[0][1] <= base:
            open_aborts.add(pending.pop(0)[0])
        if attributes & _CONTROL:
            if producer in open_aborts and _ends_abort(batch, count):
                open_aborts.discard(producer)
        elif attributes & TRANSACTIONAL and producer in open_aborts:
            pass
        elif next_offset > position:
            if crc32c(batch[_HEAD.size :]) & 0xFFFFFFFF != crc:
                return Moved(found, position, passed, f"the batch at offset {base} has a wrong checksum")
            is_dense = count == last_delta + 1
            if base >= position and is_dense and not attributes & (_APPEND_TIME | _DELETE_HORIZON):
                head = (attributes, last_delta, first_ms, last_ms)
                run = Run(base, count)
                found.append(MovedBatch(base, next_offset, epoch, crc, last_ms, (run,), count, head, batch[_BODY:]))
            elif count:
                found += _encoded_again(batch, position, epoch, crc)
        position, passed = max(position, next_offset), epoch
    return Moved(found, position, passed)


def _ends_abort(batch: memoryview, count: int) -> bool:
    """A control batch that compaction emptied says nothing; it ends whatever its producer had open."""
    if not count:
        return True
    # Of the one record: length, attributes, two deltas, the key's length (4: 8 in zigzag), then version and type.
    key = bytes(batch[_BODY:])
    at = 0
    at = _past_varint(key, at) + 1
    for _ in range(3):
        at = _past_varint(key, at)
    return bool(struct.unpack_from(">hh", key, at)[1] == _ABORT)


def _past_varint(raw: bytes, at: int) -> int:
    while raw[at] & 0x80:
        at += 1
    return at + 1


def _encoded_again(batch: memoryview, position: int, epoch: int, crc: int) -> list[MovedBatch]:
    """The batch with its records from the position on, in one that is dense."""
    raw = bytes(batch)
    base, _, _, _, _ = _HEAD.unpack_from(raw)
    attributes, last_delta, _, last_ms, _, _, _, _ = _TAIL.unpack_from(raw, _HEAD.size)
    records = [record for record in MemoryRecords(raw).next_batch() if record.offset >= position]
    if not records:
        return []
    builder = DefaultRecordBatchBuilder(
        magic=_MAGIC,
        compression_type=attributes & CODEC,
        is_transactional=1,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 30,
    )
    by_broker = attributes & _APPEND_TIME
    for index, record in enumerate(records):
        stamp = last_ms if by_broker else record.timestamp
        builder.append(index, stamp, record.key, record.value, list(record.headers))
    built = memoryview(bytes(builder.build()))
    head = _TAIL.unpack_from(built, _HEAD.size)
    runs: list[Run] = []
    for record in records:
        if runs and runs[-1].source + runs[-1].size == record.offset:
            runs[-1] = Run(runs[-1].source, runs[-1].size + 1)
        else:
            runs.append(Run(record.offset, 1))
    fields = (head[0], head[1], head[2], head[3])
    end = base + last_delta + 1
    return [MovedBatch(base, end, epoch, crc, last_ms, tuple(runs), len(records), fields, built[_BODY:])]
