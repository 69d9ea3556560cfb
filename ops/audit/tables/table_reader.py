"""Reads a table for the audit: the entries of its ledger, and its rows grouped by chunk. Without Spark.

This module alone knows the columns. A table is read at one version, so that a loader can write meanwhile; the ledger
and the quarantine are written before the table, and may then be ahead of it. Files of a table are added and removed,
but never changed: a proven file of the same size and time is not read again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from logferry.loaders.errors import ForeignTable, LedgerBroken, LoadError
from logferry.loaders.location import Location, without_secrets
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.segment_states import Segment
from logferry.loaders.storage.files import dataset, file_system, list_files, open_table
from logferry.loaders.storage.ledger import last_batch, read_ledger
from logferry.loaders.storage.rewrite import file_name, text
from logferry.loaders.storage.side_tables import read_left_out, read_segments, segment_length
from logferry.ops.audit.tables.ledger_parsers import LedgerParsers
from logferry.ops.audit.tables.parsed_columns import ParsedColumns
from logferry.ops.audit.tables.row_groups import CHUNK, HEAD, RECORD, STATE, grouped
from logferry.ops.audit.tables.rows import MAIN, QUARANTINE, ChunkRows, FileId, FileStat
from logferry.ops.cli.problems import Unavailable

_BATCH_ROWS: Final = 32_768


class AuditedFile(NamedTuple):
    """A file to read. ``values``: those of the columns by which the table is partitioned, as an expression."""

    id: FileId
    stat: FileStat
    values: ds.Expression


@dataclass(frozen=True)
class RowScanner:
    """Reads files of a table's version, in whichever process. ``schemas``: of main table and quarantine, by name."""

    paths: TablePaths
    schemas: Mapping[str, pa.Schema]
    form: ds.FileFormat
    whole_chunks: bool
    segment_s: int | None
    parsed: ParsedColumns

    def batches(self, file: AuditedFile, wanted: Any = None) -> Iterator[pa.RecordBatch]:
        """The rows with the columns that are compared. ``wanted``: a filter. Raises Unavailable."""
        schema = self.schemas[file.id.table]
        folder = self.paths.main if file.id.table == MAIN else self.paths.quarantine
        columns = [*CHUNK, *HEAD, *(["data"] if self.whole_chunks else ["line", "text", "newline"])]
        if file.id.table == QUARANTINE:
            columns = [*CHUNK, *HEAD, "line", "bytes", "newline", *STATE, *RECORD]
        else:
            columns += self.parsed.names
        columns = [name for name in columns if name in schema.names]
        with readable(folder):
            fragment = self.form.make_fragment(file.id.name, file_system(folder), file.values)
            size = {"batch_size": _BATCH_ROWS, "batch_readahead": 2, "use_threads": False}
            yield from fragment.scanner(schema=schema, columns=columns, filter=wanted, **size).to_batches()

    def groups(self, file: AuditedFile, batch: pa.RecordBatch) -> Iterator[ChunkRows]:
        return grouped(batch, self.segment_s if file.id.table == MAIN else None)


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
        self._datasets: dict[str, Any] = {}
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
            with readable(folder):
                stored = {file.name: FileStat(file.size, file.modified_ns) for file in list_files(folder)}
                for file in (file_name(table, uri) for uri in table.file_uris()):
                    if file not in stored:
                        raise FileNotFoundError(f"{folder}/{file} is missing")
                    found[FileId(name, file)] = stored[file]
        return found

    def scanner(self) -> RowScanner:
        """Raises Unavailable."""
        schemas, form = {}, ds.ParquetFileFormat()
        for name, _, folder in self._tables():
            with readable(folder):
                stored = self._dataset(name)
                schemas[name], form = stored.schema, stored.format
        parsed = ParsedColumns.of(schemas[MAIN], LedgerParsers.of(self.entries, self.last))
        return RowScanner(self.paths, schemas, form, self.whole_chunks, self.segment_s, parsed)

    def to_read(self, wanted: Collection[FileId], stats: Mapping[FileId, FileStat]) -> list[AuditedFile]:
        """These files, main table first. ``stats``: of `files`. Raises Unavailable."""
        found = []
        for name, _, folder in self._tables():
            with readable(folder):
                fragments = list(self._dataset(name).get_fragments())
            ids = ((FileId(name, each.path), each.partition_expression) for each in fragments)
            found += [AuditedFile(one, stats[one], values) for one, values in ids if one in wanted]
        return found

    def rows(self, topic: str, partition: int, start: int, end: int) -> Iterator[ChunkRows]:
        """The active rows at these offsets of a partition, main table first. Raises Unavailable."""
        offset, scanner = ds.field("offset"), self.scanner()
        wanted = (text("topic") == topic) & (ds.field("partition") == partition) & (offset >= start) & (offset < end)
        for name, _, folder in self._tables():
            with readable(folder):
                fragments = list(self._dataset(name).get_fragments(filter=wanted))
            for each in fragments:
                file = AuditedFile(FileId(name, each.path), FileStat(-1, -1), each.partition_expression)
                for batch in scanner.batches(file, wanted):
                    yield from (row for row in scanner.groups(file, batch) if row.is_active(self.last))

    def _tables(self) -> Iterator[tuple[str, DeltaTable, Location]]:
        yield MAIN, self.main, self.paths.main
        if self.quarantine is not None:
            yield QUARANTINE, self.quarantine, self.paths.quarantine

    def _dataset(self, name: str) -> Any:
        if name not in self._datasets:
            at = {one: (table, folder) for one, table, folder in self._tables()}[name]
            self._datasets[name] = dataset(at[1], at[0])
        return self._datasets[name]


@contextmanager
def readable(place: Location) -> Iterator[None]:
    """A file that is missing or damaged is an error, not a finding: its content is unknown."""
    try:
        yield
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise Unavailable(without_secrets(f"{place} cannot be read: {error}")) from None
