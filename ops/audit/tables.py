"""The tables of a load, as an audit reads them: the ledger's entries, and rows grouped by chunk. Without Spark.

The only module here that knows columns. A table is taken as of one version, so that what a loader adds meanwhile
changes nothing; the ledger and the quarantine, which are written before it, may then be ahead of it.
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
from logferry.loaders.errors import LedgerBroken, LoadError
from logferry.loaders.ledger import LedgerEntry, TablePaths, last_batch, open_table, read_ledger
from logferry.loaders.notes import Note, read_notes
from logferry.ops.audit.lines import WHOLE_RECORD, Line
from logferry.ops.problems import Unavailable

_CHUNK: Final = ("dc", "topic", "partition", "offset", "source_id", "seqno")
_BATCH_ROWS: Final = 32_768


class ChunkRows(NamedTuple):
    """Rows of one chunk that stand together in the table: all of them, or some."""

    dc: str
    topic: str
    partition: int
    offset: int
    source_id: str | None
    seqno: int | None
    lines: list[Line]


@dataclass(frozen=True)
class Tables:
    """``last``: the last batch that the main table holds. ``broken``: why the ledger cannot be read, else empty.

    ``left_out``: chunks of which the table has the copy that came by another data centre.
    """

    paths: TablePaths
    main: DeltaTable
    quarantine: DeltaTable | None
    last: int
    last_now: int
    entries: list[LedgerEntry]
    broken: str
    left_out: list[Note]

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
            )
        except LoadError as error:
            raise Unavailable(str(error)) from error

    def rows(self, topics: Collection[str], offsets: Collection[int] | None = None) -> Iterator[ChunkRows]:
        """The rows of these topics (and offsets), main table first, a batch at a time. Raises Unavailable."""
        yield from _rows(self.main, "text", topics, offsets)
        if self.quarantine is not None:
            yield from _rows(self.quarantine, "bytes", topics, offsets, standing(self.quarantine, self.last))

    def count(self) -> int:
        """How many rows there are, of any topic. Raises Unavailable."""
        with _readable(self.main):
            total: int = self.main.to_pyarrow_dataset().count_rows()
        if self.quarantine is not None:
            with _readable(self.quarantine):
                stands = standing(self.quarantine, self.last)
                total += self.quarantine.to_pyarrow_dataset().count_rows(filter=stands)
        return total


def standing(quarantine: DeltaTable, last: int) -> Any:
    """Which rows stand in the quarantine beside a table whose last batch this is: a line that a batch brought into the
    table after all leaves the quarantine in the instant in which the table holds that batch.
    """
    if "resolved" not in {field.name for field in quarantine.schema().fields}:
        return None
    return ds.field("resolved").is_null() | (ds.field("resolved") > last)


def _entries(paths: TablePaths) -> tuple[list[LedgerEntry], str]:
    try:
        return read_ledger(paths.main), ""
    except LedgerBroken as error:
        return [], str(error)


@contextmanager
def _readable(table: DeltaTable) -> Iterator[None]:
    """A file that is missing or damaged is not a finding: nobody can say what was in it."""
    try:
        yield
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise Unavailable(f"{table.table_uri} cannot be read: {error}") from error


def _rows(
    table: DeltaTable, content: str, topics: Collection[str], offsets: Collection[int] | None, stands: Any = None
) -> Iterator[ChunkRows]:
    wanted = ds.field("topic").isin(sorted(topics))
    if stands is not None:
        wanted = wanted & stands
    if offsets is not None:
        wanted = wanted & ds.field("offset").isin(sorted(offsets))
    columns = [*_CHUNK, "line", content, "newline"]
    with _readable(table):
        scanner = table.to_pyarrow_dataset().scanner(
            columns=columns, filter=wanted, batch_size=_BATCH_ROWS, batch_readahead=2, fragment_readahead=1
        )
        for batch in scanner.to_batches():
            yield from _grouped(batch)


def _grouped(batch: Any) -> Iterator[ChunkRows]:
    *chunk, numbers, content, newlines = batch.columns
    places = zip(*(column.to_pylist() for column in chunk), strict=True)
    texts = content.cast(pa.binary()).to_pylist()
    rows = zip(places, numbers.to_pylist(), texts, newlines.to_pylist(), strict=True)
    for place, group in groupby(rows, key=itemgetter(0)):
        lines = [
            Line(WHOLE_RECORD if number is None else number, text or b"", bool(newline))
            for _, number, text, newline in group
        ]
        dc, topic, partition, offset, source_id, seqno = place
        yield ChunkRows(dc, topic, partition, offset, source_id, seqno, lines)
