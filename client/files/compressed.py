"""A file that was rotated to ``.gz`` while the client was down: identified by its content, and read to its end.

The plain file is gone; the compressed one has the bytes that were not sent yet. It is the same source, not a new one:
its positions are those of the plain bytes.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from logferry.client.files.checkpoint import CheckpointEntry
from logferry.client.files.discover import FileKey
from logferry.client.files.fingerprint import HEAD_BYTES, MARK_BYTES, fingerprint
from logferry.client.files.tail import ByteSource, FileChanged

if TYPE_CHECKING:
    from gzip import GzipFile

SUFFIX = ".gz"
_STEP_BYTES = 1 << 18


class CompressedFile(ByteSource):
    """The bytes that a ``.gz`` holds. ``end`` is known: the file was read once when it was opened."""

    end = 0

    def __init__(self, path: str, file: GzipFile, position: int, mark: bytes, end: int) -> None:
        self.path = path
        self.position = position
        self.mark = mark
        self.end = end
        facts = os.fstat(file.fileno())
        self.key: FileKey = (facts.st_dev, facts.st_ino)
        self._file = file

    def close(self) -> None:
        self._file.close()

    def read(self, limit: int) -> bytes:
        """Raises OSError for a file that is damaged."""
        return self._at(self.position, min(limit, self.end - self.position))

    def before(self, limit: int) -> bytes:
        begin = max(self.position - limit, 0)
        return self._at(begin, self.position - begin)

    def go_to(self, position: int) -> None:
        if position > self.end:
            raise FileChanged(f"the gateway has recorded {position} bytes of it, {self.path} holds {self.end}")
        self.position = position
        self.mark = self.before(MARK_BYTES)

    def _at(self, position: int, size: int) -> bytes:
        """Forwards is cheap; backwards starts again at the beginning."""
        try:
            self._file.seek(position)
            return self._file.read(size)
        except (EOFError, zlib.error) as error:
            raise OSError(5, f"damaged: {error}") from None


def find_compressed(entry: CheckpointEntry) -> CompressedFile | None:
    """The ``.gz`` in the file's folder that holds its bytes: the same head, and the same bytes before its position.

    Of a symbolic link also in the folder that it leads to: there the file is rotated. Reads the one that matches to its
    end, which takes seconds if it is large.
    """
    if not entry.position and entry.head.length < HEAD_BYTES:
        return None  # too few bytes of it are known
    paths = entry.last_path, os.path.realpath(entry.last_path)
    for folder in dict.fromkeys(Path(path).parent for path in paths):
        try:
            candidates = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX) and path.is_file())
        except OSError:
            continue
        for path in candidates:
            found = _open(str(path), entry)
            if found is not None:
                return found
    return None


def _open(path: str, entry: CheckpointEntry) -> CompressedFile | None:
    import gzip  # few clients need it, and it takes memory

    try:
        file = gzip.GzipFile(path)
    except OSError:
        return None
    try:
        if fingerprint(file.read(entry.head.length)) == entry.head:
            file.seek(entry.position - entry.mark.length)
            mark = file.read(entry.mark.length)
            if fingerprint(mark) == entry.mark and file.tell() == entry.position:
                while file.read(_STEP_BYTES):
                    pass
                return CompressedFile(path, file, entry.position, mark, file.tell())
    except (OSError, EOFError, zlib.error):
        pass
    file.close()
    return None
