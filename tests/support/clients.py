"""Load through the library's writers, both faces, against real workers; every outcome goes into a history."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from logferry.client import AsyncWriter, Unknown, Writer

from tests.support.checker import History

# Of a chunk's size, so that several requests are under way, and the load is not more than the tests can hold.
_SMALL: dict[str, Any] = {"batch_bytes": 2000, "buffer_bytes": 20_000}


@dataclass
class LibraryLoad:
    """``async with`` it; leaving it drains the writers. Small batches, so that several requests are under way.

    Now and then a writer is abandoned with chunks under way, as a program that is killed does, and another one goes on
    with its source where it says that it is.
    """

    topic: str
    urls: list[str]
    seed: int
    threads: int = 4
    tasks: int = 4
    history: History = field(default_factory=History)
    abandoned: int = 0
    reached: dict[str, int] = field(default_factory=dict)
    _stop: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def __aenter__(self) -> LibraryLoad:
        plain = [asyncio.to_thread(self._plain, number) for number in range(self.threads)]
        both = [self._asyncio(number) for number in range(self.tasks)]
        self._running = [asyncio.create_task(work) for work in (*plain, *both)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop = True
        async with asyncio.timeout(120):
            await asyncio.gather(*self._running)

    async def acknowledged(self, more: int, within_s: float = 90) -> None:
        """Waits until so many more chunks are acknowledged: the faults meet a load that is under way."""
        wanted = self._acknowledged() + more
        async with asyncio.timeout(within_s):
            while self._acknowledged() < wanted:
                for task in self._running:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    def _acknowledged(self) -> int:
        with self._lock:
            return self.history.acknowledged()

    # ---- one source -----------------------------------------------------------------------------------------

    def _plain(self, number: int) -> None:
        source, rng = f"thread-{number}", random.Random(self.seed * 100 + number)
        while not self._stop:
            writer = Writer(self._shuffled(rng), self.topic, source, **_SMALL, gzip=number % 2 == 1)
            writer.open()
            book = _Book(self, source, writer.recorded_seqno)
            until, abandons = time.monotonic() + rng.uniform(0.5, 3), rng.random() < 0.5
            while not self._stop and time.monotonic() < until:
                data = _data(rng)
                book.wrote(writer.write(data), data)
                book.heard(writer.recorded_seqno)
            if abandons and not self._stop:
                self._give_up(writer, book)
            else:
                writer.close()
                book.heard(writer.recorded_seqno)

    def _give_up(self, writer: Writer, book: _Book) -> None:
        try:
            writer.close(0.0)
        except Unknown as unknown:
            self.abandoned += 1
            book.heard(unknown.recorded_seqno)
            book.ended(unknown.unknown_to)
        else:
            book.heard(writer.recorded_seqno)

    async def _asyncio(self, number: int) -> None:
        source, rng = f"task-{number}", random.Random(self.seed * 100 + 50 + number)
        while not self._stop:
            writer = AsyncWriter(self._shuffled(rng), self.topic, source, **_SMALL, gzip=number % 2 == 1)
            await writer.open()
            book = _Book(self, source, writer.recorded_seqno)
            until, abandons = time.monotonic() + rng.uniform(0.5, 3), rng.random() < 0.5
            while not self._stop and time.monotonic() < until:
                data = _data(rng)
                book.wrote(await writer.write(data), data)
                book.heard(writer.recorded_seqno)
                await asyncio.sleep(0)
            try:
                await writer.close(0.0 if abandons and not self._stop else None)
            except Unknown as unknown:
                self.abandoned += 1
                book.heard(unknown.recorded_seqno)
                book.ended(unknown.unknown_to)
            else:
                book.heard(writer.recorded_seqno)

    def _shuffled(self, rng: random.Random) -> list[str]:
        return rng.sample(self.urls, len(self.urls))


class _Book:
    """What one writer wrote and heard, noted down for the checker."""

    def __init__(self, load: LibraryLoad, source: str, recorded: int | None) -> None:
        self._load, self._source = load, source
        self._open: dict[int, bytes] = {}
        known = load.reached.get(source, 0)
        if (recorded or 0) < known:
            load.history.protests.append(f"{source}: a session at {recorded} does not know of {known}")

    def wrote(self, seqno: int, data: bytes) -> None:
        self._open[seqno] = data

    def heard(self, recorded: int | None) -> None:
        """All up to there is acknowledged."""
        done = [seqno for seqno in self._open if recorded is not None and seqno <= recorded]
        with self._load._lock:
            self._load.reached[self._source] = max([self._load.reached.get(self._source, 0), *done])
            for seqno in done:
                self._load.history.note(self._source, seqno, self._open.pop(seqno), "ok")

    def ended(self, unknown_to: int | None) -> None:
        """The writer was given up: up to there it is not known, and above it surely not recorded."""
        with self._load._lock:
            for seqno, data in self._open.items():
                unknown = unknown_to is not None and seqno <= unknown_to
                self._load.history.note(self._source, seqno, data, "unknown" if unknown else "fail")


def _data(rng: random.Random) -> bytes:
    lines = [rng.randbytes(rng.randint(0, 300)).replace(b"\n", b" ") + b"\n" for _ in range(rng.randint(1, 4))]
    return b"".join(lines)
