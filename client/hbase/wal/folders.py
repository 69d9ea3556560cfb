"""The folders of HBase's write-ahead logs: ``WALs``, with a folder for each region server, and ``oldWALs``.

A file moves from a server's folder to ``oldWALs``, and the folder of a dead server is renamed, also while they are
listed. ``WALs`` is listed first: so a file that moves meanwhile is seen twice, and the later place counts. With
``hbase.separate.oldlogdir.by.regionserver``, ``oldWALs`` has a folder for each server, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from logferry.client.hbase.definition import Unfit
from logferry.client.hbase.wal.file_names import WalFile, has_no_tables, log_file

_LIST_ATTEMPTS = 5


class FolderEntry(NamedTuple):
    name: str
    is_folder: bool


class FileStore(Protocol):
    """Raises OSError; FileNotFoundError where something is no longer at its path."""

    def entries(self, folder: str) -> list[FolderEntry]: ...

    def read(self, path: str, at: int, size: int) -> bytes:
        """Fewer bytes where the file ends now, none behind its end."""

    def is_all(self, path: str, size: int) -> bool:
        """Whether the file has no more than these bytes, and none will come."""

    def size(self, path: str) -> int:
        """In bytes; of a file that is written, perhaps too small."""

    def check(self, folder: str) -> None:
        """Raises Unfit for what is no folder, or may not be read; a store that does not answer is waited for."""


class LogFolders:
    """``wals``, ``old_wals``: in the store. ``passed_over``: the names of files of another kind that were met, which
    may hold changes of tables.
    """

    def __init__(self, store: FileStore, wals: str, old_wals: str) -> None:
        self._store, self._wals, self._old_wals = store, wals, old_wals
        self.read, self.is_all = store.read, store.is_all
        self.passed_over: set[str] = set()

    def check(self) -> None:
        """Raises Unfit."""
        for folder in (self._wals, self._old_wals):
            self._store.check(folder)

    def files(self) -> list[WalFile]:
        """All that were there at one time during the call, each once. Raises OSError."""
        for attempt in range(_LIST_ATTEMPTS):
            try:
                found = list(self._under(self._wals, False))
                break
            except FileNotFoundError:  # a server's folder was renamed
                if attempt + 1 == _LIST_ATTEMPTS:
                    raise
        found += self._under(self._old_wals, True)
        return list({(one.log, one.number): one for one in found}.values())

    def sizes(self, names: Set[str]) -> dict[str, int]:
        """Of the files with these names that are there, in bytes. Raises OSError."""
        found: dict[str, int] = {}
        for _ in range(_LIST_ATTEMPTS):
            if not (left := names - found.keys()):
                break
            for one in self.files():
                name = one.path.rpartition("/")[2]
                if name in left:
                    with suppress(FileNotFoundError):  # it moves to oldWALs
                        found[name] = self._store.size(one.path)
        return found

    def _under(self, folder: str, is_closed: bool, is_server: bool = False) -> Iterator[WalFile]:
        for one in self._store.entries(folder):
            path = f"{folder}/{one.name}"
            if one.is_folder:
                if not is_server:
                    yield from self._of_server(path, is_closed)
                continue
            # The size is not asked for: a file may be gone already, and one that grows is read to its end.
            found = log_file(one.name, path, is_closed)
            if found is not None:
                yield found
            elif not has_no_tables(one.name):
                self.passed_over.add(one.name)

    def _of_server(self, folder: str, is_closed: bool) -> Iterator[WalFile]:
        try:
            yield from self._under(folder, is_closed, is_server=True)
        except FileNotFoundError:
            if not is_closed:  # in oldWALs, HBase's cleaner removes a folder that is empty
                raise


class LocalStore:
    """On this machine, or mounted."""

    def entries(self, folder: str) -> list[FolderEntry]:
        with os.scandir(folder) as found:
            return [FolderEntry(one.name, one.is_dir()) for one in found]

    def read(self, path: str, at: int, size: int) -> bytes:
        with Path(path).open("rb", buffering=0) as file:
            file.seek(at)
            data = bytearray()
            while len(data) < size and (piece := file.read(size - len(data))):
                data += piece
            return bytes(data)

    def is_all(self, path: str, size: int) -> bool:
        return self.size(path) <= size

    def size(self, path: str) -> int:
        return Path(path).stat().st_size

    def check(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise Unfit(f"{folder} is no folder: name WALs and oldWALs of HBase (hbase.rootdir, hbase.wal.dir)")
