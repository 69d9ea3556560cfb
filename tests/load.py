"""Load from many sources at once against real workers; every answer goes into a history for the checker."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from tests.support.checker import History
from tests.support.writers import ChainedWriter, PipelinedWriter, SessionWriter, Shared

CHAINED = ("many", "single")
ALL_KINDS = ("many", "single", "pipelined", "session")


@dataclass
class Load:
    """``async with Load(…) as load: <faults>``; leaving it drains the writers. ``kinds`` of writers, in turn.

    ``topic_may_go``: the topic is deleted and created anew meanwhile; for `CHAINED` writers.
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

    async def acknowledged(self, more: int, within_s: float = 60) -> None:
        """Waits until so many more chunks are acknowledged: the faults meet a load that is under way."""
        wanted = self.history.acknowledged() + more
        async with asyncio.timeout(within_s):
            while self.history.acknowledged() < wanted:
                await asyncio.sleep(0.02)
                for task in self._tasks:
                    if task.done():
                        task.result()
