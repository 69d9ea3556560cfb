"""The stateless read: committed chunks of one partition from a position on, in the format that the reader asks for.

Repeatable: the same offset gives the same chunks on any worker. Positions pass control records and aborted data,
so ``X-Next-Offset`` is where to go on even when nothing was returned.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import cramjam
import msgpack
from aiokafka import errors
from logferry.gateway.config import Limits
from logferry.gateway.contract.chunk import MSGPACK, NDJSON
from logferry.gateway.errors import Problem
from logferry.gateway.fetch import KafkaRecord
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.rows import Row, row_object, row_of

PLAIN: Final = "text/plain"
# Log lines get about so much smaller. Kafka sends what is compressed, and what does not fit then is sent in vain.
_USUAL_RATIO: Final = 5
_LEAST_FETCH: Final = 1 << 16
_FULL: Final = 0.5
# What is smaller goes as it is.
SMALL_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Read:
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
class Page:
    """``last_offset``: of the last record that was read, whether it passed the filters or not; None: there was none."""

    rows: list[Row]
    next_offset: int
    last_offset: int | None = None


async def read(kafka: Kafka, limits: Limits, wanted: Read) -> Page:
    """At least one chunk if there is one that passes the filters within the wait, at most about ``max_bytes``.

    Raises Problem ``unknown-topic`` or ``out-of-range``.
    """
    try:
        return await _collect(kafka, limits, wanted, await _start(kafka, wanted))
    except errors.UnknownTopicOrPartitionError:
        raise await _not_found(kafka, wanted) from None
    except errors.OffsetOutOfRangeError:
        first = await kafka.offset(wanted.topic, wanted.partition, EARLIEST)
        end = await kafka.offset(wanted.topic, wanted.partition, LATEST)
        raise Problem(
            "out-of-range", f"offset {wanted.offset} is outside of {first} to {end}", first=first, next=end
        ) from None


async def _not_found(kafka: Kafka, wanted: Read) -> Problem:
    kafka.forget_leader(wanted.topic, wanted.partition)
    try:
        view = await kafka.describe_topic(wanted.topic)
    except errors.UnknownTopicOrPartitionError:
        return Problem("unknown-topic", f"there is no topic {wanted.topic}", topic=wanted.topic)
    if wanted.partition < len(view.partitions):
        return Problem("kafka-unavailable", f"the leader of {wanted.topic}-{wanted.partition} is changing; try again")
    return Problem("not-found", f"{wanted.topic} has the partitions 0 to {len(view.partitions) - 1}")


async def _start(kafka: Kafka, wanted: Read) -> int:
    if wanted.time_ms is not None:
        found = await kafka.offset(wanted.topic, wanted.partition, wanted.time_ms)
        return found if found >= 0 else await kafka.offset(wanted.topic, wanted.partition, LATEST)
    if isinstance(wanted.offset, int):
        return wanted.offset
    return await kafka.offset(wanted.topic, wanted.partition, LATEST if wanted.offset == "latest" else EARLIEST)


async def _collect(kafka: Kafka, limits: Limits, wanted: Read, position: int) -> Page:
    deadline = time.monotonic() + min(wanted.wait_ms, limits.read_wait_ms) / 1000
    max_bytes = min(wanted.max_bytes, limits.read_bytes)
    rows: list[Row] = []
    last_offset: int | None = None
    fetches = 0
    while True:
        fetches += 1
        wait_ms = 0 if rows else max(0, int((deadline - time.monotonic()) * 1000))
        room = max_bytes - sum(len(row[-1]) for row in rows)
        fetched = await kafka.fetch(
            wanted.topic,
            wanted.partition,
            position,
            max_bytes=max(_LEAST_FETCH, room // _USUAL_RATIO),
            stop_bytes=room,
            wait_ms=wait_ms,
        )
        rows += _rows(fetched.records, wanted)
        if fetched.records:
            last_offset = fetched.records[-1].offset
        position = fetched.next_offset
        is_full = fetches >= _USUAL_RATIO or sum(len(row[-1]) for row in rows) >= max_bytes * _FULL
        if (rows and (is_full or fetched.at_end)) or (fetched.at_end and time.monotonic() >= deadline):
            return Page(rows, position, last_offset)


def _rows(records: Iterable[KafkaRecord], wanted: Read) -> Iterable[Row]:
    for record in records:
        row = row_of(wanted.dc, wanted.topic, wanted.partition, record)
        if row is not None and wanted.wants(row[4], row[9]):
            yield row


# ---- formats --------------------------------------------------------------------------------------------------


def encoder(accept: str) -> tuple[str, Callable[[list[Row]], bytes]]:
    """The format for an Accept header: its media type, and rows → bytes. Raises Problem when none fits."""
    kinds = [part.split(";")[0].strip().lower() for part in accept.split(",")] if accept else ["*/*"]
    for kind in kinds:
        if kind in (MSGPACK, "*/*", "application/*"):
            return MSGPACK, _msgpack
        if kind in (NDJSON, "application/json"):
            return NDJSON, _ndjson
        if kind in (PLAIN, "text/*"):
            return PLAIN, _plain
    raise Problem("bad-request", f"Accept: none of {MSGPACK}, {NDJSON}, {PLAIN} fits {accept[:100]!r}")


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


def _msgpack(rows: list[Row]) -> bytes:
    packer = msgpack.Packer()
    return b"".join(packer.pack(row) for row in rows)


def _ndjson(rows: list[Row]) -> bytes:
    return b"".join(json.dumps(row_object(row), ensure_ascii=False).encode() + b"\n" for row in rows)


def _plain(rows: list[Row]) -> bytes:
    return b"".join(row[-1] for row in rows)
