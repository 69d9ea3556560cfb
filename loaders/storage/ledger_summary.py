"""Merges old entries of a batch ledger: its size follows the partitions, and not the batches. Without Spark.

The newest entries are kept singly. Of the older ones, consecutive loads with the same data centre, parser, settings and
origin become one entry, with the batch of the last, ``first`` of the first, and the offsets of all. Every other kind
stays single permanently, and so does a load before a move, which may have been read elsewhere. Lost are the limits
between the merged batches, their runs and the times at which they were planned.

Invariants: the offsets of a merged entry are exactly those of its parts, or nothing is merged: a gap or an overlap is
left for the audit to find. The original of each position stays. No batch that a loader may still execute is merged.

Crash windows: one commit replaces the files of the parts by that of the sum. Before it there is a file that no commit
names, which `retention` deletes; after it nothing is left to do. Where another loader commits meanwhile, this commit
fails, and a later batch makes up for it. A loader that was frozen in here cannot remove what came since.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import RemoveAction
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LOAD, MOVE
from logferry.loaders.storage.commit import HOOKS, write_log
from logferry.loaders.storage.files import file_system, storage_errors, written_rows
from logferry.loaders.storage.ledger import (
    HEAD,
    LEDGER_SCHEMA,
    add_columns,
    existing_table,
    last_batch,
    pinned_table,
    with_all_columns,
)
from logferry.loaders.storage.snapshots import newest_table

# Entries are merged every so many batches.
MERGE_EVERY: Final = 64
# Files that one merge reads: those of an old ledger are merged little by little.
_AT_ONCE: Final = 1024
_SAME: Final = ("dc", "parser", "settings", "origin")
_PLACE: Final = ("era", "topic", "topic_id", "partition")


def merge_entries(path: Location, keep: int) -> int:
    """Merges entries before the newest ``keep``, in a ledger that has some. Returns the number of files replaced.

    Safe to call again, and while others load: 0 also where another commit was faster. Raises StorageUnavailable.
    """
    newest = existing_table(path)
    with storage_errors(f"{path}: old entries cannot be merged"):
        if len(_old_files(newest, last_batch(newest) - keep)) < 2:
            return 0
        # From here on an earlier version can read the ledger, and not write it.
        add_columns(path, Schema.from_arrow(LEDGER_SCHEMA))
        table = pinned_table(path)
        files = _old_files(table, last_batch(table) - keep)
        store, schema = file_system(path), pa.schema(table.schema().to_arrow())
        names = [unquote(file["path"]) for file in files]
        rows = ds.dataset(names, schema=schema, format="parquet", filesystem=store).to_table()
        now = int(time.time() * 1000)
        parts = _settled_and_open(merged_rows(with_all_columns(rows)))
        # Nothing is added or removed for a reader of the ledger, so the table may stay append-only.
        adds = [add for part in parts for add in written_rows(path, part, changes_data=False)]
        removes = [RemoveAction(file["path"], False, now, file["size_bytes"], {}) for file in files]
        with suppress(CommitFailedError):
            write_log(table, [*adds, *removes], CommitProperties(max_commit_retries=0))
            return len(files)
    return 0


def merge_notes(path: Location) -> None:
    """Merges the files of the chunks left out, once there are many; each note stays. Raises StorageUnavailable."""
    table = newest_table(path)
    if table is None or len(table.get_add_actions()) < MERGE_EVERY:
        return
    with storage_errors(f"{path}: small files cannot be merged"), suppress(CommitFailedError):
        pinned_table(path).optimize.compact(max_concurrent_tasks=1, post_commithook_properties=HOOKS)


def _old_files(table: Any, upto: int) -> list[dict[str, Any]]:
    """The files of entries up to the batch, oldest first, from the newest merged one on."""
    actions = pa.table(table.get_add_actions(flatten=True))
    have = [name for name in ("path", "size_bytes", "max.batch", "max.first") if name in actions.column_names]
    if "max.batch" not in have:
        return []
    old = actions.select(have).filter(pc.less_equal(actions["max.batch"], upto)).sort_by("max.batch")
    files: list[dict[str, Any]] = old.to_pylist()
    merged = [number for number, file in enumerate(files) if file.get("max.first") is not None]
    return files[merged[-1] if merged else 0 :][:_AT_ONCE]


def merged_rows(rows: pa.Table) -> pa.Table:
    """The same entries, those merged that may be; the last one is not, as its successor is unknown."""
    heads = rows.group_by(["batch", "first", *HEAD]).aggregate([]).sort_by("batch").to_pylist()
    places = rows.group_by(["batch", "topic", "partition"]).aggregate([])
    if len({head["batch"] for head in heads}) != len(heads) or places.num_rows != rows.num_rows:
        # A damaged ledger is left as it is.
        return rows
    merged = _summed(rows, _eras(heads))
    return rows if merged is None else merged


def _eras(heads: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The entries in groups, each of which becomes one entry."""
    eras: list[list[dict[str, Any]]] = []
    for before, head, after in zip([None, *heads], heads, [*heads[1:], None], strict=False):
        if before is not None and _follows(before, head) and _is_load(head, after):
            eras[-1].append(head)
        else:
            eras.append([head])
    return eras


def _follows(before: dict[str, Any], head: dict[str, Any]) -> bool:
    is_next = before["batch"] + 1 == _first(head) and all(before[name] == head[name] for name in _SAME)
    return is_next and _is_load(before, head)


def _is_load(head: dict[str, Any], after: dict[str, Any] | None) -> bool:
    return (head["kind"] or LOAD) == LOAD and after is not None and after["kind"] != MOVE


def _first(head: dict[str, Any]) -> int:
    return int(head["batch"] if head["first"] is None else head["first"])


def _summed(rows: pa.Table, eras: Sequence[Sequence[dict[str, Any]]]) -> pa.Table | None:
    """One entry of each era; None where the offsets of one do not follow each other."""
    numbers = {head["batch"]: number for number, era in enumerate(eras) for head in era}
    era = pa.array(map(numbers.__getitem__, rows["batch"].to_pylist()), pa.int64())
    rows = rows.append_column("era", era).append_column("size", pc.subtract(rows["end"], rows["start"]))
    each = rows.group_by(list(_PLACE)).aggregate([("start", "min"), ("end", "max"), ("size", "sum")])
    is_whole = pc.equal(each["size_sum"], pc.subtract(each["end_max"], each["start_min"]))
    if not pc.all(is_whole).as_py() or each.group_by(["era", "topic", "partition"]).aggregate([]).num_rows < len(each):
        return None
    each = each.rename_columns([*_PLACE, "start", "end", "size"])
    originals = (
        rows.filter(pc.is_valid(rows["original"])).sort_by("batch").group_by([*_PLACE, "end"], use_threads=False)
    )
    ends = originals.aggregate([("original_id", "last"), ("original", "last")])
    each = each.join(ends.rename_columns([*_PLACE, "end", "original_id", "original"]), [*_PLACE, "end"])
    heads = [{**era[-1], "first": _first(era[0])} for era in eras]
    common = pa.Table.from_pylist(heads, schema=pa.schema(LEDGER_SCHEMA.field(n) for n in ("batch", "first", *HEAD)))
    common = common.take(each["era"].combine_chunks())
    columns = {name: (common if name in common.column_names else each)[name] for name in LEDGER_SCHEMA.names}
    return pa.table(columns, schema=LEDGER_SCHEMA).sort_by([("batch", "ascending"), ("partition", "ascending")])


def _settled_and_open(rows: pa.Table) -> list[pa.Table]:
    """The last entries are in a file of their own: the next merge reads it again, and none of the others."""
    batches = pc.unique(rows["batch"]).sort().to_pylist()
    if len(batches) <= 2:
        return [rows]
    is_open = pc.greater_equal(rows["batch"], batches[-2])
    return [rows.filter(pc.invert(is_open)), rows.filter(is_open)]
