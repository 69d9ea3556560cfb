"""Chunks into rows without Spark, by the rules of `parsing.rows`: for the few records that are not loaded yet.

Only lines, whole chunks and access logs: other formats are expressions of the JVM, and a second implementation in
Python could differ in details. Lines that are not UTF-8 are not rows, as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import pyarrow as pa
from logferry.loaders.parsing import line_patterns
from logferry.loaders.parsing.columns import DATES, LAST_MS

# The versions of the parsers that are implemented here.
LINES: Final = "lines/1"
CHUNK: Final = "chunk/1"
ACCESS: Final = "access/1"

# As Python objects, rows of short lines take twenty times as much.
_BATCH_BYTES: Final = 4 << 20
# Beside its data.
_CHUNK_BYTES: Final = 256

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class ChunkLike(Protocol):
    """A chunk as the client library's reader returns it."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def source_id(self) -> str: ...
    @property
    def seqno(self) -> int: ...
    @property
    def prev(self) -> int | None: ...
    @property
    def created_ms(self) -> int | None: ...
    @property
    def recorded_ms(self) -> int: ...
    @property
    def attributes(self) -> Mapping[str, str]: ...
    @property
    def data(self) -> bytes: ...


def can_read(parser: str) -> bool:
    """Whether this module implements the parser of this name in the ledger."""
    return parser in (LINES, CHUNK, ACCESS)


def rows(chunks: Iterable[ChunkLike], dc: str, parser: str, schema: pa.Schema) -> pa.Table:
    """All of `batches` as one table, in memory."""
    return pa.Table.from_batches(batches(chunks, dc, parser, schema), schema=schema)


def batches(chunks: Iterable[ChunkLike], dc: str, parser: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The chunks' rows with the columns of ``schema``; columns that the parser does not have are null.

    A batch has about `_BATCH_BYTES` of data, whatever the number of chunks; no further chunk is taken before its
    consumer asks for the next. ``dc``: the data centre whose offsets these are.
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


def _rows_of(chunk: ChunkLike, dc: str, parser: str) -> list[dict[str, Any]]:
    row = _origin(chunk, dc)
    if parser == CHUNK:
        return [{**row, "data": chunk.data}]
    found = [{**row, **line} for line in lines(chunk.data)]
    if parser != ACCESS:
        return found
    read = ((line, line_patterns.columns(line["text"])) for line in found)
    return [{**line, **more} for line, more in read if more is not None]


def _batch(found: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    for row in found:
        for name, of in DATES.items():
            if name in schema.names:
                row[name] = row[of].date() if row.get(of) is not None else None
    return pa.RecordBatch.from_pylist(found, schema=schema)


def lines(data: bytes) -> list[dict[str, Any]]:
    """Each line with its number; the rest after the last newline is a line only if it is not empty."""
    *whole, rest = data.split(b"\n")
    parts = [*whole, rest] if rest else whole
    found = []
    for number, part in enumerate(parts):
        try:
            found.append({"line": number, "text": part.decode(), "newline": number < len(whole)})
        except UnicodeDecodeError:
            continue
    return found


def _origin(chunk: ChunkLike, dc: str) -> dict[str, Any]:
    created = chunk.created_ms
    return {
        "topic": chunk.topic,
        "source_id": chunk.source_id,
        "seqno": chunk.seqno,
        "prev": chunk.prev,
        "dc": dc,
        "partition": chunk.partition,
        "offset": chunk.offset,
        "created": _moment(created) if created is not None and 0 <= created <= LAST_MS else None,
        "recorded": _moment(chunk.recorded_ms),
        "attributes": list(chunk.attributes.items()),
    }


def _moment(unix_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=unix_ms)
