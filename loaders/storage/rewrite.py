"""Removes or changes rows of a table by rewriting the files that hold them (copy on write); others are not touched.

Guaranteed: a file is replaced by its remaining rows, changed as demanded and in the same order, and all replacements
are one commit together with the added files. The files are those of the version that the commit builds on: where a
compaction comes between, they are searched again and the commit is retried (see `commit_once`). Memory holds a part of
one file at a time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.location import Location
from logferry.loaders.planning.plan import Range, one_a_partition
from logferry.loaders.storage.commit import FOLDER, DataFiles, add_action
from logferry.loaders.storage.files import create_file, file_system, storage_errors

_PART_BYTES: Final = 16 << 20
_PART_ROWS: Final = 1 << 16


class Rule(NamedTuple):
    """Selects rows: ``meant`` is an expression of pyarrow over ``columns``.

    ``files``: the same in SQL, by which files are passed over whose bounds exclude such rows. ``others``: rows that are
    not selected; a file whose bounds exclude these is removed unread (None: unknown). ``resolved_by``: the selected
    rows of a quarantine are marked with this batch unless an earlier one has resolved them; None: they are removed.
    """

    meant: Any
    columns: tuple[str, ...]
    files: str
    others: str | None = None
    resolved_by: int | None = None


class SelectedFile(NamedTuple):
    """A file that may hold selected rows. ``rows``: all of them, where they are known to be selected."""

    path: str
    size: int
    values: Mapping[str, Any]
    rows: int | None


class Rewriter:
    """Applies a rule; when the commit is retried, a file that is still there is not rewritten a second time."""

    def __init__(self, path: Location, batch: int, rule: Rule) -> None:
        self._path, self._rule, self._store = path, rule, file_system(path)
        self._folder = f"{FOLDER}{batch:08}-{uuid.uuid4().hex[:12]}"
        self._done: dict[str, tuple[AddAction | None, int]] = {}

    def actions(self, table: DeltaTable) -> list[AddAction | RemoveAction]:
        """The actions that apply the rule to this version. Raises StorageUnavailable."""
        adds: list[AddAction] = []
        removes: list[RemoveAction] = []
        with storage_errors(f"{self._path}: rows cannot be replaced"):
            schema = pa.schema(table.schema().to_arrow())
            for file in self._files(table):
                if file.path not in self._done:
                    self._done[file.path] = self._rewritten(file, schema)
                add, rows = self._done[file.path]
                if not rows:
                    continue
                removes.append(
                    RemoveAction(
                        path=file.path,
                        deletion_timestamp=int(time.time() * 1000),
                        data_change=True,
                        size=file.size,
                        partition_values=_texts(file.values),
                    )
                )
                if add is not None:
                    adds.append(add)
        return [*adds, *removes]

    def count(self, table: DeltaTable) -> int:
        """The number of selected rows in this version; writes nothing. Raises StorageUnavailable."""
        with storage_errors(f"{self._path} cannot be read"):
            schema = pa.schema(table.schema().to_arrow())
            files = self._files(table)
            return sum(self._count(file, schema)[0] if file.rows is None else file.rows for file in files)

    def _files(self, table: DeltaTable) -> list[SelectedFile]:
        chosen = _names(table, self._rule.files)
        mixed = chosen if self._rule.others is None else _names(table, self._rule.others)
        found = []
        for row in pa.table(table.get_add_actions(flatten=True)).to_pylist():
            if unquote(row["path"]) in chosen:
                values = {name[10:]: value for name, value in row.items() if name.startswith("partition.")}
                rows = None if unquote(row["path"]) in mixed else row["num_records"]
                found.append(SelectedFile(row["path"], row["size_bytes"], values, rows))
        return found

    def _rewritten(self, file: SelectedFile, schema: pa.Schema) -> tuple[AddAction | None, int]:
        """The replacement of the file, None where none is needed, and the number of selected rows."""
        removes = self._rule.resolved_by is None
        if removes and file.rows is not None:
            return None, file.rows
        meant, rows = self._count(file, schema)
        if not meant or (removes and meant == rows):
            return None, meant
        target = f"{self._folder}/{len(self._done):06}.parquet"
        stored = [name for name in schema.names if name not in file.values]
        kept = pa.schema([schema.field(name) for name in stored])
        with create_file(self._path, target) as stream, pq.ParquetWriter(stream, kept, compression="zstd") as writer:
            for part in self._parts(file, schema):
                after = self._changed(part).select(stored)
                if after.num_rows:
                    writer.write_table(after)
        size = self._store.get_file_info(target).size
        add, left = add_action(self._store, target, size, _texts(file.values))
        DataFiles(self._path, (add,), left).check_rows(rows - meant if removes else rows)
        return add, meant

    def _changed(self, part: pa.Table) -> pa.Table:
        if self._rule.resolved_by is None:
            return part.filter(~pc.coalesce(self._rule.meant, pa.scalar(False)))
        columns = {name: ds.field(name) for name in part.schema.names}
        is_ours = pc.coalesce(self._rule.meant, pa.scalar(False)) & ds.field("resolved").is_null()
        batch = pa.scalar(self._rule.resolved_by, pa.int64())
        columns["resolved"] = pc.if_else(is_ours, batch, ds.field("resolved"))
        return ds.dataset(part).to_table(columns=columns)

    def _count(self, file: SelectedFile, schema: pa.Schema) -> tuple[int, int]:
        """(selected rows, rows), from the columns of the rule."""
        meant = rows = 0
        for part in self._parts(file, pa.schema([schema.field(name) for name in self._rule.columns]), _PART_ROWS):
            meant += part.filter(self._rule.meant).num_rows
            rows += part.num_rows
        return meant, rows

    def _parts(self, file: SelectedFile, schema: pa.Schema, part_rows: int | None = None) -> Iterator[pa.Table]:
        """The rows with these columns: those of the partition from the log; null where the file is older than one."""
        name = unquote(file.path)
        with pq.ParquetFile(name, filesystem=self._store, coerce_int96_timestamp_unit="us") as stored:
            meta = stored.metadata
            row_bytes = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            rows = max(1, min(_PART_ROWS, _PART_BYTES * max(1, meta.num_rows) // max(1, row_bytes)))
            have = [name for name in schema.names if name in stored.schema_arrow.names]
            for part in stored.iter_batches(batch_size=part_rows or rows, columns=have):
                columns = [
                    # delta-rs's `update` writes views, which pyarrow cannot filter.
                    part[field.name].cast(field.type)
                    if field.name in have
                    else pa.repeat(pa.scalar(file.values.get(field.name), field.type), part.num_rows)
                    for field in schema
                ]
                yield pa.Table.from_arrays(columns, schema=schema)


def _names(table: DeltaTable, where: str) -> set[str]:
    """The files of the table that may hold such rows, by their bounds. Raises DeltaError."""
    return {file_name(table, uri) for uri in table.file_uris(file_pruning_predicate=where)}


def file_name(table: DeltaTable, uri: str) -> str:
    """The name of a file below the table's folder."""
    root, place = (unquote(text.removeprefix("file://")) for text in (table.table_uri, uri))
    return place.removeprefix(root).lstrip("/")


def _texts(values: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: None if value is None else str(value) for name, value in values.items()}


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
    """A rule for the rows of these offsets. Files are passed over by the outer bounds of all ranges: with thousands of
    alternatives delta-rs ends the process."""
    files = "false"
    if ranges:
        topics, starts, ends = ([r.topic for r in ranges], [r.start for r in ranges], [r.end for r in ranges])
        files = f"dc = '{dc}' AND topic >= '{min(topics)}' AND topic <= '{max(topics)}'"
        files += f" AND offset >= {min(starts)} AND offset < {max(ends)}"
    return Rule(rows_of(ranges, dc), ("dc", "topic", "partition", "offset"), files, resolved_by=resolved_by)


def where(ranges: Sequence[Range], dc: str) -> str:
    """`rows_of` in Spark's SQL."""
    places = (
        f"(topic = '{r.topic}' AND partition = {r.partition} AND offset >= {r.start} AND offset < {r.end})"
        for r in ranges
    )
    return f"dc = '{dc}' AND ({' OR '.join(places) or 'false'})"
