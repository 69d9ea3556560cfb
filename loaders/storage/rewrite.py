"""Rows out of a table, or changed in it: the files that hold them are written anew without the others being touched.

Guaranteed is that a file is replaced by just its rows as they are to be, in the order in which they stood, and that all
replacements are one commit together with what is added. The files are those of the version that the commit builds on:
where a compaction came between, they are looked for anew, and the commit is tried again (see `commit_once`). In memory
is a part of one file at a time.
"""

from __future__ import annotations

import json
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
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.errors import StorageAway
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.commit import HOOKS, Committed, commit_once
from logferry.loaders.storage.data_files import FOLDER, Written, statistics

_PART_BYTES: Final = 16 << 20
_PART_ROWS: Final = 1 << 16
_TYPES: Final = {"event_time": pa.timestamp("us", "UTC"), "resolved": pa.int64(), "since": pa.int64()}


# A part of a file, and which of its rows are meant: the part as it is to be.
Change = Callable[[pa.Table, Any], pa.Table]


class StoredFile(NamedTuple):
    """A file as the table's log tells of it. ``low``, ``high``: bounds of its columns, as far as they are known."""

    path: str
    size: int
    values: Mapping[str, Any]
    low: Mapping[str, Any]
    high: Mapping[str, Any]
    nulls: Mapping[str, int]
    rows: int


class Rule(NamedTuple):
    """What becomes of rows. ``may_hold``: whether a file can have one that is meant; ``holds_only``: whether it is
    known to have no other. ``meant``: which rows, as an expression over ``columns``; ``changed``: what becomes of those
    (None: they go).
    """

    may_hold: Callable[[StoredFile], bool]
    meant: Any
    columns: tuple[str, ...]
    holds_only: Callable[[StoredFile], bool] = lambda _: False
    changed: Change | None = None


class Actions(NamedTuple):
    adds: list[AddAction]
    removes: list[RemoveAction]
    rows: int


class Rewriter:
    """Rewrites what a rule means; a file that is still there when it is asked again is not rewritten a second time.

    ``taken``: how many rows it meant, the last time.
    """

    def __init__(self, path: Path, batch: int, rule: Rule) -> None:
        self._path, self._rule = path, rule
        self._folder = path / f"{FOLDER}{batch:08}-{uuid.uuid4().hex[:12]}"
        self._done: dict[str, tuple[AddAction | None, int]] = {}
        self.taken = 0

    def actions(self, table: DeltaTable) -> Actions:
        """What takes the rows out of this version. ``rows``: how many are meant. Raises StorageAway."""
        found = Actions([], [], 0)
        try:
            for file in stored_files(table):
                if not self._rule.may_hold(file):
                    continue
                if file.path not in self._done:
                    self._done[file.path] = self._rewritten(file)
                add, rows = self._done[file.path]
                if not rows:
                    continue
                values = {name: _said(value) for name, value in file.values.items()}
                now = int(time.time() * 1000)
                found.removes.append(_removed(file, now, values))
                found = found._replace(rows=found.rows + rows)
                if add is not None:
                    found.adds.append(add)
        except (DeltaError, pa.ArrowException, OSError) as error:
            raise StorageAway(f"{self._path}: rows cannot be replaced: {error}") from error
        self.taken = found.rows
        return found

    def count(self, table: DeltaTable) -> int:
        """How many rows are meant in this version; nothing is written. Raises StorageAway."""
        try:
            return sum(
                file.rows if self._rule.holds_only(file) else self._count(file)[0]
                for file in stored_files(table)
                if self._rule.may_hold(file)
            )
        except (DeltaError, pa.ArrowException, OSError) as error:
            raise StorageAway(f"{self._path} cannot be read: {error}") from error

    def _rewritten(self, file: StoredFile) -> tuple[AddAction | None, int]:
        """The file that takes the place of this one, None: none is needed; and how many rows are meant."""
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
        values = {name: _said(value) for name, value in file.values.items()}
        stats = json.dumps(statistics(pq.read_metadata(target)))
        path = target.relative_to(self._path).as_posix()
        return AddAction(path, target.stat().st_size, values, int(time.time() * 1000), True, stats), meant

    def _count(self, file: StoredFile) -> tuple[int, int]:
        """(rows that are meant, rows), out of the columns that decide it."""
        meant = rows = 0
        for part, is_meant in self._parts(file, self._rule.columns):
            meant += int(pc.sum(is_meant).as_py() or 0)
            rows += part.num_rows
        return meant, rows

    def _parts(self, file: StoredFile, columns: Sequence[str] | None = None) -> Any:
        """(a part of the file as it is stored, which of its rows are meant)"""
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
        # What the table is partitioned by stands in its log and not in the file.
        for name, value in file.values.items():
            if name not in part.schema.names:
                whole = whole.append_column(name, pa.array([value] * part.num_rows))
        for name in self._rule.columns:
            if name not in whole.schema.names:
                # Of a batch from before the table had it.
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
    written: Written, rewriter: Rewriter, path: Path, batch: int, run: str, partition_by: Sequence[str] = ()
) -> Committed:
    """The files in, and what the rewriter takes out, in one commit, unless the table holds the batch already.

    Safe to call again. Raises StorageAway.
    """

    def write(table: DeltaTable, properties: CommitProperties) -> None:
        actions = rewriter.actions(table)
        table.create_write_transaction(
            [*written.adds, *actions.adds, *actions.removes],
            "append",
            table.schema(),
            partition_by=list(partition_by),
            commit_properties=properties,
            post_commithook_properties=HOOKS,
        )

    return commit_once(write, path, batch, run, written.rows, alone=True)


def rows_of(ranges: Sequence[Range], dc: str) -> Any:
    """The rows of these offsets, as a filter of pyarrow. Rows that were loaded from another data centre's Kafka have
    its offsets, and are not meant."""
    found = ds.scalar(False)
    for r in ranges:
        where = (text("topic") == r.topic) & (ds.field("partition") == r.partition)
        found = found | (where & (ds.field("offset") >= r.start) & (ds.field("offset") < r.end))
    return found & (text("dc") == dc)


def text(column: str) -> Any:
    """A column of strings for a filter, in whatever files: in those that delta-rs's own ``delete`` and ``update`` write
    they are of a type (`string_view`) whose bounds pyarrow fails to compare with a string."""
    return ds.field(column).cast(pa.string())


def of_ranges(ranges: Sequence[Range], dc: str, changed: Change | None = None) -> Rule:
    """A rule for the rows of these offsets."""

    def may_hold(file: StoredFile) -> bool:
        if file.values.get("dc", dc) != dc:
            return False
        return any(_meets(file, r) for r in ranges)

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
    """The type as most files have it: pyarrow cannot filter the one that delta-rs's ``update`` writes."""
    if pa.types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), _without_views(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_without_views(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)))
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def _removed(file: StoredFile, now_ms: int, values: dict[str, str | None]) -> RemoveAction:
    return RemoveAction(
        path=file.path, deletion_timestamp=now_ms, data_change=True, size=file.size, partition_values=values
    )


def _said(value: Any) -> str | None:
    return None if value is None else str(value)
