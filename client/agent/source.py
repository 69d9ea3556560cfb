"""The state machine of one source: its next request, and the effect of each answer.

Invariants
* One request is under way at a time; a batch does not change until its outcome is known.
* The gateway decides where a source resumes: at a session's ``recorded_seqno`` (nothing recorded: 0). But one that was
  silent for a day, or nearly as long as the gateway retains sources, and of which nothing is known any more, has
  expired: it resumes at the checkpoint's position.
* What one data centre acknowledged is not sent to another one. There a source resumes at the end of what it knows to be
  acknowledged anywhere (``entry.since``), once that is on the disk; and a batch whose outcome is unknown is sent there
  unchanged, so that its copies are equal.
* Every chunk carries ``prev``, except one that resumes behind such a gap. Seqnos are positions and the bytes at a
  position never change. So a chunk that is sent again, cut alike or otherwise, is a duplicate or a refused overlap,
  never doubled.
* A source whose file is gone reports ``finished`` after the last of its chunks; then it is done. One that moves reports
  it to the data centre that it leaves when the next one has its session: it is never finished everywhere.
* ``unsaved``: the checkpoint does not hold the identity of this source yet; nothing may be sent before it does.
* After a reboot the gateway's position counts only if a mark of this host proves it: a power failure may have taken
  the end of the file, and lines that were never sent may be there now. Else a new source begins at the last mark.
"""

from __future__ import annotations

import random
from contextlib import suppress

from logferry.client.agent.config import Config, FileGroup
from logferry.client.agent.failover import FailoverPolicy
from logferry.client.agent.schedule import NEVER, HeartbeatReport, HeartbeatSchedule, PushJob, SourceStatus, WaitClock
from logferry.client.events import log_event
from logferry.client.files.batches import BatchLayout, BatchReader
from logferry.client.files.checkpoint import EXPIRED_AFTER_MS, CheckpointEntry, expires_ms
from logferry.client.files.chunking import FileBatch, Limits
from logferry.client.files.identity import digest, fingerprint
from logferry.client.files.rotation import WantedCopy
from logferry.client.files.tail import BufferedRemainder, ByteSource, FileChanged, FileTail
from logferry.client.transport.cluster import RETRY_S, pause_s
from logferry.client.transport.kubelet import PodLabels
from logferry.client.transport.source_request import FORWARDED_S, NO_ANSWER, GatewayAnswer, NextStep, Outcome, next_step

REFUSED_S, FIGHT_WINDOW_S = (5.0, 300.0), 60.0


class FileSource:
    """One incarnation of one file.

    ``tail``: None once the file is gone or holds something else: then `reading` has only the batch whose outcome was
    unknown, or what a ``.gz`` holds of it. ``home``: the data centre that has the last of its chunks; None: nothing was
    sent yet, or that one is no longer configured. ``after_reboot``: its file was followed before the last start of the
    system, and no session was opened since.
    """

    def __init__(
        self, entry: CheckpointEntry, tail: FileTail | None, config: Config, files: FileGroup, centres: FailoverPolicy
    ) -> None:
        self.entry = entry
        self.files = files
        self.tail = tail
        self.reading: ByteSource = tail or BufferedRemainder(entry.position, b"", b"")
        self.batch: FileBatch | None = None
        self.busy = self.after_reboot = False
        self.unsaved = True
        self.stopped = self._error = ""
        self.why = ""  # it is a new source, or "known"
        sizes = config.chunk_bytes, config.line_bytes, config.request_bytes
        limits = Limits(*sizes, files.record_start, files.cut_lines, files.rules)
        self._batches = BatchReader(entry.source_id, limits, files.attributes_of(config.host, entry.path))
        self._heartbeat = HeartbeatSchedule(0.0 if config.once else config.heartbeat_s)
        self._session: int | None = None
        self._url: str | None = None
        self._failures = self._asked_ms = 0
        self._expires_ms = EXPIRED_AFTER_MS
        self._not_before = self._direct_from = 0.0
        self._superseded_at: float | None = None
        self._progress = WaitClock()
        self._centres = centres
        self._at = centres.here
        is_fresh = not entry.head.length or not (entry.dc or entry.position > entry.since)
        self.home = centres.number(entry.dc) if entry.dc else None if is_fresh else 0
        self._is_sure = is_fresh  # this process knows from its home how far it is
        self._recorded: int | None = None
        self._is_heard = False  # since `update_entry`

    @property
    def name(self) -> str:
        return self.entry.source_id

    def takes_labels(self, pods: PodLabels, now: float) -> bool:
        """False: those of its pod are asked for, and worth a short wait."""
        return pods.label(self._batches, now)

    # ---- what goes next ----------------------------------------------------------------------------------

    def next_job(self, now: float, created_ms: int, idle_s: float) -> PushJob | None:
        """The next request, if there is one. Raises `FileChanged` when the file holds something else now."""
        if self.busy or now < self._not_before or self.stopped:
            return None
        if self._session is not None and self._at != self._centres.here:
            self._heartbeat.left[self._at] = self._session
            self._session = self._url = None
        is_moved = self._session is not None or self._heartbeat.is_over
        found = self._heartbeat.farewell(self.reading.position, self._centres.others(now)) if is_moved else None
        if found is not None:
            dc, session, farewell = found
            return PushJob(self.entry.topic, self.name, None, False, session, None, farewell, dc)
        if self.is_done() and (self.tail is None or self._session is None):
            return None
        direct, self._asked_ms = now >= self._direct_from, created_ms
        if self._session is None:
            return PushJob(self.entry.topic, self.name, self._url, direct, None, None, dc=self._opens_at(now))
        if self.batch is None:
            self.batch = self._cut(now, created_ms, idle_s)
        beat = None if self.batch else self._heartbeat.report(self.reading.position, self.tail, now, created_ms)
        if self.batch is None and beat is None:
            return None
        skips = self.batch is not None and self._recorded is not None and self._recorded < self.batch.start
        return PushJob(self.entry.topic, self.name, self._url, direct, self._session, self.batch, beat, self._at, skips)

    def next_due(self, now: float, idle_s: float) -> float:
        """When `next_job` may have a request after it had none, if nothing wakes the source before."""
        if self.busy or self.stopped or now < self._not_before:
            return NEVER if self.busy or self.stopped else self._not_before
        dues = [NEVER if self._session is None else self._heartbeat.due()]
        if self.tail is not None and self.reading.position < self.reading.end:
            dues += [self.tail.changed_at + wait_s for wait_s in self._batches.waits_s(self.tail, now, idle_s)]
        return min(dues)

    def _opens_at(self, now: float) -> int:
        """A source that an earlier process sent to another data centre asks there first how far it came; if that one
        is gone, the checkpoint has to do."""
        if self._is_sure or self.home is None or self._centres.is_gone(self.home, now):
            return self._centres.here
        return self.home

    def _cut(self, now: float, created_ms: int, idle_s: float) -> FileBatch | None:
        batch = self._batches.next(self.reading, now, created_ms, idle_s)
        if batch is not None and self.tail is not None and self.tail.cover(batch.data):
            self.unsaved = True
        return batch

    def is_done(self) -> bool:
        """Everything up to now is acknowledged, or nothing more will be."""
        asked = self._session is not None or self.tail is None or self.reading.end == 0
        is_unknown = not self.entry.dc and self.reading.position <= self.entry.since  # nothing was sent under its name
        is_reported = self.tail is not None or self._heartbeat.is_over or is_unknown
        is_over = asked and self._is_sent() and is_reported and not self._heartbeat.left
        return not self.busy and bool(is_over or self.stopped)

    def _is_sent(self) -> bool:
        return self.batch is None and self.reading.position >= self.reading.end

    # ---- what an answer does -----------------------------------------------------------------------------

    def take(self, job: PushJob, outcome: Outcome, now: float, once: bool) -> NextStep:
        """Applies the outcome of ``job``. Raises `FileChanged` when the file has nothing where the gateway is."""
        self.busy = False
        answer = outcome.answer
        do = next_step(answer)
        if self.stopped or (self.tail is None and self.is_done()):
            return do  # the incarnation ended meanwhile, and nothing of it is left to send
        if job.beat is not None and (job.session, job.dc) != (self._session, self._at):
            return do  # a farewell
        if job.beat is not None and self._take_heartbeat(job.beat, do, answer, now):
            return do
        if do is NextStep.ADVANCE:
            self._advance(job, outcome, now)
        elif do is NextStep.RECUT:
            log_event("recut", source=self.name, type=answer.type, recorded=answer.recorded_seqno)
            self._pause(now, RETRY_S, at_once=True)
            self._recorded = answer.recorded_seqno
            self._resume_at(answer.recorded_seqno)
        elif do is NextStep.REOPEN:
            self._superseded(answer, now, once)
        elif do is NextStep.SMALLER and self._batches.make_smaller():
            self.batch = None
            log_event("smaller", source=self.name, chunk_bytes=self._batches.limits.chunk_bytes, detail=answer.detail)
        elif do in (NextStep.WAIT, NextStep.AGAIN):
            self._again(job, answer, now)
        elif do is NextStep.ASK:
            self._session = self._url = None
            self._direct_from = now + FORWARDED_S  # if the owner's URL may not be used, a given one forwards
            self._pause(now, RETRY_S, at_once=True)
        else:
            self._refused(answer, now, once)
        return do

    def _take_heartbeat(self, beat: HeartbeatReport, do: NextStep, answer: GatewayAnswer, now: float) -> bool:
        """The answer to a heartbeat delays no lines. False: it is to be treated as that of any other request."""
        if do in (NextStep.WAIT, NextStep.AGAIN) and not beat.finished:
            log_event("retry", source=self.name, status=answer.status, type=answer.type, detail=answer.detail)
        elif do in (NextStep.REFUSED, NextStep.RECUT, NextStep.SMALLER):
            log_event("refused", source=self.name, status=answer.status, type=answer.type, detail=answer.detail)
        elif do is not NextStep.ADVANCE:
            return False
        self._is_heard = self._is_heard or do is NextStep.ADVANCE
        self._heartbeat.answered(beat, now)
        return True

    def _advance(self, job: PushJob, outcome: Outcome, now: float) -> None:
        self._url = outcome.url
        self._is_heard = True
        self._heartbeat.defer(now)
        self._recorded = recorded = outcome.answer.recorded_seqno
        if job.batch is None:
            self._session, self._at = outcome.answer.session, job.dc
            self._expires_ms = expires_ms(outcome.answer.source_retention_ms)
            log_event("session", source=self.name, session=self._session, recorded=recorded, url=self._url)
            if self.tail is None and self._is_sent():
                self.home, self._is_sure = job.dc, True
                self.reading = BufferedRemainder(max(self.reading.position, recorded or 0), b"", b"")
            else:
                self._arrive(job.dc, recorded)
        elif recorded is not None and recorded >= job.batch.end:
            self.reading.advance(job.batch.data)
            self._error = ""
            self._failures = 0  # only chunks count: a session that opens is no success yet
            self.batch = None
            log_event("sent", source=self.name, position=job.batch.end, chunks=len(job.batch.pieces))
        else:
            self._resume_at(recorded)

    def _arrive(self, dc: int, recorded: int | None) -> None:
        """The source is in a data centre that has recorded so much of it."""
        if dc != self.home:
            if self.home is not None or self.entry.dc:
                recorded = max(self.reading.position, self.entry.position, recorded or 0)
                self.entry.since = recorded
            self.home, self.entry.dc = dc, self._centres.names[dc]
            self.unsaved = self.unsaved or len(self._centres.names) > 1
        self._is_sure = True
        self._resume_at(recorded)

    def _resume_at(self, recorded: int | None) -> None:
        """Nothing recorded means from the start: the gateway's word counts more than the checkpoint's.

        But never before the position at which it came to this data centre: that part is in another one. And the
        checkpoint's word counts where the gateway forgot the source because it was silent.
        """
        is_old = 0 < self.entry.heard_ms <= self._asked_ms - self._expires_ms
        if recorded is None and is_old and self.entry.position > self.entry.since:
            log_event("source-expired", source=self.name, acknowledged=self.entry.position)
            self.entry.since, self.unsaved = self.entry.position, True
        position = max(recorded or 0, self.entry.since)
        is_proven = position <= self.entry.position or not self.after_reboot or self.tail is None
        if self.tail is not None:
            reason = self.tail.differs(self.entry.head, self.entry.position, self.entry.mark)
            if reason:
                raise FileChanged(reason)
            if position < self.entry.position:
                log_event("gateway-forgot", source=self.name, recorded=recorded, acknowledged=self.entry.position)
                self.entry.position, self.entry.mark = self.entry.since, fingerprint(b"")
        if self.batch is None or self.batch.start != position:
            self.batch = None
            self._batches.barren_end = -1  # what was read there may be cut after all
            self.reading.go_to(position)
        last = self._batches.kept  # by the process before
        if not is_proven and (last is None or (position, digest(self.reading.mark)) != (last.end, last.after)):
            raise FileChanged(f"after a reboot nothing proves that the bytes before position {position} were sent")
        self.after_reboot = False

    def _again(self, job: PushJob, answer: GatewayAnswer, now: float) -> None:
        self._error = str(answer)
        log_event("retry", source=self.name, status=answer.status, type=answer.type, detail=answer.detail)
        if answer.status == NO_ANSWER and job.direct and job.batch is not None:
            self._direct_from = now + FORWARDED_S  # the owner may be out of reach: another gateway forwards
        self._url = None
        self._pause(now, RETRY_S, answer.retry_after_s)

    def _superseded(self, answer: GatewayAnswer, now: float, once: bool) -> None:
        """Another session exists: an earlier one of this client, or that of a second client; these must not fight."""
        before, self._superseded_at = self._superseded_at, now
        if before is None or now - before >= FIGHT_WINDOW_S:
            self._session = None
            return
        self._superseded_at = None
        why = f"another client writes this source: {answer.detail}"
        self._refused(answer._replace(detail=why), now, False)
        self._error = why
        self._not_before = now + REFUSED_S[1] * random.uniform(0.5, 1.0)
        if once:
            self.stop(why)

    def _refused(self, answer: GatewayAnswer, now: float, once: bool) -> None:
        self._error = str(answer)
        log_event("refused", source=self.name, status=answer.status, type=answer.type, detail=answer.detail)
        self._session = self._url = None
        if self.tail is not None:
            self.let_go()
        elif self._is_sent():
            self._heartbeat.is_over = True  # its topic is gone, or no longer ours: nothing can be reported
        if once:
            self.stop(str(answer))
        self._pause(now, REFUSED_S)

    def cannot_read(self, error: OSError, now: float, once: bool) -> None:
        """The system cannot read the file (a broken disk, a lost server): the other sources are not affected."""
        before, self._error = self._error, f"unreadable: {error.strerror}"
        if self._error != before:
            log_event("file-unreadable", path=self.entry.last_path, reason=error.strerror)
        self.let_go()
        self._session = self.batch = None
        if once:
            self.stop(self._error)
        if self._error != before or now >= self._not_before:  # else it is the same trouble, seen by another look
            self._pause(now, REFUSED_S)

    def _pause(self, now: float, bounds: tuple[float, float], asked_s: float = 0.0, at_once: bool = False) -> None:
        """``at_once``: the first time without a pause."""
        self._failures += 1
        failures = self._failures - 1 if at_once else self._failures
        self._not_before = now + (pause_s(failures, bounds, asked_s) if failures else 0.0)

    def retry(self, now: float) -> None:
        """Its failures were about another data centre, or another token."""
        self._failures, self._not_before, self._direct_from = 0, now, 0.0

    # ---- its status --------------------------------------------------------------------------------------

    def status(self, now: float) -> SourceStatus:
        """To be called regularly: the durations are as exact as the calls are frequent."""
        size, position = max(self.reading.end, self.reading.position), self.reading.position
        path = self.tail.path if self.tail is not None else self.entry.last_path
        where = (self.name, path, self.entry.topic, position, size, size - position)
        return SourceStatus(*where, *self._progress.waits(position >= size, self._waits_for(now), now), self._error)

    def _waits_for(self, now: float) -> str:
        if self.stopped:
            return "a restart of the client"
        if now < self._not_before:
            return "the next try"
        if self.busy or self.batch is not None:
            return "the gateway's answer"
        if self.reading.position < self.reading.end:
            return "the end of its last line" if self._batches.barren_end == self.reading.end else "its turn"
        if self.tail is None:
            return "the gateway to record that it is finished"
        return "more lines" if self.tail.away_since is None else "its writer to close it"

    # ---- its end -----------------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """This process sends nothing more of it."""
        self.stopped = self._error = why
        self.batch = None
        log_event("source-stopped", source=self.name, reason=why)

    def let_go(self) -> None:
        """Frees the memory of a batch that waits; its bytes are read again, and cut alike."""
        if self.tail is not None and not self.busy and self.batch is not None:
            self._batches.kept, self.batch = self.in_flight(), None

    def resume_after(self, layout: BatchLayout | None) -> None:
        """A client that was killed sent this batch last. Everything before it was acknowledged."""
        if layout is not None and self.entry.position <= layout.start <= self.reading.end:
            self.reading.go_to(layout.start)
            if layout.before == digest(self.reading.mark) or not (layout.before or self.after_reboot):
                self.entry.position, self.entry.mark = layout.start, fingerprint(self.reading.mark)
                self._batches.kept = layout
            else:
                self.reading.go_to(self.entry.position)

    def in_flight(self) -> BatchLayout | None:
        """The layout of the batch that was sent, or is about to be; None: there is none."""
        return self._batches.kept if self.batch is None else BatchLayout.of(self.batch, self.reading.mark)

    def wanted(self, tail: FileTail) -> WantedCopy:
        """What another file must hold to be that of ``tail``, its present one."""
        batch = self.batch.data if self.batch is not None else b""
        return WantedCopy(tail.path, tail.head, tail.position, fingerprint(tail.mark), tail.born_ns, batch)

    def move_to(self, copy: FileTail) -> None:
        """The rest of it is in a copy of its file, which was opened at its position."""
        self.tail = self.reading = copy
        self.entry.device, self.entry.inode = copy.key
        self.entry.born_ns = copy.born_ns
        self.unsaved = True

    def detach(self) -> int:
        """The file holds something else now, or is gone. Keeps the batch under way; returns where that ends."""
        if self.tail is not None:
            self._heartbeat.last_size = self.tail.largest_size
        self.tail = None
        kept = bytes(self.batch.data) if self.batch else b""
        self.reading = BufferedRemainder(self.reading.position, kept, self.reading.mark)
        return self.reading.end

    def update_entry(self, now_ms: int) -> CheckpointEntry:
        """The entry of the checkpoint, as of now."""
        if self.tail is not None:
            self.entry.last_path, self.entry.head, real = self.tail.path, self.tail.head, self.tail.real_path()
            self.entry.real_path = "" if real == self.tail.path else real
            self.entry.away = self.tail.away_since is not None
        if self._session is not None:
            if self.tail is not None and self.tail.position != self.entry.position:
                with suppress(OSError):
                    self.entry.marks = self.tail.earlier_marks()
            self.entry.position, self.entry.mark = self.reading.position, fingerprint(self.reading.mark)
        self.entry.seen_ms = now_ms
        if self._is_heard:
            self.entry.heard_ms, self._is_heard = now_ms, False
        return self.entry
