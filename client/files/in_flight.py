"""How batches were cut that have left and may not be acknowledged: so that a client that is killed sends them alike.

With one data centre the gateway says where to go on, and how the bytes are cut there is all the same. With several the
one that knows may be gone. Then what is here says it: what lies before the last batch of a source was acknowledged,
and the batch itself, whose outcome is unknown, is sent to the other one with the same seqnos and bytes.

A line a batch is appended to ``cuts.jsonl`` before it leaves, without fsync: it outlives the client, not a loss of
power of the host; then chunks may overlap (by position) in two data centres. It is begun anew with each checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from logferry.client.files.chunking import Batch, Piece

FILE = "cuts.jsonl"


class Cut(NamedTuple):
    """A batch without its bytes: ``pieces`` of what begins at position ``start``."""

    start: int
    pieces: tuple[Piece, ...]
    created_ms: int

    @classmethod
    def of(cls, batch: Batch) -> Cut:
        return cls(batch.start, batch.pieces, batch.created_ms)

    @property
    def size(self) -> int:
        return self.pieces[-1].end


class Cuts:
    """The file, open for appending. Raises OSError when it cannot be written; what was written is whole lines."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._fd = -1

    def begin(self, cuts: Iterable[tuple[str, Cut]]) -> None:
        """Anew, with these alone."""
        temporary = self._path.with_name(FILE + ".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, _lines(cuts))
            temporary.replace(self._path)
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd = fd

    def add(self, cuts: Iterable[tuple[str, Cut]]) -> None:
        """Appended, in one write."""
        lines = _lines(cuts)
        if lines and self._fd >= 0:
            os.write(self._fd, lines)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def load(folder: Path) -> dict[str, Cut]:
    """The last one of each source. A line that cannot be read is left out: a write that was torn."""
    found = {}
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            name, start, pieces, created_ms = json.loads(line)
            cut = Cut(int(start), tuple(Piece(*piece) for piece in pieces), int(created_ms))
            found[str(name)] = cut if cut.size > 0 else None
        except (ValueError, TypeError, IndexError):
            continue
    return {name: cut for name, cut in found.items() if cut is not None}


def _lines(cuts: Iterable[tuple[str, Cut]]) -> bytes:
    return b"".join(json.dumps([name, *cut]).encode() + b"\n" for name, cut in cuts)
