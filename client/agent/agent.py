"""What the push-client's main loop does: watch the files, choose requests, apply their answers, save the checkpoint.

Everything but the requests themselves happens in the main thread. Memory is bounded by `held_bytes`, the batches whose
outcome is awaited; the files are the buffer. A client that is killed at any point resumes from its checkpoint and from
what the gateway has recorded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from logferry.client.agent.config import Config
from logferry.client.agent.file_batches import HeldBatches
from logferry.client.agent.looks import Shared
from logferry.client.agent.schedule import PushJob, Throttle
from logferry.client.agent.source import FileSource
from logferry.client.agent.status import render_metrics, write_status
from logferry.client.agent.watch import Watch
from logferry.client.events import log_event
from logferry.client.files.batches import InFlightLog, SentBatch
from logferry.client.files.checkpoint import Checkpoint, CheckpointEntry
from logferry.client.files.discover import FileKey
from logferry.client.files.tail import FileChanged
from logferry.client.inputs.inputs import Inputs
from logferry.client.transport.failover import FailoverPolicy
from logferry.client.transport.kubelet import PodLabels
from logferry.client.transport.source_request import NextStep, Outcome, shows_life

REMEMBER_EVERY_S = 5.0
PRESSED_EVERY_S = 0.5
STATUS_EVERY_S = 5.0
AWAY_AFTER_S = 5.0
STALE_S, LABELS_LOOK_S = 1.0, 0.1
SLOW_S, SLOW_FOR_S = 5.0, 120.0  # a topic is slow for so long after a request that took 5 s
HEARD_EVERY_MS = 3_600_000  # a heartbeat alone is noted so often


class Layer:
    """A watch with its state on the disk: what has at most one topic of each file."""

    def __init__(self, config: Config, checkpoint: Checkpoint, shared: Shared) -> None:
        self.checkpoint = checkpoint
        self.shared = shared
        self.watch = Watch(config, checkpoint, shared)
        self._cuts = InFlightLog(checkpoint.folder)
        self._is_first = checkpoint is checkpoint.layer(0)

    def log_in_flight(self, leaving: Iterable[tuple[FileSource, PushJob]]) -> None:
        """Raises OSError."""
        self._cuts.add(source.batches.leaving(source.reading, job.batch) for source, job in leaving if job.batch)

    def update(self, now_ms: int) -> list[FileSource]:
        """Brings what the next save writes up to date. Returns the sources whose entries are new then."""
        sources, changed = self.watch.sources, self.checkpoint.changed
        changed_sources = [sources[name] for name in changed if name in sources]
        for source in sources.values() if self.checkpoint.is_whole_next else changed_sources:
            source.update_entry(now_ms)
        return changed_sources

    def save(self) -> None:
        """Raises OSError."""
        is_whole = self.checkpoint.is_whole_next
        if not (self._is_first or self.checkpoint.changed or (is_whole and self.checkpoint.entries)):
            return
        self.checkpoint.save()
        if is_whole or self._cuts.is_full:
            of_unopened = [
                SentBatch(name, cut, cuts[0].start)
                for name, cuts in self.checkpoint.cuts.items()
                for cut in cuts
                if name in self.checkpoint.entries and name not in self.watch.sources
            ]
            of_sources = (sent for one in self.watch.sources.values() for sent in one.batches.in_flight(one.reading))
            with suppress(OSError):
                self._cuts.begin(chain(of_unopened, of_sources))

    def close(self) -> None:
        self.watch.close()
        self._cuts.close()


def layers_of(config: Config, checkpoint: Checkpoint, centres: FailoverPolicy, inputs: Inputs) -> list[Layer]:
    """As many as a file has topics, or had when the client was here before: what is left of these is still sent."""
    count = max(checkpoint.used_layers, *(len(files.topics) for files in config.files))
    shared = Shared(config, centres, inputs, count)
    return [Layer(config, checkpoint.layer(number), shared) for number in range(count)]


class Agent:
    """Files, sources and checkpoint, without threads; the time is an argument, so that tests can drive it."""

    def __init__(self, config: Config, checkpoint: Checkpoint, now: float, inputs: Inputs | None = None) -> None:
        names = [centre.name for centre in config.data_centres]
        here = names.index(checkpoint.dc) if checkpoint.dc in names else 0
        self.centres = FailoverPolicy(names, config.failover_s, config.failback_s, here)
        self.inputs = inputs or Inputs()
        self.layers = layers_of(config, checkpoint, self.centres, self.inputs)
        self.watches = [layer.watch for layer in self.layers]
        self.watch = self.watches[0]
        self.chunks = self.bytes = 0
        self.last_progress = now
        self.pods = None if config.kubelet is None or config.check else PodLabels(config.kubelet)
        self._config = config
        self._checkpoint = checkpoint
        self._away_since: float | None = None
        self._remembered = now
        self._moved = False
        self._pace = Throttle(config.bytes_per_s, now) if config.bytes_per_s else None
        self._cpu_pace = Throttle(config.cpu_percent / 100, now) if config.cpu_percent else None
        self._cpu_s = time.process_time()
        self._under_way: Counter[str] = Counter()  # by topic
        self._slow: dict[str, float] = {}  # topics with a request that took long: until when they count as slow
        self._next_status = now
        self._save_failed: float | None = None
        self._held = HeldBatches(config.threads, 2 * config.request_bytes)
        self._unfinished: list[FileSource] = []  # of which `is_done` has to ask the last one first

    def _layer(self, source: FileSource) -> Layer:
        return self.layers[source.layer]

    def _watch(self, source: FileSource) -> Watch:
        return self.watches[source.layer]

    def _sources(self) -> Iterator[FileSource]:
        return (source for watch in self.watches for source in watch.sources.values())

    def start_hints(self, wake: Callable[[], None]) -> None:
        for watch in self.watches:
            watch.looks.hints.start(wake)

    def take_hints(self, now: float) -> None:
        for watch in self.watches:
            if watch.looks.hints.is_due:
                watch.take_hints(now)

    def wake_all(self, now: float) -> None:
        """Also sources that pause after a refusal."""
        for watch in self.watches:
            watch.wake_all(now)

    def tick(self, now: float) -> None:
        self._choose_centre(now)
        self.inputs.check()
        for key in self.inputs.news():
            for watch in self.watches:
                watch.refresh(watch.source_at(key), now)
        for watch in self.watches:
            watch.tick(now)
        self.layers[0].shared.deleted.close_too_many()
        every_s = PRESSED_EVERY_S if self.inputs.is_pressed else REMEMBER_EVERY_S
        if self._moved and now - self._remembered >= every_s:
            self.remember(now)
        if now >= self._next_status and not self._config.once:
            self._next_status = now + STATUS_EVERY_S
            with suppress(OSError):  # a full disk is logged when the checkpoint cannot be written
                folder = Path(self._config.state_dir)
                write_status(folder, self.watches, now, self.centres, self.inputs.status())

    def metrics(self, now: float) -> str:
        """The text for `MetricsPage`."""
        away_s = 0.0 if self._away_since is None else now - self._away_since
        facts = {
            "sent_bytes_total": ("counter", "Bytes of files that gateways acknowledged.", float(self.bytes)),
            "sent_chunks_total": ("counter", "Chunks that gateways acknowledged.", float(self.chunks)),
            "held_bytes": ("gauge", "Bytes of files in memory, waiting for an answer.", float(self.held_bytes())),
            "away_seconds": ("gauge", "Seconds for which no gateway has taken chunks.", away_s),
            "process_cpu_seconds_total": ("counter", "Processor time of the client.", time.process_time()),
        }
        here = self.centres.names[self.centres.here]
        return render_metrics(self.watches, now, facts, here, self.inputs.status())

    def _choose_centre(self, now: float) -> None:
        """Every source switches, each when its present request was answered."""
        is_back = self.centres.switch(now)
        if is_back is not None:
            self.wake_all(now)
            here = self._checkpoint.dc = self.centres.names[self.centres.here]
            self.last_progress = now
            if is_back:
                log_event("data-centre-back", to=here, why=self.centres.why)
            else:
                log_event("data-centre-left", to=here, why=self.centres.why)

    def jobs(self, now: float, room: int) -> list[tuple[FileSource, PushJob]]:
        """At most ``room`` requests that may be sent now: the identity of their sources is on the disk."""
        ready: dict[FileSource, PushJob] = {}
        without: list[FileSource] = []
        room, busy = self._paced(now, room), self._under_way.copy()
        threads = room + sum(busy.values())
        slow = {topic for topic, until in self._slow.items() if now < until}
        while len(ready) < room and (source := self.watch.ready.pop(now, busy, threads, slow)) is not None:
            if source in ready:
                continue  # its own look woke it again
            if self.pods is not None and not self.pods.label(source.batches, now):
                self.watch.ready.put(source, now + LABELS_LOOK_S)  # they are asked for, and worth a short wait
                continue
            self._watch(source).refresh(source, now, STALE_S)  # before it reports what is in the file
            try:
                may_run_ahead = self._held.may_run_ahead(one.batches for one in ready)
                job = source.next_job(now, int(time.time() * 1000), self._config.idle_s, may_run_ahead)
            except FileChanged as change:
                self._watch(source).renew(source, str(change), now)
                continue
            except OSError as error:
                source.cannot_read(error, now, self._config.once)
                job = None
            if job is not None:
                ready[source] = job._replace(at=now)
                busy[job.topic] += 1
            else:
                without.append(source)
        for source in without:
            self._watch(source).settle(source, now)
        unsaved = [source for source in ready if source.unsaved]
        for source in unsaved:
            self._layer(source).checkpoint.changed.add(source.name)
        if unsaved:
            self.remember(now)
        logged = self._log_in_flight([(source, job) for source, job in ready.items() if not source.unsaved], now)
        leaving: list[tuple[FileSource, PushJob]] = []
        for source, job in ready.items():
            if not source.unsaved and (source.layer in logged or job.batch is None):
                source.leave(job, now)
                self._held.leaves(source.batches)
                leaving.append((source, job))
            else:
                source.let_go()
                self.watch.ready.put(source, now + REMEMBER_EVERY_S)
        self._under_way.update(job.topic for _, job in leaving)
        return leaving

    def _log_in_flight(self, leaving: list[tuple[FileSource, PushJob]], now: float) -> set[int]:
        """Before they are sent: after a reboot nothing else proves it. The layers of which it failed have to wait."""
        logged = set()
        for number, layer in enumerate(self.layers):
            try:
                layer.log_in_flight(each for each in leaving if each[0].layer == number)
                logged.add(number)
            except OSError as error:
                self._write_failed(error, now)
        return logged

    def _write_failed(self, error: OSError, now: float) -> None:
        if self._save_failed is None or now - self._save_failed >= REMEMBER_EVERY_S:
            log_event("state-write-failed", reason=error.strerror)
            self._save_failed = now

    def _paced(self, now: float, room: int) -> int:
        """No request while a limit is overdrawn. With a limit on bytes one at a time, so that each is accounted for."""
        if self._cpu_pace is not None:
            used_s = time.process_time()
            self._cpu_pace.spend(used_s - self._cpu_s)
            self._cpu_s = used_s
            room = room if self._cpu_pace.is_open(now) else 0
        if self._pace is not None:
            room = min(room, 1 - sum(self._under_way.values())) if self._pace.is_open(now) else 0
        return room

    def sent(self, source: FileSource, job: PushJob, now: float) -> None:
        """The body of a job has left."""
        if job.slot is not None:
            source.window.left(job.slot)
        if source.name in self._watch(source).sources:
            self.watch.ready.put(source, now)

    def finish(self, source: FileSource, job: PushJob, outcome: Outcome, now: float) -> None:
        """Applies the outcome of a job."""
        self._under_way[job.topic] -= 1
        if now - job.at >= SLOW_S:
            self._slow[job.topic] = now + SLOW_FOR_S
        watch = self._watch(source)
        if source.name in watch.sources:
            watch.wake(source, now)
        self.centres.record(job.dc, shows_life(outcome.answer), now)
        if self._pace is not None:
            self._pace.spend(outcome.sent_bytes)
        try:
            do = source.take(job, outcome, now, self._config.once)
        except FileChanged as change:
            source.window.close_session()  # the next one says where it resumes, if there is a copy
            watch.renew(source, str(change), now)
            return
        except OSError as error:
            source.cannot_read(error, now, self._config.once)
            return
        is_news = job.beat is None or time.time() * 1000 - source.entry.heard_ms >= HEARD_EVERY_MS
        if do is NextStep.ADVANCE and is_news:
            self._moved = True
            self._layer(source).checkpoint.changed.add(source.name)
        if do is NextStep.ADVANCE:
            self.chunks += source.settled[0]
            self.bytes += source.settled[1]
            source.settled = 0, 0
            if self._away_since is not None:
                log_event("gateway-back", after_s=round(now - self._away_since, 1))
            self._away_since, self.last_progress = None, now
        is_away = do in (NextStep.WAIT, NextStep.AGAIN) and now - self.last_progress >= AWAY_AFTER_S
        if is_away and self._away_since is None:
            self._away_since = now
            log_event("gateway-away", status=outcome.answer.status, detail=outcome.answer.detail)
        if self._held.is_too_much(source.batches):
            source.let_go()

    def held_bytes(self) -> int:
        """Bytes of files in memory: of requests under way, and of those that wait to be sent again."""
        return sum(source.batches.held_bytes for source in self._sources())

    def remember(self, now: float) -> bool:
        """Writes the checkpoint. False when that failed: it is logged, and not tried again for a while."""
        if self._save_failed is not None and now - self._save_failed < REMEMBER_EVERY_S:
            return False
        now_ms = int(time.time() * 1000)
        changed_sources = [layer.update(now_ms) for layer in self.layers]
        freed = self.inputs.before_save(self._entries_at)
        for layer in self.layers:
            layer.checkpoint.changed.update(name for name in freed if name in layer.checkpoint.entries)
        self._remembered = now
        failed: OSError | None = None
        for layer, sources in zip(self.layers, changed_sources):
            try:
                layer.save()
            except OSError as error:
                failed = error
            else:
                for source in sources:
                    source.unsaved = False
        if failed is not None:
            self._write_failed(failed, now)
            return False
        self._moved, self._save_failed = False, None
        self.inputs.saved(self._entries_at)
        return True

    def _entries_at(self, key: FileKey) -> list[CheckpointEntry]:
        """Of all topics of the file; none while one of them is not followed yet."""
        sources = [source for watch in self.watches if (source := watch.source_at(key)) is not None]
        same = [files for files in self._config.files if sources and files.patterns == sources[0].files.patterns]
        is_whole = len(sources) >= max((len(files.topics) for files in same), default=1)
        return [source.entry for source in sources] if is_whole else []

    def close(self) -> None:
        """Closes the files and writes nothing."""
        for layer in self.layers:
            layer.close()
        if self.pods is not None:
            self.pods.close()

    def failures(self) -> dict[str, str]:
        """Files and sources that could not be sent, with the reason."""
        failed = {path: why for watch in self.watches for path, why in watch.failed.items()}
        return {**failed, **{source.name: source.stopped for source in self._sources() if source.stopped}}

    def is_done(self) -> bool:
        """With thousands of sources, asking all of them after each answer would take longer than the answers."""
        while self._unfinished:
            if not self._unfinished[-1].is_done():
                return False
            self._unfinished.pop()
        self._unfinished = [source for source in self._sources() if not source.is_done()]
        return not self._unfinished
