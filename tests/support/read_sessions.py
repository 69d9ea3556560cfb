"""A reader of read sessions, as a program would be written against the interface; it checks the order of frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any

import aiohttp
import msgpack
from logferry.gateway.contract.chunk import MSGPACK, NDJSON

Frame = dict[str, Any]
PATIENCE_S = 60


class Stream:
    """One open session. Every frame that came is in ``frames``; ``held``: (topic, partition) → position reached."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, consumer: str, query: str, accept: str = MSGPACK
    ) -> None:
        self._http, self._url, self.consumer, self._query, self._accept = session, url, consumer, query, accept
        self.frames: list[Frame] = []
        self.held: dict[tuple[str, int], int] = {}
        self.generation = -1
        self.id = ""
        self._unpacker = msgpack.Unpacker(max_buffer_size=1 << 30)
        self._rest = b""

    async def __aenter__(self) -> Stream:
        url = f"{self._url}/v1/consumers/{self.consumer}/stream?{self._query}"
        timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
        self.response = await self._http.get(url, headers={"Accept": self._accept}, timeout=timeout)
        if self.response.status != 200:
            problem = await self.response.json()
            raise AssertionError(problem)
        self._coming = self._parsed()
        first = await self.next()
        assert first["frame"] == "session"
        self.id = first["session"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._coming.aclose()
        self.response.close()

    async def _parsed(self) -> AsyncIterator[Frame]:
        async for data in self.response.content.iter_any():
            if self._accept == NDJSON:
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    yield json.loads(line)
            else:
                self._unpacker.feed(data)
                for frame in self._unpacker:
                    yield frame

    async def next(self) -> Frame:
        """The next frame. Raises StopAsyncIteration at the end of the stream."""
        frame: Frame = await anext(self._coming)
        self.frames.append(frame)
        kind = frame["frame"]
        if kind == "assigned":
            assert not self.held, "assigned before what was held is revoked"
            assert frame["generation"] > self.generation
            self.generation = frame["generation"]
            self.held = {(p["topic"], p["partition"]): p["offset"] for p in frame["partitions"]}
        elif kind == "revoked":
            assert frame["generation"] == self.generation
            assert {(p["topic"], p["partition"]) for p in frame["partitions"]} == set(self.held)
            self.held = {}
        elif kind == "chunk":
            partition = (frame["topic"], frame["partition"])
            assert frame["offset"] >= self.held[partition], "a chunk twice, or of a partition that is not held"
            self.held[partition] = frame["offset"] + 1
        elif kind == "caught_up":
            for p in frame["partitions"]:
                assert p["offset"] >= self.held[p["topic"], p["partition"]]
                self.held[p["topic"], p["partition"]] = p["offset"]
        return frame

    async def until(self, wanted: Callable[[Stream], bool], seconds: float = PATIENCE_S) -> None:
        """Reads on until the condition holds."""
        try:
            async with asyncio.timeout(seconds):
                while not wanted(self):
                    await self.next()
        except TimeoutError:
            raise AssertionError(f"in vain; the last frames: {self.kinds()[-20:]}, held: {self.held}") from None

    @property
    def chunks(self) -> list[Frame]:
        return [frame for frame in self.frames if frame["frame"] == "chunk"]

    def kinds(self) -> list[str]:
        return [frame["frame"] for frame in self.frames]

    def last(self, kind: str) -> Frame:
        return next(frame for frame in reversed(self.frames) if frame["frame"] == kind)

    async def commit(
        self, positions: dict[tuple[str, int], int], generation: int | None = None, url: str | None = None
    ) -> tuple[int, Frame]:
        """Status and document of the answer."""
        body = {
            "generation": self.generation if generation is None else generation,
            "positions": [{"topic": t, "partition": p, "offset": o} for (t, p), o in positions.items()],
        }
        path = f"/v1/consumers/{self.consumer}/sessions/{self.id}/commit"
        async with self._http.post((url or self._url) + path, json=body) as answer:
            return answer.status, await answer.json()
