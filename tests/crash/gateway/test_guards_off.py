"""The proof of the crash tests: with deduplication off, and with the fence off, the checker must find the damage."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, ServiceWorker, configuration, free_ports, stop_all

from tests.support.checker import read_back, violations
from tests.support.clients import Load
from tests.support.faults import CuttingProxy, wait_all_lanes

_BROKEN_WORKER = Path(__file__).with_name("broken_worker.py")


@contextmanager
def broken_workers(guard: str, kafka: KafkaCluster, folder: Path) -> Iterator[list[ServiceWorker]]:
    """Two workers without the guard, on the session's broker, in a gateway of their own."""
    port = free_ports(2)[0]
    file = folder / "gateway.toml"
    file.write_text(
        configuration(
            {
                "dc": "dc1",
                "prefix": f"no-{guard}",
                "listen": f"127.0.0.1:{port}",
                "workers": 2,
                "accept_weak_kafka": ["replication", "min-isr"],
                "kafka": {"bootstrap_servers": kafka.bootstrap},
            }
        )
    )
    workers = []
    for number in range(2):
        worker = ServiceWorker(f"broken-{number}", file, number, port + number, folder / f"worker-{number}.log")
        command = [sys.executable, str(_BROKEN_WORKER), guard, "--config", str(file), "--worker", str(number)]
        worker.child = Child(worker.child.name, command, folder / f"worker-{number}.log")
        worker.child.start()
        workers.append(worker)
    try:
        yield workers
    finally:
        stop_all([worker.child for worker in workers], 10)


def _ready(workers: list[ServiceWorker]) -> list[str]:
    """Waits until the workers serve their lanes; their URLs."""
    deadline = time.monotonic() + 60
    while not all(worker.is_ready() for worker in workers):
        assert time.monotonic() < deadline, "the workers did not become ready"
        time.sleep(0.1)
    return [worker.url for worker in workers]


async def wait_frozen(child: Child) -> None:
    """Returns when the process has stopped itself."""
    async with asyncio.timeout(60):
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert child.running, child.log_tail()
            await asyncio.sleep(0.01)


async def _make_topic(url: str, name: str) -> str:
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{url}/v1/topics/{name}", json={"partitions": 4}) as response:
            assert response.status in (200, 201), await response.text()
    return f"dc1.{name}"


async def test_without_deduplication_cut_connections_double_chunks(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    with broken_workers("deduplication", kafka, tmp_path) as workers:
        urls = await asyncio.to_thread(_ready, workers)
        topic = await _make_topic(urls[0], topic_name)
        async with CuttingProxy(urls[0], seed=1) as one, CuttingProxy(urls[1], seed=2) as two:
            async with Load(topic_name, [one.url, two.url], seed=1) as load:
                await load.acknowledged(1500)
        found = violations(load.history, await read_back(kafka.bootstrap, topic))
    assert any("doubled" in violation for violation in found)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_without_the_fence_a_frozen_worker_does_damage(kafka: KafkaCluster, tmp_path: Path) -> None:
    """A worker is frozen in the middle of its transactions; unfenced, it commits them after the lanes have moved."""
    with broken_workers("fence", kafka, tmp_path) as workers:
        urls = await asyncio.to_thread(_ready, workers)
        damage: list[str] = []
        for attempt in range(6):  # who holds the lanes, and which sources are under way, is chance
            topic = await _make_topic(urls[0], f"unfenced-{attempt}")
            async with Load(f"unfenced-{attempt}", urls, seed=attempt, sources=32) as load:
                await load.acknowledged(300)
                (tmp_path / "freeze-0").touch()
                await wait_frozen(workers[0].child)
                await wait_all_lanes(urls[1:])
                await load.acknowledged(300)
                workers[0].child.send(signal.SIGCONT)
                await load.acknowledged(600)
            damage = violations(load.history, await read_back(kafka.bootstrap, topic))
            if damage:
                break
            await asyncio.to_thread(_ready, workers)
        assert damage, "a gateway without its fence did no damage: the crash tests would not notice"
