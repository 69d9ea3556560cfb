"""Bytes of a file → chunks of whole lines. Pure: what is cut depends on the arguments alone.

The chunks of a source are contiguous and unchanged: laid end to end they are the file. A chunk without the
attribute ``split`` begins at a line's start and ends with a newline. The others are pieces of a line:

    first    the line's beginning; the line is longer than ``line_bytes`` and goes on in the next chunk
    open     the file's last line, which had no newline when the file was idle, finished, or sent by ``--once``
    middle   goes on inside a line and does not reach its end (yet)
    last     the rest of a line, newline included

So when the file grows after an ``open`` piece, the rest of that line follows as ``middle`` or ``last``:
nothing is lost, nothing is doubled, and a reader can join the line again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from logferry.gateway.contract import Chunk

SMALLEST_CHUNK_BYTES = 1024


class Limits(NamedTuple):
    """``chunk_bytes``: a chunk of whole lines; ``line_bytes``: one line alone; ``request_bytes``: a request."""

    chunk_bytes: int
    line_bytes: int
    request_bytes: int

    def smaller(self) -> Limits:
        """The next step after "too large"; the same limits when there is no smaller one."""
        if self.request_bytes > self.line_bytes:
            return self._replace(request_bytes=self.line_bytes)
        half = max(self.request_bytes // 2, SMALLEST_CHUNK_BYTES)
        return Limits(min(self.chunk_bytes, half), min(self.line_bytes, half), half)


class Piece(NamedTuple):
    """One chunk to be: data[begin:end]."""

    begin: int
    end: int
    split: str | None


def cut(data: bytes, mid_line: bool, limits: Limits, flush: bool) -> list[Piece]:
    """Cuts ``data`` from its start; what no piece covers is an unfinished line that has to wait for more.

    ``mid_line``: the byte before ``data`` is not a newline. ``flush``: an unfinished line at the end goes, too.
    """
    pieces: list[Piece] = []
    begin = 0
    while begin < len(data):
        piece = _rest_of_line(data, begin, limits, flush) if mid_line else _lines(data, begin, limits, flush)
        if piece is None:
            break
        pieces.append(piece)
        begin = piece.end
        mid_line = piece.split in ("first", "middle", "open")
    return pieces


def _rest_of_line(data: bytes, begin: int, limits: Limits, flush: bool) -> Piece | None:
    end = data.find(b"\n", begin, begin + limits.line_bytes) + 1
    if end:
        return Piece(begin, end, "last")
    if len(data) - begin >= limits.line_bytes:
        return Piece(begin, begin + limits.line_bytes, "middle")
    return Piece(begin, len(data), "middle") if flush else None


def _lines(data: bytes, begin: int, limits: Limits, flush: bool) -> Piece | None:
    end = data.rfind(b"\n", begin, begin + limits.chunk_bytes) + 1
    if not end:  # the first line alone is longer than a chunk: the chunk grows with it
        end = data.find(b"\n", begin, begin + limits.line_bytes) + 1
    if end:
        return Piece(begin, end, None)
    if len(data) - begin >= limits.line_bytes:
        return Piece(begin, begin + limits.line_bytes, "first")
    return Piece(begin, len(data), "open") if flush else None


@dataclass(frozen=True)
class Batch:
    """Chunks of one source that go in one request; kept as it is until its outcome is known.

    ``data`` begins at position ``start`` of the file, and the pieces cover it from end to end.
    """

    start: int
    data: bytes
    pieces: tuple[Piece, ...]
    created_ms: int
    attributes: dict[str, str]

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def chunks(self) -> Iterator[Chunk]:
        for piece in self.pieces:
            attributes = {**self.attributes, "split": piece.split} if piece.split else self.attributes
            yield Chunk(
                seqno=self.start + piece.end,
                prev=self.start + piece.begin,
                created_ms=self.created_ms,
                attributes=attributes,
                data=self.data[piece.begin : piece.end],
            )
