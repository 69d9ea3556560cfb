"""The few threads that carry requests. Each has its own connections; everything else is done by the main thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from logferry.client.agent.requests import Job, Pusher
from logferry.client.agent.source import Source
from logferry.client.transport.cluster import Cluster
from logferry.client.transport.connections import ANSWER_TIMEOUT_S, Connections
from logferry.client.transport.dialer import Dialer
from logferry.client.transport.redirects import Outcome

try:
    from _queue import Empty, SimpleQueue  # those of queue, without the 0.3 MB for its other kinds
except ImportError:
    from queue import Empty, SimpleQueue

PROBE_TIMEOUT_S = 5.0


class Result(NamedTuple):
    source: Source
    job: Job
    outcome: Outcome


class Probed(NamedTuple):
    """Whether the data centre of this number works."""

    dc: int
    works: bool


class Workers:
    """``free`` threads can take a job now; a result comes for every job. One more thread probes data centres, where
    there are several, so that one that does not answer holds up no lines."""

    def __init__(self, count: int, clusters: Sequence[Cluster], gzip: bool, dialer: Dialer | None = None) -> None:
        self.free = count
        self.may_probe = len(clusters) > 1
        self._jobs: SimpleQueue[tuple[Source, Job] | None] = SimpleQueue()
        self._probes: SimpleQueue[int | None] = SimpleQueue()
        self._results: SimpleQueue[Result | Probed | BaseException | None] = SimpleQueue()
        self._threads = []
        self._prober: threading.Thread | None = None
        for number in range(count + self.may_probe):
            probes = number == count
            connections = Connections(PROBE_TIMEOUT_S if probes else ANSWER_TIMEOUT_S, dialer)
            pusher = Pusher(clusters, connections.exchange, gzip)
            target, name = (self._probe, "probe") if probes else (self._work, f"push-{number}")
            thread = threading.Thread(target=target, args=(pusher, connections), name=name, daemon=True)
            if probes:
                self._prober = thread
            else:
                self._threads.append(thread)
            thread.start()

    def start(self, source: Source, job: Job) -> None:
        self.free -= 1
        self._jobs.put((source, job))

    def probe(self, dc: int) -> None:
        """Only while ``may_probe``: one at a time."""
        self.may_probe = False
        self._probes.put(dc)

    def wait(self, timeout_s: float) -> Result | Probed | None:
        """The next result; None when none came in time or `wake` was called. Raises what a thread died of."""
        try:
            result = self._results.get(timeout=max(timeout_s, 0.0))
        except Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, Probed):
            self.may_probe = True
        elif result is not None:
            self.free += 1
        return result

    def wake(self) -> None:
        """Ends a `wait`; may be called from a signal handler (`queue.SimpleQueue.put` is reentrant)."""
        self._results.put(None)

    def close(self, timeout_s: float) -> None:
        """Ends the threads; one whose request is still under way is left to the end of the process."""
        for _ in self._threads:
            self._jobs.put(None)
        self._probes.put(None)
        if self._prober is not None and self.may_probe:
            self._prober.join(timeout_s)
        if self.free == len(self._threads):
            for thread in self._threads:
                thread.join(timeout_s)

    def _probe(self, pusher: Pusher, connections: Connections) -> None:
        try:
            while True:
                dc = self._probes.get()
                if dc is None:
                    return
                self._results.put(Probed(dc, pusher.probe(dc)))
        except BaseException as error:  # noqa: BLE001  (a defect: the main thread raises it)
            self._results.put(error)
        finally:
            connections.close()

    def _work(self, pusher: Pusher, connections: Connections) -> None:
        try:
            while True:
                item = self._jobs.get()
                if item is None:
                    return
                source, job = item
                self._results.put(Result(source, job, pusher.perform(job)))
        except BaseException as error:  # noqa: BLE001  (a defect: the main thread raises it)
            self._results.put(error)
        finally:
            connections.close()
