"""A cheap load generator: prebuilt requests on raw keep-alive connections, one in flight per connection.

It must not dominate the measurement. So it uses no HTTP library; it knows its one request and the gateway's answers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit


@dataclass(slots=True)
class LoadTally:
    """Counts of a load. ``latencies_s``: of each answered request."""

    requests: int = 0
    bytes: int = 0
    refused: int = 0
    latencies_s: list[float] = field(default_factory=list)


class LoadConnection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        end = buffer.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        head = bytes(buffer[: end + 4])
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 : head.index(b"\r\n", at)]) if at >= 0 else 0
        if len(buffer) < end + 4 + length:
            return
        body = bytes(buffer[end + 4 : end + 4 + length])
        del buffer[: end + 4 + length]
        answer, self._answer = self._answer, None
        answer.set_result((int(head[9:12]), head, body))

    async def ask(self, head: bytes, body: bytes) -> tuple[int, bytes, bytes]:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(head + body if len(body) < 4096 else head)
        if len(body) >= 4096:
            self._transport.write(body)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(url: str) -> LoadConnection:
    parts = urlsplit(url)
    _, protocol = await asyncio.get_running_loop().create_connection(
        LoadConnection, parts.hostname or "", parts.port or 80
    )
    return protocol


async def find_owner(url: str, topic: str, source: str) -> str:
    """URL of the worker that owns the source; follows one redirect."""
    connection = await connect(url)
    head = (
        f"POST /v1/topics/{topic}/sources/{source}/session HTTP/1.1\r\nHost: bench\r\n"
        "X-Logferry-Redirect: 1\r\nContent-Length: 0\r\n\r\n"
    )
    status, answer, _ = await connection.ask(head.encode(), b"")
    connection.close()
    if status != 307:
        return url
    location = answer.decode().lower().split("location: ", 1)[1].split("\r\n", 1)[0]
    return location.split("/v1/", 1)[0]


async def read_page(
    connection: LoadConnection, topic: str, partition: int, offset: int, more: str = ""
) -> tuple[int, bytes]:
    """The next offset, and the chunks from ``offset`` on."""
    path = f"/v1/topics/{topic}/partitions/{partition}/chunks?offset={offset}{more}&max_bytes=4000000"
    status, head, body = await connection.ask(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode(), b"")
    if status != 200:
        raise RuntimeError(f"reading answered {status}: {body[:200]!r}")
    return int(head.lower().split(b"x-next-offset: ", 1)[1].split(b"\r\n", 1)[0]), body


async def run(
    urls: list[str],
    topic: str,
    sources: int,
    payloads: list[bytes],
    seconds: float,
    pause_s: float = 0,
    *,
    stamp_created: bool = False,
    headers: str = "",
) -> tuple[LoadTally, float]:
    """All sources write chunks for ``seconds``, each with prev. ``pause_s``: minimum time per chunk of a source.

    ``headers``: further lines of each head. Returns the tally and the time from first request to last answer.
    """
    tally = LoadTally()
    started = time.perf_counter()
    until = started + seconds

    async def write(source: int) -> None:
        connection = await connect(await find_owner(urls[source % len(urls)], topic, f"s-{source}"))
        number = 0
        while time.perf_counter() < until:
            body = payloads[(source + number) % len(payloads)]
            prev = f"&prev={number}" if number else ""
            created = f"&created_ms={int(time.time() * 1000)}" if stamp_created else ""
            head = (
                f"POST /v1/topics/{topic}/sources/s-{source}/chunks?seqno={number + 1}{prev}{created} HTTP/1.1\r\n"
                f"Host: bench\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
            )
            asked = time.perf_counter()
            status, _, _answer = await connection.ask(head.encode(), body)
            took = time.perf_counter() - asked
            if status == 200:
                number += 1
                tally.requests += 1
                tally.bytes += len(body)
                tally.latencies_s.append(took)
            else:
                tally.refused += 1
                await asyncio.sleep(0.05)
            if pause_s > took:
                await asyncio.sleep(pause_s - took)
        connection.close()

    await asyncio.gather(*map(write, range(sources)))
    return tally, time.perf_counter() - started
