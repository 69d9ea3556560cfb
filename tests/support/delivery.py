"""Workers of `deliver` as processes, and a receiver that follows the rule and misbehaves as told."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, ServiceWorker, Setting, configuration, free_ports, stop_all

from tests.support.gateway import Gateway, source_path

Answer = web.StreamResponse | int | None


@dataclass
class Received:
    """One delivery as it came; ``hang_up`` ends its connection without an answer."""

    token: str
    epoch: int
    replay: int
    shard: int
    body: bytes
    headers: dict[str, str]
    hang_up: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.splitlines()]


@dataclass
class PushReceiver:
    """Takes every batch once by its token. ``behave``: an answer instead of taking it; ``after``: after it was."""

    behave: Callable[[Received], Awaitable[Answer]] | None = None
    after: Callable[[Received], Awaitable[Answer]] | None = None
    taken: dict[tuple[int, str], Received] = field(default_factory=dict)
    seen: list[Received] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    connections: set[asyncio.Transport] = field(default_factory=set)
    _bodies: dict[tuple[int, str], str] = field(default_factory=dict)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            self.connections.add(request.transport)
        body = await request.read()
        head = request.headers
        got = Received(
            head["X-Logferry-Token"],
            int(head["X-Logferry-Epoch"]),
            int(head["X-Logferry-Replay"]),
            int(head["X-Logferry-Shard"]),
            body,
            dict(head),
            lambda: request.transport.abort() if request.transport is not None else None,
        )
        self.seen.append(got)
        key, digest = (got.replay, got.token), hashlib.sha256(body).hexdigest()
        if self._bodies.setdefault(key, digest) != digest:
            self.different.append(got.token)
        answer = await self.behave(got) if self.behave is not None else None
        if answer is None:
            self.taken.setdefault(key, got)
            answer = await self.after(got) if self.after is not None else None
        self.changed.set()
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.Response(status=200 if answer is None else answer)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of the batches that were taken, in the order of taking."""
        return [row for got in self.taken.values() for row in got.rows]

    async def until(self, holds: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        """Fails when nothing has been taken for so long."""
        taken, deadline = -1, 0.0
        while not holds():
            if len(self.taken) > taken:
                taken, deadline = len(self.taken), time.monotonic() + timeout_s
            assert time.monotonic() < deadline, f"{what}: {len(self.seen)} deliveries, {len(self.taken)} taken"
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self.changed.wait()

    def problems(self, written: list[tuple[str, int]], *, order: str = "partition") -> list[str]:
        """What breaks the guarantee: ``written`` are (source, seqno) in the order of each source."""
        found = [f"{token} came with different bytes" for token in self.different]
        rows = [(row["source_id"], row["seqno"]) for row in self.rows]
        counts, known = Counter(rows), set(written)
        found += [f"{row} was taken {count} times" for row, count in counts.items() if count > 1]
        found += [f"{row} is missing" for row in written if row not in counts]
        found += [f"{row} was never written" for row in counts if row not in known]
        last: dict[str, int] = {}
        for source, seqno in rows:
            if seqno <= last.get(source, -1):
                found.append(f"{source}: {seqno} came after {last[source]}")
            last[source] = seqno
        if order == "partition":
            ends: dict[tuple[str, int], int] = {}
            for row in self.rows:
                tp = row["topic"], row["partition"]
                if row["offset"] <= ends.get(tp, -1):
                    found.append(f"{tp}: offset {row['offset']} came after {ends[tp]}")
                ends[tp] = row["offset"]
        return found


@asynccontextmanager
async def receiver(
    given: PushReceiver | None = None, port: int = 0, *, tls: ssl.SSLContext | None = None, is_packed: bool = False
) -> AsyncIterator[PushReceiver]:
    """``is_packed``: bodies stay compressed."""
    made = given or PushReceiver()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{path:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1, auto_decompress=not is_packed)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
    await site.start()
    scheme = "http" if tls is None else "https"
    made.url = f"{scheme}://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/in"  # type: ignore[union-attr]
    try:
        yield made
    finally:
        await runner.cleanup()
        # The sender, too, would have to say that a TLS connection ends.
        for connection in made.connections if tls else ():
            connection.abort()
        await asyncio.sleep(0)


def is_signed(got: Received, secret: bytes) -> bool:
    """By the rule of the documentation, not by our code."""
    parts = [part.partition("=")[::2] for part in got.headers["X-Logferry-Signature"].split(",")]
    stamp = next(value for name, value in parts if name == "t")
    good = hmac.new(secret, f"{stamp}.".encode() + got.body, hashlib.sha256).hexdigest()
    return good in [value for name, value in parts if name == "v1"]


class Deliver:
    """Workers of deliver on a cluster; beside a gateway with the same prefix. ``connection``: of a user to Kafka."""

    def __init__(
        self,
        kafka: KafkaCluster,
        folder: Path,
        prefix: str,
        workers: int = 1,
        lanes: int = 4,
        connection: Mapping[str, Setting] | None = None,
        **settings: Setting,
    ) -> None:
        self._port = free_ports(workers)[0]
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self._folder, self._count = folder / "deliver.toml", folder, workers
        asked: dict[str, Setting] = {
            "dc": "dc1",
            "data_centres": ["dc1", "dc2"],
            "prefix": prefix,
            "listen": f"127.0.0.1:{self._port}",
            "workers": workers,
            "lanes": lanes,
            "accept_weak_kafka": ["replication", "min-isr"],
            "allowed_networks": ["127.0.0.0/8"],
        }
        tables: dict[str, Setting] = {"kafka": connection or {"bootstrap_servers": kafka.bootstrap}}
        tables |= {key: value for key, value in settings.items() if isinstance(value, dict)}
        self.file.write_text(configuration({**asked, **settings, **tables}), encoding="utf-8")
        self.workers: list[ServiceWorker] = []

    def start(self, number: int) -> ServiceWorker:
        log = self._folder / f"deliver-{number}.log"
        worker = ServiceWorker(f"deliver-{number}", self.file, number, self._port + number, log)
        command = [
            sys.executable,
            "-m",
            "logferry.gateway.delivery",
            "--config",
            str(self.file),
            "--worker",
            str(number),
        ]
        worker.child = Child(worker.child.name, command, log)
        worker.child.start()
        self.workers.append(worker)
        return worker

    async def units(self, number: int = 0) -> list[dict[str, Any]]:
        """As a worker sees them; none while it starts. It must be running."""
        worker = self.workers[number]
        if not worker.child.running:
            raise worker.startup_error()
        try:
            units: list[dict[str, Any]] = (await self.status(number))["units"]
            return units
        except aiohttp.ClientError:
            return []

    async def status(self, number: int = 0) -> dict[str, Any]:
        url = f"{self.workers[number].url}/v1/status"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def until(self, holds: Callable[[list[dict[str, Any]]], bool], what: str, timeout_s: float = 60) -> None:
        """Until it holds of the units of the first worker."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds(await self.units()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"no {what}: {await self.units()}\n{self.log()[-4000:]}") from None

    def log(self, number: int = 0) -> str:
        return (self._folder / f"deliver-{number}.log").read_text()


@contextmanager
def deliver(kafka: KafkaCluster, folder: Path, prefix: str, workers: int = 1, **settings: Any) -> Iterator[Deliver]:
    """Workers, started; ended on leaving."""
    running = Deliver(kafka, folder, prefix, workers, **settings)
    try:
        for number in range(workers):
            running.start(number)
        yield running
    finally:
        stop_all([worker.child for worker in running.workers], 15)


async def send(
    gateway: Gateway, topic: str, source: str, seqnos: range, size: int = 20, headers: Mapping[str, str] | None = None
) -> list[tuple[str, int]]:
    """Writes chunks, one request each some; returns what was acknowledged."""
    for seqno in seqnos:
        data = f"{source} {seqno} ".encode().ljust(size, b"x") + b"\n"
        await gateway.ask("POST", source_path(topic, source, f"/chunks?seqno={seqno}"), data=data, headers=headers)
    return [(source, seqno) for seqno in seqnos]


async def subscribe(gateway: Gateway, name: str, topic: str, url: str, **settings: Any) -> None:
    body = {"topics": [topic], "url": url, "start": "earliest", "max_wait_ms": 20, **settings}
    answer = await gateway.ask("PUT", f"/v1/subscriptions/{name}", json=body, expect=None)
    assert answer.status in (200, 201), answer.body
