"""Gateways under load: a stack in a temporary folder, and writers and readers with one request in flight each.

A load must not dominate the measurement. So it uses no HTTP library; it knows its requests and the gateway's answers.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgpack
import uvloop
from logferry.ops.bench.harness.figures import Side
from logferry.ops.bench.harness.kafka import chunks
from logferry.ops.bench.harness.usage import UsageMeter, rss_mb
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.stack.kafka_cluster import LONG_RUN
from logferry.ops.stack.stack import Stack

PARTITIONS: Final = 8
SECONDS: Final = 8.0
CHUNK_BYTES: Final = 64 * 1024
_PAGE_BYTES: Final = 4_000_000


@contextmanager
def running_stack(workers: int, **options: Any) -> Iterator[Stack]:
    """A stack in a temporary folder, as the benchmarks use it."""
    with tempfile.TemporaryDirectory() as folder:
        with Stack(Path(folder), workers=workers, heap="1g", jvm=LONG_RUN, **options) as stack:
            yield stack


def make_topic(stack: Stack, name: str, partitions: int = PARTITIONS) -> str:
    """Creates a topic through the gateway; returns its full name."""
    gateway = GatewayClient(stack.urls()[0])
    return str(gateway.request("PUT", f"/v1/topics/{name}", {"partitions": partitions})["topic"])


def gateway_pids(stack: Stack) -> list[int]:
    return [pid for name, pid in stack.pids.items() if "gateway" in name]


# ---- writing -----------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """Sources that write chunks to a topic, each with prev.

    ``pause_s``: minimum time per request of a source. ``headers``: further lines of each head. ``created``: the chunks
    have the time of their creation. ``batch``: chunks of a request; more than one go as MessagePack.
    """

    topic: str
    payloads: list[bytes]
    sources: int = 64
    pause_s: float = 0.0
    headers: str = ""
    created: bool = False
    partitions: int = PARTITIONS
    batch: int = 1


@dataclass(slots=True)
class LoadTally:
    """Counts of a load. ``latencies_s``: of each answered request. ``took_s``: from first request to last answer."""

    bytes: int = 0
    refused: int = 0
    latencies_s: list[float] = field(default_factory=list)
    took_s: float = 0.0


def loaded(stack: Stack, *loads: Load) -> Side:
    """`measured` on the workers of a stack; the topics are created where they are missing."""
    for load in loads:
        make_topic(stack, load.topic, load.partitions)
    return measured(stack.urls(), gateway_pids(stack), *loads)


def measured(urls: list[str], pids: list[int], *loads: Load) -> Side:
    """Throughput, latency and cost of all loads at once. Raises RuntimeError when one request in a hundred was refused:
    a topic that was just created may refuse its first ones."""
    with UsageMeter(pids) as meter:
        tallies = uvloop.run(run(urls, *loads))
    side, requests = side_of(*tallies), sum(len(tally.latencies_s) for tally in tallies)
    if side["refused"] > requests / 100:
        raise RuntimeError(f"{side['refused']} requests were refused, {requests} were not")
    per_gb = meter.cpu_s / (sum(tally.bytes for tally in tallies) / 1e9)
    return {**side, "cpu_s_per_gb": per_gb, "cpu_us_per_request": meter.cpu_s / requests * 1e6, "rss_mb": rss_mb(pids)}


def side_of(*tallies: LoadTally) -> Side:
    took_s = max(tally.took_s for tally in tallies)
    latencies_ms = [latency_s * 1000 for tally in tallies for latency_s in tally.latencies_s]
    return {
        "mb_s": sum(tally.bytes for tally in tallies) / took_s / 1e6,
        "requests_s": len(latencies_ms) / took_s,
        "refused": sum(tally.refused for tally in tallies),
        **percentiles(latencies_ms),
    }


def percentiles(found_ms: list[float]) -> Side:
    found_ms.sort()
    return {"p50_ms": found_ms[len(found_ms) // 2], "p99_ms": found_ms[int(len(found_ms) * 0.99)]}


async def run(urls: list[str], *loads: Load) -> list[LoadTally]:
    """All sources of the loads write at once for `SECONDS`."""
    return await asyncio.gather(*(_run(urls, load) for load in loads))


async def _run(urls: list[str], load: Load) -> LoadTally:
    tally = LoadTally()
    started = time.perf_counter()

    async def write(source: int) -> None:
        path = f"/v1/topics/{load.topic}/sources/s-{source}"
        connection = await _connect(urls[source % len(urls)])
        status, head, _ = await connection.ask(f"POST {path}/session", "X-Logferry-Redirect: 1\r\n")
        if status == 307:  # another worker owns the source
            connection.close()
            connection = await _connect(_field(head, "location").split("/v1/", 1)[0])
        number = 0
        while time.perf_counter() < started + SECONDS:
            query, headers, body = _request(load, source, number)
            asked = time.perf_counter()
            status, _, _ = await connection.ask(f"POST {path}/chunks{query}", headers, body)
            took = time.perf_counter() - asked
            if status == 200:
                tally.bytes += sum(len(_payload(load, source, number + place)) for place in range(load.batch))
                number += load.batch
                tally.latencies_s.append(took)
            else:
                tally.refused += 1
                await asyncio.sleep(0.05)
            if load.pause_s > took:
                await asyncio.sleep(load.pause_s - took)
        connection.close()

    await asyncio.gather(*map(write, range(load.sources)))
    tally.took_s = time.perf_counter() - started
    return tally


def _request(load: Load, source: int, number: int) -> tuple[str, str, bytes]:
    """Query, lines of the head and body of the next request of a source that has ``number`` chunks recorded."""
    created_ms = int(time.time() * 1000) if load.created else None
    if load.batch > 1:
        pack = msgpack.Packer().pack
        body = b"".join(
            pack([one + 1, one or None, created_ms, None, _payload(load, source, one)])
            for one in range(number, number + load.batch)
        )
        return "", f"{load.headers}Content-Type: application/vnd.msgpack\r\n", body
    prev = f"&prev={number}" if number else ""
    created = f"&created_ms={created_ms}" if load.created else ""
    return f"?seqno={number + 1}{prev}{created}", load.headers, _payload(load, source, number)


def _payload(load: Load, source: int, number: int) -> bytes:
    return load.payloads[(source + number) % len(load.payloads)]


class Post(NamedTuple):
    """Requests to one path by several senders, each with one in flight. ``lines``: in each body."""

    path: str
    bodies: list[bytes]
    lines: int
    headers: str = ""
    senders: int = 16


def posted(urls: list[str], pids: list[int], post: Post) -> Side:
    """Lines a second of all senders for `SECONDS`. Raises RuntimeError when a request is refused."""

    async def send(sender: int, until: float) -> int:
        connection, done = await _connect(urls[sender % len(urls)]), 0
        name = f"X-Logferry-Source: {sender}\r\n"
        while time.perf_counter() < until:
            body = post.bodies[(sender + done) % len(post.bodies)]
            status, _, answer = await connection.ask(f"POST {post.path}", post.headers + name, body)
            if status != 200 or b'"errors": true' in answer:
                raise RuntimeError(f"{post.path} answered {status}: {answer[:200]!r}")
            done += 1
        connection.close()
        return done

    async def send_all() -> int:
        until = time.perf_counter() + SECONDS
        return sum(await asyncio.gather(*(send(sender, until) for sender in range(post.senders))))

    with UsageMeter(pids) as meter:
        requests = uvloop.run(send_all())
    lines = requests * post.lines
    cpu_us = meter.cpu_s / lines * 1e6
    return {"lines_s": lines / meter.wall_s, "cpu_us_per_line": cpu_us, "rss_mb": rss_mb(pids)}


def archived(urls: list[str], pids: list[int], pieces: list[bytes], senders: int = 16) -> Side:
    """Throughput of files of these pieces, sent by the archive's protocol for `SECONDS`, each until it is committed."""

    async def send(sender: int, until: float) -> int:
        connection, done = await _connect(urls[sender % len(urls)]), 0

        async def call(rest: str, body: bytes = b"") -> str:
            status, _, answer = await connection.ask(f"POST {path}/{rest}", "", body)
            if status != 200:
                raise RuntimeError(f"{rest} answered {status}: {answer[:200]!r}")
            return f"digest={json.loads(answer)['digest']}"

        while time.perf_counter() < until:
            path, query = f"/v1/archive/{sender}-{time.time_ns()}", "host=h&file=f&log_type=l"
            for number, piece in enumerate(pieces, 1):
                query = await call(f"store?piece={number}&{query}", piece)
            for end in ("commit_request", "commit"):
                await call(f"{end}?{query}")
            done += 1
        connection.close()
        return done

    async def send_all() -> int:
        until = time.perf_counter() + SECONDS
        return sum(await asyncio.gather(*(send(sender, until) for sender in range(senders))))

    with UsageMeter(pids) as meter:
        files = uvloop.run(send_all())
    size = files * sum(map(len, pieces))
    return {"mb_s": size / meter.wall_s / 1e6, "cpu_s_per_gb": meter.cpu_s / (size / 1e9), "rss_mb": rss_mb(pids)}


# ---- reading -----------------------------------------------------------------------------------------------------


async def pages(url: str, topic: str, partition: int, wait_ms: int = 0) -> AsyncIterator[bytes]:
    """The chunks of a partition from its start to its present end; with ``wait_ms`` by long polls, without an end."""
    connection = await _connect(url)
    path, offset = f"/v1/topics/{topic}/partitions/{partition}/chunks", "0"
    try:
        while True:
            asked = f"GET {path}?offset={offset}&max_bytes={_PAGE_BYTES}&wait_ms={wait_ms}"
            status, head, body = await connection.ask(asked)
            if status != 200:
                raise RuntimeError(f"reading answered {status}: {body[:200]!r}")
            if not body and not wait_ms:
                return
            offset = _field(head, "x-next-offset")
            yield body
    finally:
        connection.close()


# ---- HTTP --------------------------------------------------------------------------------------------------------


class _Connection:
    """A keep-alive connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.close = writer.close

    async def ask(self, request: str, headers: str = "", body: bytes = b"") -> tuple[int, str, bytes]:
        """Status, head in lower case, and body of the answer."""
        head = f"{request} HTTP/1.1\r\nHost: bench\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self._writer.writelines((head.encode(), body))
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        return int(answer[9:12]), answer, await self._reader.readexactly(int(_field(answer, "content-length") or 0))


async def _connect(url: str) -> _Connection:
    parts = urlsplit(url)
    return _Connection(*await asyncio.open_connection(parts.hostname, parts.port, limit=_PAGE_BYTES))


def _field(head: str, name: str) -> str:
    return head.partition(f"\r\n{name}: ")[2].partition("\r\n")[0]


def filled(stack: Stack) -> int:
    """Fills a topic with 64 KiB chunks of log lines; returns their number."""
    make_topic(stack, "read")
    [tally] = uvloop.run(run(stack.urls(), Load("read", chunks(256, CHUNK_BYTES))))
    return len(tally.latencies_s)


def read_over_http(stack: Stack, readers: int) -> Side:
    urls = stack.urls()

    async def read(reader: int, partition: int) -> int:
        url = urls[(reader + partition) % len(urls)]
        return sum([len(page) async for page in pages(url, "dc1.read", partition)])

    async def read_all() -> int:
        return sum(await asyncio.gather(*(read(one, place) for one in range(readers) for place in range(PARTITIONS))))

    with UsageMeter(gateway_pids(stack)) as meter:
        size = uvloop.run(read_all())
    return {"mb_s": size / meter.wall_s / 1e6, "cpu_s_per_gb": meter.cpu_s / (size / 1e9)}
