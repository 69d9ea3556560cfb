"""Load from many sources at once against real workers; every answer goes into a history for the checker.

Load through the library's writers, both faces, against real workers; every outcome goes into a history.

Readers that move between data centres by their cursor, a page in each."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from logferry.client import AsyncWriter, Unknown, Writer
from logferry.ops.stack.stack import Stack

from tests.support.checker import History
from tests.support.mirror import Log
from tests.support.writers import ChainedWriter, PipelinedWriter, SessionWriter, Shared

CHAINED = ("many", "single")
ALL_KINDS = ("many", "single", "pipelined", "session")


@dataclass
class Load:
    """``async with Load(…) as load: <faults>``; leaving it drains the writers. ``kinds`` of writers, in turn.

    ``topic_may_go``: the topic is deleted and recreated meanwhile; for `CHAINED` writers.
    """

    topic: str
    urls: list[str]
    seed: int
    sources: int = 16
    drain_s: float = 90
    kinds: tuple[str, ...] = CHAINED
    topic_may_go: bool = False
    history: History = field(default_factory=History)
    acknowledgements: list[tuple[str, float]] = field(default_factory=list)
    _stop: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=False))
        shared = Shared(
            self.topic,
            self.urls,
            self._session,
            self.history,
            self.acknowledgements,
            lambda: not self._stop,
            self.topic_may_go,
        )
        self._tasks = [asyncio.create_task(self._writer(number, shared).run()) for number in range(self.sources)]
        return self

    def _writer(self, number: int, shared: Shared) -> ChainedWriter | PipelinedWriter | SessionWriter:
        name, rng, redirects = f"host-{number}/access.log", random.Random(self.seed * 1000 + number), number % 8 < 4
        kind = self.kinds[number % len(self.kinds)]
        if kind == "pipelined":
            return PipelinedWriter(name, shared, rng, redirects)
        if kind == "session":
            return SessionWriter(name, shared, rng, redirects)
        return ChainedWriter(name, shared, rng, redirects, many=kind == "many")

    async def __aexit__(self, *exc: object) -> None:
        self._stop = True
        try:
            async with asyncio.timeout(self.drain_s):
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._session.close()

    async def acknowledged(self, more: int, within_s: float = 180) -> None:
        """Waits until so many more chunks are acknowledged: the faults meet a load that is under way."""
        wanted = self.history.acknowledged() + more
        async with asyncio.timeout(within_s):
            while self.history.acknowledged() < wanted:
                await asyncio.sleep(0.02)
                for task in self._tasks:
                    if task.done():
                        task.result()


# Of a chunk's size, so that several requests are under way, and the load is not more than the tests can hold.
_SMALL: dict[str, Any] = {"batch_bytes": 2000, "buffer_bytes": 20_000}


@dataclass
class LibraryLoad:
    """``async with`` it; leaving it drains the writers. Small batches, so that several requests are under way.

    Now and then a writer is abandoned with chunks under way, as a program that is killed does, and another one
    continues with its source at the recorded position.
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


class MovingReader:
    """Reads one partition, a page in each data centre in turn; ``seen``: (source, seqno), in order."""

    def __init__(
        self,
        stack: Stack,
        topic: str,
        partition: int,
        session: aiohttp.ClientSession,
        dcs: tuple[str, ...] = ("dc1", "dc2"),
    ) -> None:
        self._stack, self._session = stack, session
        self._path = f"/v1/topics/{topic}/partitions/{partition}/chunks"
        self.cursor = f"{topic}:{partition}:0"
        self.seen: list[tuple[str, int]] = []
        self.pages = dict.fromkeys(dcs, 0)

    async def page(self, dc: str) -> int:
        """How many chunks it held; -1: the data centre could not answer."""
        # Small steps where everything is there at once, so that something is left for the other.
        max_bytes = 2_000 if dc == "dc1" else 60_000
        parameters: dict[str, Any] = {"cursor": self.cursor, "max_bytes": max_bytes, "wait_ms": 300}
        headers = {"Accept": "application/x-ndjson"}
        url = self._stack.urls(dc)[0] + self._path
        try:
            async with self._session.get(url, params=parameters, headers=headers) as answer:
                body = await answer.read()
                if answer.status in (404, 503):
                    return -1  # it is not mirrored yet, or Kafka is away
                assert answer.status == 200, body
                self.cursor = answer.headers["X-Next-Cursor"]
        except aiohttp.ClientError:
            return -1
        rows = [json.loads(line) for line in body.splitlines()]
        self.seen += [(row["source_id"], row["seqno"]) for row in rows]
        self.pages[dc] += bool(rows)
        return len(rows)

    async def to_and_fro(self, is_over: asyncio.Event) -> None:
        """Until it is over and no data centre has anything more."""
        while True:
            was_over = is_over.is_set()
            found = [await self.page(dc) for dc in self.pages]
            if was_over and not any(found):
                return


async def have_moved(readers: list[MovingReader], more: int = 2) -> None:
    """Returns when each has got so many more pages in either data centre: the faults meet readers that move."""
    wanted = [{dc: pages + more for dc, pages in reader.pages.items()} for reader in readers]
    async with asyncio.timeout(90):
        while any(  # noqa: ASYNC110
            r.pages[dc] < least[dc] for r, least in zip(readers, wanted, strict=True) for dc in least
        ):
            await asyncio.sleep(0.05)


def chunks_of(log: Log, partition: int) -> list[tuple[str, int]]:
    """(source, seqno) of the records of a partition, in order."""
    return [
        ((record.key or b"").decode(), int.from_bytes(dict(record.headers)["seqno"])) for _, record in log[partition]
    ]
