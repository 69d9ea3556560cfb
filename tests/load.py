"""Writers that keep the rules of the interface, against real workers, and write down every answer.

Each source has one request in flight and gives ``prev``. A retriable or unknown answer: the same bytes again. Half of
the sources write single chunks, half many in a request; half ask for redirects, half let the workers forward.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp
from logferry.gateway.contract import MSGPACK, Chunk, pack_chunk

from tests.checker import History

_ATTEMPT_S = 12.0


@dataclass
class Writer:
    """One source."""

    name: str
    topic: str
    urls: list[str]
    history: History
    rng: random.Random
    many: bool
    redirects: bool
    acknowledgements: list[tuple[str, float]]
    size_bytes: int = 3000
    recorded: int = 0
    _url: str = ""

    async def run(self, session: aiohttp.ClientSession, goes_on: Callable[[], bool]) -> None:
        """Writes until told to stop, then until the last request is answered."""
        while goes_on():
            chunks = self._next_chunks()
            while not await self._attempt(session, chunks):
                self._url = self.rng.choice(self.urls)
                await asyncio.sleep(self.rng.uniform(0.02, 0.2))
            self.recorded = chunks[-1].seqno

    def _next_chunks(self) -> list[Chunk]:
        chunks, prev = [], self.recorded
        for _ in range(self.rng.randint(1, 5) if self.many else 1):
            data = self.rng.randbytes(self.rng.randint(1, self.size_bytes)) + b"\n"
            chunks.append(Chunk(prev + len(data), prev, None, {}, data))
            prev += len(data)
        return chunks

    async def _attempt(self, session: aiohttp.ClientSession, chunks: list[Chunk]) -> bool:
        try:
            async with asyncio.timeout(_ATTEMPT_S), self._post(session, chunks) as response:
                body = await response.text()
                return self._answered(chunks, response.status, body)
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._note(chunks, "unknown")
            return False

    def _post(self, session: aiohttp.ClientSession, chunks: list[Chunk]) -> aiohttp.client._RequestContextManager:
        url = f"{self._url or self.urls[0]}/v1/topics/{self.topic}/sources/{quote(self.name, safe='')}/chunks"
        headers = {"X-Logferry-Redirect": "1"} if self.redirects else {}
        if self.many:
            headers["Content-Type"] = MSGPACK
            return session.post(url, data=b"".join(map(pack_chunk, chunks)), headers=headers)
        query = f"?seqno={chunks[0].seqno}&prev={chunks[0].prev}"
        return session.post(url + query, data=chunks[0].data, headers=headers)

    def _answered(self, chunks: list[Chunk], status: int, body: str) -> bool:
        if status == 200:
            self._note(chunks, "ok")
            self.acknowledgements.append((self.name, time.monotonic()))
            return True
        if status in (429, 503):
            self._note(chunks, "fail")
        elif status >= 500:
            self._note(chunks, "unknown")
        else:
            self.history.protests.append(f"{self.name} at {self.recorded}: {status} {body[:300]}")
            self._note(chunks, "unknown")
            return True
        return False

    def _note(self, chunks: list[Chunk], answer: str) -> None:
        for chunk in chunks:
            self.history.note(self.name, chunk.seqno, chunk.data, answer)  # type: ignore[arg-type]


@dataclass
class Load:
    """Load from many sources at once: ``async with Load(…) as load: <faults>``; leaving it drains the writers."""

    topic: str
    urls: list[str]
    seed: int
    sources: int = 16
    drain_s: float = 90
    history: History = field(default_factory=History)
    acknowledgements: list[tuple[str, float]] = field(default_factory=list)
    _stop: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=False))
        for number in range(self.sources):
            writer = Writer(
                f"host-{number}/access.log",
                self.topic,
                self.urls,
                self.history,
                random.Random(self.seed * 1000 + number),
                many=number % 2 == 0,
                redirects=number % 4 < 2,
                acknowledgements=self.acknowledgements,
            )
            self._tasks.append(asyncio.create_task(writer.run(self._session, lambda: not self._stop)))
        return self

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
