"""The next batch of a source: read from its file, and cut into chunks (`chunking`)."""

from __future__ import annotations

from logferry.client.events import log_event
from logferry.client.files.chunking import FileBatch, Limits, Piece, cut, holes, is_inside, line_so_far
from logferry.client.files.in_flight import BatchLayout
from logferry.client.files.tail import ByteSource

READ_BYTES = 256 << 10  # of a request, unless a chunk or a line is larger; each thread holds that much
RECORD_WAIT_S = 2.0  # so long a record waits for more lines of it


class BatchReader:
    """``kept``: how the batch at the present position was cut before; it is cut alike, so that its copies are equal."""

    def __init__(self, source_id: str, limits: Limits, attributes: dict[str, str]) -> None:
        self.kept: BatchLayout | None = None
        self._source_id = source_id
        self.limits = limits
        self._attributes = attributes
        self._barren_end = -1  # an end of the file up to which there was no whole line
        self._looked_to = 0

    def make_smaller(self) -> bool:
        """The gateway found a chunk too large. False: there are no smaller ones."""
        before, self.limits = self.limits, self.limits.smaller()
        return self.limits != before

    def resume(self) -> None:
        """The position was changed: what was read there may be cut after all."""
        self._barren_end = -1

    def waits_for_line(self, end: int) -> bool:
        """What lies before ``end`` is an unfinished line."""
        return self._barren_end == end

    def waits_s(self, source: ByteSource, now: float, idle_s: float) -> list[float]:
        """After so many seconds without a change an unfinished line, or record, is sent; those that have not passed."""
        waits_s = (idle_s,) if self.limits.record_start is None else (idle_s, min(idle_s, RECORD_WAIT_S))
        return [wait_s for wait_s in waits_s if not source.is_last(now, wait_s)]

    def next(self, source: ByteSource, now: float, created_ms: int, idle_s: float) -> FileBatch | None:
        """The batch at the position of ``source``; None: there is no whole chunk yet."""
        limits, end, is_last = self.limits, source.end, source.is_last(now, idle_s)
        settled = is_last or (limits.record_start is not None and source.is_last(now, min(idle_s, RECORD_WAIT_S)))
        if end <= source.position or (end == self._barren_end and not settled and self.kept is None):
            return None
        kept, self.kept = self.kept, None
        batch = None if kept is None else self._cut_alike(source, kept)
        if batch is not None:
            return batch
        usual = min(limits.request_bytes, max(limits.chunk_bytes, READ_BYTES))
        data, pieces = self._cut(source, usual, is_last, settled)
        if not pieces and len(data) == usual < limits.request_bytes:  # a line, or a record, that is longer
            data, pieces = self._cut(source, limits.request_bytes, is_last, settled)
        if not pieces:
            self._barren_end = end
            return None
        size = pieces[-1].end
        self._log_holes(source.position, data, size)
        sent = data if size == len(data) else memoryview(data)[:size]  # no copy
        return FileBatch(source.position, sent, tuple(pieces), created_ms, self._attributes)

    def _cut(self, source: ByteSource, limit: int, is_last: bool, settled: bool) -> tuple[bytes, list[Piece]]:
        """At most ``limit`` bytes from the position on, and how they are cut."""
        limits, data = self.limits, source.read(limit)
        flush = settled and source.position + len(data) >= source.end
        if flush and not is_last:
            data = data[: data.rfind(b"\n") + 1]
        inside = is_inside(source.mark, data, limits)
        so_far = line_so_far(source.before(limits.line_bytes), limits) if inside and limits.cut_lines else 0
        return data, cut(data, inside, limits, flush, so_far)

    def _cut_alike(self, source: ByteSource, kept: BatchLayout) -> FileBatch | None:
        """None when ``kept`` belongs to another position."""
        if source.position != kept.start or source.end < kept.start + kept.size:
            return None
        data = source.read(kept.size)
        if len(data) < kept.size:
            return None
        return FileBatch(kept.start, data, kept.pieces, kept.created_ms, self._attributes)

    def _log_holes(self, start: int, data: bytes, size: int) -> None:
        """Each once, however often it is read."""
        for begin, end in holes(data, size):
            if start + begin >= self._looked_to:
                log_event("nul-hole", source=self._source_id, position=start + begin, bytes=end - begin)
        self._looked_to = max(self._looked_to, start + size)
