"""Bytes of a file → chunks of whole lines. Pure: the cuts depend on the arguments alone.

The chunks of a source are contiguous and unchanged: concatenated they are the file. A chunk without the attribute
``split`` begins at a line's start and ends with a newline. The others are pieces of a line:

    first    the beginning of a line longer than ``line_bytes``; the next chunk continues it
    open     the file's last line, which had no newline when the file was idle, finished, or sent by ``--once``
    middle   continues a line and does not reach its end (yet)
    last     the rest of a line, newline included

So if the file grows after an ``open`` piece, the rest of that line follows as ``middle`` or ``last``: nothing is lost,
nothing is doubled, and a reader can join the line again.

With a ``record_start`` a *record* takes the place of a line: a line that matches the pattern, and all lines after it
that do not. Its end is known only when the next record begins. If none comes, the record is sent without ``split``
after a short time, and late lines of it follow as ``last``.

Of a container's file a chunk holds whole messages, whose parts are joined (see `containers`).

With ``cut_lines`` a line longer than ``line_bytes`` keeps its first ``line_bytes`` and its newline. The omitted bytes
still count in the seqnos, which are positions in the file; the attribute ``cut`` of the chunk gives their number. So
do lines that are left out by a rule, which ``filtered`` counts: their chunk is sent without them, empty if need be.

`holes` finds runs of NUL bytes: a power failure, or a truncation that the writer does not notice, leaves such runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from logferry.client.files.containers import ContainerRules
from logferry.client.files.lines import LineRules, regular_expression
from logferry.gateway.contract.chunk import Chunk, pack_head

SMALLEST_CHUNK_BYTES = 1024


class Limits(NamedTuple):
    """``chunk_bytes``: a chunk of whole lines; ``line_bytes``: one line alone; ``request_bytes``: a request."""

    chunk_bytes: int
    line_bytes: int
    request_bytes: int
    record_start: re.Pattern[bytes] | None = None
    cut_lines: bool = False
    rules: LineRules | ContainerRules | None = None

    def smaller(self) -> Limits:
        """The limits after "too large"; the same if there are no smaller ones."""
        if self.request_bytes > self.line_bytes:
            return self._replace(request_bytes=self.line_bytes)
        half = max(self.request_bytes // 2, SMALLEST_CHUNK_BYTES)
        return self._replace(
            chunk_bytes=min(self.chunk_bytes, half), line_bytes=min(self.line_bytes, half), request_bytes=half
        )


class Piece(NamedTuple):
    """A chunk: data[begin:end]. ``keep``: only so many of its first bytes, and its newline, are sent; None: all."""

    begin: int
    end: int
    split: str | None
    keep: int | None = None


def starts_record(pattern: str) -> re.Pattern[bytes]:
    """The pattern, bound to the starts of lines. Raises ValueError if it is no regular expression."""
    return regular_expression(pattern, starts_line=True)


def is_inside(before: bytes, data: bytes, limits: Limits) -> bool:
    """Whether ``data`` continues a line, or record. ``before``: the bytes before it, empty at the file's start."""
    if not before:
        return False
    if not before.endswith(b"\n"):
        return True
    return limits.record_start is not None and not limits.record_start.match(data)


def line_so_far(before: bytes, limits: Limits) -> int:
    """How many bytes at the end of ``before`` belong to the line, or record, that continues after it."""
    if limits.record_start is None:
        return len(before) - before.rfind(b"\n") - 1
    begin = 0
    for found in limits.record_start.finditer(before):
        begin = found.start() if found.start() < len(before) else begin
    return len(before) - begin


def cut(data: bytes, inside: bool, limits: Limits, flush: bool, line_so_far: int = 0) -> list[Piece]:
    """Cuts ``data`` from its start. What no piece covers is an unfinished line, which waits for more.

    ``inside``: see `is_inside`; ``line_so_far``: how many bytes of that line lie before ``data``, for ``cut_lines``.
    ``flush``: an unfinished line, or record, at the end is sent, too.
    """
    pieces: list[Piece] = []
    begin = 0
    whole_lines = len(data) if flush else data.rfind(b"\n") + 1
    while begin < len(data):
        if limits.record_start is not None:
            piece = _record(data, begin, whole_lines, inside, limits.record_start, limits, flush)
        elif inside:
            piece = _rest_of_line(data, begin, limits, flush)
        elif isinstance(limits.rules, ContainerRules):
            piece = _messages(data, begin, limits, limits.rules, flush)
        else:
            piece = _lines(data, begin, limits, flush)
        if piece is None:
            break
        if limits.cut_lines and inside and line_so_far >= limits.line_bytes:
            piece = piece._replace(keep=0)
        pieces.append(piece)
        begin = piece.end
        inside = piece.split in ("first", "middle", "open")
        line_so_far = line_so_far + piece.end - piece.begin if inside else 0
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


def _messages(data: bytes, begin: int, limits: Limits, rules: ContainerRules, flush: bool) -> Piece | None:
    """Whole messages; or what is there of one that is too long, or has to be sent without its end."""
    end = rules.messages_end(data, begin, limits.chunk_bytes, limits.line_bytes)
    if end:
        return Piece(begin, end, None)
    end = data.rfind(b"\n", begin, begin + limits.line_bytes) + 1
    if end:
        return Piece(begin, end, None) if flush or len(data) - begin >= limits.line_bytes else None
    return _lines(data, begin, limits, flush)


def _record(
    data: bytes, begin: int, whole_lines: int, inside: bool, start: re.Pattern[bytes], limits: Limits, flush: bool
) -> Piece | None:
    """Records that begin at ``begin``; or, ``inside`` of one, its rest. Only lines before ``whole_lines`` count."""
    end = 0
    for found in start.finditer(data, begin + 1, whole_lines):
        far = found.start() - begin
        if found.start() >= whole_lines or far > limits.line_bytes or (end and far > limits.chunk_bytes):
            break
        end = found.start()
        if inside or far > limits.chunk_bytes:
            break
    if end:
        return Piece(begin, end, "last" if inside else None)
    if len(data) - begin >= limits.line_bytes:
        end = data.rfind(b"\n", begin, begin + limits.line_bytes) + 1 or begin + limits.line_bytes
        return Piece(begin, end, "middle" if inside else "first")
    if not flush:
        return None
    if data.endswith(b"\n"):
        return Piece(begin, len(data), "last" if inside else None)
    return Piece(begin, len(data), "middle" if inside else "open")


class FileBatch(NamedTuple):
    """Chunks of one source in one request; unchanged until the outcome is known.

    ``data`` begins at position ``start`` of the file, and the pieces cover it from end to end.
    """

    start: int
    data: bytes | memoryview
    pieces: tuple[Piece, ...]
    created_ms: int
    attributes: dict[str, str]
    rules: LineRules | ContainerRules | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    @property
    def last(self) -> int:
        """The seqno of its last chunk."""
        return self.end

    def chunks(self, skips: bool = False) -> Iterator[tuple[Chunk, list[memoryview]]]:
        """Each without its data, and the parts of that, which are no copies.

        ``skips``: the recorded part ends before the first chunk, and what lies between is in another data centre.
        Then the first chunk has no ``prev``, which would be a gap; its attribute ``resumed_at`` says where it begins.
        """
        view = memoryview(self.data)
        for piece in self.pieces:
            parts, attributes = [view[piece.begin : piece.end]], self.attributes
            resumes = skips and piece is self.pieces[0]
            if resumes:
                attributes = {**attributes, "resumed_at": str(self.start + piece.begin)}
            if piece.split:
                attributes = {**attributes, "split": piece.split}
            if piece.keep is not None:
                newline = piece.end - (self.data[piece.end - 1 : piece.end] == b"\n")
                left = newline - piece.begin - piece.keep
                parts = [view[piece.begin : piece.begin + piece.keep], view[newline : piece.end]]
                attributes = {**attributes, "cut": str(left)} if left else attributes
            if self.rules is not None:
                sent, told = self.rules.sent(b"".join(parts), piece.split is None)
                parts, attributes = [memoryview(sent)], {**attributes, **told}
            yield (
                Chunk(
                    seqno=self.start + piece.end,
                    prev=None if resumes else self.start + piece.begin,
                    created_ms=self.created_ms,
                    attributes=attributes,
                    data=b"",
                ),
                parts,
            )

    def body(self, skips: bool = False) -> Iterator[bytes | memoryview]:
        """The body of the request, in parts."""
        for chunk, parts in self.chunks(skips):
            yield pack_head(chunk, sum(map(len, parts)))
            yield from parts


SMALLEST_HOLE_BYTES = 64
_SIGN = b"\0" * SMALLEST_HOLE_BYTES
_HOLE = re.compile(b"\0{%d,}" % SMALLEST_HOLE_BYTES)


def holes(data: bytes, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of at least `SMALLEST_HOLE_BYTES` in ``data[:end]``."""
    end = len(data) if end is None else end
    first = data.find(_SIGN, 0, end)
    if first >= 0:
        for found in _HOLE.finditer(data, first, end):
            yield found.span()
