"""The stateless read: committed chunks of one partition from a position on, in the format that the caller accepts.

Repeatable: the same offset gives the same chunks on any worker. Positions pass control records and aborted data,
so ``X-Next-Offset`` is the position to continue at even when no chunk was returned.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import cramjam
from aiokafka import errors
from logferry.gateway.config import Limits
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.kafka.record_batch import CorruptBatch, KafkaRecord
from logferry.gateway.limits import FairShare, ReadLimit
from logferry.gateway.reading.assignment import undecodable, unknown_topic
from logferry.gateway.reading.formats import ENCODERS, EVENTS, Row, media_type, row_of

# The usual compression of log lines. Kafka sends compressed batches; those that do not fit the answer are wasted.
_USUAL_RATIO: Final = 5
_LEAST_FETCH: Final = 1 << 16
_FULL: Final = 0.5
# Of what is free, one read takes such a part at most.
_SHARE: Final = 4
_INLINE_RECORDS: Final = 50
# Beside the data of a row.
_ROW_BYTES: Final = 30
# Smaller answers are not compressed.
SMALL_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One stateless read, checked. Exactly one of ``offset`` and ``time_ms`` says where it begins."""

    topic: str
    dc: str
    partition: int
    offset: int | str | None = "earliest"
    time_ms: int | None = None
    max_bytes: int = 1 << 20
    wait_ms: int = 0
    source_prefix: str = ""
    attributes: dict[str, str] = field(default_factory=dict)

    def wants(self, source_id: str, attributes: dict[str, str]) -> bool:
        return source_id.startswith(self.source_prefix) and self.attributes.items() <= attributes.items()


@dataclass(frozen=True, slots=True)
class PartitionPage:
    """``last_offset``: of the last record that was read, whether it passed the filters or not; None: there was none."""

    rows: list[Row]
    next_offset: int
    last_offset: int | None = None


@dataclass(slots=True)
class HeldBytes:
    """What one read holds of the room of all, and of its caller's quota. Whoever made it releases it at the end,
    however the read ends. ``set_aside``: of the quota, until `charge`."""

    room: FairShare
    token: str | None
    quota: ReadLimit | None = None
    bytes: int = 0
    set_aside: int = 0

    def grow(self, wanted: int) -> int:
        """Takes up to so many more, a part of what is free so that others find some, too; 0: there is no room.

        Raises Problem ``quota``.
        """
        # Of what was set aside for the fetch before, that which it did not find.
        left = max(0, self.set_aside - self.bytes)
        if self.quota is not None and wanted > left:
            more = self.quota.hold(wanted - left, _LEAST_FETCH)
            self.set_aside += more
            wanted = left + more
        free = int(self.room.room(self.token)) // _SHARE
        more = min(wanted, free) if free >= min(wanted, _LEAST_FETCH) else 0
        self.room.take(self.token, more)
        self.bytes += more
        return more

    def settle(self, size_bytes: int) -> None:
        """Holds exactly so many. Raises Problem ``overloaded`` where that is more, and there is no room for it."""
        if size_bytes > self.bytes and size_bytes - self.bytes > self.room.room(self.token):
            raise self.overloaded()
        self.room.give(self.token, self.bytes - size_bytes)
        self.bytes = size_bytes

    def charge(self, size_bytes: int) -> None:
        """Charges what was read, in place of what was set aside for it."""
        if self.quota is not None and (self.set_aside or size_bytes):
            self.quota.settle(self.set_aside, size_bytes)
            self.set_aside = 0

    def release(self) -> None:
        self.charge(0)
        self.settle(0)

    def overloaded(self) -> Problem:
        return Problem("overloaded", f"{self.room.used} bytes of reads wait for their readers; try again later")


async def read_page(kafka: KafkaClient, limits: Limits, wanted: ReadRequest, held: HeldBytes) -> PartitionPage:
    """At least one chunk if there is one that passes the filters within the wait, at most about ``max_bytes``.

    Raises Problem ``unknown-topic`` or ``out-of-range``, and ``kafka-unavailable`` where Kafka gives damaged records.
    """
    try:
        return await _collect(kafka, limits, wanted, await _start(kafka, wanted), held)
    except errors.UnknownTopicOrPartitionError:
        raise await _not_found(kafka, wanted) from None
    except errors.OffsetOutOfRangeError:
        first = await kafka.offset(wanted.topic, wanted.partition, EARLIEST)
        end = await kafka.offset(wanted.topic, wanted.partition, LATEST)
        detail = f"offset {wanted.offset} is outside the retained offsets {first} to {end}"
        raise Problem("out-of-range", detail, first=first, next=end) from None
    except CorruptBatch as error:
        raise undecodable((wanted.topic, wanted.partition), error) from error


async def _not_found(kafka: KafkaClient, wanted: ReadRequest) -> Problem:
    kafka.forget_leader(wanted.topic, wanted.partition)
    try:
        view = await kafka.describe_topic(wanted.topic)
    except errors.UnknownTopicOrPartitionError:
        return unknown_topic(wanted.topic)
    if wanted.partition < len(view.partitions):
        return Problem("kafka-unavailable", f"the leader of {wanted.topic}-{wanted.partition} is changing; try again")
    return Problem("not-found", f"{wanted.topic} has the partitions 0 to {len(view.partitions) - 1}")


async def _start(kafka: KafkaClient, wanted: ReadRequest) -> int:
    if wanted.time_ms is not None:
        found = await kafka.offset(wanted.topic, wanted.partition, wanted.time_ms)
        return found if found >= 0 else await kafka.offset(wanted.topic, wanted.partition, LATEST)
    if isinstance(wanted.offset, int):
        return wanted.offset
    return await kafka.offset(wanted.topic, wanted.partition, LATEST if wanted.offset == "latest" else EARLIEST)


async def _collect(
    kafka: KafkaClient, limits: Limits, wanted: ReadRequest, position: int, held: HeldBytes
) -> PartitionPage:
    """Data is looked for without waiting, and what a fetch may bring is taken of the room before. Who has to wait for
    data, or finds no room, makes a small fetch.
    """
    deadline = time.monotonic() + min(wanted.wait_ms, limits.read_wait_ms) / 1000
    max_bytes = min(wanted.max_bytes, limits.read_bytes)
    rows: list[Row] = []
    last_offset: int | None = None
    fetches, at_end = 0, False
    tp = wanted.topic, wanted.partition
    while True:
        wait_ms, room = 0, min(max_bytes, _LEAST_FETCH)
        try:
            if at_end:
                # Many may wait at the same time: what they find is charged then.
                held.charge(0)
                wait_ms = max(0, int((deadline - time.monotonic()) * 1000))
            elif more := held.grow(max(1, max_bytes - _size(rows))):
                room = more
            elif fetches:
                raise held.overloaded()
            fetches += not at_end
            max_fetch = max(_LEAST_FETCH, room // _USUAL_RATIO)
            fetched = await kafka.fetch(*tp, position, max_bytes=max_fetch, stop_bytes=room, wait_ms=wait_ms)
        except (CorruptBatch, Problem):
            if rows:
                return PartitionPage(rows, position, last_offset)
            raise
        if fetched.records:
            last_offset = fetched.records[-1].offset
        is_small = len(fetched.records) <= _INLINE_RECORDS
        rows += _rows(fetched.records, wanted) if is_small else await asyncio.to_thread(_rows, fetched.records, wanted)
        held.settle(_size(rows))
        position, at_end = fetched.next_offset, fetched.at_end
        is_full = fetches >= _USUAL_RATIO or _size(rows) >= max_bytes * _FULL
        if (rows and (is_full or at_end)) or (at_end and time.monotonic() >= deadline):
            return PartitionPage(rows, position, last_offset)


def _size(rows: list[Row]) -> int:
    return sum(len(row[-1]) + _ROW_BYTES * (1 + len(row[9])) for row in rows)


def _rows(records: list[KafkaRecord], wanted: ReadRequest) -> list[Row]:
    """The rows; frees the records, which takes as long."""
    rows = (row_of(wanted.dc, wanted.topic, wanted.partition, record) for record in records)
    found = [row for row in rows if row is not None and wanted.wants(row[4], row[9])]
    records.clear()
    return found


FORMATS: Final = (*ENCODERS, EVENTS)


def encoder(accept: str) -> tuple[str, Callable[[Sequence[Row]], bytes]]:
    """The format for an Accept header: its media type, and rows → bytes. Raises Problem when none fits."""
    found = media_type(accept, tuple(ENCODERS))
    return found, ENCODERS[found]


def content_coding(accept_encoding: str) -> str | None:
    """The encoding that the answer gets for an Accept-Encoding header: zstd before gzip; None: as it is."""
    accepted = set()
    for part in accept_encoding.lower().split(","):
        name, _, weight = part.partition(";")
        if weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000"):
            accepted.add(name.strip())
    return next((coding for coding in ("zstd", "gzip") if coding in accepted), None)


def compressed(body: bytes, coding: str) -> bytes:
    """The body in that encoding, at the level that costs least. Safe in a thread, where large ones belong."""
    if coding == "zstd":
        return bytes(cramjam.zstd.compress(body, 1))
    return zlib.compress(body, 1, wbits=31)
