"""What a table keeps: merges small files, deletes those that no reader needs, the cut-off of old rows. Without Spark.

A merge is a commit without a batch: rows, batches and positions stay as they are (see `merge`).

Deleted are files that the table has not named for the time ``retain``, and files of the same age that no commit ever
named, unless they belong to an unfinished batch. So a reader can use a pinned version for that long. A loader that was
frozen in mid-write finds the files of its batch, or the batch committed, however long that took.

Files of a merge that no commit names belong to a merge that died, or that is frozen. They are deleted when they are
older than `KEPT_S`; a merge does not commit files that are older than half of it. A commit of its own comes before
their deletion, so that a merge which has looked at its age before cannot commit afterwards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import SegmentRules
from logferry.loaders.storage.commit import FOLDER, clean_log, is_data
from logferry.loaders.storage.files import (
    StoredFile,
    delete_files,
    delete_folder,
    folders,
    list_files,
    open_table,
    storage_errors,
)
from logferry.loaders.storage.ledger import last_batch, pinned_table
from logferry.loaders.storage.merge import KEPT_S, MERGED, Merge, Progress, fence
from logferry.loaders.storage.rewrite import file_name
from logferry.loaders.storage.side_tables import segment_length
from logferry.loaders.storage.tables import partition_columns

RETAIN: Final = timedelta(days=7)
# Folders with a log for a single reading, see `batches.file_view`.
VIEW: Final = "_view-"
_BATCH: Final = re.compile(rf"{re.escape(FOLDER)}(\d+)-")


class CompactedTable(NamedTuple):
    """``before``, ``after``: files of the table. ``removed``: from the disk, files of any kind."""

    path: Location
    before: int
    after: int
    removed: int
    bytes: int


def compact(
    path: Location,
    retain: timedelta = RETAIN,
    merge: Merge | None = None,
    progress: Progress = lambda *_: None,
) -> Iterator[CompactedTable]:
    """The table and its side tables, one after the other. Safe to call again, and while others load.

    ``merge``: of the main table and its quarantine; the side tables are small. ``progress``: of each merge.
    Raises LoaderConfigError where there is no table, StorageUnavailable.
    """
    paths, merge = TablePaths.of(path), merge or Merge()
    main = open_table(paths.main)
    if main is None:
        raise LoaderConfigError(f"{paths.main} is not a table: check the path, and whether it was loaded")
    for place in paths:
        if open_table(place) is not None:
            chosen = merge if place in (paths.main, paths.quarantine) else Merge(merge.target_mb)
            yield compact_table(place, last_batch(main), retain, chosen, progress)


def compact_table(
    path: Location,
    last: int,
    retain: timedelta = RETAIN,
    merge: Merge | None = None,
    progress: Progress = lambda *_: None,
) -> CompactedTable:
    """One table. ``last``: the last batch that the main table held before; later batches may be in progress."""
    before, after = (merge or Merge()).run(path, progress)
    table = pinned_table(path)
    with storage_errors(f"{path} cannot be compacted"):
        # Of the newest state, so that the log before it is not needed to open the table.
        table.create_checkpoint()
        clean_log(table)
        hours = int(retain.total_seconds() // 3600)
        old = table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True)
        stored = list_files(path)
        unneeded = set(map(unquote, removable(old, last)))
        merged_ns = time.time_ns() - int(max(KEPT_S, retain.total_seconds()) * 1e9)
        merges = {file.name for file in stored if file.name.startswith(MERGED) and file.name in unneeded}
        unneeded -= {file.name for file in stored if file.name in merges and file.modified_ns > merged_ns}
        if unneeded & merges:
            fence(path)
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


def _remove_leftovers(
    path: Location, last: int, retain: timedelta, named: set[str], stored: Sequence[StoredFile]
) -> None:
    """Deletes old folders of finished batches, merges and views that hold no rows, only leftovers of Spark or of a
    killed loader."""
    oldest_ns = time.time_ns() - int(retain.total_seconds() * 1e9)
    kept_ns = min(oldest_ns, time.time_ns() - int(KEPT_S * 1e9))
    inside: dict[str, list[StoredFile]] = {}
    for file in stored:
        inside.setdefault(file.name.split("/")[0], []).append(file)
    in_use = {name.split("/")[0] for name in named}
    made = folders(path)
    for folder in {*made, *inside} - in_use:
        batch = batch_of(folder + "/")
        is_ours = folder.startswith((MERGED, VIEW))
        if not is_ours and (batch is None or batch > last):
            continue
        files, old_ns = inside.get(folder, []), kept_ns if is_ours else oldest_ns
        if any(file.modified_ns > old_ns or is_data(file.name) for file in files):
            continue
        if files or made[folder] <= old_ns:
            delete_folder(path / folder)


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
