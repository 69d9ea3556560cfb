"""The few threads that carry requests. Each has its own connections; everything else is done by the main thread."""

from __future__ import annotations

import queue
import threading
from typing import NamedTuple

from logferry.client.cluster import Cluster
from logferry.client.connections import ANSWER_TIMEOUT_S, Connections
from logferry.client.dial import Dialer
from logferry.client.push import Job, Pusher
from logferry.client.source import Source
from logferry.client.trip import Outcome


class Result(NamedTuple):
    source: Source
    job: Job
    outcome: Outcome


class Workers:
    """``free`` threads can take a job now; a result comes for every job."""

    def __init__(self, count: int, cluster: Cluster, gzip: bool, dialer: Dialer | None = None) -> None:
        self.free = count
        self._jobs: queue.SimpleQueue[tuple[Source, Job] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
        self._threads = []
        for number in range(count):
            connections = Connections(ANSWER_TIMEOUT_S, dialer)
            pusher = Pusher(cluster, connections.exchange, gzip)
            thread = threading.Thread(target=self._work, args=(pusher, connections), name=f"push-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def start(self, source: Source, job: Job) -> None:
        self.free -= 1
        self._jobs.put((source, job))

    def wait(self, timeout_s: float) -> Result | None:
        """The next result; None when none came in time or `wake` was called. Raises what a thread died of."""
        try:
            result = self._results.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        if result is not None:
            self.free += 1
        return result

    def wake(self) -> None:
        """Ends a `wait`; may be called from a signal handler (`queue.SimpleQueue.put` is reentrant)."""
        self._results.put(None)

    def close(self, timeout_s: float) -> None:
        """Ends the threads; one whose request is still under way is left to the end of the process."""
        for _ in self._threads:
            self._jobs.put(None)
        if self.free == len(self._threads):
            for thread in self._threads:
                thread.join(timeout_s)

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
