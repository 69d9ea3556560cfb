"""Chunks into rows without Spark, by the rules of `parsing.rows`: for the few records that are not loaded yet.

Only lines, whole chunks and access logs: other formats are expressions of the JVM, and a second implementation in
Python could differ in details. Lines that are not UTF-8 are not rows, as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
from logferry.client.reading.decode import ReceivedChunk
from logferry.loaders.parsing.columns import DATES, LAST_MS, access_columns

# The versions of the parsers that are implemented here.
LINES: Final = "lines/1"
CHUNK: Final = "chunk/1"
ACCESS: Final = "access/1"

# As Python objects, rows of short lines take twenty times as much.
_BATCH_BYTES: Final = 4 << 20
# Beside its data.
_CHUNK_BYTES: Final = 256

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def can_read(parser: str) -> bool:
    """Whether this module implements the parser of this name in the ledger."""
    return parser in (LINES, CHUNK, ACCESS)


def batches(
    chunks: Iterable[ReceivedChunk], dc: str | None, parser: str, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The chunks' rows with the columns of ``schema``; columns that the parser does not have are null.

    A batch has about `_BATCH_BYTES` of data, whatever the number of chunks; no further chunk is taken before its
    consumer asks for the next. ``dc``: the data centre whose offsets these are; None: that of each chunk.
    """
    found: list[dict[str, Any]] = []
    size = 0
    for chunk in chunks:
        found += _rows_of(chunk, dc, parser)
        size += len(chunk.data) + _CHUNK_BYTES
        if size >= _BATCH_BYTES:
            yield _batch(found, schema)
            found, size = [], 0
    if found:
        yield _batch(found, schema)


def _rows_of(chunk: ReceivedChunk, dc: str | None, parser: str) -> list[dict[str, Any]]:
    times = {"created": _moment(chunk.created_ms), "recorded": _moment(chunk.recorded_ms)}
    row = {**chunk._asdict(), **times, "dc": chunk.dc if dc is None else dc}
    row["attributes"] = list(chunk.attributes.items())
    if parser == CHUNK:
        return [row]
    del row["data"]
    found = [{**row, **line} for line in lines(chunk.data)]
    if parser != ACCESS:
        return found
    read = ((line, access_columns(line["text"])) for line in found)
    return [{**line, **more} for line, more in read if more is not None]


def _batch(found: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    for row in found:
        for name, of in DATES.items():
            if name in schema.names:
                row[name] = row[of].date() if row.get(of) is not None else None
    return pa.RecordBatch.from_pylist(found, schema=schema)


def lines(data: bytes) -> list[dict[str, Any]]:
    """Each line with its number; the rest after the last newline is a line only if it is not empty."""
    whole, found = data.count(b"\n"), []
    for number, part in enumerate(data.removesuffix(b"\n").split(b"\n") if data else ()):
        with suppress(UnicodeDecodeError):
            found.append({"line": number, "text": part.decode(), "newline": number < whole})
    return found


def _moment(unix_ms: int | None) -> datetime | None:
    return None if unix_ms is None or not 0 <= unix_ms <= LAST_MS else _EPOCH + timedelta(milliseconds=unix_ms)
