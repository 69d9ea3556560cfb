"""A chunk as readers see it: the fields of a row in the one order that every format of reading keeps. Pure."""

from __future__ import annotations

import base64
from typing import Any, Final

from logferry.gateway.contract.chunk import Malformed, chunk_of_record
from logferry.gateway.fetch import KafkaRecord

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


def row_object(row: Row) -> dict[str, Any]:
    """The row with its keys; data that is not UTF-8 is in base64, under a key of its own."""
    found = dict(zip(KEYS, row, strict=True))
    data: bytes = found.pop("data")
    try:
        found["data"] = data.decode()
    except UnicodeDecodeError:
        found["data_base64"] = base64.b64encode(data).decode()
    return found
