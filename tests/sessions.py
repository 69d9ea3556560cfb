"""What the tests of read sessions share: topics, chunks, and what a consumer has of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from logferry.gateway.contract.chunk import MSGPACK, Chunk, pack_chunk

from tests.support.read_sessions import PATIENCE_S, Stream
from tests.support.served_gateway import Gateway

# A session whose connection is cut gives its partitions up within this time.
MOVED_S = 10


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
