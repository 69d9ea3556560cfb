"""Small batches of a partition that follow each other, written as one: one request and one append for many. Pure.

Only what is not compressed is gathered, and no key, value or header is looked at: of each record its head alone is
written anew, since its time and offset count from where the batch begins. All else stays where it was fetched.

A batch of many records goes as it is, because to walk through them costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from logferry.gateway.kafka.broker_connection import Piece
from logferry.gateway.kafka.record_batch import Stamp
from logferry.mirror.copy.batch_rewrite import CODEC, TRANSACTIONAL, MovedBatch, header

# Of a batch that is added to those before it.
_FEW_RECORDS: Final = 16
# By which a record can grow: its length, the time and the offset.
_GROWTH_BYTES: Final = 5 + 10 + 5
# Below this a copy costs less than a piece of its own.
_SMALL_BYTES: Final = 4096


class Written(NamedTuple):
    """One batch as it is written, of one or more as they were read. ``first``: the records of its part before it.

    ``head``: attributes, last offset delta, timestamps; ``body``: the records, in pieces.
    """

    first: int
    size: int
    batches: tuple[MovedBatch, ...]
    head: tuple[int, int, int, int]
    body: Sequence[Piece]

    def pieces(self, stamp: Stamp) -> list[Piece]:
        return [header(self.head, self.size, stamp, self.body), *self.body]


def gathered(batches: Iterable[MovedBatch], limit_bytes: int) -> Iterator[Written]:
    """All of the batches, in order; one that was gathered is not larger than the limit."""
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
    """A batch that others may be added to. The first is in it as it is."""

    def __init__(self, batch: MovedBatch) -> None:
        attributes, _, self._base_ms, self._last_ms = batch.head
        self._attributes = attributes & ~TRANSACTIONAL
        self._batches, self._size, self._bytes = [batch], batch.size, batch.size_bytes
        self._body: list[Piece] = [batch.body]
        self._small = bytearray()

    def takes(self, batch: MovedBatch, limit_bytes: int) -> bool:
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
            head = b"".join((attribute, _zigzag(base_ms + time_delta - self._base_ms), _zigzag(self._size)))
            self._add(_zigzag(len(head) + len(rest)) + head, rest)
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

    def written(self, first: int) -> Written:
        if len(self._batches) == 1:
            [batch] = self._batches
            return Written(first, batch.size, (batch,), batch.head, (batch.body,))
        head = (self._attributes, self._size - 1, self._base_ms, self._last_ms)
        return Written(first, self._size, tuple(self._batches), head, [*self._body, self._small])


def _records(batch: MovedBatch) -> list[tuple[bytes, int, memoryview]] | None:
    """Attributes, time delta, and what follows the offset delta; None where it is not as it should be."""
    raw, at = batch.body, 0
    found: list[tuple[bytes, int, memoryview]] = []
    try:
        for index in range(batch.size):
            length, begin = _read_zigzag(raw, at)
            time_delta, after = _read_zigzag(raw, begin + 1)
            offset_delta, after = _read_zigzag(raw, after)
            at = begin + length
            if offset_delta != index or not after <= at <= len(raw):
                return None
            found.append((bytes(raw[begin : begin + 1]), time_delta, raw[after:at]))
    except IndexError:
        return None
    return found if at == len(raw) else None


def _zigzag(number: int) -> bytes:
    rest = number << 1 if number >= 0 else (-number << 1) - 1
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _read_zigzag(raw: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
