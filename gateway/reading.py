"""The stateless read: committed chunks of one partition from a position on, in the format that the reader asks for.

Repeatable: the same offset gives the same chunks on any worker. Positions pass control records and aborted data,
so ``X-Next-Offset`` is where to go on even when nothing was returned.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
from aiokafka import errors
from logferry.gateway.config import Limits
from logferry.gateway.contract import MSGPACK, NDJSON, Malformed, chunk_of_record
from logferry.gateway.errors import Problem
from logferry.gateway.fetch import KafkaRecord
from logferry.gateway.kafka import EARLIEST, LATEST, Kafka

PLAIN: Final = "text/plain"
KEYS: Final = (
    "dc",
    "topic",
    "partition",
    "offset",
    "source_id",
    "seqno",
    "prev",
    "created_ms",
    "recorded_ms",
    "attributes",
    "data",
)

Row = tuple[Any, ...]


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
    rows: list[Row]
    next_offset: int


async def read(kafka: Kafka, limits: Limits, wanted: Read) -> Page:
    """At least one chunk if there is one that passes the filters within the wait, at most about ``max_bytes``.

    Raises Problem ``unknown-topic`` or ``out-of-range``.
    """
    try:
        view = await kafka.describe_topic(wanted.topic)
        if wanted.partition >= len(view.partitions):
            detail = f"{wanted.topic} has the partitions 0 to {len(view.partitions) - 1}"
            raise Problem("not-found", detail)
        position = await _start(kafka, wanted)
        return await _collect(kafka, limits, wanted, position)
    except errors.UnknownTopicOrPartitionError:
        raise Problem("unknown-topic", f"there is no topic {wanted.topic}", topic=wanted.topic) from None
    except errors.OffsetOutOfRangeError:
        first = await kafka.offset(wanted.topic, wanted.partition, EARLIEST)
        end = await kafka.offset(wanted.topic, wanted.partition, LATEST)
        raise Problem(
            "out-of-range", f"offset {wanted.offset} is outside of {first} to {end}", first=first, next=end
        ) from None


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
    while True:
        wait_ms = max(0, int((deadline - time.monotonic()) * 1000))
        fetched = await kafka.fetch(
            wanted.topic, wanted.partition, position, max_bytes=max_bytes, stop_bytes=max_bytes, wait_ms=wait_ms
        )
        rows = list(_rows(fetched.records, wanted))
        position = fetched.next_offset
        if rows or (fetched.at_end and time.monotonic() >= deadline):
            return Page(rows, position)


def _rows(records: Iterable[KafkaRecord], wanted: Read) -> Iterable[Row]:
    for record in records:
        row = row_of(wanted.dc, wanted.topic, wanted.partition, record)
        if row is not None and wanted.wants(row[4], row[9]):
            yield row


def row_of(dc: str, topic: str, partition: int, record: KafkaRecord) -> Row | None:
    """The row of a record, its fields by `KEYS`; None for one that no gateway wrote: it is not a chunk."""
    try:
        chunk = chunk_of_record(record.value or b"", record.headers)
        source_id = (record.key or b"").decode()
    except (Malformed, UnicodeDecodeError):
        return None
    return (
        dc,
        topic,
        partition,
        record.offset,
        source_id,
        chunk.seqno,
        chunk.prev,
        chunk.created_ms,
        record.timestamp_ms,
        chunk.attributes,
        chunk.data,
    )


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


def _msgpack(rows: list[Row]) -> bytes:
    packer = msgpack.Packer()
    return b"".join(packer.pack(row) for row in rows)


def _ndjson(rows: list[Row]) -> bytes:
    return b"".join(json.dumps(row_object(row), ensure_ascii=False).encode() + b"\n" for row in rows)


def row_object(row: Row) -> dict[str, Any]:
    """The row with its keys; data that is not UTF-8 is in base64, under a key of its own."""
    found = dict(zip(KEYS, row, strict=True))
    data: bytes = found.pop("data")
    try:
        found["data"] = data.decode()
    except UnicodeDecodeError:
        found["data_base64"] = base64.b64encode(data).decode()
    return found


def _plain(rows: list[Row]) -> bytes:
    return b"".join(row[-1] for row in rows)
