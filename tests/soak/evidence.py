"""What is stored, read without the code of gateway, mirror, loader and audit: a plain Kafka consumer, plain delta-rs.

Records are decoded as the page *Record format* says.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
from aiokafka import ConsumerRecord
from deltalake import DeltaTable

from tests.soak.verdict import Row, SegmentChange, Stored
from tests.support.checker import committed_records

_BATCH: Final = re.compile(r"batch-(\d+)")
_APPLICATION: Final = "logferry.loader"


async def read_topic(bootstrap: str, topic: str) -> list[Stored]:
    """All committed chunks up to the present end of every partition, by partition and offset."""
    found = [_decoded(record) for record in await committed_records(bootstrap, topic)]
    return sorted(found, key=lambda one: (one.partition, one.offset))


def _decoded(record: ConsumerRecord) -> Stored:
    headers = dict(record.headers)
    attributes = {name[2:]: value.decode() for name, value in record.headers if name.startswith("a.")}
    return Stored(
        partition=record.partition,
        offset=record.offset,
        source=(record.key or b"").decode(),
        seqno=_number(headers.get("seqno")),
        prev=_number(headers["prev"]) if "prev" in headers else None,
        data=record.value or b"",
        headers=tuple(record.headers),
        recorded_ms=record.timestamp,
        host=attributes.get("host"),
    )


def _number(data: bytes | None) -> int:
    """Eight bytes, signed; -1 where no gateway wrote the record."""
    return int(struct.unpack(">q", data)[0]) if data is not None and len(data) == 8 else -1


# ---- tables ----------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    """The rows of the main table, and the open lines of its quarantine, with their batches."""
    if not (path / "_delta_log").exists():
        return []
    last = _last_batch(path)
    rows = [
        Row(one["source_id"], one["seqno"], one["line"], one["text"].encode(), one["event_time"], batch)
        for batch, one in _rows(path, ["source_id", "seqno", "line", "text", "event_time"])
    ]
    quarantine = path.with_name(path.name + "_quarantine")
    columns = ["source_id", "seqno", "line", "bytes", "resolved", "since"]
    for batch, one in _rows(quarantine, columns) if (quarantine / "_delta_log").exists() else ():
        counts = (one["since"] or 0) <= last and (one["resolved"] is None or one["resolved"] > last) and batch <= last
        if counts:
            rows.append(Row(one["source_id"], one["seqno"], one["line"], one["bytes"], None, batch))
    return rows


def read_segments(path: Path) -> list[SegmentChange]:
    """Each change of a segment that the main table's batches confirm, also those that a later batch has replaced."""
    segments = path.with_name(path.name + "_segments")
    if not (segments / "_delta_log").exists():
        return []
    last = _last_batch(path)
    found: dict[tuple[datetime, int], SegmentChange] = {}
    for commit in sorted((segments / "_delta_log").glob("*[0-9].json")):
        for action in map(json.loads, commit.read_text(encoding="utf-8").splitlines()):
            if "add" not in action or not (segments / action["add"]["path"]).exists():
                continue
            for one in pq.ParquetFile(segments / action["add"]["path"]).read().to_pylist():
                if one["batch"] <= last:
                    start, batch = one["start"], one["batch"]
                    facts = (one["version"], one["state"], one["rows"], batch, action["add"]["modificationTime"])
                    found.setdefault((start, batch), SegmentChange(start, *facts, one["silent_sources"] or 0))
    return list(found.values())


def _rows(path: Path, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for uri in (uri.removeprefix("file://") for uri in DeltaTable(path).file_uris()):
        batch = _BATCH.search(uri.removeprefix(str(path)))
        present = [name for name in columns if name in pq.read_schema(uri).names]
        for row in pq.ParquetFile(uri).read(columns=present).to_pylist():
            yield int(batch[1]) if batch else -1, dict.fromkeys(columns) | row


def _last_batch(path: Path) -> int:
    last = DeltaTable(path).transaction_version(_APPLICATION)
    return -1 if last is None else last
