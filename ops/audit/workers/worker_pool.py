"""Processes that read for the audit. They are this program again, and get their work through a socket of their own:
settings and credentials are in no argument, file or variable.

Each job is done once and its result returned, or the run ends with an error: a worker that is killed is named with the
job that it had. Memory does not grow with the jobs: a worker gets its next job when its result was taken.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Final, Protocol, TypeVar

from logferry.ops.audit.workers.worker_process import BROKEN, DONE, PROGRESS, REFUSED
from logferry.ops.cli.problems import Unavailable

J = TypeVar("J")
R = TypeVar("R")
Job = TypeVar("Job", contravariant=True)
Result = TypeVar("Result", covariant=True)
_DIED: Final = "died"
_MODULE: Final = "logferry.ops.audit.workers.worker_process"


class Work(Protocol[Job, Result]):
    """Sent to each worker, entered, and given jobs. Errors that are no CommandError are errors of the program."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *error: object) -> None: ...

    def handles(self) -> Sequence[int]:
        """File descriptors that a worker needs."""

    def adopt(self, handles: list[int]) -> None:
        """Called in the worker, with descriptors of its own for the same files."""

    def name(self, job: Job) -> str:
        """For errors."""

    async def do(self, job: Job, advance: Callable[[int], None]) -> Result:
        """``advance``: to be called with the part of the job that is done."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    job: Any = None
    done: int = 0

    @classmethod
    def start(cls) -> _Worker:
        ours, theirs = socket.socketpair()
        # A signal for the terminal's processes must not reach it before it ignores that.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            command = [sys.executable, "-m", _MODULE, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            theirs.close()
        return cls(process, Connection(ours.detach()))

    def receive(self) -> tuple[str, Any]:
        try:
            found: tuple[str, Any] = self.connection.recv()
            return found
        except (EOFError, OSError):
            return _DIED, None

    def give(self, job: Any) -> None:
        self.job, self.done = job, 0
        with suppress(OSError):  # its end is noticed when it answers nothing
            self.connection.send(job)

    def begin(self, work: Work[Any, Any]) -> None:
        with suppress(OSError):
            handles = work.handles()
            self.connection.send((work, len(handles)))
            for handle in handles:
                send_handle(self.connection, handle, self.process.pid)


@dataclass
class WorkerPool:
    """``size``: how many processes read at the same time; 1: this one alone. Processes are started when needed and end
    with `close`."""

    size: int
    _workers: list[_Worker] = field(default_factory=list)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def run(
        self, work: Work[J, R], jobs: Sequence[J], advance: Callable[[int], None], *, is_small: bool = False
    ) -> AsyncGenerator[R, None]:
        """The results, in any order. ``advance``: called with the part of the present jobs that is done. ``is_small``:
        less than it takes to start a process. Raises what `Work.do` raises; Unavailable when a worker dies."""
        if is_small or min(self.size, len(jobs)) <= 1:
            async with work:
                for job in jobs:
                    yield await work.do(job, advance)
            return
        workers = self._started(min(self.size, len(jobs)))
        waiting, answers = deque(jobs), asyncio.Queue[tuple[_Worker, str, Any]]()
        loop = asyncio.get_running_loop()
        try:
            for worker in workers:
                worker.begin(work)
                worker.give(waiting.popleft())
                loop.add_reader(worker.connection.fileno(), self._read, worker, answers)
            for _ in jobs:
                yield await self._next(workers, waiting, answers, work, advance)
        finally:
            for worker in workers:
                loop.remove_reader(worker.connection.fileno())

    async def _next(
        self,
        workers: Sequence[_Worker],
        waiting: deque[J],
        answers: asyncio.Queue[tuple[_Worker, str, Any]],
        work: Work[J, R],
        advance: Callable[[int], None],
    ) -> R:
        while True:
            worker, kind, value = await answers.get()
            if kind == PROGRESS:
                worker.done = value
                advance(sum(one.done for one in workers))
            elif kind == DONE:
                worker.give(waiting.popleft() if waiting else None)
                result: R = value
                return result
            elif kind == REFUSED:
                raise value
            elif kind == BROKEN:
                raise RuntimeError(f"a worker of the audit failed while it read {self._job(worker, work)}:\n{value}")
            else:
                raise Unavailable(self._death(worker, work))

    def _read(self, worker: _Worker, answers: asyncio.Queue[tuple[_Worker, str, Any]]) -> None:
        kind, value = worker.receive()
        if kind == _DIED:
            asyncio.get_running_loop().remove_reader(worker.connection.fileno())
            if worker.job is None:
                return  # it had answered everything
        answers.put_nowait((worker, kind, value))

    def _job(self, worker: _Worker, work: Work[Any, Any]) -> str:
        return "nothing" if worker.job is None else work.name(worker.job)

    def _death(self, worker: _Worker, work: Work[Any, Any]) -> str:
        status = worker.process.wait()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return (
            f"a worker (process {worker.process.pid}) {how} while it read {self._job(worker, work)}; run the audit "
            "again, with fewer --workers if memory was short"
        )

    def _started(self, count: int) -> list[_Worker]:
        self._workers = [worker for worker in self._workers if worker.process.poll() is None]
        while len(self._workers) < count:
            self._workers.append(_Worker.start())
        return self._workers[:count]

    def close(self) -> None:
        """Ends all workers, whatever they do."""
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
            worker.process.wait()
        self._workers.clear()


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))
