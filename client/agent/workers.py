"""The threads that carry requests of sources, each over its own connections. The main thread does everything else.

`Signals` is what the main thread is asked from outside, `GivenConfig` what it reads again then.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, NamedTuple, NoReturn, Union

from logferry.client.agent.config import Config, parse
from logferry.client.agent.schedule import PushJob
from logferry.client.agent.source import FileSource
from logferry.client.events import log_event
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import ANSWER_TIMEOUT_S, Connections, Dialer, NoResponse, Reply
from logferry.client.transport.source_request import Outcome, SourceAddress, SourceRequest

try:
    from _queue import Empty, SimpleQueue  # those of queue, without the 0.3 MB for its other kinds
except ImportError:
    from queue import Empty, SimpleQueue

PROBE_TIMEOUT_S = 5.0
USER_AGENT = "logferry-push"
_Exchange = Callable[..., Reply]  # url, headers, body, method; and what to call when the body has left


class Signals:
    """``end``: SIGTERM or SIGINT came; ``reread``: SIGHUP. From a terminal, a hangup still ends the client.

    SIGHUP is noted from the beginning on, the others while the client `serves`.
    """

    def __init__(self) -> None:
        self.end = self.reread = False
        self._wake: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if not os.isatty(2):
            self._take(signal.SIGHUP)
        return self

    def serves(self, wake: Callable[[], None]) -> None:
        """``wake`` is called after each signal."""
        self._wake = wake
        self._take(signal.SIGTERM)
        self._take(signal.SIGINT)

    def _take(self, number: int) -> None:
        self._before.setdefault(number, signal.signal(number, self._handle))

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            self.reread = True
        else:
            self.end = True
        self._wake()


class GivenConfig:
    """``config``: by the command line and the file that it names. Raises as `parse`."""

    def __init__(self, argv: Sequence[str] | None = None) -> None:
        self._argv = argv
        self.config = parse(argv)

    def has_changed(self) -> bool:
        """Reads all of it again. One with an error is logged, and the one before stays in use."""
        try:
            config = parse(self._argv, _raise)
            if any(each.kind == "stdin" for each in self.config.inputs) and _lasting(config) != _lasting(self.config):
                raise ValueError("standard input cannot be begun again: restart the client")
        except (ValueError, OSError) as error:
            log_event("config-unusable", reason=error)
            return False
        if _lasting(config) == _lasting(self.config):
            return False
        log_event("config-read")
        self.config = config
        return True


def _raise(text: str) -> NoReturn:
    raise ValueError(text)


def _lasting(config: Config) -> Config:
    """Without the tokens, which are read again by themselves."""
    return config._replace(data_centres=tuple(centre._replace(token=None) for centre in config.data_centres))


class Pusher:
    """Carries out jobs, one at a time. ``clusters``: by the number of their data centre; all threads share them."""

    def __init__(self, clusters: Sequence[GatewayCluster], exchange: _Exchange, encoding: str = "gzip") -> None:
        self.clusters = clusters
        self.exchange = exchange
        self.encoding = encoding

    def request(self, job: PushJob) -> SourceRequest:
        """That of the job."""
        to = SourceAddress(self.clusters[job.dc], USER_AGENT, job.topic, job.source_id)
        if job.batch is not None:
            # They may be sent again; uncompressed ones are views of the batch and take no memory.
            parts = list(job.batch.body(job.skips))
            return SourceRequest(
                *(to, "chunks", job.session, parts), encoding=self.encoding, direct=job.direct, owner=job.url
            )
        if job.beat is not None:
            said = {name: value for name, value in job.beat._asdict().items() if value is not None}
            return SourceRequest(to, "heartbeat", job.session, json.dumps(said).encode())
        return SourceRequest(to, "session")

    def perform(self, job: PushJob, sent: Callable[[], None] | None = None) -> Outcome:
        """Never raises for faults of the network or the gateway: the outcome holds them. Calls ``sent`` when the body
        has left."""
        request = self.request(job)
        told = () if sent is None else (sent,)
        outcome = request.follow(lambda url, headers, body: self.exchange(url, headers, body, "POST", *told))
        return outcome._replace(sent_bytes=request.parts_bytes)

    def probe(self, dc: int) -> bool:
        """Whether one of the given gateways of the data centre is ready."""
        return any(self._is_ready(url) for url in self.clusters[dc].urls)

    def _is_ready(self, base: str) -> bool:
        try:
            return self.exchange(f"{base}/readyz", {"User-Agent": USER_AGENT}, None, "GET").status == 200
        except NoResponse:
            return False


class JobResult(NamedTuple):
    source: FileSource
    job: PushJob
    outcome: Outcome


class BodySent(NamedTuple):
    """The body of the job has left; its answer is not there yet."""

    source: FileSource
    job: PushJob


class ProbeResult(NamedTuple):
    """Whether the data centre with this number works."""

    dc: int
    works: bool


_Result = Union[JobResult, BodySent, ProbeResult]
_Task = Callable[[Pusher], Union[JobResult, ProbeResult]]


class Workers:
    """``free`` threads can take a job now; every job has a result. If there are several data centres, one more thread
    probes them, so that one that does not answer delays no lines."""

    def __init__(self, count: int, clusters: Sequence[GatewayCluster], encoding: str, dialer: Dialer) -> None:
        self.free = self._count = count
        self.may_probe = len(clusters) > 1
        self._jobs: SimpleQueue[_Task | None] = SimpleQueue()
        self._probes: SimpleQueue[_Task | None] = SimpleQueue()
        self._results: SimpleQueue[_Result | BaseException | None] = SimpleQueue()

        def begin(name: str, tasks: SimpleQueue[_Task | None], timeout_s: float) -> threading.Thread:
            connections = Connections(timeout_s, dialer)
            pusher = Pusher(clusters, connections.exchange, encoding)
            thread = threading.Thread(target=self._work, args=(tasks, pusher, connections), name=name, daemon=True)
            thread.start()
            return thread

        self._pushers = [begin(f"push-{number}", self._jobs, ANSWER_TIMEOUT_S) for number in range(count)]
        self._probers = [begin("probe", self._probes, PROBE_TIMEOUT_S)] if self.may_probe else []

    def start(self, source: FileSource, job: PushJob) -> None:
        self.free -= 1
        sent = partial(self._results.put, BodySent(source, job)) if job.more else None
        self._jobs.put(lambda pusher: JobResult(source, job, pusher.perform(job, sent)))

    def probe(self, dc: int) -> None:
        """Only while ``may_probe``: one at a time."""
        self.may_probe = False
        self._probes.put(lambda pusher: ProbeResult(dc, pusher.probe(dc)))

    def wait(self, timeout_s: float) -> _Result | None:
        """The next result; None if none came in time or `wake` was called. Raises the error that ended a thread."""
        try:
            result = self._results.get(timeout=max(timeout_s, 0.0))
        except Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, ProbeResult):
            self.may_probe = True
        elif isinstance(result, JobResult):
            self.free += 1
        return result

    def wake(self) -> None:
        """Ends a `wait`; may be called from a signal handler (`queue.SimpleQueue.put` is reentrant)."""
        self._results.put(None)

    def close(self, timeout_s: float) -> None:
        """Ends the threads; one whose request is still under way ends with the process."""
        for _ in self._pushers:
            self._jobs.put(None)
        self._probes.put(None)
        idle = [*(self._probers if self.may_probe else ()), *(self._pushers if self.free == self._count else ())]
        for thread in idle:
            thread.join(timeout_s)

    def _work(self, tasks: SimpleQueue[_Task | None], pusher: Pusher, connections: Connections) -> None:
        try:
            while (task := tasks.get()) is not None:
                self._results.put(task(pusher))
                del task  # it has a batch
        except BaseException as error:  # noqa: BLE001  (a defect: the main thread raises it)
            self._results.put(error)
        finally:
            connections.close()
