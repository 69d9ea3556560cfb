"""Kafka's record batches (KIP-98, version 2): encode and compress; decode the committed records of a fetch. Pure.

Encoding is our own because batches are compressed by zstd at level 1: log lines get as small as at level 3, the only
one that aiokafka knows, in two thirds of the time.

Decoding is our own because the position after the last record must be exact (control batches and aborted data take
offsets, ranges have holes), and because a compacted topic may hold a control batch without records, at which a stock
consumer stops permanently: a lane could never be replayed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import cramjam
from aiokafka import errors
from crc32c import crc32c
from logferry.gateway.contract.chunk import Headers
from logferry.gateway.contract.varint import zigzag
from logferry.gateway.kafka.aiokafka_internals import (
    ABORT_MARKER,
    ControlRecord,
    MemoryRecords,
    gzip_encode,
    lz4_encode,
    snappy_encode,
)
from logferry.gateway.kafka.types import Piece, Record

# Base offset, length, leader epoch, magic, checksum.
BATCH_HEAD: Final = struct.Struct(">qiibI")
# Attributes, last offset delta, first and last timestamp, producer id and epoch, base sequence, number of records.
BATCH_TAIL: Final = struct.Struct(">hiqqqhii")
HEADER_BYTES: Final = BATCH_HEAD.size + BATCH_TAIL.size
# Base offset and length, which the length does not count.
BEFORE_LENGTH: Final = 12
MAGIC: Final = 2
TRANSACTIONAL: Final = 0x10
_NULL: Final = b"\x01"
# Attributes and timestamp delta of a record: none, all of a batch are of one time.
_PLAIN: Final = b"\0\0"
_ZSTD_LEVEL: Final = 1
# Of a batch's bytes: its attributes' lower one, and those of the last offset delta; a bit of the former.
_ATTRIBUTES: Final = BATCH_HEAD.size + 1
_LAST_DELTA: Final = BATCH_HEAD.size + 2
_CONTROL: Final = 0x20
# Batches with the same bytes here are as long, and of the same kind: the length, the format, the attributes.
_ALIKE: Final = (*range(8, BEFORE_LENGTH), 16, _ATTRIBUTES)
# Counted for each record and header beside its bytes: the room and the work that it takes.
_ENTRY_BYTES: Final = 30


class Codec(NamedTuple):
    """``number``: as in a batch's attributes."""

    number: int
    encode: Callable[[bytes], bytes]


CODECS: Final[dict[str, Codec]] = {
    "none": Codec(0, bytes),
    "gzip": Codec(1, gzip_encode),
    "snappy": Codec(2, snappy_encode),
    "lz4": Codec(3, lz4_encode),
    "zstd": Codec(4, lambda data: bytes(cramjam.zstd.compress(data, level=_ZSTD_LEVEL))),
}


class Stamp(NamedTuple):
    """The producer of a batch. ``sequence``: of the first record among the producer's in the partition."""

    producer_id: int
    epoch: int
    sequence: int


def batch_header(head: tuple[int, int, int, int], size: int, stamp: Stamp, body: Iterable[Piece]) -> bytes:
    """Of a batch as a part of a transaction.

    ``head``: attributes, last offset delta, first and last timestamp; ``size``: the number of records in ``body``.
    """
    attributes, *delta_and_times = head
    tail = BATCH_TAIL.pack(attributes | TRANSACTIONAL, *delta_and_times, *stamp, size)
    length, checksum = HEADER_BYTES - BEFORE_LENGTH, crc32c(tail)
    for piece in body:
        length += len(piece)
        checksum = crc32c(piece, checksum)
    return BATCH_HEAD.pack(0, length, -1, MAGIC, checksum) + tail


class RecordBatch(NamedTuple):
    """Records in their encoding. ``first``: the index of the first among all that were given; ``size``: of them."""

    first: int
    size: int
    records: bytes
    now_ms: int
    codec: Codec

    def pieces(self, stamp: Stamp) -> tuple[bytes, bytes]:
        """The batch as a part of a transaction."""
        number, body = 0, self.records
        if self.codec.number:
            packed = self.codec.encode(body)
            if len(packed) < len(body):
                number, body = self.codec.number, packed
        return batch_header((number, self.size - 1, self.now_ms, self.now_ms), self.size, stamp, (body,)), body


def batches(records: list[Record], limit_bytes: int, now_ms: int, codec: Codec) -> Iterator[RecordBatch]:
    """The records in batches of at most so many bytes before compression; a larger record has one of its own.

    All have the one timestamp.
    """
    room = limit_bytes - HEADER_BYTES
    parts: list[bytes] = []
    first = size = 0
    for index, record in enumerate(records):
        encoded = _encoded(index - first, *record)
        length = sum(map(len, encoded))
        if parts and size + length > room:
            yield RecordBatch(first, index - first, b"".join(parts), now_ms, codec)
            first, size, parts = index, 0, []
            encoded = _encoded(0, *record)
        parts += encoded
        size += length
    yield RecordBatch(first, len(records) - first, b"".join(parts), now_ms, codec)


def _encoded(index: int, key: bytes, value: bytes | None, headers: Headers) -> tuple[bytes, ...]:
    """A record in parts: its length, what comes before the value, the value, and its headers."""
    announced = _NULL if value is None else _varint(len(value))
    before = b"".join((_PLAIN, _varint(index), _varint(len(key)), key, announced))
    parts = [_varint(len(headers))]
    for name, content in headers:
        parts += (_header_name(name), _varint(len(content)), content)
    data, after = value or b"", b"".join(parts)
    return _varint(len(before) + len(data) + len(after)), before, data, after


@lru_cache(maxsize=4096)
def _header_name(name: str) -> bytes:
    encoded = name.encode()
    return _varint(len(encoded)) + encoded


def _varint(number: int) -> bytes:
    """`zigzag` of a number from 0 on, the small ones from a table."""
    return _SMALL[number] if number < len(_SMALL) else zigzag(number)


_SMALL: Final = tuple(map(zigzag, range(4096)))


class CorruptBatch(errors.KafkaError):
    """A batch whose checksum is wrong, or whose records cannot be decoded. Kafka gives the same again."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # without the name of the class


class KafkaRecord(NamedTuple):
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


class FetchedRecords(NamedTuple):
    """The records of one fetch. ``next_offset``: where the next one starts, past everything that was skipped.

    ``last_stable``: the end for readers of committed records.
    """

    records: list[KafkaRecord]
    next_offset: int
    last_stable: int

    @property
    def at_end(self) -> bool:
        return self.next_offset >= self.last_stable


def committed_records(
    raw: bytes, aborted: Iterable[tuple[int, int]], offset: int, stop_bytes: int | None = None
) -> tuple[list[KafkaRecord], int]:
    """The committed records from ``offset`` on, and the offset after them.

    ``aborted``: (producer id, first offset) of the aborted transactions in the range, as the fetch answered.
    ``stop_bytes``: stop after the record that reaches it, by keys, values and headers, and some for each of these; at
    least one record is returned if there is one. What lies before a batch that cannot be decoded is returned, too;
    raises CorruptBatch where there is nothing.
    """
    pending = sorted(aborted, key=lambda transaction: transaction[1])
    open_aborts: set[int] = set()
    found: list[KafkaRecord] = []
    size, position, passed = 0, offset, offset
    if not pending:
        raw, passed = without_markers(raw, offset)
    batches = MemoryRecords(raw)
    while batches.has_next():
        batch = batches.next_batch()
        try:
            while pending and pending[0][1] <= batch.base_offset:
                open_aborts.add(pending.pop(0)[0])
            if batch.is_control_batch:
                # There are many, most end a commit, and a replay of a lane passes them all.
                if batch.producer_id in open_aborts and ends_abort(batch):
                    open_aborts.discard(batch.producer_id)
            elif not (batch.is_transactional and batch.producer_id in open_aborts):
                if not batch.validate_crc():
                    raise CorruptBatch(f"the batch at offset {batch.base_offset} has a wrong checksum")
                for record in batch:
                    if record.offset < offset:
                        continue
                    found.append(KafkaRecord(record.offset, record.timestamp, record.key, record.value, record.headers))
                    size += len(record.value or b"") + len(record.key or b"") + _ENTRY_BYTES
                    for _, content in record.headers:
                        size += len(content or b"") + _ENTRY_BYTES
                    if stop_bytes is not None and size >= stop_bytes:
                        return found, record.offset + 1
            position = max(position, batch.next_offset)
        except MemoryError:
            raise
        except Exception as error:  # each codec has errors of its own
            if found or position > offset:
                return found, max(position, found[-1].offset + 1 if found else offset)
            if isinstance(error, CorruptBatch):
                raise
            raise CorruptBatch(
                f"the batch at offset {getattr(batch, 'base_offset', position)} cannot be decoded: {error!r}"
            ) from error
    return found, max(position, passed)


def without_markers(raw: bytes, offset: int) -> tuple[bytes, int]:
    """The batches without the long runs of those that end transactions, and the offset after the last that is left out.

    Compaction leaves these of all transactions for days: a lane that is taken over has millions, and passes them by a
    few comparisons for thousands. Only where no transaction was aborted: the others mean nothing to a reader.
    """
    at, kept_from, kept, passed = 0, 0, list[bytes](), offset
    while at + HEADER_BYTES <= len(raw):
        size = BEFORE_LENGTH + int.from_bytes(raw[at + 8 : at + BEFORE_LENGTH], "big")
        following = at + max(size, HEADER_BYTES)
        if raw[at + _ATTRIBUTES] & _CONTROL and _is_alike(raw, at, following):
            end = at + size * _run(raw, at, size)
            kept.append(raw[kept_from:at])
            last = end - size
            delta = int.from_bytes(raw[last + _LAST_DELTA : last + _LAST_DELTA + 4], "big")
            passed = max(passed, int.from_bytes(raw[last : last + 8], "big") + delta + 1)
            following = kept_from = end
        at = following
    return (raw, offset) if not kept_from else (b"".join((*kept, raw[kept_from:])), passed)


def _is_alike(raw: bytes, one: int, other: int) -> bool:
    return all(raw[one + byte : one + byte + 1] == raw[other + byte : other + byte + 1] for byte in _ALIKE)


def _run(raw: bytes, at: int, size: int) -> int:
    """How many whole batches from ``at`` on are alike: as long, and of the same attributes."""
    left, looked = (len(raw) - at) // size, 16
    while True:
        looked = min(4 * looked, left)
        end = at + size * looked
        columns = (raw[at + byte : end : size] for byte in _ALIKE)
        count = min(looked - len(column.lstrip(column[:1])) for column in columns)
        if count < looked or looked == left:
            return count


def ends_abort(batch: Iterable[object]) -> bool:
    """A control batch emptied by compaction ends whatever its producer had open."""
    for record in batch:
        return bool(ControlRecord.parse(record.key) == ABORT_MARKER)  # type: ignore[attr-defined]
    return True
