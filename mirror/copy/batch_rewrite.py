"""Copies record batches from one cluster to another without decoding their records. Pure.

Of a batch only the producer's id, epoch and sequence, the transactional bit and the checksum are rewritten. Control
batches and those of aborted transactions are dropped. Three kinds are decoded and encoded again, because a broker
would reject them or a reader would see something else: a batch that begins before the offset asked for (records were
deleted into it), one with holes (its topic is compacted), and one whose timestamps its broker set.

Small batches that follow each other in a partition are coalesced into one: one request and one append for many. Only
uncompressed batches are coalesced, and no key, value or header is read: only the head of each record is rewritten,
since its time and offset count from the beginning of the batch. All other bytes stay where they were fetched. A batch
of many records is written as it is, because walking through them costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from crc32c import crc32c
from logferry.gateway.contract.varint import read_zigzag, zigzag
from logferry.gateway.kafka.aiokafka_internals import DefaultRecordBatchBuilder, MemoryRecords
from logferry.gateway.kafka.record_batch import (
    BATCH_HEAD,
    BATCH_TAIL,
    BEFORE_LENGTH,
    HEADER_BYTES,
    MAGIC,
    TRANSACTIONAL,
    Stamp,
    batch_header,
    ends_abort,
)
from logferry.gateway.kafka.types import Piece

CODEC: Final = 0x07
_APPEND_TIME, _CONTROL, _DELETE_HORIZON = 0x08, 0x20, 0x40
# A batch with more records than this is not added to another.
_FEW_RECORDS: Final = 16
# How much a record can grow: its length, the time and the offset.
_GROWTH_BYTES: Final = 5 + 10 + 5
# Below this a copy costs less than a piece of its own.
_SMALL_BYTES: Final = 4096

_Records = list[tuple[bytes, int, memoryview]]


class SourceRange(NamedTuple):
    """``size`` records with consecutive offsets, from ``source`` on in the remote partition."""

    source: int
    size: int


class CopiedBatch(NamedTuple):
    """One batch to write. It keeps at most about twice its size in memory.

    ``base``: its first offset in the original partition, ``end``: the offset after it. ``epoch``, ``crc``: of the
    original. ``head``: attributes, last offset delta, timestamps; ``body``: the records as they are.
    """

    base: int
    end: int
    epoch: int
    crc: int
    last_ms: int
    ranges: tuple[SourceRange, ...]
    size: int
    head: tuple[int, int, int, int]
    body: memoryview

    @property
    def size_bytes(self) -> int:
        return HEADER_BYTES + len(self.body)


class CopiedBatches(NamedTuple):
    """The batches of one fetch. ``next_offset``: past everything that was dropped, too.

    ``epoch``: of the last batch before it, of any kind; None: there was none. ``wrong``: why the batch there cannot be
    copied; None: it is not complete yet.
    """

    batches: list[CopiedBatch]
    next_offset: int
    epoch: int | None = None
    wrong: str | None = None


def committed_batches(raw: memoryview, aborted: Iterable[tuple[int, int]], offset: int) -> CopiedBatches:
    """The batches with committed records from ``offset`` on.

    ``aborted``: (producer id, first offset) of the aborted transactions in the range, as the fetch answered; one that
    began in an earlier fetch is among them. A truncated last batch is left to the next fetch.
    """
    pending = sorted(aborted, key=lambda transaction: transaction[1])
    open_aborts: set[int] = set()
    found: list[CopiedBatch] = []
    position, at, end = offset, 0, len(raw)
    passed: int | None = None
    while end - at >= HEADER_BYTES:
        base, length, epoch, magic, crc = BATCH_HEAD.unpack_from(raw, at)
        after = at + BEFORE_LENGTH + length
        if after > end:
            break
        if magic != MAGIC:
            wrong = f"the batch at offset {base} has format {magic}; only {MAGIC} can be mirrored"
            return CopiedBatches(found, position, passed, wrong)
        attributes, last_delta, first_ms, last_ms, producer, _, _, count = BATCH_TAIL.unpack_from(
            raw, at + BATCH_HEAD.size
        )
        batch, at = raw[at:after], after
        next_offset = base + last_delta + 1
        while pending and pending[0][1] <= base:
            open_aborts.add(pending.pop(0)[0])
        try:
            if attributes & _CONTROL:
                if producer in open_aborts and ends_abort(MemoryRecords(bytes(batch)).next_batch()):
                    open_aborts.discard(producer)
            elif next_offset > position and not (attributes & TRANSACTIONAL and producer in open_aborts):
                if crc32c(batch[BATCH_HEAD.size :]) & 0xFFFFFFFF != crc:
                    return CopiedBatches(found, position, passed, f"the batch at offset {base} has a wrong checksum")
                is_dense = count == last_delta + 1
                if base >= position and is_dense and not attributes & (_APPEND_TIME | _DELETE_HORIZON):
                    head, spans = (attributes, last_delta, first_ms, last_ms), (SourceRange(base, count),)
                    found.append(CopiedBatch(base, next_offset, epoch, crc, last_ms, spans, count, head, _body(batch)))
                elif count:
                    found += _encoded_again(batch, position, epoch, crc)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  each codec has errors of its own
            kind = "control batch" if attributes & _CONTROL else "batch"
            wrong = f"the {kind} at offset {base} cannot be decoded: {error!r}"
            return CopiedBatches(found, position, passed, wrong)
        position, passed = max(position, next_offset), epoch
    return CopiedBatches(found, position, passed)


def _body(batch: memoryview) -> memoryview:
    """The records. A view would keep the whole answer of the fetch in memory, so it is one only of most of it."""
    body = batch[HEADER_BYTES:]
    return body if 2 * len(body) >= memoryview(batch.obj).nbytes else memoryview(bytes(body))


def _encoded_again(batch: memoryview, position: int, epoch: int, crc: int) -> list[CopiedBatch]:
    """The records from the position on as one batch without holes."""
    raw = bytes(batch)
    base = BATCH_HEAD.unpack_from(raw)[0]
    attributes, last_delta, _, last_ms, _, _, _, _ = BATCH_TAIL.unpack_from(raw, BATCH_HEAD.size)
    records = [record for record in MemoryRecords(raw).next_batch() if record.offset >= position]
    if not records:
        return []
    builder = DefaultRecordBatchBuilder(
        magic=MAGIC,
        compression_type=attributes & CODEC,
        is_transactional=1,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 30,
    )
    for index, record in enumerate(records):
        stamp = last_ms if attributes & _APPEND_TIME else record.timestamp
        builder.append(index, stamp, record.key, record.value, list(record.headers))
    built = memoryview(bytes(builder.build()))
    head = BATCH_TAIL.unpack_from(built, BATCH_HEAD.size)
    runs = groupby(enumerate(record.offset for record in records), lambda numbered: numbered[1] - numbered[0])
    spans = ([offset for _, offset in run] for _, run in runs)
    ranges = tuple(SourceRange(span[0], len(span)) for span in spans)
    fields, body = (head[0], head[1], head[2], head[3]), built[HEADER_BYTES:]
    return [CopiedBatch(base, base + last_delta + 1, epoch, crc, last_ms, ranges, len(records), fields, body)]


class CoalescedBatch(NamedTuple):
    """One batch to write, made of one or more that were read. ``first``: the number of records of its part before it.

    ``head``: attributes, last offset delta, timestamps; ``body``: the records, in pieces.
    """

    first: int
    size: int
    batches: tuple[CopiedBatch, ...]
    head: tuple[int, int, int, int]
    body: Sequence[Piece]

    def pieces(self, stamp: Stamp) -> list[Piece]:
        return [batch_header(self.head, self.size, stamp, self.body), *self.body]


def coalesced(batches: Iterable[CopiedBatch], limit_bytes: int) -> Iterator[CoalescedBatch]:
    """All batches in order; a coalesced one is not larger than the limit."""
    first = size_bytes = 0
    run: list[tuple[CopiedBatch, _Records]] = []
    for batch in batches:
        most = len(batch.body) + _GROWTH_BYTES * batch.size
        records = _records(batch, run[0][0].head[0]) if run and size_bytes + most <= limit_bytes else None
        if records is None:
            if run:
                yield (written := _one_of(first, run))
                first += written.size
            run, size_bytes, records = [], batch.size_bytes, []
        else:
            size_bytes += most
        run.append((batch, records))
    if run:
        yield _one_of(first, run)


def _one_of(first: int, run: list[tuple[CopiedBatch, _Records]]) -> CoalescedBatch:
    """The first batch as it is, and the records of the others behind it."""
    batches = tuple(batch for batch, _ in run)
    size, body, small = batches[0].size, list[Piece]([batches[0].body]), bytearray()
    if len(run) == 1:
        return CoalescedBatch(first, size, batches, batches[0].head, body)
    attributes, _, base_ms, _ = batches[0].head
    for batch, records in run[1:]:
        later_ms = batch.head[2] - base_ms
        for attribute, time_delta, rest in records:
            head = b"".join((attribute, zigzag(later_ms + time_delta), zigzag(size)))
            small += zigzag(len(head) + len(rest)) + head
            if len(rest) < _SMALL_BYTES:
                small += rest
            else:
                body += (small, rest)
                small = bytearray()
            size += 1
    fields = (attributes & ~TRANSACTIONAL, size - 1, base_ms, max(batch.head[3] for batch in batches))
    return CoalescedBatch(first, size, batches, fields, [*body, small])


def _records(batch: CopiedBatch, attributes: int) -> _Records | None:
    """Attributes, time delta, and the bytes after the offset delta.

    None if it cannot be in one batch with those before it, which has these ``attributes``.
    """
    if batch.size > _FEW_RECORDS or attributes & CODEC or (batch.head[0] ^ attributes) & ~TRANSACTIONAL:
        return None
    raw, at = batch.body, 0
    found: _Records = []
    try:
        for index in range(batch.size):
            length, begin = read_zigzag(raw, at)
            time_delta, after = read_zigzag(raw, begin + 1)
            offset_delta, after = read_zigzag(raw, after)
            at = begin + length
            if offset_delta != index or not after <= at <= len(raw):
                return None
            found.append((bytes(raw[begin : begin + 1]), time_delta, raw[after:at]))
    except IndexError:
        return None
    return found if at == len(raw) else None
