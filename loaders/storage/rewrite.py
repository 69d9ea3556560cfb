"""Removes or changes rows of a table by rewriting the files that hold them (copy on write); others are not touched.

Guaranteed: a file is replaced by its remaining rows, changed as demanded and in the same order, and all replacements
are one commit together with the added files. The files are those of the version that the commit builds on: where a
compaction comes between, they are searched again and the commit is retried (see `commit_once`). Memory holds a part of
one file at a time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.commit import FOLDER, CommittedBatch, DataFiles, add_action, commit_once, write_actions
from logferry.loaders.storage.ledger import storage_errors

_PART_BYTES: Final = 16 << 20
_PART_ROWS: Final = 1 << 16
_TYPES: Final = {"event_time": pa.timestamp("us", "UTC"), "resolved": pa.int64(), "since": pa.int64()}


# (a part of a file, which of its rows are selected) → the part as it will be stored.
Change = Callable[[pa.Table, Any], pa.Table]


class StoredFile(NamedTuple):
    """A file as in the table's log. ``low``, ``high``: bounds of its columns, as far as known."""

    path: str
    size: int
    values: Mapping[str, Any]
    low: Mapping[str, Any]
    high: Mapping[str, Any]
    nulls: Mapping[str, int]
    rows: int

    @property
    def partition_values(self) -> dict[str, str | None]:
        return {name: None if value is None else str(value) for name, value in self.values.items()}


class Rule(NamedTuple):
    """Selects rows. ``may_hold``: whether a file can have a selected row; ``holds_only``: whether all its rows are
    known to be selected. ``meant``: the selection, as an expression over ``columns``; ``changed``: the change of the
    selected rows (None: they are removed).
    """

    may_hold: Callable[[StoredFile], bool]
    meant: Any
    columns: tuple[str, ...]
    holds_only: Callable[[StoredFile], bool] = lambda _: False
    changed: Change | None = None


class Rewriter:
    """Applies a rule; when the commit is retried, a file that is still there is not rewritten a second time."""

    def __init__(self, path: Path, batch: int, rule: Rule) -> None:
        self._path, self._rule = path, rule
        self._folder = path / f"{FOLDER}{batch:08}-{uuid.uuid4().hex[:12]}"
        self._done: dict[str, tuple[AddAction | None, int]] = {}

    def actions(self, table: DeltaTable) -> list[AddAction | RemoveAction]:
        """The actions that apply the rule to this version. Raises StorageUnavailable."""
        adds: list[AddAction] = []
        removes: list[RemoveAction] = []
        with storage_errors(f"{self._path}: rows cannot be replaced"):
            for file in stored_files(table):
                if not self._rule.may_hold(file):
                    continue
                if file.path not in self._done:
                    self._done[file.path] = self._rewritten(file)
                add, rows = self._done[file.path]
                if not rows:
                    continue
                removes.append(
                    RemoveAction(
                        path=file.path,
                        deletion_timestamp=int(time.time() * 1000),
                        data_change=True,
                        size=file.size,
                        partition_values=file.partition_values,
                    )
                )
                if add is not None:
                    adds.append(add)
        return [*adds, *removes]

    def count(self, table: DeltaTable) -> int:
        """The number of selected rows in this version; writes nothing. Raises StorageUnavailable."""
        with storage_errors(f"{self._path} cannot be read"):
            return sum(
                file.rows if self._rule.holds_only(file) else self._count(file)[0]
                for file in stored_files(table)
                if self._rule.may_hold(file)
            )

    def _rewritten(self, file: StoredFile) -> tuple[AddAction | None, int]:
        """The replacement of the file, None where none is needed, and the number of selected rows."""
        change = self._rule.changed
        if change is None and self._rule.holds_only(file):
            return None, file.rows
        meant, rows = self._count(file)
        if not meant or (change is None and meant == rows):
            return None, meant
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"{len(self._done):06}.parquet"
        writer: Any = None
        try:
            for part, is_meant in self._parts(file):
                after = part.filter(pc.invert(is_meant)) if change is None else change(part, is_meant)
                writer = writer or pq.ParquetWriter(target, part.schema, compression="zstd")
                if after.num_rows:
                    writer.write_table(after)
        finally:
            if writer is not None:
                writer.close()
        add, stored = add_action(self._path, target, file.partition_values)
        DataFiles(self._folder, (add,), stored).check_rows(rows - meant if change is None else rows)
        return add, meant

    def _count(self, file: StoredFile) -> tuple[int, int]:
        """(selected rows, rows), from the columns of the rule."""
        meant = rows = 0
        for part, is_meant in self._parts(file, self._rule.columns):
            meant += int(pc.sum(is_meant).as_py() or 0)
            rows += part.num_rows
        return meant, rows

    def _parts(self, file: StoredFile, columns: Sequence[str] | None = None) -> Any:
        """(a part of the file as stored, which of its rows are selected)"""
        with pq.ParquetFile(self._path / unquote(file.path), coerce_int96_timestamp_unit="us") as stored:
            meta = stored.metadata
            row_bytes = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            rows = max(1, min(_PART_ROWS, _PART_BYTES * max(1, meta.num_rows) // max(1, row_bytes)))
            have = stored.schema_arrow.names
            chosen = None if columns is None else [name for name in columns if name in have]
            for batch in stored.iter_batches(batch_size=_PART_ROWS if columns else rows, columns=chosen):
                part = pa.Table.from_batches([batch])
                part = part.cast(pa.schema([f.with_type(_without_views(f.type)) for f in part.schema]))
                yield part, self._which(part, file)

    def _which(self, part: pa.Table, file: StoredFile) -> Any:
        whole = part
        # Values of partition columns are in the log, not in the file.
        for name, value in file.values.items():
            if name not in part.schema.names:
                whole = whole.append_column(name, pa.array([value] * part.num_rows))
        for name in self._rule.columns:
            if name not in whole.schema.names:
                # A file of a batch from before the table had the column.
                whole = whole.append_column(name, pa.nulls(part.num_rows, _TYPES.get(name, pa.null())))
        numbered = whole.append_column("_row", pa.array(range(part.num_rows), pa.int64()))
        chosen = ds.dataset(numbered).scanner(columns=["_row"], filter=self._rule.meant).to_table()["_row"]
        return pc.is_in(numbered["_row"], value_set=chosen.combine_chunks())


def stored_files(table: DeltaTable) -> list[StoredFile]:
    """Raises DeltaError."""
    found = []
    for row in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        by: dict[str, dict[str, Any]] = {"partition": {}, "min": {}, "max": {}, "null_count": {}}
        for name, value in row.items():
            kind, _, column = name.partition(".")
            if column and kind in by and (value is not None or kind == "partition"):
                by[kind][column] = value
        found.append(
            StoredFile(
                *(row["path"], row["size_bytes"], by["partition"], by["min"], by["max"], by["null_count"]),
                row["num_records"] if row["num_records"] is not None else -1,
            )
        )
    return found


def commit_rewritten(
    written: DataFiles, rewriter: Rewriter, path: Path, batch: int, run: str, partition_by: Sequence[str] = ()
) -> CommittedBatch:
    """Adds the files and applies the rewriter in one commit, unless the table holds the batch already.

    Safe to call again. Raises StorageUnavailable.
    """

    def write(table: DeltaTable, properties: CommitProperties) -> None:
        write_actions(table, properties, [*written.adds, *rewriter.actions(table)], partition_by)

    return commit_once(write, path, batch, run, written.rows, alone=True)


def rows_of(ranges: Sequence[Range], dc: str) -> Any:
    """A filter of pyarrow for the rows of these offsets. Rows loaded from another data centre's Kafka have its offsets
    and are not selected."""
    found = ds.scalar(False)
    for r in ranges:
        where = (text("topic") == r.topic) & (ds.field("partition") == r.partition)
        found = found | (where & (ds.field("offset") >= r.start) & (ds.field("offset") < r.end))
    return found & (text("dc") == dc)


def text(column: str) -> Any:
    """A column of strings for a filter. Files that delta-rs's own ``delete`` and ``update`` write have the type
    `string_view`, whose bounds pyarrow fails to compare with a string."""
    return ds.field(column).cast(pa.string())


def of_ranges(ranges: Sequence[Range], dc: str, changed: Change | None = None) -> Rule:
    """A rule for the rows of these offsets."""

    def may_hold(file: StoredFile) -> bool:
        return bool(file.values.get("dc", dc) == dc) and any(_meets(file, r) for r in ranges)

    return Rule(may_hold, rows_of(ranges, dc), ("dc", "topic", "partition", "offset"), changed=changed)


def _meets(file: StoredFile, r: Range) -> bool:
    if file.values.get("topic", r.topic) != r.topic:
        return False
    low, high = file.low, file.high
    return bool(
        low.get("topic", r.topic) <= r.topic <= high.get("topic", r.topic)
        and low.get("partition", r.partition) <= r.partition <= high.get("partition", r.partition)
        and low.get("offset", r.start) < r.end
        and high.get("offset", r.start) >= r.start
    )


def _without_views(kind: pa.DataType) -> pa.DataType:
    """The type without views, which delta-rs's ``update`` writes and pyarrow cannot filter."""
    if pa.types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), _without_views(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_without_views(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)))
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind
