"""Which rows a batch removes or changes, and which files may hold them. Without Spark; `batches.rewrite_rows` does it.

Files are passed over, or removed as a whole, by the bounds of their columns in the table's log. Files that must be
read are read by Spark's executors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction
from logferry.loaders.planning.plan import Range, one_a_partition

# The format of a moment in delta-rs's SQL.
SQL_TIME: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


class Rule(NamedTuple):
    """Selects rows: those of ``ranges`` that were loaded from ``dc``, or those for which ``meant``, in Spark's SQL,
    is true.

    ``files``: the same in delta-rs's SQL, by which files are passed over whose bounds exclude such rows. ``others``:
    rows that are not selected; a file whose bounds exclude these is removed unread (None: unknown). ``resolved_by``:
    the selected rows of a quarantine are marked with this batch unless an earlier one has resolved them; None: they are
    removed.
    """

    files: str
    meant: str = ""
    ranges: tuple[Range, ...] = ()
    dc: str = ""
    others: str | None = None
    resolved_by: int | None = None


class TableFile(NamedTuple):
    """A file of a table. ``path``: as in the log. ``values``: of the partition columns. ``rows``: None where unknown.
    ``bounds``: the smallest values of the indexed columns."""

    path: str
    size: int
    values: Mapping[str, str | None]
    rows: int | None
    bounds: Mapping[str, Any]

    @property
    def name(self) -> str:
        return unquote(self.path)

    def removed(self, *, data_change: bool = True) -> RemoveAction:
        return RemoveAction(
            path=self.path,
            deletion_timestamp=int(time.time() * 1000),
            data_change=data_change,
            size=self.size,
            partition_values=dict(self.values),
        )


def table_files(table: DeltaTable) -> list[TableFile]:
    """All files of this version. Raises DeltaError."""
    found = []
    for row in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        values = {name[10:]: _text(value) for name, value in row.items() if name.startswith("partition.")}
        bounds = {name[4:]: value for name, value in row.items() if name.startswith("min.") and value is not None}
        found.append(TableFile(row["path"], row["size_bytes"], values, row.get("num_records"), bounds))
    return found


def selected_files(table: DeltaTable, rule: Rule) -> list[tuple[TableFile, bool]]:
    """The files that may hold selected rows, each with whether all of its rows are selected. Raises DeltaError."""
    chosen = _names(table, rule.files)
    mixed = chosen if rule.others is None else _names(table, rule.others)
    files = [file for file in table_files(table) if file.name in chosen]
    return [(file, file.name not in mixed and file.rows is not None) for file in files]


def _names(table: DeltaTable, where: str) -> set[str]:
    """The files of the table that may hold such rows, by their bounds. Raises DeltaError."""
    return {file_name(table, uri) for uri in table.file_uris(file_pruning_predicate=where)}


def file_name(table: DeltaTable, uri: str) -> str:
    """The name of a file below the table's folder."""
    root, place = (unquote(text.removeprefix("file://")) for text in (table.table_uri, uri))
    return place.removeprefix(root).lstrip("/")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def rows_of(ranges: Sequence[Range], dc: str) -> Any:
    """A filter of pyarrow for the rows of these offsets. Rows loaded from another data centre's Kafka have its offsets
    and are not selected.

    A partition's bounds are looked up by its name, so that the filter is as deep for 10,000 ranges as for one: pyarrow
    descends recursively, and some thousand alternatives end the process.
    """
    found = ds.scalar(False)
    for chosen in one_a_partition(ranges):
        names = pa.array([f"{r.partition}:{r.topic}" for r in chosen], pa.string())
        number = pc.index_in(pc.binary_join_element_wise(text("partition"), text("topic"), ":"), value_set=names)
        start = pc.choose(number, *(pa.scalar(r.start, pa.int64()) for r in chosen))
        end = pc.choose(number, *(pa.scalar(r.end, pa.int64()) for r in chosen))
        # Without a name in the list, and so without bounds, the row is not selected.
        is_between = pc.coalesce((ds.field("offset") >= start) & (ds.field("offset") < end), pa.scalar(False))
        found = found | (_around(chosen) & is_between)
    return found & (text("dc") == dc)


def _around(ranges: Sequence[Range]) -> Any:
    """The outer bounds of the ranges, by which pyarrow passes over parts of files."""
    topics = [r.topic for r in ranges]
    offset = ds.field("offset")
    is_inside = (offset >= min(r.start for r in ranges)) & (offset < max(r.end for r in ranges))
    return (text("topic") >= min(topics)) & (text("topic") <= max(topics)) & is_inside


def text(column: str) -> Any:
    """A column of strings for a filter. Files that delta-rs's own ``delete`` and ``update`` write have the type
    `string_view`, whose bounds pyarrow fails to compare with a string."""
    return ds.field(column).cast(pa.string())


def of_ranges(ranges: Sequence[Range], dc: str, resolved_by: int | None = None) -> Rule:
    """A rule for the rows of these offsets, which do not overlap. Files are passed over by the outer bounds of all
    ranges: with thousands of alternatives delta-rs ends the process."""
    files = "false"
    if ranges:
        topics, starts, ends = ([r.topic for r in ranges], [r.start for r in ranges], [r.end for r in ranges])
        files = f"dc = '{dc}' AND topic >= '{min(topics)}' AND topic <= '{max(topics)}'"
        files += f" AND offset >= {min(starts)} AND offset < {max(ends)}"
    return Rule(files, "false", tuple(ranges), dc, resolved_by=resolved_by)
