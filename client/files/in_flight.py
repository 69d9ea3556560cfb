"""The layout of batches in flight: how far a client that was killed had come, and how it cut its last batch.

* Everything before the last batch of a source was acknowledged; the batch itself, whose outcome is unknown, is sent
  again with the same seqnos and bytes. With several data centres the one that knows the position may be gone.
* A layout has digests of the bytes before its start and before its end. After a reboot they prove that the file still
  holds what was sent after the last checkpoint: a power failure may have taken that, and other lines may be there now.

A line a batch is written to ``cuts.jsonl`` before the batch is sent, without fsync. It survives the client, but not a
power failure of the host; then chunks may overlap by position in two data centres. A layout before the position of the
checkpoint has no effect; so a new file is begun only now and then. The file has room for a while: on a full disk, where
the checkpoint cannot be written, its lines alone prove how far a source is.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from logferry.client.files.chunking import FileBatch, Piece
from logferry.client.files.fingerprint import digest, grown

FILE = "cuts.jsonl"
# What it has room for, behind its first lines.
RESERVED_BYTES = 1 << 20


class BatchLayout(NamedTuple):
    """A batch without its bytes: ``pieces`` of what begins at position ``start``.

    ``before``, ``after``: digests of the marks at its start and at its end; empty in lines of older clients.
    """

    start: int
    pieces: tuple[Piece, ...]
    created_ms: int
    before: str = ""
    after: str = ""

    @classmethod
    def of(cls, batch: FileBatch, mark: bytes) -> BatchLayout:
        """``mark``: the bytes before the batch."""
        marks = digest(mark), digest(grown(mark, batch.data))
        return cls(batch.start, batch.pieces, batch.created_ms, *marks)

    @property
    def size(self) -> int:
        return self.pieces[-1].end

    @property
    def end(self) -> int:
        return self.start + self.size


class InFlightLog:
    """The file, open for writing. Raises OSError if it cannot be written: then nothing counts that was not written.

    NUL bytes are behind its lines.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._fd = -1
        self._end = self._begun = 0
        self._is_torn = False  # the last line

    @property
    def is_full(self) -> bool:
        """What was reserved is used up: `begin` a new file."""
        return self._end - self._begun > RESERVED_BYTES

    def begin(self, cuts: Iterable[tuple[str, BatchLayout | None]]) -> None:
        """Replaces the file by one with these layouts alone."""
        temporary = self._path.with_name(FILE + ".new")
        fd, lines = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644), _lines(cuts)
        try:
            with suppress(AttributeError):  # not every system has it
                os.posix_fallocate(fd, 0, len(lines) + RESERVED_BYTES)
            _write(fd, lines, 0)
            temporary.replace(self._path)
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd, self._end, self._begun, self._is_torn = fd, len(lines), len(lines), False

    def add(self, cuts: Iterable[tuple[str, BatchLayout | None]]) -> None:
        """Behind the others, in one write."""
        lines = _lines(cuts)
        if not lines:
            return
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            before = self._path.read_bytes().rstrip(b"\0")
            self._end = self._begun = len(before)
            self._is_torn = before[-1:] not in (b"", b"\n")
        lines = b"\n" * self._is_torn + lines
        _write(self._fd, lines, self._end)
        self._end, self._is_torn = self._end + len(lines), False

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def load(folder: Path) -> dict[str, BatchLayout]:
    """The last layout of each source. A line that cannot be read is left out: its write was torn."""
    found = {}
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            name, start, pieces, created_ms, *marks = json.loads(line)
            cut = BatchLayout(int(start), tuple(Piece(*piece) for piece in pieces), int(created_ms), *map(str, marks))
            if cut.size > 0:
                found[str(name)] = cut
        except (ValueError, TypeError, IndexError):
            continue
    return found


def _write(fd: int, data: bytes, position: int) -> None:
    if os.pwrite(fd, data, position) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lines(cuts: Iterable[tuple[str, BatchLayout | None]]) -> bytes:
    return b"".join(json.dumps([name, *cut]).encode() + b"\n" for name, cut in cuts if cut is not None)
