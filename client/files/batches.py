"""The next batch of a source, and the layout of those in flight.

The layout shows how far a client that was killed had come, and how it cut its last batch:

* A line has a batch, and how much of the source was acknowledged when it left. What was sent behind that is sent again
  with the same seqnos and bytes: its outcome is unknown. With several data centres the one that knows the position may
  be gone.
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from logferry.client.events import log_event
from logferry.client.files.chunking import FileBatch, Limits, Piece, cut, holes, is_inside, line_so_far
from logferry.client.files.containers import ContainerRules
from logferry.client.files.identity import digest, grown
from logferry.client.files.tail import ByteSource, ReadPlace

FILE = "cuts.jsonl"
RESERVED_BYTES = 1 << 20  # what it has room for, behind its first lines
READ_BYTES = 512 << 10  # of a request, unless a chunk or a line is larger; each thread holds that much
LARGEST_READ_BYTES = 2 << 20  # of a request behind others of its source: on a long way fewer, larger ones carry more
RECORD_WAIT_S = 2.0  # so long a record waits for more lines of it


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

    @classmethod
    def chain(cls, batches: Iterable[FileBatch], mark: bytes) -> list[BatchLayout]:
        """Of batches that follow each other; ``mark``: the bytes before the first one."""
        found = []
        for batch in batches:
            found.append(cls.of(batch, mark))
            mark = grown(mark, batch.data)
        return found

    @property
    def size(self) -> int:
        return self.pieces[-1].end

    @property
    def end(self) -> int:
        return self.start + self.size


class SentBatch(NamedTuple):
    """A batch that leaves. ``acknowledged``: the source's position then; what lies between is under way, too."""

    source_id: str
    layout: BatchLayout
    acknowledged: int


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

    def begin(self, cuts: Iterable[SentBatch]) -> None:
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

    def add(self, cuts: Iterable[SentBatch]) -> None:
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


def load(folder: Path) -> dict[str, list[BatchLayout]]:
    """The batches of each source that were not acknowledged, in order, without holes. A line that cannot be read is
    left out: its write was torn."""
    found: dict[str, list[BatchLayout]] = {}
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            name, start, pieces, created_ms, *marks = json.loads(line)
            acknowledged = int(marks.pop()) if len(marks) > 2 else int(start)
            cut = BatchLayout(int(start), tuple(Piece(*piece) for piece in pieces), int(created_ms), *map(str, marks))
            if cut.size > 0:
                found[str(name)] = _behind(found.get(str(name), []), cut, acknowledged)
        except (ValueError, TypeError, IndexError):
            continue
    return found


def _behind(chain: list[BatchLayout], last: BatchLayout, acknowledged: int) -> list[BatchLayout]:
    """The chain with the batch that left last. One that goes again unchanged leaves those behind it as they are."""
    chain = [cut for cut in chain if cut.start >= acknowledged]
    if last not in chain:
        chain = [*(cut for cut in chain if cut.end <= last.start), last]
    found: list[BatchLayout] = []
    for layout in chain:
        if layout.start == (found[-1].end if found else acknowledged):
            found.append(layout)
    return found


def _write(fd: int, data: bytes, position: int) -> None:
    if os.pwrite(fd, data, position) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lines(cuts: Iterable[SentBatch]) -> bytes:
    """The position is left out where it is the start: then clients of older versions can read the line."""
    rows = ([name, *cut, *([] if cut.start == position else [position])] for name, cut, position in cuts)
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


class BatchReader:
    """``kept``: how the next batches were cut before; they are cut alike, so that their copies are equal."""

    __slots__ = "_barren", "_looked_to", "_source_id", "_waits", "kept", "limits"

    def __init__(self, source_id: str, limits: Limits) -> None:
        self.kept: Sequence[BatchLayout] = ()
        self._source_id = source_id
        self.limits = limits
        self._barren = (-1, -1)  # between these positions there was no whole line
        self._looked_to = 0
        self._waits = (-1, 0.0)  # at this position for the end of a container's message, since then

    def make_smaller(self) -> bool:
        """The gateway found a chunk too large. False: there are no smaller ones."""
        before, self.limits = self.limits, self.limits.smaller()
        return self.limits != before

    def is_barren(self, source: ByteSource) -> bool:
        """There is no whole line at its position."""
        return self._barren == (source.position, source.end)

    def waits_s(self, source: ByteSource, now: float, idle_s: float) -> list[float]:
        """After so many seconds without a change an unfinished line, or record, is sent; those that have not passed."""
        waits_s = (idle_s,) if self.limits.record_start is None else (idle_s, min(idle_s, RECORD_WAIT_S))
        return [wait_s for wait_s in waits_s if not source.is_last(now, wait_s)]

    def next(
        self,
        source: ByteSource,
        now: float,
        created_ms: int,
        idle_s: float,
        place: ReadPlace,
        attributes: Callable[[], dict[str, str]],
        ahead: int = 0,
    ) -> FileBatch | None:
        """The batch at ``place``; None: there is no whole chunk yet. ``ahead``: so many are under way before it.

        ``attributes``: of its chunks.
        """
        limits, end, is_last = self.limits, source.end, source.is_last(now, idle_s)
        settled = is_last or self._is_settled(source, place, now, idle_s)
        if end <= place.position or ((place.position, end) == self._barren and not settled and not self.kept):
            return None
        batch = self._cut_alike(source, place, attributes)
        if batch is not None:
            return batch
        wanted = min(READ_BYTES << ahead, LARGEST_READ_BYTES)
        usual = min(limits.request_bytes, max(limits.chunk_bytes, wanted))
        data, pieces = self._cut(source, place, usual, is_last, settled)
        if not pieces and len(data) == usual < limits.request_bytes:  # a line, or a record, that is longer
            data, pieces = self._cut(source, place, limits.request_bytes, is_last, settled)
        if not pieces:
            self._barren = place.position, end
            self._waits = self._waits if self._waits[0] == place.position else (place.position, now)
            return None
        size = pieces[-1].end
        self.kept = ()
        self._log_holes(place.position, data, size)
        sent = data if size == len(data) else memoryview(data)[:size]  # no copy
        return FileBatch(place.position, sent, tuple(pieces), created_ms, attributes(), limits.rules)

    def _is_settled(self, source: ByteSource, place: ReadPlace, now: float, idle_s: float) -> bool:
        """More lines of a record, or the end of a container's message, are awaited no longer."""
        if isinstance(self.limits.rules, ContainerRules):  # it holds up the other stream, which may never be quiet
            return self._waits[0] == place.position and now - self._waits[1] >= idle_s
        return self.limits.record_start is not None and source.is_last(now, min(idle_s, RECORD_WAIT_S))

    def _cut(
        self, source: ByteSource, place: ReadPlace, limit: int, is_last: bool, settled: bool
    ) -> tuple[bytes, list[Piece]]:
        """At most ``limit`` bytes from the place on, and how they are cut."""
        limits, data = self.limits, source.read(limit, place)
        flush = settled and place.position + len(data) >= source.end
        if flush and not is_last:
            data = data[: data.rfind(b"\n") + 1]
        inside = is_inside(place.mark, data, limits)
        so_far = line_so_far(source.before(limits.line_bytes, place), limits) if inside and limits.cut_lines else 0
        return data, cut(data, inside, limits, flush, so_far)

    def _cut_alike(
        self, source: ByteSource, place: ReadPlace, attributes: Callable[[], dict[str, str]]
    ) -> FileBatch | None:
        """None when what is kept belongs to another position; then it is of no use any more. A file that is too short
        for it may be another one, which `_cut` finds, and a copy may have it: so it is kept."""
        if self.kept and place.position != self.kept[0].start:
            self.kept = ()
        if not self.kept or source.end < self.kept[0].end:
            return None
        kept = self.kept[0]
        data = source.read(kept.size, place)
        if len(data) < kept.size:
            return None
        self.kept = self.kept[1:]
        return FileBatch(kept.start, data, kept.pieces, kept.created_ms, attributes(), self.limits.rules)

    def _log_holes(self, start: int, data: bytes, size: int) -> None:
        """Each once, however often it is read."""
        for begin, end in holes(data, size):
            if start + begin >= self._looked_to:
                log_event("nul-hole", source=self._source_id, position=start + begin, bytes=end - begin)
        self._looked_to = max(self._looked_to, start + size)
