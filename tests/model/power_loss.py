"""What a loss of power leaves: of a folder what was synced, of logs less than was written.

The folder may have lost every byte and every name that was not synced. A log file loses any part of its end, or has NUL
bytes there; a rename may not have happened. Not here: a truncation that did not happen, and an older version of synced
data, which no file system brings back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch


class SyncedFolder:
    """Follows `os.fsync` and `os.fdatasync` below ``folder``, which has no folders in it, from `__enter__` on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, int] = {}
        self._contents: dict[int, bytes] = {}
        self._patches = [patch.object(os, name, self._following(getattr(os, name))) for name in ("fsync", "fdatasync")]

    def __enter__(self) -> SyncedFolder:
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()

    def _following(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            call(fd)
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if path == self._folder:
                self._names = {file.name: file.stat().st_ino for file in self._folder.iterdir()}
            elif path.parent == self._folder and path.is_file():
                self._contents[os.fstat(fd).st_ino] = path.read_bytes()

        return sync

    def lose(self) -> None:
        """Nothing may have the folder's files open."""
        left = {name: self._contents.get(inode, b"") for name, inode in self._names.items()}
        for file in self._folder.glob("*"):
            file.unlink()
        for name, content in left.items():
            (self._folder / name).write_bytes(content)
        self._names = {name: (self._folder / name).stat().st_ino for name in left}
        self._contents = {self._names[name]: content for name, content in left.items()}
