"""A folder for what a load needs while it runs: batches between reading and writing, Spark's log.

Each run has a folder of its own and holds a lock on it. A run that was killed cannot clean up, so the next one removes
every folder whose lock nobody holds: a loader that dies again and again does not fill the disk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
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
    remove_stale(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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
