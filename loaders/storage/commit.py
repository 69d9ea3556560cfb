"""Commits the rows of a batch: the quarantine first, the main table last, each once whoever writes.

The rows are in files already, which are not part of the table until a commit names them. Spark writes them into a
separate folder in the table's, so other loaders do not interfere. A killed loader's files are in no commit, and
`retention` deletes them. The column bounds by which Delta's readers skip files are taken from the files' own footers.

One commit, an atomic creation of a file by delta-rs, makes the rows part of the table. It carries the batch as Delta's
transaction version, so a second commit of the same batch is rejected. The winner is read back from the commit's user
metadata.

Crash windows: before, in or after the quarantine's commit, or in mid-write: the next run repeats the batch and skips
what is committed. After the main commit: nothing is left to do. A loader that was frozen anywhere in here and resumes
days later finds its batch committed. Where the log was cleaned up meanwhile, its commit gets a version in the past,
which is not part of the table; the table's newest state shows that.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.errors import LedgerBroken, Overtaken, StorageUnavailable, UnsupportedFeature
from logferry.loaders.location import Location
from logferry.loaders.planning.column_changes import column_types
from logferry.loaders.storage.files import (
    bound,
    delete_files,
    file_system,
    in_parallel,
    list_files,
    read_text,
    storage_errors,
    written_rows,
)
from logferry.loaders.storage.ledger import APP, check_features, existing_table, last_batch, pinned_table
from logferry.loaders.storage.snapshots import newest_table

_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
# Longer texts are useless as bounds.
FOLDER: Final = "batch-"


class DataFiles(NamedTuple):
    """Files that no commit names yet. ``rows`` in all of them; ``types`` of their columns, where known."""

    table: Location
    adds: tuple[AddAction, ...] = ()
    rows: int = 0
    types: Mapping[str, Any] = MappingProxyType({})

    def check_rows(self, expected: int) -> DataFiles:
        """To be called before the commit: a stale listing of the folder can lack a file. Raises StorageUnavailable."""
        if self.rows != expected:
            raise StorageUnavailable(
                f"{self.table}: {expected:,} rows were written, but its files hold {self.rows:,}: the listing of their "
                "folder may be stale. Nothing is committed; the next load repeats the batch"
            )
        return self

    @property
    def names(self) -> list[str]:
        return [unquote(add.path) for add in self.adds]


def new_files(table: Location, folder: str, partition_by: Sequence[str]) -> DataFiles:
    """The files with rows in a folder of the table, by their footers; a file without rows is deleted.

    Raises OSError, ArrowException, DeltaError.
    """
    store = file_system(table)
    files = [(f"{folder}/{file.name}", file.size) for file in list_files(table / folder) if is_data(file.name)]

    def added(file: tuple[str, int]) -> tuple[AddAction, int]:
        return add_action(store, *file, partition_values(file[0], partition_by))

    found = list(in_parallel(added, files))
    delete_files(table, [name for (name, _), (_, rows) in zip(files, found, strict=True) if not rows])
    return DataFiles(table, tuple(add for add, rows in found if rows), sum(rows for _, rows in found))


def is_data(name: str) -> bool:
    """Whether the file holds rows, and is not a leftover of Spark or of its committers."""
    hidden = any(part.startswith(("_", ".")) for part in name.split("/"))
    return name.endswith(".parquet") and not hidden


def add_action(store: Any, name: str, size: int, values: Mapping[str, str | None]) -> tuple[AddAction, int]:
    """The action that adds a file with these values of the partition columns, and the number of its rows."""
    meta = pq.read_metadata(name, filesystem=store)
    stats = json.dumps(statistics(meta))
    return AddAction(name, size, dict(values), int(time.time() * 1000), True, stats), meta.num_rows


def partition_values(name: str, partition_by: Sequence[str]) -> dict[str, str | None]:
    """From the names of the file's folders."""
    said = dict(part.split("=", 1) for part in name.split("/")[1:-1])
    return {name: None if said[name] == _NO_VALUE else unquote(said[name]) for name in partition_by}


def statistics(meta: Any) -> dict[str, Any]:
    """A file's statistics for the Delta log: rows, and bounds and nulls of each indexed column."""
    said: dict[str, Any] = {"numRecords": meta.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
    for number in range(meta.num_columns):
        name = meta.schema.column(number).path
        columns = [group.column(number) for group in groups]
        stats = [column.statistics for column in columns]
        if name not in INDEXED or not stats or any(one is None or not one.has_null_count for one in stats):
            continue
        bounded = [one for one in stats if one.has_min_max]
        # Without bounds, a group must hold nulls only.
        if any(not s.has_min_max and s.null_count < c.num_values for s, c in zip(stats, columns, strict=True)):
            continue
        said["nullCount"][name] = sum(one.null_count for one in stats)
        if bounded and (low := bound(min(one.min for one in bounded), up=False)) is not None:
            said["minValues"][name] = low
        if bounded and (high := bound(max(one.max for one in bounded), up=True)) is not None:
            said["maxValues"][name] = high
    return said


# Statistics of the text, and of nested values, would cost time and skip no file.
INDEXED: Final = ("topic", "source_id", "seqno", "partition", "offset", "created", "recorded", "event_time")


_TRIES: Final = 10
# By table, the commits that another writer was faster than, since the metrics of a run took them.
LOST_RACES: Final[Counter[str]] = Counter()
_HISTORY: Final = 100
_CHECKPOINT: Final = 50
# Cleaning lists the whole log, so it is done at few of the checkpoints.
_CLEANING: Final = 1000
# A commit with a version in the past must not write a checkpoint there; checkpoints are of the newest state only.
HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)

Write = Callable[[DeltaTable, CommitProperties], None]
Changes = Callable[[DeltaTable], Sequence[AddAction | RemoveAction]]


class CommittedBatch(NamedTuple):
    """A batch that a table holds. ``ours``: this run wrote it. ``rows``: None where the log no longer has them."""

    ours: bool
    rows: int | None


def commit_files(
    written: DataFiles,
    path: Location,
    batch: int,
    run: str,
    *,
    replace: bool = False,
    changes: Changes | None = None,
    beside: Sequence[Transaction] = (),
    after: int | None = None,
) -> CommittedBatch:
    """Adds the files to the table, unless it holds the batch already; with ``replace`` in place of all its rows.

    ``changes``: further actions of the same commit, for the version that it builds on. ``beside``: further transaction
    versions that the table keeps of the batch. ``after``: the batch that the table must hold before. Safe to call
    again. Raises LedgerBroken, Overtaken, StorageUnavailable.
    """

    def write(table: DeltaTable, properties: CommitProperties) -> None:
        if after is not None and (last := last_batch(table)) != after:
            # The commit of the batch before was replaced, by Spark on a mounted folder, or by a restore.
            raise LedgerBroken(
                f"{path} holds batch {last} and no longer {after}: another program has replaced a commit. Nothing of "
                f"batch {batch} is in the table"
            )
        check_types(written, table)
        actions = [*written.adds, *(changes(table) if changes else ())]
        write_log(table, actions, properties, "overwrite" if replace else "append")

    return commit_once(write, path, batch, run, written.rows, alone=replace or changes is not None, beside=beside)


def check_types(written: DataFiles, table: DeltaTable) -> None:
    """To be called before each try of a commit: another loader may widen columns meanwhile. Raises Overtaken."""
    if not written.types:
        return
    stored = column_types(table.schema().to_json())
    if other := sorted(name for name, kind in written.types.items() if stored.get(name, kind) != kind):
        raise Overtaken(
            f"{written.table}: another loader has changed the type of {', '.join(other)}; "
            "the next load writes the batch again"
        )


def write_log(
    table: DeltaTable,
    actions: Sequence[AddAction | RemoveAction],
    properties: CommitProperties,
    mode: Literal["append", "overwrite"] = "append",
) -> None:
    """One commit of these actions to the table as it is opened. Raises CommitFailedError, DeltaError, OSError."""
    table.create_write_transaction(
        [*actions],
        mode,
        table.schema(),
        partition_by=list(table.metadata().partition_columns),
        commit_properties=properties,
        post_commithook_properties=HOOKS,
    )


def commit_rows(rows: pa.Table, path: Location, batch: int, run: str, *, replace: bool = False) -> CommittedBatch:
    """Appends a few rows, or replaces all by them, without Spark; once per batch. Raises StorageUnavailable."""
    adds: list[AddAction | RemoveAction] = []

    def write(table: DeltaTable, properties: CommitProperties) -> None:
        if not adds:
            adds.extend(written_rows(path, rows))
        write_log(table, adds, properties, "overwrite" if replace else "append")

    return commit_once(write, path, batch, run, rows.num_rows, alone=replace)


def commit_once(
    write: Write,
    path: Location,
    batch: int,
    run: str,
    rows: int,
    *,
    alone: bool = False,
    beside: Sequence[Transaction] = (),
) -> CommittedBatch:
    """One commit with the batch as its transaction version. ``write`` makes it and may be called again.

    ``alone``: no other commit may come between the version that ``write`` gets and its own. Removals need it: delta-rs
    accepts the removal of a file that a compaction has just replaced, and its rows would stay. ``beside``: as in
    `commit_files`. Raises UnsupportedFeature, StorageUnavailable.
    """
    facts = json.dumps({"app": APP, "batch": batch, "run": run, "rows": rows})
    versions: set[int] = set()
    refused = ""
    for _ in range(_TRIES):
        is_beaten = False
        # Removals are of the version that they were searched in: nothing may bring that object to another one.
        table = pinned_table(path) if alone else existing_table(path)
        check_features(path, table)
        versions.add(int(table.version()))
        if last_batch(table) < batch:
            properties = CommitProperties(
                app_transactions=[Transaction(APP, batch), *beside],
                custom_metadata={"userMetadata": facts},
                max_commit_retries=0 if alone else None,
            )
            with storage_errors(f"{path}: batch {batch} cannot be written"):
                try:
                    write(table, properties)
                except CommitFailedError as error:
                    # Another loader committed the batch, or another commit was faster, such as a compaction.
                    is_beaten, refused = True, str(error)
                    LOST_RACES[str(path)] += 1
                except (DeltaError, OSError):
                    # The store may have it, and its answer was lost.
                    if committed_batch(path, batch, run) is None:
                        raise
        # Only the table's newest state counts: where the log was cleaned up, a commit can land in the past.
        if done := committed_batch(path, batch, run):
            if not is_beaten:
                _checkpoint(path)
            return done
    if len(versions) == 1:
        # Nobody was faster: the table takes no commit of ours.
        raise UnsupportedFeature(f"{path}: batch {batch} cannot be committed: {refused}")
    raise StorageUnavailable(f"{path}: batch {batch} lost {_TRIES} races with other writers")


def _checkpoint(path: Location) -> None:
    """Every so many versions, so that opening the table stays fast. A later batch makes up for one that fails."""
    table = newest_table(path)
    if table is not None and table.version() % _CHECKPOINT == 0:
        with storage_errors(f"{path}: the checkpoint cannot be written"):
            table.create_checkpoint()
            if table.version() % _CLEANING == 0:
                clean_log(table)


def clean_log(table: DeltaTable) -> None:
    """Deletes what the log has kept for longer than its retention and no checkpoint needs, as Delta's other writers do
    at their checkpoints, unless the table forbids it. Raises OSError, DeltaError."""
    if table.metadata().configuration.get("delta.enableExpiredLogCleanup", "true").lower() != "false":
        table.cleanup_metadata()


def committed_batch(path: Location, batch: int, run: str) -> CommittedBatch | None:
    """Who wrote the batch; None while the table does not hold it."""
    table = newest_table(path)
    if table is None or last_batch(table) < batch:
        return None
    for facts in commit_facts(path, table.version()):
        if facts.get("app") == APP and facts.get("batch") == batch:
            rows = facts.get("rows")
            return CommittedBatch(facts.get("run") == run, None if rows is None else int(rows))
    return CommittedBatch(False, None)


def commit_facts(path: Location, version: int) -> Iterator[dict[str, Any]]:
    """The user metadata of the commits up to ``version``, newest first, up to the first one that is missing.

    They are read from the files, whose names are the versions: where the log was cleaned up, a late loader can write a
    commit into the past, and delta-rs's `history` would number it as part of the table.
    """
    for number in range(version, max(-1, version - _HISTORY), -1):
        with storage_errors(f"{path}: version {number} cannot be read"):
            try:
                actions = read_text(path / "_delta_log" / f"{number:020}.json").splitlines()
            except FileNotFoundError:
                return
        for info in (action["commitInfo"] for action in map(json.loads, actions) if "commitInfo" in action):
            # Other programs may write anything there.
            with suppress(ValueError):
                if isinstance(facts := json.loads(info.get("userMetadata") or "{}"), dict):
                    yield facts
