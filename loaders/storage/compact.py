"""Many small files into few, and what no reader needs any more off the disk. Without Spark or Kafka.

Merging is a commit of its own, without a batch: rows, batches and positions stay what they are. Where it meets a commit
that takes files away it fails and is tried again; one that adds files goes beside it; and a batch that replaces rows
looks for them anew (see `rewrite`).

What is removed: files that the table has not named for so long (``retain``), and of those that no commit ever named the
ones that are as old and no part of an unfinished batch. So a reader keeps a pinned version that long; and a loader that
was frozen in mid-write, for however long, finds the files of its batch, or finds the batch done.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from deltalake.exceptions import CommitFailedError, DeltaError
from logferry.loaders.errors import ConfigError, StorageAway
from logferry.loaders.storage.commit import HOOKS
from logferry.loaders.storage.data_files import FOLDER
from logferry.loaders.storage.ledger import TablePaths, last_batch, open_table

TARGET_MB: Final = 128
RETAIN: Final = timedelta(days=7)
_TRIES: Final = 5
_BATCH: Final = re.compile(rf"{re.escape(FOLDER)}(\d+)-")


class Tidied(NamedTuple):
    """``before``, ``after``: files of the table. ``removed``: from the disk, files of any kind."""

    path: Path
    before: int
    after: int
    removed: int
    bytes: int


def compact(path: Path, retain: timedelta = RETAIN, target_mb: int = TARGET_MB) -> Iterator[Tidied]:
    """The table and what stands beside it, one after the other. Safe to call again, and while others load.

    Raises ConfigError where there is no table, StorageAway.
    """
    paths = TablePaths.of(path)
    main = open_table(paths.main)
    if main is None:
        raise ConfigError(f"{paths.main} is not a table: has it been loaded, and is the path right?")
    for place in paths.every:
        if open_table(place) is not None:
            yield tidy(place, last_batch(main), retain, target_mb)


def tidy(path: Path, last: int, retain: timedelta, target_mb: int = TARGET_MB) -> Tidied:
    """One table. ``last``: the last batch that the main table held before: batches behind it may be under way."""
    before, after = _merge(path, target_mb)
    table = open_table(path)
    if table is None:
        raise StorageAway(f"{path} is not there any more")
    try:
        # Of the newest state, so that the log before it is not needed to open the table.
        table.create_checkpoint()
        table.cleanup_metadata()
        hours = int(retain.total_seconds() // 3600)
        unneeded = table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True)
        freed = [_remove(path / unquote(name)) for name in removable(unneeded, last)]
        _remove_leftovers(path, last, retain, {unquote(_relative(uri, path)) for uri in table.file_uris()})
    except (DeltaError, OSError) as error:
        raise StorageAway(f"{path} cannot be tidied: {error}") from error
    return Tidied(path, before, after, sum(size is not None for size in freed), sum(size or 0 for size in freed))


def removable(files: Iterable[str], last: int) -> list[str]:
    """Of files that are old and not named, those that nobody can name any more: not those of a batch behind ``last``.

    Pure. Whoever comes with a batch that the table holds is refused, so its files are nobody's.
    """
    return [name for name in files if (batch := batch_of(name)) is None or batch <= last]


def batch_of(name: str) -> int | None:
    """The batch whose loader wrote the file, by its folder; None: another's."""
    match = _BATCH.match(name)
    return None if match is None else int(match[1])


def _merge(path: Path, target_mb: int) -> tuple[int, int]:
    for _ in range(_TRIES):
        table = open_table(path)
        if table is None:
            raise StorageAway(f"{path} is not there any more")
        before = len(table.file_uris())
        try:
            told: dict[str, Any] = table.optimize.compact(
                target_size=target_mb << 20, max_concurrent_tasks=1, post_commithook_properties=HOOKS
            )
        except CommitFailedError:
            # A batch has taken away what was to be merged; what is there now is looked at again.
            continue
        except (DeltaError, OSError) as error:
            raise StorageAway(f"{path} cannot be merged: {error}") from error
        return before, before - told["numFilesRemoved"] + told["numFilesAdded"]
    raise StorageAway(f"{path}: its files were replaced {_TRIES} times while they were merged")


def _remove(file: Path) -> int | None:
    """How many bytes; None: it is gone already, by another one that tidies."""
    try:
        size = file.stat().st_size
        file.unlink()
    except FileNotFoundError:
        return None
    return size


def _remove_leftovers(path: Path, last: int, retain: timedelta, named: set[str]) -> None:
    """Folders of finished batches that hold no rows any more, but what Spark or a killed loader has left in them."""
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


def _relative(uri: str, path: Path) -> str:
    return Path(unquote(uri.removeprefix("file://"))).relative_to(path).as_posix()


__all__ = ["RETAIN", "TARGET_MB", "Tidied", "batch_of", "compact", "removable", "tidy"]
