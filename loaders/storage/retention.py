"""What a table keeps: merges small files, deletes those that no reader needs, drops old rows. Without Spark or Kafka.

A merge is a commit without a batch: rows, batches and positions stay as they are. It fails and is retried where another
commit removed files meanwhile; it does not conflict with one that adds files; a batch that replaces rows searches their
files again (see `rewrite`).

Deleted are files that the table has not named for the time ``retain``, and files of the same age that no commit ever
named, unless they belong to an unfinished batch. So a reader can use a pinned version for that long. A loader that was
frozen in mid-write finds the files of its batch, or the batch committed, however long that took.

Rows before a cut-off are dropped by whole segments or days, as a batch of the ledger. The time of a row is its event
time, but never more than a day before or after it was recorded: a host with a wrong clock writes events of 1970 or
2099, and its rows are as old as their recording. Without an event time the latter counts, as it does for quarantined
lines.

One commit of the main table removes the rows. The quarantined lines become inactive in the same instant (see
`tables.active_filter`), and the segments that ended by then are DROPPED. These, and later ones that lose events of a
clock that was ahead, count the rows that stay.

Rows before the cut-off that arrive later are loaded, and dropped by the next such batch. Any loader that finds the
batch planned executes it. Crash windows: as with a reload.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from logferry.loaders.errors import LedgerBroken, LoaderConfigError, StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.segment_states import AddedRows, SegmentRules, drop_before
from logferry.loaders.planning.source_facts import shared_topics
from logferry.loaders.storage.commit import (
    FOLDER,
    HOOKS,
    CommittedBatch,
    DataFiles,
    commit_files,
    committed_batch,
    is_data,
)
from logferry.loaders.storage.files import (
    StoredFile,
    dataset,
    delete_files,
    delete_folder,
    folders,
    list_files,
    open_table,
    storage_errors,
)
from logferry.loaders.storage.ledger import check_features, last_batch, pinned_table
from logferry.loaders.storage.rewrite import Rewriter, Rule, file_name
from logferry.loaders.storage.side_tables import (
    add_sources,
    complete_sources,
    put_segments,
    read_segments,
    rows_by_segment,
    segment_length,
    segments_before,
)
from logferry.loaders.storage.tables import count_rows, partition_columns

TARGET_MB: Final = 128
RETAIN: Final = timedelta(days=7)
_TRIES: Final = 5
_BATCH: Final = re.compile(rf"{re.escape(FOLDER)}(\d+)-")


class CompactedTable(NamedTuple):
    """``before``, ``after``: files of the table. ``removed``: from the disk, files of any kind."""

    path: Location
    before: int
    after: int
    removed: int
    bytes: int


def compact(path: Location, retain: timedelta = RETAIN, target_mb: int = TARGET_MB) -> Iterator[CompactedTable]:
    """The table and its side tables, one after the other. Safe to call again, and while others load.

    Raises LoaderConfigError where there is no table, StorageUnavailable.
    """
    paths = TablePaths.of(path)
    main = open_table(paths.main)
    if main is None:
        raise LoaderConfigError(f"{paths.main} is not a table: check the path, and whether it was loaded")
    for place in paths:
        if open_table(place) is not None:
            yield compact_table(place, last_batch(main), retain, target_mb)


def compact_table(path: Location, last: int, retain: timedelta, target_mb: int = TARGET_MB) -> CompactedTable:
    """One table. ``last``: the last batch that the main table held before; later batches may be in progress."""
    before, after = _merge(path, target_mb)
    table = pinned_table(path)
    with storage_errors(f"{path} cannot be compacted"):
        # Of the newest state, so that the log before it is not needed to open the table.
        table.create_checkpoint()
        table.cleanup_metadata()
        hours = int(retain.total_seconds() // 3600)
        old = table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True)
        stored = list_files(path)
        unneeded = set(map(unquote, removable(old, last)))
        freed = [file for file in stored if file.name in unneeded]
        delete_files(path, [file.name for file in freed])
        named = {file_name(table, uri) for uri in table.file_uris()}
        _remove_leftovers(path, last, retain, named, [file for file in stored if file.name not in unneeded])
    return CompactedTable(path, before, after, len(freed), sum(file.size for file in freed))


def removable(files: Iterable[str], last: int) -> list[str]:
    """Of old files without a name in the log, those that no commit can name: not those of batches after ``last``.

    A commit of a batch that the table holds is rejected, so further files of that batch are unused.
    """
    return [name for name in files if (batch := batch_of(name)) is None or batch <= last]


def batch_of(name: str) -> int | None:
    """The batch of the file, by its folder; None: not written by a batch."""
    match = _BATCH.match(name)
    return None if match is None else int(match[1])


def _merge(path: Location, target_mb: int) -> tuple[int, int]:
    for _ in range(_TRIES):
        table = pinned_table(path)
        check_features(path, table)
        before = len(table.file_uris())
        with storage_errors(f"{path} cannot be merged"):
            try:
                result: dict[str, Any] = table.optimize.compact(
                    target_size=target_mb << 20, max_concurrent_tasks=1, post_commithook_properties=HOOKS
                )
            except CommitFailedError:
                # A batch has removed files that were to be merged: try again with the present ones.
                continue
        return before, before - result["numFilesRemoved"] + result["numFilesAdded"]
    raise StorageUnavailable(f"{path}: its files were replaced {_TRIES} times while they were merged")


def _remove_leftovers(
    path: Location, last: int, retain: timedelta, named: set[str], stored: Sequence[StoredFile]
) -> None:
    """Deletes folders of finished batches that no longer hold rows, only leftovers of Spark or a killed loader."""
    oldest_ns = time.time_ns() - int(retain.total_seconds() * 1e9)
    inside: dict[str, list[StoredFile]] = {}
    for file in stored:
        inside.setdefault(file.name.split("/")[0], []).append(file)
    in_use = {name.split("/")[0] for name in named}
    made = folders(path)
    for folder in {*made, *inside} - in_use:
        batch = batch_of(folder + "/")
        if batch is None or batch > last:
            continue
        files = inside.get(folder, [])
        if any(file.modified_ns > oldest_ns or is_data(file.name) for file in files):
            continue
        if files or made[folder] <= oldest_ns:
            delete_folder(path / folder)


_DAY: Final = timedelta(days=1)
_SQL: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


class OldRows(NamedTuple):
    """The rows, quarantined lines and segments before a cut-off."""

    rows: int
    quarantined: int
    segments: int

    def __bool__(self) -> bool:
        return any(self)


def cutoff(now: datetime, keep: timedelta, window_s: int | None, *, by_days: bool) -> datetime:
    """The cut-off: at least ``keep`` ago, and the start of a segment or day.

    ``window_s``: of the table's segments, None without; days count without, and where it is partitioned by days.
    """
    at = now - keep
    if by_days or window_s is None:
        at = SegmentRules(86_400).start_of(at)
    return at if window_s is None else SegmentRules(window_s).start_of(at)


def cutoff_of(paths: TablePaths, now: datetime, keep: timedelta) -> datetime:
    """Raises StorageUnavailable, ForeignTable."""
    by_days = any(name in ("event_date", "recorded_date") for name in partition_columns(paths.main))
    return cutoff(now, keep, segment_length(paths.segments), by_days=by_days)


def newest_recorded(path: Location) -> datetime | None:
    """When a gateway recorded the newest row, by the files' bounds; None: unknown. Raises StorageUnavailable."""
    if (table := open_table(path)) is None:
        return None
    with storage_errors(f"{path} cannot be read"):
        files = pa.table(table.get_add_actions(flatten=True))
    return pc.max(files["max.recorded"]).as_py() if "max.recorded" in files.column_names else None


def count_old(paths: TablePaths, last: int, before: datetime) -> OldRows:
    """Counts what is older, as of batch ``last``. Raises StorageUnavailable."""
    rows = segments = 0
    if (table := open_table(paths.main)) is not None:
        rows = Rewriter(paths.main, last, _rule(before, has_events=_has_events(table))).count(table)
    quarantined = count_rows(paths.quarantine, ds.field("recorded") < _at(before), active_as_of=last)
    if (length := segment_length(paths.segments)) is not None:
        rules = SegmentRules(length)
        staying = _staying(paths.main, table, before, rules)
        changed = drop_before(read_segments(paths.segments, last), before, last, before, rules, staying)
        segments = sum(rules.end_of(start) <= before for start in changed)
    return OldRows(rows, quarantined, segments)


def drop_rows(paths: TablePaths, entry: LedgerEntry, run: str) -> CommittedBatch:
    """Executes the entry. Safe to call again. Raises Overtaken, StorageUnavailable."""
    before = entry.cutoff
    if before is None:
        raise LedgerBroken(f"{paths.ledger}: batch {entry.batch} is a drop without a cut-off")
    nothing = DataFiles(paths.main)
    if committed_batch(paths.quarantine, entry.batch, run) is None:
        # Quarantined lines have no event time.
        rule = _rule(before, has_events=False)._replace(resolved_by=entry.batch)
        rewriter = Rewriter(paths.quarantine, entry.batch, rule)
        commit_files(nothing, paths.quarantine, entry.batch, run, changes=rewriter.actions)
    length = segment_length(paths.segments)
    if length is not None or shared_topics(r.topic for r in entry.ranges):
        # The facts of sources stay, although rows are dropped: these are not owed.
        complete_sources(paths, entry.batch, run)
        add_sources(paths.sources, entry.batch, run, {})
    if length is not None:
        rules = SegmentRules(length)
        segments = segments_before(paths, entry.batch, run, rules)
        staying = _staying(paths.main, open_table(paths.main), before, rules)
        changed = drop_before(segments, before, entry.batch, datetime.now(UTC), rules, staying)
        put_segments(paths.segments, entry.batch, run, changed.values())
    table = open_table(paths.main)
    rewriter = Rewriter(paths.main, entry.batch, _rule(before, has_events=_has_events(table)))
    parted = partition_columns(paths.main)
    return commit_files(nothing, paths.main, entry.batch, run, parted, changes=rewriter.actions)


def _at(moment: datetime) -> Any:
    return pa.scalar(moment, pa.timestamp("us", "UTC"))


def _has_events(table: DeltaTable | None) -> bool:
    return table is not None and any(field.name == "event_time" for field in table.schema().fields)


def _staying(
    path: Location, table: DeltaTable | None, before: datetime, rules: SegmentRules
) -> dict[datetime, AddedRows | None]:
    """The rows that stay, by segment: those of events before the cut-off that were recorded too late to be dropped, and
    all others of later segments that lose events, recorded long before."""
    if table is None or not _has_events(table):
        return {}
    event, is_gone = ds.field("event_time"), ds.field("recorded") < _at(before - _DAY)
    with storage_errors(f"{table.table_uri} cannot be read"):
        counted = partial(rows_by_segment, dataset(path, table), rules=rules)
        young = (event < _at(before)) & (ds.field("recorded") >= _at(before + _DAY))
        found: dict[datetime, AddedRows | None] = {**counted(young)}
        for start in counted((event >= _at(before)) & is_gone):
            found[start] = counted((event >= _at(start)) & (event < _at(rules.end_of(start))) & ~is_gone).get(start)
        return found


def _rule(before: datetime, *, has_events: bool) -> Rule:
    """Files are skipped, or removed as a whole, by their column bounds, which never exclude a row of the file."""
    recorded = ds.field("recorded")
    # The SQL is never null, so that its opposite is true for all other rows.
    long_ago, early, late = (f"recorded IS NOT NULL AND recorded < '{before + i * _DAY:{_SQL}}'" for i in (-1, 0, 1))
    if not has_events:
        return Rule(recorded < _at(before), ("recorded",), early, f"NOT ({early})")
    # For rows without an event time, the time of recording counts.
    old = (pc.coalesce(ds.field("event_time"), recorded) < _at(before)) & (recorded < _at(before + _DAY))
    event = f"event_time IS NOT NULL AND event_time < '{before:{_SQL}}'"
    files = f"({long_ago}) OR ({event} AND {late}) OR (event_time IS NULL AND {early})"
    return Rule(old | (recorded < _at(before - _DAY)), ("event_time", "recorded"), files, f"NOT ({files})")
