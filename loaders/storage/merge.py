"""Merges the small files of a table into larger ones: a plan, and commits that are each complete. Without Spark.

A plan groups files of one partition, in the order of their times, so that a merged file holds a span of time. A round
is as many groups as fit into `_ROUND_FILES` and `_ROUND_BYTES`. Its files are written first, then one commit replaces
the old ones by them: it adds and removes exactly these, its version follows the one it was checked against, and the
rows are as many. So an interrupted merge leaves the rounds that it has committed, and the next call continues.

A commit in between that only adds files is no obstacle: the commit is repeated. A group whose files another commit has
removed is given up, and its rows are where that commit left them.

This process writes the files with pyarrow, some of them at the same time, unless Spark's executors do
(`batches.merge_files`). Memory holds a part of each file that is written.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.storage.commit import DataFiles, add_action, write_log
from logferry.loaders.storage.files import create_file, delete_files, file_system, in_parallel, storage_errors
from logferry.loaders.storage.ledger import check_features, pinned_table
from logferry.loaders.storage.rewrite import TableFile, table_files

TARGET_MB: Final = 128
# The folders of merged files; clustered ones bear it in their name.
MERGED: Final = "merged-"
CLUSTERED: Final = f"{MERGED}clustered-"
KEPT_S: Final = 86_400.0
_ROUND_FILES: Final = 10_000
_ROUND_BYTES: Final = 4 << 30
# Time slices of this many files are clustered together.
_SLICE: Final = 16
_TRIES: Final = 50
_ROUNDS: Final = 100_000
_PART_BYTES: Final = 32 << 20
_SMALL: Final = 4 << 20
_WINDOW: Final = 64
_FENCE: Final = "logferry.compact"

# Of a merge in progress: the table, files merged so far, files to merge.
Progress = Callable[[Location, int, int], None]


class MergeGroup(NamedTuple):
    """Files of one partition that are replaced together."""

    files: tuple[TableFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def rows(self) -> int | None:
        counts = [file.rows for file in self.files]
        return None if None in counts else sum(count for count in counts if count is not None)


class MergedGroup(NamedTuple):
    """A group, and the files that replace it: not committed yet."""

    group: MergeGroup
    adds: tuple[AddAction, ...]


# Writes the groups of a version into a folder of the table, or folders whose names begin so; checks their rows.
Write = Callable[[Location, DeltaTable, Sequence[MergeGroup], str], list[MergedGroup]]


def plan_groups(files: Sequence[TableFile], target: int, *, cluster: bool = False) -> list[MergeGroup]:
    """Groups of at least two small files, with about ``target`` bytes; small: below three quarters of it.

    ``cluster``: groups of several targets, of all files that are not clustered yet; a single one is a group then.
    """
    largest = _SLICE * target if cluster else target
    by_partition: dict[tuple[tuple[str, str | None], ...], list[TableFile]] = {}
    for file in files:
        is_clustered = file.name.startswith(CLUSTERED)
        if (not is_clustered or file.size < target // 4) if cluster else file.size < target * 3 // 4:
            by_partition.setdefault(tuple(sorted(file.values.items())), []).append(file)
    found: list[MergeGroup] = []
    for its in by_partition.values():
        group: list[TableFile] = []
        size = 0
        for file in sorted(its, key=_time):
            if group and (size + file.size > largest or len(group) >= _ROUND_FILES):
                found.append(MergeGroup(tuple(group)))
                group, size = [], 0
            group.append(file)
            size += file.size
        found.append(MergeGroup(tuple(group)))
    return [g for g in found if len(g.files) > 1 or (cluster and not g.files[0].name.startswith(CLUSTERED))]


_FIRST: Final = datetime(1, 1, 1, tzinfo=UTC)


def _time(file: TableFile) -> tuple[datetime, str]:
    return file.bounds.get("event_time") or file.bounds.get("recorded") or _FIRST, file.path


def round_of(groups: Sequence[MergeGroup]) -> list[MergeGroup]:
    """The first groups that one commit replaces; at least one."""
    files = itertools.accumulate(len(group.files) for group in groups)
    size = itertools.accumulate(group.bytes for group in groups)
    fits = sum(f <= _ROUND_FILES and b <= _ROUND_BYTES for f, b in zip(files, size, strict=True))
    return list(groups[: max(1, fits)])


@dataclass(frozen=True)
class Merge:
    """How files are merged. ``write``: writes the files of a round; None: this process does."""

    target_mb: int = TARGET_MB
    cluster: bool = False
    write: Write | None = None

    def run(self, path: Location, progress: Progress = lambda *_: None) -> tuple[int, int]:
        """Merges until nothing is left; returns the files before and after. Safe to interrupt, and to call again.

        Raises UnsupportedFeature, StorageUnavailable, and the errors of ``write``.
        """
        before, merged = None, 0
        made: set[str] = set()
        for _ in range(_ROUNDS):
            began = time.time()
            table = pinned_table(path)
            check_features(path, table)
            with storage_errors(f"{path} cannot be read"):
                files = table_files(table)
            before = len(files) if before is None else before
            left = [file for file in files if not (self.cluster and file.name.startswith(tuple(made)))]
            groups = plan_groups(left, self.target_mb << 20, cluster=self.cluster)
            if not groups:
                return before, len(files)
            chosen = round_of(groups)
            progress(path, merged, merged + sum(len(group.files) for group in groups))
            folder = f"{CLUSTERED if self.cluster else MERGED}{uuid.uuid4().hex[:12]}"
            made.add(folder)
            written = (self.write or write_here)(path, table, chosen, folder)
            merged += commit_merge(path, written, folder, began)
            progress(path, merged, merged + sum(len(group.files) for group in groups[len(chosen) :]))
        raise StorageUnavailable(f"{path}: its files were replaced all the time while they were merged")


def commit_merge(path: Location, written: Sequence[MergedGroup], folder: str, began: float) -> int:
    """Replaces the files of the groups that are still there; returns how many. ``began``: before they were written.

    Raises StorageUnavailable; then none is replaced.
    """
    for _ in range(_TRIES):
        table = pinned_table(path)
        check_features(path, table)
        if time.time() - began > KEPT_S / 2:
            raise StorageUnavailable(f"{path}: the merge took too long, its files may be deleted; it can be repeated")
        with storage_errors(f"{path} cannot be merged"):
            named = {file.path for file in table_files(table)}
            ours = [one for one in written if any(add.path in named for add in one.adds)]
            whole = ours or [one for one in written if all(file.path in named for file in one.group.files)]
            if ours or not whole:
                # Committed, and the answer was lost; or replaced by another commit.
                return sum(len(one.group.files) for one in whole)
            removes = [file.removed(data_change=False) for one in whole for file in one.group.files]
            properties = CommitProperties(
                max_commit_retries=0, custom_metadata={"userMetadata": json.dumps({"merge": folder})}
            )
            try:
                write_log(table, [*(add for one in whole for add in one.adds), *removes], properties)
            except CommitFailedError:
                continue
            except (DeltaError, OSError):
                # The store may have it, and its answer was lost.
                now = {file.path for file in table_files(pinned_table(path))}
                if not any(add.path in now for one in whole for add in one.adds):
                    raise
        return sum(len(one.group.files) for one in whole)
    raise StorageUnavailable(f"{path}: other commits were faster {_TRIES} times while its files were merged")


def fence(path: Location) -> None:
    """A commit that changes nothing: no commit that was checked before it succeeds after it.

    Raises StorageUnavailable.
    """
    properties = CommitProperties(app_transactions=[Transaction(_FENCE, int(time.time()))])
    table = pinned_table(path)
    with storage_errors(f"{path} cannot be written"):
        write_log(table, [], properties)


# ---- in this process -------------------------------------------------------------------------------------


def write_here(path: Location, table: DeltaTable, groups: Sequence[MergeGroup], folder: str) -> list[MergedGroup]:
    """Writes the groups with pyarrow. Raises StorageUnavailable."""
    schema = pa.schema(table.schema().to_arrow())
    numbered = list(enumerate(groups))
    with storage_errors(f"{path} cannot be merged"), ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda one: _write(path, schema, one[1], f"{folder}/{one[0]:06}.parquet"), numbered))


def _write(path: Location, schema: pa.Schema, group: MergeGroup, target: str) -> MergedGroup:
    values = group.files[0].values
    stored = pa.schema([field for field in schema if field.name not in values])
    store, rows = file_system(path), 0
    with create_file(path, target) as stream, pq.ParquetWriter(stream, stored, compression="zstd") as writer:
        held: list[pa.Table] = []
        size = 0
        for part in _parts(store, group.files, stored):
            held.append(part)
            rows += part.num_rows
            size += part.nbytes
            if size >= _PART_BYTES:
                writer.write_table(pa.concat_tables(held))
                held, size = [], 0
        if held:
            writer.write_table(pa.concat_tables(held))
    add, left = add_action(store, target, store.get_file_info(target).size, values)
    DataFiles(path, (add,), left).check_rows(rows if group.rows is None else group.rows)
    add.data_change = False
    if not left:
        delete_files(path, [target])
    return MergedGroup(group, (add,) if left else ())


def _parts(store: Any, files: Sequence[TableFile], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of the files in their order; null where a file is older than a column."""
    for first in range(0, len(files), _WINDOW):
        some = files[first : first + _WINDOW]
        small = [file for file in some if file.size <= _SMALL]
        read = in_parallel(lambda file: _read(store, file.name), small)
        for file in some:
            if file.size <= _SMALL:
                yield _as_stored(next(read), schema)
                continue
            with pq.ParquetFile(file.name, filesystem=store, coerce_int96_timestamp_unit="us") as large:
                for batch in large.iter_batches(_WINDOW << 8):
                    yield _as_stored(pa.Table.from_batches([batch]), schema)


def _read(store: Any, name: str) -> pa.Table:
    with pq.ParquetFile(name, filesystem=store, coerce_int96_timestamp_unit="us") as stored:
        return stored.read(use_threads=False)


def _as_stored(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    have = set(rows.schema.names)
    # delta-rs's `update` writes views, which are other types.
    columns = [
        rows[field.name].cast(field.type) if field.name in have else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
