"""Chunks into the rows of a table without Spark, by the rules of `parse`: for the few rows that are not loaded yet.

Lines, whole chunks and access logs only: what the other formats make of a line is said in expressions of the JVM, and a
second telling in Python could differ in some corner. Lines that are not UTF-8 are no rows, as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import pyarrow as pa
from logferry.loaders.parsing import access_log as access

# The versions of the parsers whose rules these are.
LINES: Final = "lines/1"
CHUNK: Final = "chunk/1"
ACCESS: Final = "access/1"

_DATES: Final = {"event_date": "event_time", "recorded_date": "recorded"}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# As in `parse`: the end of the year 9999.
_LAST_MS: Final = 253_402_300_799_999


class Chunk(Protocol):
    """As the library's reader hands it out."""

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
    """Whether lines of this parser of the ledger are read here."""
    return parser in (LINES, CHUNK, ACCESS)


def rows(chunks: Iterable[Chunk], dc: str, parser: str, schema: pa.Schema) -> pa.Table:
    """The chunks' rows with the columns of ``schema``; those that the parser knows nothing of are null.

    ``dc``: the data centre whose offsets these are.
    """
    found: list[dict[str, Any]] = []
    for chunk in chunks:
        row = _origin(chunk, dc)
        if parser == CHUNK:
            found.append({**row, "data": chunk.data})
        else:
            found += [{**row, **line} for line in lines(chunk.data)]
    if parser == ACCESS:
        read = ((row, access.columns(row["text"])) for row in found)
        found = [{**row, **more} for row, more in read if more is not None]
    for row in found:
        for name, of in _DATES.items():
            if name in schema.names:
                row[name] = row[of].date() if row.get(of) is not None else None
    return pa.Table.from_pylist(found, schema=schema)


def lines(data: bytes) -> list[dict[str, Any]]:
    """Each line with its number; what stands after the last newline is one only if it is something."""
    *whole, rest = data.split(b"\n")
    parts = [*whole, rest] if rest else whole
    found = []
    for number, part in enumerate(parts):
        try:
            found.append({"line": number, "text": part.decode(), "newline": number < len(whole)})
        except UnicodeDecodeError:
            continue
    return found


def _origin(chunk: Chunk, dc: str) -> dict[str, Any]:
    created = chunk.created_ms
    return {
        "topic": chunk.topic,
        "source_id": chunk.source_id,
        "seqno": chunk.seqno,
        "prev": chunk.prev,
        "dc": dc,
        "partition": chunk.partition,
        "offset": chunk.offset,
        "created": _moment(created) if created is not None and 0 <= created <= _LAST_MS else None,
        "recorded": _moment(chunk.recorded_ms),
        "attributes": list(chunk.attributes.items()),
    }


def _moment(unix_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=unix_ms)
