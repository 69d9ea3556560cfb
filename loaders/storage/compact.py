"""Merges small files, and deletes files that no reader needs. Without Spark or Kafka.

A merge is a commit without a batch: rows, batches and positions stay as they are. It fails and is retried where another
commit removed files meanwhile; it does not conflict with one that adds files; a batch that replaces rows searches their
files again (see `rewrite`).

Deleted are files that the table has not named for the time ``retain``, and files of the same age that no commit ever
named, unless they belong to an unfinished batch. So a reader can use a pinned version for that long. A loader that was
frozen in mid-write finds the files of its batch, or the batch committed, however long that took.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from deltalake.exceptions import CommitFailedError
from logferry.loaders.errors import LoaderConfigError, StorageUnavailable
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.commit import FOLDER, HOOKS
from logferry.loaders.storage.ledger import existing_table, last_batch, open_table, refuse_features, storage_errors

TARGET_MB: Final = 128
RETAIN: Final = timedelta(days=7)
_TRIES: Final = 5
_BATCH: Final = re.compile(rf"{re.escape(FOLDER)}(\d+)-")


class CompactedTable(NamedTuple):
    """``before``, ``after``: files of the table. ``removed``: from the disk, files of any kind."""

    path: Path
    before: int
    after: int
    removed: int
    bytes: int


def compact(path: Path, retain: timedelta = RETAIN, target_mb: int = TARGET_MB) -> Iterator[CompactedTable]:
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


def compact_table(path: Path, last: int, retain: timedelta, target_mb: int = TARGET_MB) -> CompactedTable:
    """One table. ``last``: the last batch that the main table held before; later batches may be in progress."""
    before, after = _merge(path, target_mb)
    table = existing_table(path)
    with storage_errors(f"{path} cannot be compacted"):
        # Of the newest state, so that the log before it is not needed to open the table.
        table.create_checkpoint()
        table.cleanup_metadata()
        hours = int(retain.total_seconds() // 3600)
        unneeded = table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True)
        freed = [_remove(path / unquote(name)) for name in removable(unneeded, last)]
        files = (Path(unquote(uri.removeprefix("file://"))).relative_to(path) for uri in table.file_uris())
        _remove_leftovers(path, last, retain, {unquote(file.as_posix()) for file in files})
    sizes = [size for size in freed if size is not None]
    return CompactedTable(path, before, after, len(sizes), sum(sizes))


def removable(files: Iterable[str], last: int) -> list[str]:
    """Of old files without a name in the log, those that no commit can name: not those of batches after ``last``.

    A commit of a batch that the table holds is rejected, so further files of that batch are unused.
    """
    return [name for name in files if (batch := batch_of(name)) is None or batch <= last]


def batch_of(name: str) -> int | None:
    """The batch of the file, by its folder; None: not written by a batch."""
    match = _BATCH.match(name)
    return None if match is None else int(match[1])


def _merge(path: Path, target_mb: int) -> tuple[int, int]:
    for _ in range(_TRIES):
        table = existing_table(path)
        refuse_features(path, table)
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


def _remove(file: Path) -> int | None:
    """The size in bytes; None: another compaction has deleted it already."""
    with suppress(FileNotFoundError):
        size = file.stat().st_size
        file.unlink()
        return size
    return None


def _remove_leftovers(path: Path, last: int, retain: timedelta, named: set[str]) -> None:
    """Deletes folders of finished batches that no longer hold rows, only leftovers of Spark or a killed loader."""
    oldest = time.time() - retain.total_seconds()
    for folder in path.glob(f"{FOLDER}*"):
        batch = batch_of(folder.name + "/")
        if batch is None or batch > last or any(name.startswith(f"{folder.name}/") for name in named):
            continue
        inside = [file for file in folder.rglob("*") if file.is_file()]
        if any(file.stat().st_mtime > oldest or _is_data(file, folder) for file in inside):
            continue
        if inside or folder.stat().st_mtime <= oldest:
            shutil.rmtree(folder, ignore_errors=True)


def _is_data(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)
    return file.suffix == ".parquet" and not hidden
