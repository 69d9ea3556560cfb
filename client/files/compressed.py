"""A file that became a ``.gz``, in which a known source continues.

It is known by its content alone, and read to its end; the positions are those of the plain bytes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from logferry.client.files.checkpoint import CheckpointEntry
from logferry.client.files.discover import COMPRESSED, FileKey, files_beside
from logferry.client.files.identity import HEAD_BYTES, MARK_BYTES, fingerprint
from logferry.client.files.tail import ByteSource, FileChanged, ReadPlace

if TYPE_CHECKING:
    from gzip import GzipFile

_STEP_BYTES = 1 << 18


class CompressedFile(ByteSource):
    """The bytes that a ``.gz`` holds. ``end`` is known: the file was read once when it was opened."""

    end = 0  # a property of the protocol

    def __init__(self, path: str, file: GzipFile, position: int, mark: bytes, end: int) -> None:
        self.path = path
        self.position = position
        self.mark = mark
        self.end = end
        facts = os.fstat(file.fileno())
        self.key: FileKey = (facts.st_dev, facts.st_ino)
        self._file, self._size = file, facts.st_size

    def close(self) -> None:
        self._file.close()

    def read(self, limit: int, place: ReadPlace | None = None) -> bytes:
        """Raises OSError for a file that is damaged, FileChanged for one that was written again in place."""
        position, _ = place or self.place
        return self._at(position, min(limit, self.end - position))

    def before(self, limit: int, place: ReadPlace | None = None) -> bytes:
        position, _ = place or self.place
        begin = max(position - limit, 0)
        return self._at(begin, position - begin)

    def go_to(self, position: int) -> None:
        if position > self.end:
            raise FileChanged(f"the gateway has recorded {position} bytes of it, {self.path} holds {self.end}")
        self.position = position
        self.mark = self.before(MARK_BYTES)

    def _at(self, position: int, size: int) -> bytes:
        """Forwards is cheap; backwards starts again at the beginning."""
        if os.fstat(self._file.fileno()).st_size != self._size:
            raise FileChanged(f"{self.path} was written again in place")
        try:
            self._file.seek(position)
            return self._file.read(size)
        except (EOFError, zlib.error) as error:
            raise OSError(5, f"damaged: {error}") from None


def grown_gzip(entry: CheckpointEntry, path: str, patterns: Iterable[str]) -> CompressedFile | None:
    """The ``.gz`` that gzip made of the file, if it holds more than was sent of it; as `find_gzip`."""
    try:
        with open(f"{path}.gz", "rb") as file:  # noqa: PTH123
            file.seek(-4, os.SEEK_END)
            size = int.from_bytes(file.read(4), "little")
    except OSError:
        return None
    return None if size == entry.position % (1 << 32) else find_gzip(entry, patterns, [f"{path}.gz"])


def find_gzip(
    entry: CheckpointEntry, patterns: Iterable[str], beside: Iterable[str] | None = None
) -> CompressedFile | None:
    """The ``.gz`` beside the file that holds its bytes: the same head, and the same bytes before its position. None
    also where such files are sources themselves, by the patterns. ``beside``: only these; None: all in its folder.

    Reads the one that matches to its end, which takes seconds if it is large.
    """
    if not entry.position and entry.head.length < HEAD_BYTES:
        return None  # too few bytes of it are known
    if any(pattern.endswith(COMPRESSED) for pattern in patterns):
        return None
    for path in beside or files_beside(entry.last_path, lambda _, candidate: candidate.name.endswith(".gz")):
        import gzip  # few clients need it, and it takes memory

        try:
            file = gzip.GzipFile(path)
        except OSError:
            continue
        with suppress(OSError, EOFError, zlib.error):
            if fingerprint(file.read(entry.head.length)) == entry.head:
                file.seek(entry.position - entry.mark.length)
                mark = file.read(entry.mark.length)
                if fingerprint(mark) == entry.mark and file.tell() == entry.position:
                    while file.read(_STEP_BYTES):
                        pass
                    return CompressedFile(path, file, entry.position, mark, file.tell())
        file.close()
    return None
