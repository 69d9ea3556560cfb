"""One source on its way: what it sends next, and what each answer makes of it.

Invariants
* One request is under way at a time; a batch is kept as it is until its outcome is known.
* Where a source goes on is the gateway's word alone: a session's ``recorded_seqno`` (nothing recorded: 0).
* What one data centre acknowledged is not sent to another: there a source goes on at the end of what it knows to be
  acknowledged anywhere (``entry.since``), once that is on the disk; and a batch whose outcome is unknown goes there
  as it is, so that its copies are equal. See ops/decisions/push-client.md.
* Every chunk carries ``prev``, but for one that goes on behind such a gap. Seqnos are positions and the bytes at a
  position never change, so a chunk that is sent again, cut in the same way or in another one, is a duplicate or a
  refused overlap, never doubled.
* One whose file is over says so, as ``finished``, after the last of its chunks; then it is done.
* ``unsaved``: the checkpoint does not yet hold what identifies this source; nothing may leave before it does.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from logferry.client.agent.failover import Centres
from logferry.client.agent.requests import Beat, Job
from logferry.client.events import tell
from logferry.client.files.checkpoint import Entry
from logferry.client.files.chunking import Batch, Limits, Piece, cut, is_inside, line_so_far
from logferry.client.files.fingerprint import of
from logferry.client.files.in_flight import Cut
from logferry.client.files.tail import Changed, Reading, Remains, Tail
from logferry.client.holes import holes
from logferry.client.transport.backoff import RETRY_S, pause_s
from logferry.client.transport.redirects import Outcome
from logferry.client.transport.responses import NO_ANSWER, Answer, Do, judge

REFUSED_S = (5.0, 300.0)
FIGHT_WINDOW_S = 60.0
FORWARDED_FOR_S = 60.0
READ_BYTES = 256 << 10  # a request, unless a chunk or a line is larger; so many for each thread are held
RECORD_WAIT_S = 2.0  # so long a record waits for more lines of it


class Standing(NamedTuple):
    """Where a source is; ``behind_s`` and ``waits_s``: since when that has been so without a pause."""

    source: str
    path: str
    topic: str
    position: int
    size: int
    lag_bytes: int
    behind_s: float
    waits_for: str
    waits_s: float
    error: str


class Source:
    """One incarnation of one file. ``tail`` is None once the file is gone or holds something else: then only the
    batch whose outcome was unknown is left, in `reading`, or what a ``.gz`` holds of it.
    ``heartbeat_s``: 0 for no heartbeats, `finished` included. ``home``: the data centre that has the last of its
    chunks; None: nothing was sent yet, or that one is not configured any more."""

    def __init__(
        self,
        entry: Entry,
        tail: Tail | None,
        limits: Limits,
        attributes: dict[str, str],
        centres: Centres,
        heartbeat_s: float = 0.0,
    ) -> None:
        self.entry = entry
        self.tail = tail
        self.reading: Reading = tail or Remains(entry.position, b"", b"")
        self.batch: Batch | None = None
        self.busy = False
        self.unsaved = True
        self.stopped = ""
        self.why = ""  # it is a source of its own, or is the one that was known
        self._attributes = attributes
        self._limits = limits
        self._session: int | None = None
        self._url: str | None = None
        self._failures = 0
        self._not_before = 0.0
        self._direct_from = 0.0
        self._superseded_at: float | None = None
        self._barren_end = -1
        self._looked_to = 0
        self._unreadable: str | None = None
        self._heartbeat_s = heartbeat_s
        self._next_beat = 0.0
        self._last_size: int | None = None
        self._finished = not heartbeat_s
        self._error = ""
        self._behind_from: float | None = None
        self._waits = ("", 0.0)
        self._centres = centres
        self._bound_for = self._at = centres.here
        is_fresh = not entry.head.length or not (entry.dc or entry.position)
        self.home = centres.number(entry.dc) if entry.dc else None if is_fresh else 0
        self._is_sure = is_fresh  # where its home is, this process was told by it
        self._recorded: int | None = None
        self._kept: Cut | None = None

    @property
    def name(self) -> str:
        return self.entry.source_id

    # ---- what goes next ----------------------------------------------------------------------------------

    def next_job(self, now: float, created_ms: int, idle_s: float) -> Job | None:
        """The next request, if there is one. Raises `Changed` when the file holds something else now."""
        if self._bound_for != self._centres.here:
            self._bound_for = self._centres.here
            self._failures, self._not_before, self._direct_from = 0, now, 0.0  # that was about another one
        if self.busy or now < self._not_before or self.stopped:
            return None
        if self._session is not None and self._at != self._centres.here:
            job = self._farewell(now)
            self._session = self._url = None
            if job is not None:
                return job
        if self.is_done() and (self.tail is None or self._session is None):
            return None
        direct = now >= self._direct_from
        if self._session is None:
            return Job(self.entry.topic, self.name, self._url, direct, None, None, dc=self._opens_at(now))
        if self.batch is None:
            self.batch = self._cut(now, created_ms, idle_s)
        beat = None if self.batch else self._beat(now, created_ms)
        if self.batch is None and beat is None:
            return None
        skips = self.batch is not None and self._recorded is not None and self._recorded < self.batch.start
        return Job(self.entry.topic, self.name, self._url, direct, self._session, self.batch, beat, self._at, skips)

    def _opens_at(self, now: float) -> int:
        """Before it leaves the data centre where it was in an earlier life, it asks there how far it had come; but if
        that one is gone, what the checkpoint says has to do."""
        if self._is_sure or self.home is None or self._centres.is_gone(self.home, now):
            return self._centres.here
        return self.home

    def _farewell(self, now: float) -> Job | None:
        """To a data centre that it leaves: no more of it is to be waited for there. Said once, whatever is answered."""
        if not self._heartbeat_s or self._centres.is_gone(self._at, now) or not self.reading.position:
            return None
        beat = Beat(self.reading.position, None, None, True)
        return Job(self.entry.topic, self.name, None, False, self._session, None, beat, self._at)

    def _beat(self, now: float, created_ms: int) -> Beat | None:
        """What there is to say now that there is nothing to send."""
        position = self.reading.position
        if self.tail is None:
            return Beat(position, self._last_size, None, True)
        if not self._heartbeat_s or now < self._next_beat:
            return None
        seen_ms = created_ms - int((now - self.tail.looked_at) * 1000) - 1
        return Beat(position, self.tail.size, seen_ms if position >= self.tail.size else None, False)

    def _cut(self, now: float, created_ms: int, idle_s: float) -> Batch | None:
        reading, end = self.reading, self.reading.end
        limits, is_last = self._limits, reading.is_last(now, idle_s)
        settled = is_last or (limits.record_start is not None and reading.is_last(now, min(idle_s, RECORD_WAIT_S)))
        if end <= reading.position or (end == self._barren_end and not settled and self._kept is None):
            return None
        if self._kept is not None:
            batch = self._cut_alike(self._kept)
            self._kept = None
            if batch is not None:
                return batch
        usual = min(limits.request_bytes, max(limits.chunk_bytes, READ_BYTES))
        data, pieces = self._cut_from(usual, is_last, settled)
        if not pieces and len(data) == usual < limits.request_bytes:  # a line, or a record, that is longer
            data, pieces = self._cut_from(limits.request_bytes, is_last, settled)
        if not pieces:
            self._barren_end = end
            return None
        size = pieces[-1].end
        self._tell_holes(reading.position, data, size)
        sent = data if size == len(data) else memoryview(data)[:size]  # no copy
        if self.tail is not None and self.tail.cover(sent):
            self.unsaved = True
        return Batch(reading.position, sent, tuple(pieces), created_ms, self._attributes)

    def _cut_from(self, limit: int, is_last: bool, settled: bool) -> tuple[bytes, list[Piece]]:
        """At most ``limit`` bytes from where it is, and how they are cut."""
        reading, limits = self.reading, self._limits
        data = reading.read(limit)
        flush = settled and reading.position + len(data) >= reading.end
        if flush and not is_last:
            data = data[: data.rfind(b"\n") + 1]
        inside = is_inside(reading.mark, data, limits)
        so_far = line_so_far(reading.before(limits.line_bytes), limits) if inside and limits.cut_lines else 0
        return data, cut(data, inside, limits, flush, so_far)

    def _cut_alike(self, kept: Cut) -> Batch | None:
        """As it was cut before, so that what is there already is the same; None when it is about another place."""
        reading = self.reading
        if reading.position != kept.start or reading.end < kept.start + kept.size:
            return None
        data = reading.read(kept.size)
        if len(data) < kept.size:
            return None
        if self.tail is not None and self.tail.cover(data):
            self.unsaved = True
        return Batch(kept.start, data, kept.pieces, kept.created_ms, self._attributes)

    def _tell_holes(self, start: int, data: bytes, size: int) -> None:
        """Once: what is read again is known."""
        for begin, end in holes(data, size):
            if start + begin >= self._looked_to:
                tell("nul-hole", source=self.name, position=start + begin, bytes=end - begin)
        self._looked_to = max(self._looked_to, start + size)

    def is_done(self) -> bool:
        """All that there is now is acknowledged, or nothing more will be."""
        asked = self._session is not None or self.tail is None or self.reading.end == 0
        return not self.busy and bool((asked and self._is_sent() and self._is_over()) or self.stopped)

    def _is_sent(self) -> bool:
        return self.batch is None and self.reading.position >= self.reading.end

    def _is_over(self) -> bool:
        """That it is finished has been said, or need not be."""
        return self.tail is not None or self._finished or self.reading.position == 0

    # ---- what an answer does -----------------------------------------------------------------------------

    def take(self, job: Job, outcome: Outcome, now: float, once: bool) -> Do:
        """Applies the outcome of ``job``. Raises `Changed` when the file cannot go on where the gateway is."""
        self.busy = False
        answer = outcome.answer
        do = judge(answer)
        if self.stopped or (self.tail is None and self.is_done()):
            return do  # the incarnation ended meanwhile and nothing of it is left to send
        if job.beat is not None and job.session != self._session:
            return do  # a farewell
        if job.beat is not None and self._was_answered(job.beat, do, answer, now):
            return do
        if do is Do.ADVANCE:
            self._advance(job, outcome, now)
        elif do is Do.RECUT:
            tell("recut", source=self.name, type=answer.type, recorded=answer.recorded_seqno)
            self._pause(now, RETRY_S, at_once=True)
            self._recorded = answer.recorded_seqno
            self._go_on_at(answer.recorded_seqno)
        elif do is Do.REOPEN:
            self._superseded(answer, now)
        elif do is Do.SMALLER and self._limits.smaller() != self._limits:
            self._limits = self._limits.smaller()
            self.batch = self._kept = None
            tell("smaller", source=self.name, chunk_bytes=self._limits.chunk_bytes, detail=answer.detail)
        elif do in (Do.WAIT, Do.AGAIN):
            self._again(job, answer, now)
        elif do is Do.ASK:
            self._session = self._url = None
            self._pause(now, RETRY_S, at_once=True)
        else:
            self._refused(answer, now, once)
        return do

    def _was_answered(self, beat: Beat, do: Do, answer: Answer, now: float) -> bool:
        """What a heartbeat is answered holds up no lines. One that failed is not repeated before its time: of a host's
        thousand quiet files none shall trouble a gateway in trouble. That a source is finished is said until heard.
        """
        if do in (Do.WAIT, Do.AGAIN) and not beat.finished:
            tell("retry", source=self.name, status=answer.status, type=answer.type, detail=answer.detail)
        elif do in (Do.REFUSED, Do.RECUT, Do.SMALLER):
            tell("refused", source=self.name, status=answer.status, type=answer.type, detail=answer.detail)
        elif do is not Do.ADVANCE:
            return False
        self._finished = self._finished or beat.finished
        self._rest(now)
        return True

    def _rest(self, now: float) -> None:
        """Heard just now: no heartbeat for a while. Not all at once, though they all began with the client."""
        self._next_beat = now + self._heartbeat_s * random.uniform(0.75, 1.0)

    def _advance(self, job: Job, outcome: Outcome, now: float) -> None:
        self._url = outcome.url
        self._rest(now)
        self._recorded = recorded = outcome.answer.recorded_seqno
        if job.batch is None:
            self._session, self._at = outcome.answer.session, job.dc
            tell("session", source=self.name, session=self._session, recorded=recorded, url=self._url)
            if self.tail is None and self._is_sent():
                self.home, self._is_sure = job.dc, True
                self.reading = Remains(max(self.reading.position, recorded or 0), b"", b"")
            else:
                self._arrive(job.dc, recorded)
        elif recorded is not None and recorded >= job.batch.end:
            self.reading.advance(job.batch.data)
            self._unreadable = None
            self._error = ""
            self._failures = 0  # by chunks only: a session that opens is no success yet
            self.batch = None
            tell("sent", source=self.name, position=job.batch.end, chunks=len(job.batch.pieces))
        else:
            self._go_on_at(recorded)

    def _arrive(self, dc: int, recorded: int | None) -> None:
        """In a data centre, which has recorded so much of it."""
        if dc != self.home:
            if self.home is not None or self.entry.dc:
                recorded = max(self.reading.position, self.entry.position, recorded or 0)
                self.entry.since = recorded
            self.home, self.entry.dc = dc, self._centres.names[dc]
            self.unsaved = self.unsaved or len(self._centres.names) > 1
        self._is_sure = True
        self._go_on_at(recorded)

    def _go_on_at(self, recorded: int | None) -> None:
        """Nothing recorded means from the start: the gateway's word goes before the checkpoint's.

        But not to before where it came here: that is in another data centre.
        """
        position = max(recorded or 0, self.entry.since)
        if self.tail is not None:
            reason = self.tail.differs(self.entry.head, self.entry.position, self.entry.mark)
            if reason:
                raise Changed(reason)
            if position < self.entry.position:
                tell("gateway-forgot", source=self.name, recorded=recorded, acknowledged=self.entry.position)
                self.entry.position, self.entry.mark = self.entry.since, of(b"")
        if self.batch is None or self.batch.start != position:
            self.batch = None
            self._barren_end = -1
            self.reading.go_to(position)

    def _again(self, job: Job, answer: Answer, now: float) -> None:
        self._error = f"{answer.status or 'no answer'} {answer.type}: {answer.detail}"
        tell("retry", source=self.name, status=answer.status, type=answer.type, detail=answer.detail)
        if answer.status == NO_ANSWER and job.direct and job.batch is not None:
            self._direct_from = now + FORWARDED_FOR_S  # the owner may be out of our reach: let it be forwarded
        self._url = None
        self._pause(now, RETRY_S)
        self._not_before = max(self._not_before, now + answer.retry_after_s * random.uniform(1.0, 1.2))

    def _superseded(self, answer: Answer, now: float) -> None:
        """A session of another's: of ourselves before a restart, or of a second client; those must not fight."""
        self._session = None
        if self._superseded_at is not None and now - self._superseded_at < FIGHT_WINDOW_S:
            self.stop(f"another client writes this source: {answer.detail}")
        self._superseded_at = now

    def _refused(self, answer: Answer, now: float, once: bool) -> None:
        self._error = f"{answer.status} {answer.type}: {answer.detail}"
        tell("refused", source=self.name, status=answer.status, type=answer.type, detail=answer.detail)
        self._session = self._url = None
        if self.tail is not None:
            self.let_go()
        elif self._is_sent():
            self._finished = True  # its topic is gone, or no longer ours: there is nobody to say it to
        if once:
            self.stop(f"{answer.status} {answer.type}: {answer.detail}")
        self._pause(now, REFUSED_S)

    def cannot_read(self, error: OSError, now: float, once: bool) -> None:
        """The system refuses to read the file (a broken disk, a server that is gone): the others go on."""
        if self._unreadable != error.strerror:
            tell("file-unreadable", path=self.entry.last_path, reason=error.strerror)
        self._unreadable = error.strerror
        self._error = f"unreadable: {error.strerror}"
        self.let_go()
        self._session = self.batch = None
        if once:
            self.stop(f"unreadable: {error.strerror}")
        self._pause(now, REFUSED_S)

    def _pause(self, now: float, bounds: tuple[float, float], at_once: bool = False) -> None:
        """``at_once``: the first time without a pause."""
        self._failures += 1
        failures = self._failures - 1 if at_once else self._failures
        self._not_before = now + (pause_s(failures, bounds) if failures else 0.0)

    # ---- how it stands -----------------------------------------------------------------------------------

    def standing(self, now: float) -> Standing:
        """To be asked again and again: what has gone on for how long is known as finely as it is asked."""
        size, position = max(self.reading.end, self.reading.position), self.reading.position
        if position >= size:
            self._behind_from = None
        elif self._behind_from is None:
            self._behind_from = now
        waits_for = self._waits_for(now)
        if waits_for != self._waits[0]:
            self._waits = (waits_for, now)
        path = self.tail.path if self.tail is not None else self.entry.last_path
        behind_s = 0.0 if self._behind_from is None else now - self._behind_from
        waits_s = now - self._waits[1]
        return Standing(
            self.name,
            path,
            self.entry.topic,
            position,
            size,
            size - position,
            behind_s,
            waits_for,
            waits_s,
            self._error,
        )

    def _waits_for(self, now: float) -> str:
        if self.stopped:
            return "a new start of the client"
        if now < self._not_before:
            return "the next try"
        if self.busy or self.batch is not None:
            return "the gateway's answer"
        if self.reading.position < self.reading.end:
            return "the end of its last line" if self._barren_end == self.reading.end else "its turn"
        if self.tail is None:
            return "the gateway to hear that it is finished"
        return "more lines" if self.tail.away_since is None else "its writer to be done with it"

    # ---- its end -----------------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Nothing more is sent for it by this process."""
        self.stopped = self._error = why
        self.batch = None
        tell("source-stopped", source=self.name, reason=why)

    def let_go(self) -> None:
        """Gives up the memory of a batch that waits; its bytes are read anew, and cut alike."""
        if self.tail is not None and not self.busy and self.batch is not None:
            self._kept, self.batch = Cut.of(self.batch), None

    def go_on_after(self, cut: Cut) -> None:
        """A client that was killed had sent this last. What lies before was acknowledged."""
        if self.entry.position <= cut.start <= self.reading.end:
            self.reading.go_to(cut.start)
            self.entry.position, self.entry.mark = cut.start, of(self.reading.mark)
            self._kept = cut

    def cut(self) -> Cut | None:
        """Of the batch that has left, or is about to, if there is one."""
        return self._kept if self.batch is None else Cut.of(self.batch)

    def detach(self) -> int:
        """The file holds something else now, or is gone; keeps the batch under way. Returns the position kept up to."""
        batch = self.batch
        if self.tail is not None:
            self._last_size = self.tail.largest_size
        self.tail = None
        kept = (batch.start, bytes(batch.data)) if batch else (self.reading.position, b"")
        self.reading = Remains(*kept, self.reading.mark)
        return self.reading.end

    def note(self, now_ms: int) -> Entry:
        """The entry as of now, for the checkpoint."""
        if self.tail is not None:
            self.entry.last_path, self.entry.head = self.tail.path, self.tail.head
            self.entry.away = self.tail.away_since is not None
        if self._session is not None:
            self.entry.position, self.entry.mark = self.reading.position, of(self.reading.mark)
        self.entry.seen_ms = now_ms
        return self.entry
