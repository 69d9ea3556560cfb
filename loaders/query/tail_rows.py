"""Chunks to rows of a table in Arrow, without Spark: for the records that are not loaded yet.

Lines, their numbers and their parser's columns are those of `parsing.rows`. Lines that are not UTF-8, or that the
parser cannot read, are not rows: they belong to the quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from logferry.client.reading.decode import ReceivedChunk
from logferry.loaders.errors import LedgerBroken
from logferry.loaders.parsing.columns import DATES, LAST_MS

if TYPE_CHECKING:
    from logferry.loaders.query.parsed_lines import LineParser

LINES: Final = "lines/1"
CHUNK: Final = "chunk/1"
# The number of the chunk in a tail, where a caller asks for it.
TAIL_CHUNK: Final = "tail_chunk"

_TIMESTAMP: Final = pa.timestamp("us", "UTC")
_BATCH_BYTES: Final = 4 << 20
# Beside its data.
_CHUNK_BYTES: Final = 256

Batches = Callable[[Sequence[ReceivedChunk], int], list[pa.RecordBatch]]


def portions(chunks: Iterable[ReceivedChunk]) -> Iterator[list[ReceivedChunk]]:
    """Chunks with about `_BATCH_BYTES` of data; none is taken before its consumer asks for the next."""
    found: list[ReceivedChunk] = []
    size = 0
    for chunk in chunks:
        found.append(chunk)
        size += len(chunk.data) + _CHUNK_BYTES
        if size >= _BATCH_BYTES:
            yield found
            found, size = [], 0
    if found:
        yield found


def batches(chunks: Iterable[ReceivedChunk], dc: str | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Each chunk as one row, for the parser ``chunk``. ``dc``: whose offsets these are; None: that of each chunk."""
    for portion in portions(chunks):
        columns = _chunk_columns(portion, dc, schema.names)
        yield _batch(columns, schema, len(portion))


def chunk_batches(dc: str | None, schema: pa.Schema) -> Batches:
    """As `line_batches`, for the parser ``chunk``."""

    def made(chunks: Sequence[ReceivedChunk], first: int) -> list[pa.RecordBatch]:
        columns = _chunk_columns(chunks, dc, schema.names)
        columns[TAIL_CHUNK] = pa.array(range(first, first + len(chunks)), pa.int64())
        return [_batch(columns, schema, len(chunks))]

    return made


def line_batches(parser: LineParser, dc: str | None, schema: pa.Schema) -> Batches:
    """A function from chunks, and the number of the first one, to their rows with the columns of ``schema``.

    Columns that neither rows nor the parser have are null. It keeps no state, so threads may share it.
    """
    from logferry.loaders.query.parsed_lines import utf8_lines

    of_lines = {*schema.names} - {"data"}
    wanted = {*schema.names, *(of for name, of in DATES.items() if name in schema.names)}

    def made(chunks: Sequence[ReceivedChunk], first: int) -> list[pa.RecordBatch]:
        lines = lines_of([chunk.data for chunk in chunks])
        of_chunks = _chunk_columns(chunks, dc, schema.names)
        of_chunks[TAIL_CHUNK] = pa.array(range(first, first + len(chunks)), pa.int64())
        good, _ = utf8_lines(lines.data)
        made_us = None
        if parser.needs_made:
            each = pa.array([_micros(chunk.created_ms, chunk.recorded_ms) for chunk in chunks], pa.int64())
            made_us = each.take(pa.array(lines.chunk[good.rows]))
        groups, _ = parser.groups(good.values, made_us, wanted)
        found = []
        for group in groups:
            if not len(group.rows):
                continue
            rows = good.rows[group.rows]
            of = pa.array(lines.chunk[rows])
            columns = {name: column.take(of) for name, column in of_chunks.items() if name in of_lines}
            if "line" in wanted:
                columns["line"] = pa.array(lines.number[rows], pa.int32())
            if "newline" in wanted:
                columns["newline"] = pa.array(lines.newline[rows])
            if "text" in wanted:
                whole = len(group.rows) == len(good.values)
                columns["text"] = (
                    good.values if whole and _is_range(group.rows) else good.values.take(pa.array(group.rows))
                )
            found.append(_batch({**columns, **group.columns}, schema, len(rows)))
        return found

    return made


class ChunkLines(NamedTuple):
    """``data``: binary, without newlines. Each line has the index of its chunk, and its number in it from 0."""

    data: pa.BinaryArray
    chunk: np.ndarray
    number: np.ndarray
    newline: np.ndarray


def lines_of(chunks: Sequence[bytes]) -> ChunkLines:
    """A line is what lies between two newlines; the rest after the last one is a line only if it is not empty."""
    is_open = [bool(data) and not data.endswith(b"\n") for data in chunks]
    joined = b"".join([data + b"\n" if rest else data for data, rest in zip(chunks, is_open, strict=True)])
    ends = np.flatnonzero(np.frombuffer(joined, np.uint8) == ord("\n"))
    size = len(ends)
    offsets = np.zeros(size + 1, dtype=np.int32)
    offsets[1:] = ends - np.arange(size)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined.replace(b"\n", b""))]
    sizes = [len(data) + rest for data, rest in zip(chunks, is_open, strict=True)]
    after = np.searchsorted(ends, np.cumsum(np.array(sizes, dtype=np.int64)))
    counts = np.diff(after, prepend=0)
    newline = np.ones(size, dtype=bool)
    newline[after[np.array(is_open, dtype=bool)] - 1] = False
    return ChunkLines(
        pa.Array.from_buffers(pa.binary(), size, buffers),
        np.repeat(np.arange(len(chunks)), counts),
        np.arange(size) - np.repeat(after - counts, counts),
        newline,
    )


def _is_range(rows: Any) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


def _chunk_columns(chunks: Sequence[ReceivedChunk], dc: str | None, names: Collection[str]) -> dict[str, pa.Array]:
    """Columns that all rows of a chunk share."""
    found: dict[str, pa.Array] = {}
    for name, kind in _OF_CHUNKS.items():
        if name in names or name in [DATES.get(each) for each in names]:
            found[name] = pa.array([_value(chunk, name, dc) for chunk in chunks], kind)
    return found


_OF_CHUNKS: Final[Mapping[str, pa.DataType]] = {
    **dict.fromkeys(("topic", "source_id", "dc"), pa.string()),
    **dict.fromkeys(("seqno", "prev", "offset"), pa.int64()),
    "partition": pa.int32(),
    **dict.fromkeys(("created", "recorded"), _TIMESTAMP),
    "attributes": pa.map_(pa.string(), pa.string()),
    "data": pa.binary(),
}


def _value(chunk: ReceivedChunk, name: str, dc: str | None) -> Any:
    if name in ("created", "recorded"):
        return _micros(chunk.created_ms if name == "created" else chunk.recorded_ms)
    if name == "attributes":
        return list(chunk.attributes.items())
    return dc if name == "dc" and dc is not None else getattr(chunk, name)


def _micros(*choices: int | None) -> int | None:
    """The first time that a table can hold."""
    return next((ms * 1000 for ms in choices if ms is not None and 0 <= ms <= LAST_MS), None)


def _batch(columns: Mapping[str, pa.Array], schema: pa.Schema, size: int) -> pa.RecordBatch:
    found = []
    for field in schema:
        column = columns.get(field.name)
        if column is None and field.name in DATES and DATES[field.name] in columns:
            column = columns[DATES[field.name]].cast(pa.date32())
        if column is None:
            column = pa.nulls(size, field.type)
        found.append(column if column.type == field.type else pc.cast(column, field.type))
    return pa.RecordBatch.from_arrays(found, schema=schema)


def line_parser(name: str, as_json: str) -> LineParser:
    """Of the parser's name and settings in the ledger. Raises LoaderConfigError where only Spark can apply them."""
    from logferry.loaders.parsing.settings import settings_of
    from logferry.loaders.query.parsed_lines import LineParser

    settings = settings_of(name, as_json)
    if settings is None:
        raise LedgerBroken(f"the table was loaded with the parser {name}, which this version does not have")
    return LineParser(settings)
