"""The tables of a load, as an audit reads them: the ledger's entries, and rows grouped by chunk. Without Spark.

The only module here that knows columns. A table is taken as of one version, so that what a loader adds meanwhile
changes nothing; the ledger and the quarantine, which are written before it, may then be ahead of it. Files of a table
are never changed, only added and taken away: one that was proven and is there as it was need not be read again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from logferry.loaders.errors import ForeignTable, LedgerBroken, LoadError
from logferry.loaders.notes import Note, read_notes
from logferry.loaders.planning.segment_states import Segment
from logferry.loaders.storage.ledger import LedgerEntry, TablePaths, last_batch, open_table, read_ledger
from logferry.loaders.storage.rewrite import text
from logferry.loaders.storage.segment_table import read_segments, window_s
from logferry.ops.audit.digests.lines import WHOLE_CHUNK, WHOLE_RECORD, Line
from logferry.ops.cli.problems import Unavailable

_CHUNK: Final = ("dc", "topic", "partition", "offset", "source_id", "seqno")
_FATE: Final = ("resolved", "since")
_BATCH_ROWS: Final = 32_768
MAIN: Final = "main"
QUARANTINE: Final = "quarantine"


class ChunkRows(NamedTuple):
    """Rows of one chunk that stand together in the table: all of them, or some.

    ``window``: of the segments, its start in seconds since 1970; None where the table has none, or the row no time.
    ``resolved``: the batch that brings, or brought, a row of the quarantine into the table, or takes it away;
    ``since``: the one that puts it there in place of others.
    """

    dc: str
    topic: str
    partition: int
    offset: int
    source_id: str | None
    seqno: int | None
    lines: list[Line]
    window: int | None = None
    resolved: int | None = None
    since: int | None = None

    def is_for(self, last: int) -> bool:
        """Whether it is all the same for later batches, too."""
        return all(batch is None or batch <= last for batch in (self.resolved, self.since))


class FileId(NamedTuple):
    """A file of a table: ``table`` is `MAIN` or `QUARANTINE`, ``name`` its path within."""

    table: str
    name: str


class Stat(NamedTuple):
    """What the file system says of a file; -1: to be read again whatever it says."""

    size_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Tables:
    """``last``: the last batch that the main table holds. ``broken``: why the ledger cannot be read, else empty.

    ``left_out``: chunks of which the table has the copy that came by another data centre. ``window_s``: the length of
    the segments, None where there are none. ``whole_chunks``: a row is a chunk, not a line.
    """

    paths: TablePaths
    main: DeltaTable
    quarantine: DeltaTable | None
    last: int
    last_now: int
    entries: list[LedgerEntry]
    broken: str
    left_out: list[Note]
    window_s: int | None = None

    @classmethod
    def open(cls, path: Path) -> Tables:
        """Raises Unavailable where there is no table, or it cannot be read."""
        paths = TablePaths.of(path)
        try:
            main = open_table(paths.main)
            if main is None:
                raise Unavailable(f"{paths.main}: there is no Delta table")
            entries, broken = _entries(paths)
            last = last_batch(main)
            return cls(
                paths,
                main,
                open_table(paths.quarantine),
                last,
                last_batch(open_table(paths.main)),
                entries,
                broken,
                read_notes(paths.moved, last),
                window_s(paths.segments),
            )
        except (LoadError, ForeignTable) as error:
            raise Unavailable(str(error)) from error

    @property
    def id(self) -> str:
        """Delta's own, which a table that is made anew does not keep."""
        return str(self.main.metadata().id)

    @property
    def whole_chunks(self) -> bool:
        names = {field.name for field in self.main.schema().fields}
        return "data" in names and "line" not in names

    def segments(self) -> dict[int, Segment]:
        """The windows by their start in seconds since 1970, as the table's last batch left them. Raises Unavailable."""
        try:
            found = read_segments(self.paths.segments, self.last) if self.window_s is not None else {}
        except LoadError as error:
            raise Unavailable(str(error)) from error
        return {int(start.timestamp()): segment for start, segment in found.items()}

    def files(self) -> dict[FileId, Stat]:
        """All files of both tables. Raises Unavailable."""
        found: dict[FileId, Stat] = {}
        for name, table in self._both():
            folder = self.paths.main if name == MAIN else self.paths.quarantine
            with readable(table):
                for fragment in table.to_pyarrow_dataset().get_fragments():
                    stat = (folder / fragment.path).stat()
                    found[FileId(name, fragment.path)] = Stat(stat.st_size, stat.st_mtime_ns)
        return found

    def read(self, wanted: Collection[FileId]) -> Iterator[tuple[FileId, Iterator[ChunkRows]]]:
        """The rows of these files, one file after the other, main table first. Raises Unavailable."""
        for name, table in self._both():
            with readable(table):
                dataset = table.to_pyarrow_dataset()
                fragments = [f for f in dataset.get_fragments() if FileId(name, f.path) in wanted]
            for fragment in fragments:
                yield FileId(name, fragment.path), self._scanned(name, table, fragment, dataset.schema)

    def rows(self, topic: str, partition: int, start: int, end: int) -> Iterator[ChunkRows]:
        """The rows at these offsets of a partition that stand in the tables, main table first. Raises Unavailable."""
        wanted = (
            (text("topic") == topic)
            & (ds.field("partition") == partition)
            & (ds.field("offset") >= start)
            & (ds.field("offset") < end)
        )
        for name, table in self._both():
            with readable(table):
                dataset = table.to_pyarrow_dataset()
                for fragment in dataset.get_fragments(filter=wanted):
                    for row in self._scanned(name, table, fragment, dataset.schema, wanted):
                        if stands(row, self.last):
                            yield row

    def count(self, files: Collection[FileId]) -> int:
        """How many rows these files have. Raises Unavailable."""
        total = 0
        for name, table in self._both():
            with readable(table):
                fragments = table.to_pyarrow_dataset().get_fragments()
                total += sum(f.count_rows() for f in fragments if FileId(name, f.path) in files)
        return total

    def _both(self) -> Iterator[tuple[str, DeltaTable]]:
        yield MAIN, self.main
        if self.quarantine is not None:
            yield QUARANTINE, self.quarantine

    def _scanned(self, name: str, table: DeltaTable, fragment: Any, schema: Any, wanted: Any = None) -> Any:
        have = set(schema.names)
        columns = list(_CHUNK)
        if name == QUARANTINE:
            columns += ["line", "bytes", "newline", *(name for name in _FATE if name in have)]
        elif self.whole_chunks:
            columns += ["data"]
        else:
            columns += ["line", "text", "newline"]
        if name == MAIN and self.window_s is not None and "event_time" in have:
            columns.append("event_time")
        with readable(table):
            scanner = fragment.scanner(
                schema=schema, columns=columns, filter=wanted, batch_size=_BATCH_ROWS, batch_readahead=2
            )
            for batch in scanner.to_batches():
                yield from _grouped(batch, self.window_s)


def stands(row: ChunkRows, last: int) -> bool:
    """Whether a row stands beside a table whose last batch this is: a line that a batch brought into the table after
    all leaves the quarantine in the instant in which the table holds that batch.
    """
    return (row.resolved is None or row.resolved > last) and (row.since is None or row.since <= last)


def _entries(paths: TablePaths) -> tuple[list[LedgerEntry], str]:
    try:
        return read_ledger(paths.main), ""
    except LedgerBroken as error:
        return [], str(error)


@contextmanager
def readable(table: DeltaTable) -> Iterator[None]:
    """A file that is missing or damaged is not a finding: nobody can say what was in it."""
    try:
        yield
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise Unavailable(f"{table.table_uri} cannot be read: {error}") from error


def _grouped(batch: Any, length_s: int | None) -> Iterator[ChunkRows]:
    """Rows that stand together and are of one chunk, one window and one fate."""
    have, count = batch.schema.names, batch.num_rows
    nothing = [None] * count
    windows = _windows(batch.column("event_time"), length_s) if "event_time" in have and length_s else nothing
    fate = [batch.column(name).to_pylist() if name in have else nothing for name in _FATE]
    keys = zip(*(batch.column(name).to_pylist() for name in _CHUNK), windows, *fate, strict=True)
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
            Line(WHOLE_RECORD if number is None else number, text or b"", bool(newline))
            for _, number, text, newline in group
        ]
        dc, topic, partition, offset, source_id, seqno, window, brought, since = key
        yield ChunkRows(dc, topic, partition, offset, source_id, seqno, lines, window, brought, since)


def _windows(times: Any, length_s: int) -> list[int | None]:
    length_us = length_s * 1_000_000
    micros = times.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
    return [None if at is None else at // length_us * length_s for at in micros]
