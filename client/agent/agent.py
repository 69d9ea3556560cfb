"""The push-client's main loop: look at the files, give requests to threads, apply the answers, remember.

Everything but the requests themselves happens in the main thread. Memory is bounded by `held_bytes`, the batches
whose outcome is awaited; the files are the buffer. What is killed at any point is continued from the checkpoint
and from what the gateway has recorded.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from logferry.client.agent import inspect as status
from logferry.client.agent.config import Config, parse
from logferry.client.agent.failover import Centres
from logferry.client.agent.requests import Job
from logferry.client.agent.source import Source
from logferry.client.agent.watch import Watch
from logferry.client.agent.workers import Probed, Result, Workers
from logferry.client.check import check
from logferry.client.events import set_up, tell
from logferry.client.files.checkpoint import Checkpoint, StateUnusable
from logferry.client.files.in_flight import Cut, Cuts
from logferry.client.files.tail import Changed
from logferry.client.pace import Pace
from logferry.client.transport.cluster import Cluster
from logferry.client.transport.redirects import Outcome
from logferry.client.transport.responses import NO_ANSWER, Do

if TYPE_CHECKING:
    from logferry.client.agent.metrics import Page

REMEMBER_EVERY_S = 5.0
STATUS_EVERY_S = 5.0
PAGE_EVERY_S = 1.0
AWAY_AFTER_S = 5.0
END_GRACE_S = 5.0


class Agent:
    """Files, sources and checkpoint together; knows no threads and no clock, so that tests can drive it."""

    def __init__(self, config: Config, checkpoint: Checkpoint, now: float) -> None:
        names = [centre.name for centre in config.data_centres]
        here = names.index(checkpoint.dc) if checkpoint.dc in names else 0
        self.centres = Centres(names, config.failover_s, config.failback_s, here)
        self.watch = Watch(config, checkpoint, self.centres)
        self._cuts = Cuts(Path(config.state_dir)) if len(names) > 1 else None
        self.chunks = self.bytes = 0
        self.last_progress = now
        self._config = config
        self._checkpoint = checkpoint
        self._away_since: float | None = None
        self._remembered = now
        self._moved = False
        self._pace = Pace(config.bytes_per_s, now) if config.bytes_per_s else None
        self._cpu_pace = Pace(config.cpu_percent / 100, now) if config.cpu_percent else None
        self._cpu_s = time.process_time()
        self._under_way = 0
        self._next_status = now
        self._save_failed: float | None = None

    def tick(self, now: float) -> None:
        self._choose_centre(now)
        self.watch.tick(now)
        if self._moved and now - self._remembered >= REMEMBER_EVERY_S:
            self.remember(now)
        if now >= self._next_status and not self._config.once:
            self._next_status = now + STATUS_EVERY_S
            with suppress(OSError):  # a full disk is told when the checkpoint cannot be written
                folder = Path(self._config.state_dir)
                status.write(folder, self.watch.sources.values(), self.watch.failed, now, self.centres)

    def metrics(self, now: float) -> str:
        """The page for `metrics.Page`."""
        from logferry.client.agent import metrics

        facts = {
            "sent_bytes_total": ("counter", "Bytes of files that were acknowledged.", float(self.bytes)),
            "sent_chunks_total": ("counter", "Chunks that were acknowledged.", float(self.chunks)),
            "held_bytes": ("gauge", "Bytes of files in memory.", float(self.held_bytes())),
            "away_seconds": ("gauge", "For how long no gateway has taken anything.", self._away_s(now)),
            "process_cpu_seconds_total": ("counter", "Time of a processor that it took.", time.process_time()),
        }
        rows = [source.standing(now) for source in self.watch.sources.values()]
        return metrics.render(rows, len(self.watch.failed), facts, self.centres.names[self.centres.here])

    def _away_s(self, now: float) -> float:
        return 0.0 if self._away_since is None else now - self._away_since

    def _choose_centre(self, now: float) -> None:
        """Every source moves, each when its request under way has been answered."""
        move = self.centres.move(now)
        if move is not None:
            self._checkpoint.dc = self.centres.names[move.to]
            self.last_progress = now
            if move.back:
                tell("data-centre-back", to=self._checkpoint.dc, why=move.why)
            else:
                tell("data-centre-left", to=self._checkpoint.dc, why=move.why)

    def probed(self, dc: int, works: bool, now: float) -> None:
        """The outcome of the probe that `centres` wanted."""
        self.centres.heard(dc, works, now)

    def jobs(self, now: float, room: int) -> list[tuple[Source, Job]]:
        """At most ``room`` requests that may leave now: what identifies their sources is on the disk."""
        ready: list[tuple[Source, Job]] = []
        room = self._paced(now, room)
        for source in list(self.watch.sources.values()):
            if len(ready) >= room:
                break
            try:
                job = source.next_job(now, int(time.time() * 1000), self._config.idle_s)
            except Changed as change:
                self.watch.renew(source, str(change), now)
                continue
            except OSError as error:
                source.cannot_read(error, now, self._config.once)
                continue
            if job is not None:
                ready.append((source, job))
        for source, _ in ready:
            self.watch.sources[source.name] = self.watch.sources.pop(source.name)  # to the end of the row
        if any(source.unsaved for source, _ in ready):
            self.remember(now)
        for source, _ in ready:
            source.busy = not source.unsaved
            if source.unsaved:
                source.let_go()
        leaving = [(source, job) for source, job in ready if source.busy]
        self._note_cuts(leaving)
        self._under_way += len(leaving)
        return leaving

    def _note_cuts(self, leaving: list[tuple[Source, Job]]) -> None:
        """Before they leave. That it fails is told when the checkpoint cannot be written either."""
        if self._cuts is not None:
            with suppress(OSError):
                self._cuts.add((source.name, Cut.of(job.batch)) for source, job in leaving if job.batch is not None)

    def _paced(self, now: float, room: int) -> int:
        """No request while a limit is overdrawn; with a limit on bytes one at a time, so that each is accounted for."""
        if self._cpu_pace is not None:
            used_s = time.process_time()
            self._cpu_pace.spend(used_s - self._cpu_s)
            self._cpu_s = used_s
            room = room if self._cpu_pace.is_open(now) else 0
        if self._pace is not None:
            room = min(room, 1 - self._under_way) if self._pace.is_open(now) else 0
        return room

    def finish(self, source: Source, job: Job, outcome: Outcome, now: float) -> None:
        """Applies the outcome of a job."""
        self._under_way -= 1
        self.centres.heard(job.dc, NO_ANSWER < outcome.answer.status < 500, now)
        if self._pace is not None:
            self._pace.spend(outcome.sent_bytes)
        try:
            do = source.take(job, outcome, now, self._config.once)
        except Changed as change:
            self.watch.renew(source, str(change), now)
            return
        except OSError as error:
            source.cannot_read(error, now, self._config.once)
            return
        if do is Do.ADVANCE:
            self._moved = True
            self.chunks += len(job.batch.pieces) if job.batch else 0
            self.bytes += len(job.batch.data) if job.batch else 0
            if self._away_since is not None:
                tell("gateway-back", after_s=round(now - self._away_since, 1))
            self._away_since, self.last_progress = None, now
        elif do in (Do.WAIT, Do.AGAIN):
            if self._away_since is None and now - self.last_progress >= AWAY_AFTER_S:
                self._away_since = now
                tell("gateway-away", status=outcome.answer.status, detail=outcome.answer.detail)
            if self._resting_bytes() > 2 * self._config.request_bytes:
                source.let_go()

    def held_bytes(self) -> int:
        """Bytes of files in memory: those under way, one request a thread, and those that rest."""
        return sum(len(source.batch.data) for source in self.watch.sources.values() if source.batch)

    def _resting_bytes(self) -> int:
        """Of sources that wait to send the same bytes again. Few may; the others read theirs anew."""
        return sum(len(s.batch.data) for s in self.watch.sources.values() if s.batch and not s.busy)

    def remember(self, now: float) -> bool:
        """Writes the checkpoint; False when that failed, which is told, and for a while is not tried again."""
        if self._save_failed is not None and now - self._save_failed < REMEMBER_EVERY_S:
            return False
        now_ms = int(time.time() * 1000)
        for source in self.watch.sources.values():
            source.note(now_ms)
        self._remembered = now
        try:
            self._checkpoint.save()
        except OSError as error:
            tell("state-write-failed", reason=error.strerror)
            self._save_failed = now
            return False
        self._moved, self._save_failed = False, None
        if self._cuts is not None:
            cuts: dict[str, Cut | None] = {
                name: cut for name, cut in self._checkpoint.cuts.items() if name in self._checkpoint.entries
            }  # of files that were not looked at yet
            cuts.update((source.name, source.cut()) for source in self.watch.sources.values())
            with suppress(OSError):
                self._cuts.begin((name, cut) for name, cut in cuts.items() if cut is not None)
        for source in self.watch.sources.values():
            source.unsaved = False
        return True

    def close(self) -> None:
        """Closes files; writes nothing."""
        self.watch.close()
        if self._cuts is not None:
            self._cuts.close()

    def failures(self) -> dict[str, str]:
        """What could not be sent, and why."""
        stopped = {source.name: source.stopped for source in self.watch.sources.values() if source.stopped}
        return {**self.watch.failed, **stopped}

    def is_done(self) -> bool:
        return all(source.is_done() for source in self.watch.sources.values())


class Stop:
    """Set by SIGTERM and SIGINT."""

    requested = False


def run(config: Config, checkpoint: Checkpoint, stop: Stop, workers: Workers, page: Page | None = None) -> int:
    """The main loop; returns the exit status."""
    agent = Agent(config, checkpoint, time.monotonic())
    next_tick = next_page = 0.0
    exit_status: int | None = None
    while exit_status is None and not stop.requested:
        now = time.monotonic()
        if now >= next_tick:
            agent.tick(now)
            next_tick = now + config.linger_s
        if page is not None and now >= next_page:
            page.text = agent.metrics(now)
            next_page = now + PAGE_EVERY_S
        for source, job in agent.jobs(now, workers.free):
            workers.start(source, job)
        dc = agent.centres.probe(now) if workers.may_probe else None
        if dc is not None:
            workers.probe(dc)
        exit_status = _status(agent, config, now) if config.once else None
        result = workers.wait(next_tick - time.monotonic()) if exit_status is None else None
        if result is not None:
            _apply(agent, result)
    _end(agent, config, workers)
    if exit_status is None:
        exit_status = 1 if config.once and not agent.is_done() else 0
    tell("stopped", status=exit_status, chunks=agent.chunks, bytes=agent.bytes)
    return exit_status


def _apply(agent: Agent, result: Result | Probed) -> None:
    if isinstance(result, Probed):
        agent.probed(*result, time.monotonic())
    else:
        agent.finish(*result, time.monotonic())


def _status(agent: Agent, config: Config, now: float) -> int | None:
    """With --once: how it ended, None while it goes on."""
    if agent.is_done():
        return 1 if agent.failures() else 0
    if now - agent.last_progress < config.timeout_s:
        return None
    tell("gateway-timeout", seconds=config.timeout_s)
    return 1 if agent.failures() else 3


def _end(agent: Agent, config: Config, workers: Workers) -> None:
    """Waits a little for the answers under way; what then has none is asked for at the next start."""
    deadline = time.monotonic() + END_GRACE_S
    while workers.free < config.threads and time.monotonic() < deadline:
        result = workers.wait(deadline - time.monotonic())
        if result is not None:
            _apply(agent, result)
    agent.remember(time.monotonic())
    agent.close()


@contextmanager
def _signals(stop: Stop, workers: Workers) -> Iterator[None]:
    def handle(number: int, frame: object) -> None:
        stop.requested = True
        workers.wake()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_file_limit() -> None:
    """Every file that is followed stays open, so that a rotated one can be read to its end."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        tell("file-limit", reason=error)


def _page(config: Config) -> Page | None:
    if not config.metrics_port:
        return None
    from logferry.client.agent.metrics import Page

    return Page(config.metrics_port)


def main(argv: Sequence[str] | None = None) -> int:
    """``logferry push``: returns the exit status."""
    try:
        config = parse(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    if config.status:
        return status.show(Path(config.state_dir), config.json)
    set_up(config.verbose)
    if config.check:
        return check(config)
    _raise_file_limit()
    os.nice(config.nice)
    try:
        checkpoint = Checkpoint.open(Path(config.state_dir))
    except StateUnusable as error:
        tell("state-unusable", reason=error)
        return 2
    stop = Stop()
    try:
        page = _page(config)
    except OSError as error:
        tell("metrics-unusable", port=config.metrics_port, reason=error.strerror)
        checkpoint.close()
        return 2
    clusters = [Cluster(centre.urls, centre.token) for centre in config.data_centres]
    workers = Workers(config.threads, clusters, config.gzip, config.dialer())
    try:
        with _signals(stop, workers):
            topics = " ".join(dict.fromkeys(files.topic for files in config.files))
            urls = " ".join(url for centre in config.data_centres for url in centre.urls)
            tell("started", url=urls, topic=topics, state_dir=config.state_dir)
            return run(config, checkpoint, stop, workers, page)
    finally:
        if page is not None:
            page.close()
        workers.close(END_GRACE_S)
        checkpoint.close()


if __name__ == "__main__":
    sys.exit(main())
