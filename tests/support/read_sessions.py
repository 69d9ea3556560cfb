"""What the tests of read sessions share: topics, chunks, and what a consumer has of them.

A reader of read sessions, as a program would be written against the interface; it checks the order of frames."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any

import aiohttp
import msgpack
from logferry.gateway.contract.chunk import MSGPACK, NDJSON, Chunk, pack_chunk

from tests.support.served_gateway import Gateway

# A session whose connection is cut gives its partitions up within this time.


async def make(gateway: Gateway, topic: str, partitions: int = 2) -> str:
    status, document, _ = await gateway.ask("PUT", f"/v1/topics/{topic}", json={"partitions": partitions})
    assert status in (200, 201), document
    return f"dc1.{topic}"


async def write(gateway: Gateway, topic: str, sources: int = 8, start: int = 0, chunks: int = 1, size: int = 20) -> int:
    """``chunks`` of random bytes to each source, from seqno ``start`` + 1 on; returns how many in all.

    Kafka shows a transaction to readers a moment after its commit is answered; that is waited for.
    """
    rng = random.Random(start)
    last: dict[int, int] = {}
    for source in range(sources):
        body = b"".join(
            pack_chunk(Chunk(start + n + 1, None, 1000 + n, {"host": f"web{source}"}, rng.randbytes(size)))
            for n in range(chunks)
        )
        path = f"/v1/topics/{topic}/sources/web{source}/chunks"
        status = 503
        async with asyncio.timeout(PATIENCE_S):
            while status == 503:  # a topic of that name was there a moment ago, perhaps
                status, document, _ = await gateway.ask("POST", path, data=body, headers={"Content-Type": MSGPACK})
        assert status == 200, document
        last[document["partition"]] = document["offsets"][1]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            _, document, _ = await gateway.ask("GET", f"/v1/topics/{topic}")
            if all(p["next"] > last.get(p["partition"], -1) + 1 for p in document["offsets"] if p["partition"] in last):
                return sources * chunks
            await asyncio.sleep(0.01)


def has(count: int) -> Callable[[Stream], bool]:
    return lambda stream: len(stream.chunks) >= count


def is_caught_up(stream: Stream) -> bool:
    """Every partition that is held was said to be caught up, after its last chunk."""
    kinds = stream.kinds()
    if not stream.held:
        return False
    waiting = set(stream.held)
    for frame in stream.frames[len(kinds) - kinds[::-1].index("assigned") :]:
        if frame["frame"] == "chunk":
            waiting.add((frame["topic"], frame["partition"]))
        elif frame["frame"] == "caught_up":
            waiting -= {(p["topic"], p["partition"]) for p in frame["partitions"]}
    return not waiting


def identities(*streams: Stream) -> list[tuple[str, str, int]]:
    return sorted((f["topic"], f["source_id"], f["seqno"]) for stream in streams for f in stream.chunks)


PATIENCE_S = 60


async def offsets(gateway: Gateway, consumer: str, query: str = "") -> Any:
    status, document, _ = await gateway.ask("GET", f"/v1/consumers/{consumer}/offsets{query}")
    assert status == 200, document
    return document


async def put(gateway: Gateway, consumer: str, body: Any) -> None:
    status, document, _ = await gateway.ask("PUT", f"/v1/consumers/{consumer}/offsets", json=body)
    assert status == 200, document


async def until_members(gateway: Gateway, consumer: str, members: int, seconds: float = PATIENCE_S) -> None:
    async with asyncio.timeout(seconds):
        while True:
            view = await offsets(gateway, consumer)
            if view["members"] == members and view["state"] in ("Stable", "Empty"):
                return
            await asyncio.sleep(0.1)


Frame = dict[str, Any]


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

    async def _parsed(self) -> AsyncGenerator[Frame, None]:
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
            raise AssertionError(f"not in time; the last frames: {self.kinds()[-20:]}, held: {self.held}") from None

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
