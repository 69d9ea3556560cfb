"""Coalesces small batches that follow each other in a partition into one: one request and one append for many. Pure.

Only uncompressed batches are coalesced, and no key, value or header is read: only the head of each record is
rewritten, since its time and offset count from the beginning of the batch. All other bytes stay where they were
fetched.

A batch of many records is written as it is, because walking through them costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from logferry.gateway.contract.varint import read_zigzag, zigzag
from logferry.gateway.kafka.record_batch import TRANSACTIONAL, Stamp, batch_header
from logferry.gateway.kafka.types import Piece
from logferry.mirror.copy.batch_rewrite import CODEC, CopiedBatch

# A batch with more records than this is not added to another.
_FEW_RECORDS: Final = 16
# How much a record can grow: its length, the time and the offset.
_GROWTH_BYTES: Final = 5 + 10 + 5
# Below this a copy costs less than a piece of its own.
_SMALL_BYTES: Final = 4096


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
    first, open_one = 0, None
    for batch in batches:
        if open_one is not None:
            if open_one.takes(batch, limit_bytes):
                continue
            written = open_one.written(first)
            first += written.size
            yield written
        open_one = _Open(batch)
    if open_one is not None:
        yield open_one.written(first)


class _Open:
    """A batch that others may be added to, beginning with the first as it is."""

    def __init__(self, batch: CopiedBatch) -> None:
        attributes, _, self._base_ms, self._last_ms = batch.head
        self._attributes = attributes & ~TRANSACTIONAL
        self._batches, self._size, self._bytes = [batch], batch.size, batch.size_bytes
        self._body: list[Piece] = [batch.body]
        self._small = bytearray()

    def takes(self, batch: CopiedBatch, limit_bytes: int) -> bool:
        """Whether it was added."""
        attributes, _, base_ms, last_ms = batch.head
        most = len(batch.body) + _GROWTH_BYTES * batch.size
        if batch.size > _FEW_RECORDS or self._bytes + most > limit_bytes:
            return False
        if self._attributes & CODEC or attributes & ~TRANSACTIONAL != self._attributes:
            return False
        records = _records(batch)
        if records is None:
            return False
        for attribute, time_delta, rest in records:
            head = b"".join((attribute, zigzag(base_ms + time_delta - self._base_ms), zigzag(self._size)))
            self._add(zigzag(len(head) + len(rest)) + head, rest)
            self._size += 1
        self._batches.append(batch)
        self._last_ms = max(self._last_ms, last_ms)
        return True

    def _add(self, head: bytes, rest: memoryview) -> None:
        self._bytes += len(head) + len(rest)
        self._small += head
        if len(rest) < _SMALL_BYTES:
            self._small += rest
        else:
            self._body += (self._small, rest)
            self._small = bytearray()

    def written(self, first: int) -> CoalescedBatch:
        if len(self._batches) == 1:
            [batch] = self._batches
            return CoalescedBatch(first, batch.size, (batch,), batch.head, (batch.body,))
        head = (self._attributes, self._size - 1, self._base_ms, self._last_ms)
        return CoalescedBatch(first, self._size, tuple(self._batches), head, [*self._body, self._small])


def _records(batch: CopiedBatch) -> list[tuple[bytes, int, memoryview]] | None:
    """Attributes, time delta, and the bytes after the offset delta; None if the batch is malformed."""
    raw, at = batch.body, 0
    found: list[tuple[bytes, int, memoryview]] = []
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
