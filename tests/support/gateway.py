"""Gateway workers as processes on the tests' Kafka, and plain HTTP to ask them with.

Requests that several tests make of a gateway."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from logferry.gateway.contract.names import lane_of
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, ServiceWorker, Setting, configuration, free_ports, stop_all
from yarl import URL

from tests.support.checker import read_back

LANES = 4
_READY_S = 120.0
_STOP_S = 15.0
_LARGE_BYTES = 1 << 20  # above, aiohttp wants a file


@dataclass(frozen=True)
class Answer:
    """What a worker answered, its body read."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    document: Any

    @property
    def problem(self) -> str | None:
        """The last segment of the problem's type; None for what is no problem document."""
        if self.headers.get("Content-Type") != "application/problem+json":
            return None
        return str(self.document["type"]).rpartition("/")[2]


@dataclass(frozen=True)
class Gateway:
    """The workers of one data centre, dc1, and the Kafka behind them."""

    kafka: KafkaCluster
    workers: list[ServiceWorker]
    folder: Path
    state_topic: str

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.workers]

    @property
    def pids(self) -> list[int | None]:
        return [worker.child.pid for worker in self.workers]

    def wait_ready(self) -> None:
        """Until all of them serve their lanes in one look."""
        deadline = time.monotonic() + _READY_S
        while not all(worker.is_ready() for worker in self.workers):
            for worker in self.workers:
                if not worker.child.running:
                    raise worker.startup_error()
            if time.monotonic() > deadline:
                raise self.workers[0].child.failed(f"or another one is not ready after {_READY_S:.0f} s")
            time.sleep(0.05)

    async def ask(self, method: str, path: str, worker: int = 0, *, expect: int | None = 200, **options: Any) -> Answer:
        """One request to one worker; redirects are not followed. ``expect``: its status, None: any."""
        if isinstance(data := options.get("data"), bytes):
            options["data"] = io.BytesIO(data) if len(data) > _LARGE_BYTES else data
        plain = {"Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(auto_decompress=False, headers=plain) as session:
            url = URL(self.urls[worker] + path, encoded=True)
            async with session.request(method, url, allow_redirects=False, **options) as response:
                body = await response.read()
                is_json = "json" in response.content_type and "ndjson" not in response.content_type
                document = await response.json(content_type=None) if is_json else None
                answer = Answer(response.status, response.headers, body, document)
        assert expect is None or answer.status == expect, f"{answer.status}: {body[:500]!r}"
        return answer

    async def make_topic(self, name: str, partitions: int = 1) -> str:
        """Its full name."""
        answer = await self.ask("PUT", f"/v1/topics/{name}", json={"partitions": partitions}, expect=None)
        assert answer.status in (200, 201), answer.body
        return f"dc1.{name}"

    async def owner(self, key: str) -> int:
        """The number of the worker that serves the lane of a key."""
        lane = str(lane_of(key, LANES))
        for number in range(len(self.workers)):
            answer = await self.ask("GET", "/readyz", number)
            if lane in answer.document["lanes"]:
                return number
        raise LookupError(f"nobody serves lane {lane}")


def source_path(topic: str, source_id: str, rest: str = "") -> str:
    return f"/v1/topics/{quote(topic, safe='')}/sources/{quote(source_id, safe='')}{rest}"


@contextmanager
def gateway(
    kafka: KafkaCluster,
    folder: Path,
    name: str,
    workers: int = 2,
    command: Callable[[Path, int], list[str]] | None = None,
    **settings: Setting,
) -> Iterator[Gateway]:
    """Workers with lanes of their own, ready; ended on leaving. ``command``: instead of the real program's."""
    port = free_ports(workers)[0]
    file = folder / f"{name}.toml"
    asked: dict[str, Setting] = {
        "dc": "dc1",
        "data_centres": ["dc1", "dc2"],
        "prefix": name,
        "listen": f"127.0.0.1:{port}",
        "workers": workers,
        "lanes": LANES,
        "accept_weak_kafka": ["replication", "min-isr"],
    }
    # Tables come last in TOML.
    tables = {"kafka": {"bootstrap_servers": kafka.bootstrap}} | {
        key: value for key, value in settings.items() if isinstance(value, Mapping)
    }
    file.write_text(configuration({**asked, **settings, **tables}), encoding="utf-8")
    made = []
    for number in range(workers):
        log = folder / f"{name}-{number}.log"
        worker = ServiceWorker(f"{name}-{number}", file, number, port + number, log)
        if command is not None:
            worker.child = Child(worker.child.name, command(file, number), log)
        made.append(worker)
    running = Gateway(kafka, made, folder, f"{name}.gateway.dc1.state")
    try:
        for worker in made:
            worker.child.start()
        running.wait_ready()
        yield running
    finally:
        stop_all([worker.child for worker in made], _STOP_S)


async def write(
    workers: Gateway,
    topic: str,
    source: str,
    query: str,
    data: bytes = b"line\n",
    expect: int | None = 200,
    **options: Any,
) -> Answer:
    path = source_path(topic, source, f"/chunks?{query}")
    return await workers.ask("POST", path, data=data, expect=expect, **options)


async def log_of(workers: Gateway, topic: str) -> list[tuple[str, int, int | None]]:
    """(source, seqno, prev) in the order of partition and offset."""
    stored = await read_back(workers.kafka.bootstrap, f"dc1.{topic}")
    return [(record.source, record.seqno, record.prev) for record in sorted(stored, key=lambda r: r[1:3])]


async def open_session(workers: Gateway, topic: str, source: str, query: str = "", worker: int = 0) -> dict[str, Any]:
    answer = await workers.ask("POST", source_path(topic, source, f"/session{query}"), worker)
    document: dict[str, Any] = answer.document
    return document
