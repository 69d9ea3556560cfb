"""The state machine of one source: its next request, and the effect of each answer.

Invariants
* `RequestWindow` keeps the protocol. Several batches of the source may be under way; what else it asks of a gateway,
  it asks alone. The position is the end of the acknowledged bytes; batches are cut behind those under way.
* The gateway decides where a source resumes: at a session's ``recorded_seqno`` (nothing recorded: 0). But one that was
  silent for a day, or nearly as long as the gateway retains sources, and of which nothing is known any more, has
  expired: it resumes at the checkpoint's position.
* What one data centre acknowledged is not sent to another one. There a source resumes at the end of what it knows to be
  acknowledged anywhere (``entry.since``), once that is on the disk; and a batch whose outcome is unknown is sent there
  unchanged, so that its copies are equal.
* Every chunk carries ``prev``, except one that resumes behind such a gap. Seqnos are positions whose bytes never
  change: a chunk that is sent again, cut alike or otherwise, is a duplicate or a refused overlap, never doubled.
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
from logferry.client.agent.file_batches import FileBatches
from logferry.client.agent.schedule import NEVER, HeartbeatReport, HeartbeatSchedule, PushJob, SourceStatus, WaitClock
from logferry.client.events import log_event
from logferry.client.files.checkpoint import EXPIRED_AFTER_MS, CheckpointEntry, expires_ms
from logferry.client.files.chunking import FileBatch
from logferry.client.files.identity import digest, fingerprint
from logferry.client.files.rotation import WantedCopy
from logferry.client.files.tail import BufferedRemainder, ByteSource, FileChanged, FileTail
from logferry.client.transport.cluster import RETRY_S
from logferry.client.transport.failover import FailoverPolicy
from logferry.client.transport.request_window import RequestWindow
from logferry.client.transport.source_request import GatewayAnswer, NextStep, Outcome, next_step

REFUSED_S, FIGHT_WINDOW_S = (5.0, 300.0), 60.0


class FileSource:
    """One incarnation of one file.

    ``tail``: None once the file is gone or holds something else: then `reading` has only what was not acknowledged, or
    what a ``.gz`` holds of it. ``home``: the data centre that has the last of its chunks; None: nothing was sent yet,
    or that one is no longer configured. ``after_reboot``: its file was followed before the last start of the system,
    and no session was opened since.
    """

    __slots__ = (
        *("_asked_ms", "_at", "_centres", "_error", "_expires_ms", "_heartbeat", "_is_asking", "_is_heard"),
        *("_is_sure", "_progress", "_superseded_at", "after_reboot", "batches", "entry", "files", "home", "layer"),
        *("reading", "settled", "stopped", "tail", "unsaved", "why", "window"),
    )

    def __init__(
        self, entry: CheckpointEntry, tail: FileTail | None, config: Config, files: FileGroup, centres: FailoverPolicy
    ) -> None:
        self.entry, self.files, self.tail = entry, files, tail
        self.reading: ByteSource = tail or BufferedRemainder(entry.position, b"", b"")
        self.window: RequestWindow[FileBatch] = RequestWindow(config.threads)
        self.settled = 0, 0  # chunks and bytes, by the last answer
        self.after_reboot = self._is_asking = self._is_heard = False  # heard of: since `update_entry`
        self.unsaved = True
        self.stopped = self._error = ""
        self.why, self.layer = "", 0  # why it is a new source, or "known"; the number of the watch that has it
        self.batches = FileBatches(entry, config, files, self.window)
        self._heartbeat = HeartbeatSchedule(0.0 if config.once else config.heartbeat_s)
        self._asked_ms, self._expires_ms = 0, EXPIRED_AFTER_MS
        self._superseded_at: float | None = None
        self._progress = WaitClock()
        self._centres, self._at = centres, centres.here
        is_fresh = not entry.head.length or not (entry.dc or entry.position > entry.since)
        self.home = centres.number(entry.dc) if entry.dc else None if is_fresh else 0
        self._is_sure = is_fresh  # this process knows from its home how far it is

    @property
    def name(self) -> str:
        return self.entry.source_id

    @property
    def busy(self) -> bool:
        """A request is under way."""
        return self._is_asking or self.window.under_way > 0

    # ---- what goes next ----------------------------------------------------------------------------------

    def next_job(self, now: float, created_ms: int, idle_s: float, may_run_ahead: bool = True) -> PushJob | None:
        """The next request, if there is one, for `leave`. Raises `FileChanged` when the file holds something else."""
        window = self.window
        if self._is_asking or now < window.not_before or self.stopped:
            return None
        if window.session is not None and (self._at != self._centres.here or window.asks_for_owner):
            if window.under_way:
                return None
            if self._at != self._centres.here:
                self._heartbeat.leave(self._at, window.session)
            window.close_session()
        job = PushJob(self.entry.topic, self.name, window.url, window.is_direct(now), window.session, None, dc=self._at)
        if window.under_way == 0:
            is_moved = window.session is not None or self._heartbeat.is_over
            found = self._heartbeat.farewell(self.reading.position, self._centres.others(now)) if is_moved else None
            if found is not None:
                dc, session, farewell = found
                return job._replace(url=None, direct=False, session=session, beat=farewell, dc=dc)
            if self.is_done() and (self.tail is None or window.session is None):
                return None
            if window.session is None:
                self._asked_ms = created_ms
                return job._replace(dc=self._opens_at(now))
        slot = self.batches.next_slot(self.reading, now, created_ms, idle_s, may_run_ahead, self._is_covered)
        if slot is not None:
            batch, recorded = slot.batch, window.recorded
            skips = slot is window.slots[0] and recorded is not None and recorded < batch.start
            more = slot is not window.slots[-1] or batch.end < self.reading.end
            return job._replace(batch=batch, skips=skips, slot=slot, more=more)
        is_idle = not window.slots and not window.under_way
        beat = self._heartbeat.report(self.reading.position, self.tail, now, created_ms) if is_idle else None
        return None if beat is None else job._replace(beat=beat)

    def leave(self, job: PushJob, now: float) -> None:
        """The request is under way."""
        if job.slot is None:
            self._is_asking = True
        else:
            self.window.leave(job.slot, now)

    def next_due(self, now: float, idle_s: float) -> float:
        """When `next_job` may have a request after it had none, if nothing wakes the source before."""
        if self.busy or self.stopped or now < self.window.not_before:
            return NEVER if self.busy or self.stopped else self.window.not_before
        dues = [NEVER if self.window.session is None else self._heartbeat.due()]
        if self.tail is not None and self.reading.position < self.reading.end:
            dues += [self.tail.changed_at + wait_s for wait_s in self.batches.reader.waits_s(self.tail, now, idle_s)]
        return min(dues)

    def _opens_at(self, now: float) -> int:
        """A source that an earlier process sent to another data centre asks there first how far it came; if that one
        is gone, the checkpoint has to do."""
        if self._is_sure or self.home is None or self._centres.is_gone(self.home, now):
            return self._centres.here
        return self.home

    def _is_covered(self) -> None:
        self.unsaved = True

    def is_done(self) -> bool:
        """Everything up to now is acknowledged, or nothing more will be."""
        asked = self.window.session is not None or self.tail is None or self.reading.end == 0
        is_unknown = not self.entry.dc and self.reading.position <= self.entry.since  # nothing was sent under its name
        is_reported = self.tail is not None or self._heartbeat.is_over or is_unknown
        is_over = asked and self._is_sent() and is_reported and not self._heartbeat.left
        return not self.busy and bool(is_over or self.stopped)

    def _is_sent(self) -> bool:
        return not self.window.slots and self.reading.position >= self.reading.end

    # ---- what an answer does -----------------------------------------------------------------------------

    def take(self, job: PushJob, outcome: Outcome, now: float, once: bool) -> NextStep:
        """Applies the outcome of ``job``. Raises `FileChanged` when the file has nothing where the gateway is."""
        answer = outcome.answer
        do = next_step(answer)
        settled = [] if job.slot is None else [slot.batch for slot in self.window.take(job.slot, outcome, now)]
        self.settled = sum(len(batch.pieces) for batch in settled), sum(len(batch.data) for batch in settled)
        for batch in settled:
            self.reading.advance(batch.data)
            log_event("sent", source=self.name, position=batch.end, chunks=len(batch.pieces))
        if job.slot is None:
            self._is_asking = False
        if self.stopped or (self.tail is None and self.is_done()):
            return do  # the incarnation ended meanwhile, and nothing of it is left to send
        if do is NextStep.ADVANCE and job.beat is None:
            self._is_heard = True
            self._heartbeat.defer(now)
        if job.slot is not None:
            self._take_batch(do, answer, now, once)
        elif job.beat is not None and self._take_heartbeat(job, job.beat, do, answer, now):
            pass
        elif do is NextStep.ADVANCE:
            self._opened(job, outcome)
        elif do in (NextStep.WAIT, NextStep.AGAIN, NextStep.ASK):
            self._fails(answer)
            self.window.repeat(answer, now, was_direct=False)
        else:
            self._refused(do, answer, now, once)
        return do

    def _take_batch(self, do: NextStep, answer: GatewayAnswer, now: float, once: bool) -> None:
        if do is NextStep.ADVANCE:
            self._error = ""
        elif do in (NextStep.WAIT, NextStep.AGAIN) and self.window.slots:  # else an answer behind it has come before
            self._fails(answer)
        refused = self.window.refused
        if refused is not None:
            self.window.begin_again()  # it is dealt with once, though others may be under way
            self._refused(next_step(refused), refused, now, once)

    def _fails(self, answer: GatewayAnswer) -> None:
        self._error = str(answer)
        log_event("retry", **self.entry.where, status=answer.status, type=answer.type, detail=answer.detail)

    def _take_heartbeat(
        self, job: PushJob, beat: HeartbeatReport, do: NextStep, answer: GatewayAnswer, now: float
    ) -> bool:
        """The answer to a heartbeat delays no lines. False: it is to be treated as that of any other request."""
        if (job.session, job.dc) != (self.window.session, self._at):
            return True  # a farewell
        if do in (NextStep.WAIT, NextStep.AGAIN) and not beat.finished:
            log_event("retry", **self.entry.where, status=answer.status, type=answer.type, detail=answer.detail)
        elif do in (NextStep.REFUSED, NextStep.RECUT, NextStep.SMALLER):
            log_event("refused", **self.entry.where, status=answer.status, type=answer.type, detail=answer.detail)
        elif do is not NextStep.ADVANCE:
            return False
        self._is_heard = self._is_heard or do is NextStep.ADVANCE
        self._heartbeat.answered(beat, now)
        return True

    def _opened(self, job: PushJob, outcome: Outcome) -> None:
        session, recorded = outcome.answer.session, outcome.answer.recorded_seqno
        self.window.opened(session, outcome.url, recorded)
        self._at = job.dc
        self._expires_ms = expires_ms(outcome.answer.source_retention_ms)
        log_event("session", source=self.name, session=session, recorded=recorded, url=outcome.url)
        if self.tail is None and self._is_sent():
            self.home, self._is_sure = job.dc, True
            self.reading = BufferedRemainder(max(self.reading.position, recorded or 0), b"", b"")
        else:
            self._arrive(job.dc, recorded)

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
            log_event("source-expired", **self.entry.where, acknowledged=self.entry.position)
            self.entry.since, self.unsaved = self.entry.position, True
        position = max(recorded or 0, self.entry.since)
        is_proven = position <= self.entry.position or not self.after_reboot or self.tail is None
        if self.tail is not None:
            reason = self.tail.differs(self.entry.head, self.entry.position, self.entry.mark)
            if reason:
                raise FileChanged(reason)
            if position < self.entry.position:
                log_event("gateway-forgot", **self.entry.where, recorded=recorded, acknowledged=self.entry.position)
                self.entry.position, self.entry.mark = self.entry.since, fingerprint(b"")
        ends = [(layout.end, layout.after) for layout in self.batches.reader.kept]  # of the process before
        told = self.window.recorded  # by this data centre
        for slot in self.window.advance(position):
            self.reading.advance(slot.batch.data)
        self.window.recorded = told
        if not self.window.slots or self.window.slots[0].batch.start != position:
            self.window.clear()
            self.reading.go_to(position)
        if not is_proven and (position, digest(self.reading.mark)) not in ends:
            raise FileChanged(f"after a reboot nothing proves that the bytes before position {position} were sent")
        self.after_reboot = False

    def _refused(self, do: NextStep, answer: GatewayAnswer, now: float, once: bool) -> None:
        """Nothing of the first batch was recorded by that request."""
        if do is NextStep.RECUT:
            log_event("recut", **self.entry.where, type=answer.type, recorded=answer.recorded_seqno)
            self.window.pause(now, RETRY_S, at_once=True)
            self.window.recorded = answer.recorded_seqno
            self._resume_at(answer.recorded_seqno)
        elif do is NextStep.REOPEN:
            self._superseded(answer, now, once)
        elif do is NextStep.SMALLER and self.batches.reader.make_smaller():
            self.window.clear()
            chunk_bytes = self.batches.reader.limits.chunk_bytes
            log_event("smaller", **self.entry.where, chunk_bytes=chunk_bytes, detail=answer.detail)
        else:
            self._end_session(answer, now, once)

    def _superseded(self, answer: GatewayAnswer, now: float, once: bool) -> None:
        """Another session exists: an earlier one of this client, or that of a second client; these must not fight."""
        before, self._superseded_at = self._superseded_at, now
        if before is None or now - before >= FIGHT_WINDOW_S:
            self.window.close_session()
            return
        self._superseded_at = None
        why = f"another client writes this source: {answer.detail}"
        self._end_session(answer._replace(detail=why), now, False)
        self._error = why
        self.window.not_before = now + REFUSED_S[1] * random.uniform(0.5, 1.0)
        if once:
            self.stop(why)

    def _end_session(self, answer: GatewayAnswer, now: float, once: bool) -> None:
        self._error = str(answer)
        log_event("refused", **self.entry.where, status=answer.status, type=answer.type, detail=answer.detail)
        self.window.close_session()
        if self.tail is not None:
            self.let_go()
        elif self._is_sent():
            self._heartbeat.is_over = True  # its topic is gone, or no longer ours: nothing can be reported
        if once:
            self.stop(str(answer))
        self.window.pause(now, REFUSED_S)

    def cannot_read(self, error: OSError, now: float, once: bool) -> None:
        """The system cannot read the file (a broken disk, a lost server): the other sources are not affected."""
        before, self._error = self._error, f"unreadable: {error.strerror}"
        if self._error != before:
            log_event("file-unreadable", path=self.entry.last_path, reason=error.strerror)
        self.batches.drop(self.reading.mark)
        self.window.close_session()
        if once:
            self.stop(self._error)
        if self._error != before or now >= self.window.not_before:  # else it is the same trouble, seen by another look
            self.window.pause(now, REFUSED_S)

    def retry(self, now: float) -> None:
        """Its failures were about another data centre, or another token."""
        self.window.retry(now)

    # ---- its status and end --------------------------------------------------------------------------------------

    def status(self, now: float) -> SourceStatus:
        """To be called regularly: the durations are as exact as the calls are frequent."""
        size, position = max(self.reading.end, self.reading.position), self.reading.position
        path = self.tail.path if self.tail is not None else self.entry.last_path
        where = (self.name, path, self.entry.topic, position, size, size - position)
        return SourceStatus(*where, *self._progress.waits(position >= size, self._waits_for(now), now), self._error)

    def _waits_for(self, now: float) -> str:
        if self.stopped:
            return "a restart of the client"
        if now < self.window.not_before:
            return "the next try"
        if self.busy or self.window.slots:
            return "the gateway's answer"
        if self.reading.position < self.reading.end:
            return "the end of its last line" if self.batches.reader.is_barren(self.reading) else "its turn"
        if self.tail is None:
            return "the gateway to record that it is finished"
        end = "its file to be found again" if self.tail.is_missing else "its writer to close it"
        return "more lines" if self.tail.away_since is None else end

    def stop(self, why: str) -> None:
        """This process sends nothing more of it."""
        self.stopped = self._error = why
        self.window.clear()
        log_event("source-stopped", **self.entry.where, reason=why)

    def let_go(self) -> None:
        """Frees the memory of batches that wait, if they can be read again."""
        if self.tail is not None:
            self.batches.let_go(self.reading.mark)

    def wanted(self, tail: FileTail) -> WantedCopy:
        """What another file must hold to be that of ``tail``, its present one."""
        mark, sent = fingerprint(tail.mark), self.batches.data()
        return WantedCopy(tail.path, tail.head, tail.position, mark, tail.born_ns, sent)

    def move_to(self, copy: FileTail) -> None:
        """The rest of it is in a copy of its file, which was opened at its position."""
        self.tail = self.reading = copy
        self.entry.device, self.entry.inode = copy.key
        self.entry.born_ns = copy.born_ns
        self.unsaved = True

    def detach(self) -> int:
        """The file holds something else now, or is gone. Keeps the batches under way; returns where they end."""
        if self.tail is not None:
            self._heartbeat.last_size = self.tail.largest_size
        self.tail = None
        self.reading = BufferedRemainder(self.reading.position, self.batches.data(), self.reading.mark)
        return self.reading.end

    def update_entry(self, now_ms: int) -> CheckpointEntry:
        """The entry of the checkpoint, as of now."""
        if self.tail is not None:
            self.entry.last_path, self.entry.head, real = self.tail.path, self.tail.head, self.tail.real_path()
            self.entry.real_path = "" if real == self.tail.path else real
            self.entry.away = self.tail.away_since is not None
        if self.window.session is not None:
            if self.tail is not None and self.tail.position != self.entry.position:
                with suppress(OSError):
                    self.entry.marks = self.tail.earlier_marks()
            self.entry.position, self.entry.mark = self.reading.position, fingerprint(self.reading.mark)
        self.entry.seen_ms = now_ms
        self.entry.heard_ms, self._is_heard = now_ms if self._is_heard else self.entry.heard_ms, False
        return self.entry
