"""The folders of HBase's write-ahead logs: ``WALs``, with a folder for each region server, and ``oldWALs``.

A file moves from a server's folder to ``oldWALs``, and the folder of a dead server is renamed, also while they are
listed. ``WALs`` is listed first: so a file that moves meanwhile is seen twice, and the later place counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from logferry.client.hbase.wal.file_names import LogFile, log_file

_LIST_ATTEMPTS = 5


class LogFolders(Protocol):
    """Raises OSError; FileNotFoundError where a file is no longer at its path."""

    def files(self) -> list[LogFile]:
        """All that were there at one time during the call, each once."""

    def read(self, path: str, at: int, size: int) -> bytes:
        """Fewer bytes where the file ends."""


class LocalFolders:
    """On this machine, or mounted."""

    def __init__(self, wals: Path, old_wals: Path) -> None:
        self._wals, self._old_wals = wals, old_wals

    def files(self) -> list[LogFile]:
        for attempt in range(_LIST_ATTEMPTS):
            try:
                found = list(self._live())
                break
            except FileNotFoundError:  # a server's folder was renamed
                if attempt + 1 == _LIST_ATTEMPTS:
                    raise
        found += self._in(self._old_wals, True)
        return list({(one.log, one.number): one for one in found}.values())

    def read(self, path: str, at: int, size: int) -> bytes:
        with Path(path).open("rb", buffering=0) as file:
            file.seek(at)
            data = bytearray()
            while len(data) < size and (piece := file.read(size - len(data))):
                data += piece
            return bytes(data)

    def _live(self) -> Iterator[LogFile]:
        with os.scandir(self._wals) as servers:
            paths = [one.path for one in servers if one.is_dir()]
        for path in paths:
            yield from self._in(Path(path), False)

    @staticmethod
    def _in(folder: Path, is_closed: bool) -> Iterator[LogFile]:
        with os.scandir(folder) as files:
            for one in files:
                # The size is not asked for: a file may be gone already, and one that grows is read to its end.
                found = log_file(one.name, one.path, is_closed)
                if found is not None:
                    yield found
