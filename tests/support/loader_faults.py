"""Faults of loaders: frozen ones that wake, and racing ones that are killed at random instants; and their input."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.support.loader import Sent, chunks_of
from tests.support.loader_process import LoaderProcess


def seeded() -> random.Random:
    """The choices of a run. Prints the seed; ``LOGFERRY_SEED`` repeats a run."""
    seed = int(os.environ.get("LOGFERRY_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"LOGFERRY_SEED={seed}")
    return random.Random(seed)


def logs(sources: int, lines: int, round_: int = 0) -> list[Sent]:
    """Lines of several sources, a bad one in each chunk, a megabyte or so in all."""
    sent: list[Sent] = []
    for source in range(sources):
        parts = [
            b"".join(b"%d %d %s\n" % (part, line, b"x" * 60) for line in range(lines)) + b"\xff\n" for part in range(20)
        ]
        sent += chunks_of(f"web{source}", *parts, start=round_ * 100_000_000)
    return sent


@contextmanager
def frozen(loader: LoaderProcess) -> Iterator[None]:
    """Stops the loader and its JVM; both continue at the end."""
    jvm = loader.jvm()
    assert jvm is not None
    processes = (jvm, loader.process.pid)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


class RacingLoaders:
    """Loaders at work on one table. ``starts``: starts each of them, the first time and after its end."""

    def __init__(self, dice: random.Random, starts: Sequence[Callable[[], LoaderProcess]]) -> None:
        self._dice, self._starts = dice, starts
        self._running = [start() for start in starts]

    def kill_one(self) -> None:
        """Kills one, or its Python or its JVM alone. Starts again every loader that has ended."""
        victim = self._dice.randrange(len(self._running))
        self._running[victim].kill(python=self._dice.random() < 0.7, jvm=self._dice.random() < 0.7)
        for number, loader in enumerate(self._running):
            if number == victim or loader.process.poll() is not None:
                loader.kill()
                loader.finish()
                self._running[number] = self._starts[number]()

    def finish(self) -> None:
        """Returns when all have ended: with everything loaded, or with a batch that the next run repeats."""
        for loader in self._running:
            status, summary, err = loader.finish()
            assert status in (0, 3), (summary, err)
