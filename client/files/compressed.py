"""A file that was rotated to ``.gz`` while the client was down: found by what it holds, and read to its end.

The plain file is gone, and what of it was not sent yet is in the compressed one. It is the same source, not a new one:
its positions are those of the plain bytes.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from logferry.client.files.checkpoint import Entry
from logferry.client.files.discover import FileKey
from logferry.client.files.fingerprint import HEAD_BYTES, MARK_BYTES, grown, of
from logferry.client.files.tail import Changed

if TYPE_CHECKING:
    from gzip import GzipFile

SUFFIX = ".gz"
_STEP_BYTES = 1 << 18


class Compressed:
    """A `Reading` of the bytes that a ``.gz`` holds. ``end`` is known: it was read through once when it was opened."""

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

    def advance(self, data: bytes | memoryview) -> None:
        self.mark = grown(self.mark, data)
        self.position += len(data)

    def go_to(self, position: int) -> None:
        if position > self.end:
            raise Changed(f"the gateway has recorded {position} bytes of it, {self.path} holds {self.end}")
        self.position = position
        self.mark = self.before(MARK_BYTES)

    def is_last(self, now: float, idle_s: float) -> bool:
        return True

    def _at(self, position: int, size: int) -> bytes:
        """Forwards is cheap, backwards begins anew."""
        try:
            self._file.seek(position)
            return self._file.read(size)
        except (EOFError, zlib.error) as error:
            raise OSError(5, f"damaged: {error}") from None


def find_compressed(entry: Entry) -> Compressed | None:
    """The ``.gz`` beside where the file was that holds its bytes: the same head, and the same before its position.

    Reads the one that fits through, so it takes seconds for a large one.
    """
    if not entry.position and entry.head.length < HEAD_BYTES:
        return None  # too little is known of it
    folder = Path(entry.last_path).parent
    try:
        candidates = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX) and path.is_file())
    except OSError:
        return None
    for path in candidates:
        found = _open(str(path), entry)
        if found is not None:
            return found
    return None


def _open(path: str, entry: Entry) -> Compressed | None:
    import gzip  # few clients need it, and it takes memory

    try:
        file = gzip.GzipFile(path)
    except OSError:
        return None
    try:
        if of(file.read(entry.head.length)) == entry.head:
            file.seek(entry.position - entry.mark.length)
            mark = file.read(entry.mark.length)
            if of(mark) == entry.mark and file.tell() == entry.position:
                while file.read(_STEP_BYTES):
                    pass
                return Compressed(path, file, entry.position, mark, file.tell())
    except (OSError, EOFError, zlib.error):
        pass
    file.close()
    return None
