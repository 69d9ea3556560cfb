"""Reads a table for the audit: the entries of its ledger, and its rows grouped by chunk. Without Spark.

This module alone knows the columns. A table is read at one version, so that a loader can write meanwhile; the ledger
and the quarantine are written before the table, and may then be ahead of it. Files of a table are added and removed,
but never changed: a proven file of the same size and time is not read again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from logferry.loaders.errors import ForeignTable, LedgerBroken, LoadError
from logferry.loaders.location import Location, without_secrets
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.segment_states import Segment
from logferry.loaders.storage.files import dataset, list_files, open_table
from logferry.loaders.storage.ledger import last_batch, read_ledger
from logferry.loaders.storage.rewrite import file_name, text
from logferry.loaders.storage.side_tables import read_left_out, read_segments, segment_length
from logferry.ops.audit.digests.sums import WHOLE_CHUNK, WHOLE_RECORD, ChunkLine
from logferry.ops.audit.tables.rows import MAIN, QUARANTINE, ChunkRows, FileId, FileStat
from logferry.ops.cli.problems import Unavailable

_CHUNK: Final = ("dc", "topic", "partition", "offset", "source_id", "seqno")
_STATE: Final = ("resolved", "since")
_BATCH_ROWS: Final = 32_768


class TableReader:
    """``last``: the last batch in the main table; ``last_now``: as it was after the ledger was read. ``broken``: why
    the ledger cannot be read, else empty.

    ``left_out``: chunks whose copy, which arrived by another data centre, is in the table. ``segment_s``: the length of
    the segments, None where there are none. ``whole_chunks``: a row is a chunk, not a line.
    """

    def __init__(self, path: Location) -> None:
        """Raises Unavailable if there is no table, or it cannot be read."""
        self.paths = paths = TablePaths.of(path)
        self.entries, self.broken = list[LedgerEntry](), ""
        try:
            main = open_table(paths.main)
            if main is None:
                raise Unavailable(f"{paths.main}: no Delta table; check --table")
            try:
                self.entries = read_ledger(paths.main)
            except LedgerBroken as error:
                self.broken = str(error)
            self.main, self.last, self.quarantine = main, last_batch(main), open_table(paths.quarantine)
            self.last_now = last_batch(open_table(paths.main))
            self.left_out = read_left_out(paths.left_out, self.last)
            self.segment_s = segment_length(paths.segments)
        except (LoadError, ForeignTable) as error:
            raise Unavailable(str(error)) from error

    @property
    def id(self) -> str:
        """Delta's id of the table; a recreated table has another one."""
        return str(self.main.metadata().id)

    @property
    def whole_chunks(self) -> bool:
        names = {field.name for field in self.main.schema().fields}
        return "data" in names and "line" not in names

    def segments(self) -> dict[int, Segment]:
        """The segments by their start in Unix seconds, as of the table's last batch. Raises Unavailable."""
        try:
            found = read_segments(self.paths.segments, self.last) if self.segment_s is not None else {}
        except LoadError as error:
            raise Unavailable(str(error)) from error
        return {int(start.timestamp()): segment for start, segment in found.items()}

    def files(self) -> dict[FileId, FileStat]:
        """All files of both tables. Raises Unavailable."""
        found = {}
        for name, table, folder in self._tables():
            with readable(table):
                stored = {file.name: FileStat(file.size, file.modified_ns) for file in list_files(folder)}
                for file in (file_name(table, uri) for uri in table.file_uris()):
                    if file not in stored:
                        raise FileNotFoundError(f"{folder}/{file} is missing")
                    found[FileId(name, file)] = stored[file]
        return found

    def read(self, wanted: Collection[FileId]) -> Iterator[tuple[FileId, Iterator[ChunkRows]]]:
        """The rows of these files, one file after the other, main table first. Raises Unavailable."""
        for file, table, fragment, schema in self._fragments():
            if file in wanted:
                yield file, self._scanned(file.table, table, fragment, schema)

    def rows(self, topic: str, partition: int, start: int, end: int) -> Iterator[ChunkRows]:
        """The active rows at these offsets of a partition, main table first. Raises Unavailable."""
        offset = ds.field("offset")
        wanted = (text("topic") == topic) & (ds.field("partition") == partition) & (offset >= start) & (offset < end)
        for file, table, fragment, schema in self._fragments(wanted):
            for row in self._scanned(file.table, table, fragment, schema, wanted):
                if row.is_active(self.last):
                    yield row

    def _fragments(self, wanted: Any = None) -> Iterator[tuple[FileId, DeltaTable, Any, Any]]:
        """The files with their table and its schema, main table first."""
        for name, table, folder in self._tables():
            with readable(table):
                stored = dataset(folder, table)
                fragments = list(stored.get_fragments(filter=wanted))
            yield from ((FileId(name, each.path), table, each, stored.schema) for each in fragments)

    def _tables(self) -> Iterator[tuple[str, DeltaTable, Location]]:
        yield MAIN, self.main, self.paths.main
        if self.quarantine is not None:
            yield QUARANTINE, self.quarantine, self.paths.quarantine

    def _scanned(self, name: str, table: DeltaTable, fragment: Any, schema: Any, wanted: Any = None) -> Any:
        have = set(schema.names)
        columns = [*_CHUNK, *(["data"] if self.whole_chunks else ["line", "text", "newline"])]
        if name == QUARANTINE:
            columns = [*_CHUNK, "line", "bytes", "newline", *(name for name in _STATE if name in have)]
        if name == MAIN and self.segment_s is not None and "event_time" in have:
            columns.append("event_time")
        with readable(table):
            size = {"batch_size": _BATCH_ROWS, "batch_readahead": 2}
            for batch in fragment.scanner(schema=schema, columns=columns, filter=wanted, **size).to_batches():
                yield from _grouped(batch, self.segment_s)


@contextmanager
def readable(table: DeltaTable) -> Iterator[None]:
    """A file that is missing or damaged is an error, not a finding: its content is unknown."""
    try:
        yield
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise Unavailable(f"{table.table_uri} cannot be read: {without_secrets(str(error))}") from None


def _grouped(batch: Any, length_s: int | None) -> Iterator[ChunkRows]:
    """Groups adjacent rows of one chunk, one segment and one state in the quarantine."""
    have, count = batch.schema.names, batch.num_rows
    nothing = [None] * count
    segments = _segments(batch.column("event_time"), length_s) if "event_time" in have and length_s else nothing
    state = [batch.column(name).to_pylist() if name in have else nothing for name in _STATE]
    keys = zip(*(batch.column(name).to_pylist() for name in _CHUNK), segments, *state, strict=True)
    content = next(name for name in ("text", "bytes", "data") if name in have)
    texts = batch.column(content).cast(pa.binary()).to_pylist()
    if content == "data":
        numbers: list[int | None] = [WHOLE_CHUNK] * count
        newlines: list[bool | None] = [False] * count
    else:
        numbers, newlines = batch.column("line").to_pylist(), batch.column("newline").to_pylist()
    rows = zip(keys, numbers, texts, newlines, strict=True)
    for key, group in groupby(rows, key=itemgetter(0)):
        lines = [
            ChunkLine(WHOLE_RECORD if number is None else number, text or b"", bool(newline))
            for _, number, text, newline in group
        ]
        dc, topic, partition, offset, source_id, seqno, segment, brought, since = key
        yield ChunkRows(dc, topic, partition, offset, source_id, seqno, lines, segment, brought, since)


def _segments(times: Any, length_s: int) -> list[int | None]:
    length_us = length_s * 1_000_000
    micros = times.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
    return [None if at is None else at // length_us * length_s for at in micros]
