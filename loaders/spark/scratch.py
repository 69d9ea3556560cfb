"""A folder for what a load needs while it runs: batches between reading and writing, Spark's log.

Each run has a folder of its own and holds a lock on it. A run that was killed cannot clean up, so the next one removes
every folder without a lock holder: a loader that dies repeatedly does not fill the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_LOCK: Final = "lock"
_PREFIX: Final = "run-"


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder, removed at the end. Raises OSError when none can be made."""
    base = parent if parent is not None else Path(tempfile.gettempdir()) / f"logferry-loader-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent is None:
        _refuse_foreign(base)
    remove_stale(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _refuse_foreign(base: Path) -> None:
    """In the shared temporary folder, another user may have made the folder, or a link, before. Raises OSError."""
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it is a link, or others may write into it: remove it", str(base))


def remove_stale(base: Path) -> list[Path]:
    """Removes the folders of runs that are gone; returns them. A folder without a lock yet is left alone."""
    removed = []
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
        except (FileNotFoundError, BlockingIOError):
            continue
    return removed
