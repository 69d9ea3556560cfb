"""Faults in a random order for minutes: two nodes with two workers each, three brokers, 32 sources behind cutting
proxies, and eight more whose topic is deleted and recreated.

The seed is printed; `LOGFERRY_SEED` replays a run, `LOGFERRY_FAULT_SECONDS` changes its length.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from logferry.ops.stack.stack import Stack

from tests.support.checker import read_back, violations
from tests.support.clients import Load
from tests.support.faults import CuttingProxy
from tests.support.kafka import delete_topic, recreate_topic

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

_NODES, _WORKERS, _BROKERS = 2, 4, 3
_FROZEN_S = 8.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("stack"), brokers=_BROKERS, nodes=_NODES, workers=_WORKERS // _NODES, heap="384m"
    ) as stack:
        yield stack


class Faults:
    """What can be done to the stack; each returns when it was done, not when it is mended."""

    def __init__(self, stack: Stack, topic: str, removed: Load, rng: random.Random) -> None:
        self.stack, self.topic, self.removed, self.rng = stack, topic, removed, rng
        self.partitions = 4
        self.done: Counter[str] = Counter()

    async def one(self) -> None:
        faults: list[Callable[[], Awaitable[None]]] = [
            self.worker_killed,
            self.worker_killed,
            self.worker_stopped,
            self.worker_frozen,
            self.broker_restarted,
            self.broker_restarted,
            self.brokers_restarted_in_turn,
            self.all_brokers_restarted,
            self.topic_grown,
            self.topic_removed,
        ]
        fault = self.rng.choice(faults)
        self.done[fault.__name__] += 1
        await fault()

    def _worker(self) -> str:
        return f"gateway-{self.rng.randrange(_WORKERS)}"

    async def worker_killed(self) -> None:
        self.stack.kill(self._worker())

    async def worker_stopped(self) -> None:
        self.stack.kill(self._worker(), signal.SIGTERM)

    async def worker_frozen(self) -> None:
        worker = self._worker()
        self.stack.kill(worker, signal.SIGSTOP)
        await asyncio.sleep(_FROZEN_S)  # the fault: longer than a session
        self.stack.kill(worker, signal.SIGCONT)

    async def broker_restarted(self) -> None:
        await asyncio.to_thread(self.stack.restart, f"kafka-{self.rng.randint(1, _BROKERS)}")

    async def brokers_restarted_in_turn(self) -> None:
        for node in range(1, _BROKERS + 1):
            await asyncio.to_thread(self.stack.restart, f"kafka-{node}")

    async def all_brokers_restarted(self) -> None:
        brokers = [f"kafka-{node}" for node in range(1, _BROKERS + 1)]
        await asyncio.gather(*(asyncio.to_thread(self.stack.restart, broker) for broker in brokers))

    async def topic_grown(self) -> None:
        self.partitions += 1
        async with aiohttp.ClientSession() as session:
            for url in self.stack.urls():
                try:
                    async with session.put(f"{url}/v1/topics/{self.topic}", json={"partitions": self.partitions}):
                        return
                except aiohttp.ClientError:
                    continue

    async def topic_removed(self) -> None:
        topic, bootstrap = f"dc1.{self.removed.topic}", self.stack.cluster().bootstrap
        gone = await delete_topic(bootstrap, topic)
        self.removed.history.topic_removed()
        await recreate_topic(bootstrap, topic, self.stack.urls(), 4, gone)


async def test_random_faults(stack: Stack, topic_name: str) -> None:
    seed = int(os.environ.get("LOGFERRY_SEED") or random.SystemRandom().randrange(10**9))
    seconds = float(os.environ.get("LOGFERRY_FAULT_SECONDS", "600"))
    print(f"LOGFERRY_SEED={seed}")
    rng = random.Random(seed)
    removed_name = f"{topic_name}-removed"
    async with aiohttp.ClientSession() as session:
        for name in (topic_name, removed_name):
            async with session.put(f"{stack.urls()[0]}/v1/topics/{name}", json={"partitions": 4}) as response:
                assert response.status == 201, await response.text()
    async with AsyncExitStack() as proxies:
        urls = [
            (await proxies.enter_async_context(CuttingProxy(url, seed + number))).url
            for number, url in enumerate(stack.urls())
        ]
        async with (
            Load(topic_name, urls, seed, sources=32, drain_s=240) as load,
            Load(removed_name, urls, seed + 1, sources=8, drain_s=240, topic_may_go=True) as removed,
        ):
            faults = Faults(stack, topic_name, removed, rng)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                await load.acknowledged(200, within_s=240)
                await faults.one()
            await asyncio.to_thread(stack.wait_ready)
            await removed.acknowledged(100, within_s=240)
    print(f"{load.history.acknowledged()} chunks acknowledged through {dict(faults.done)}")
    for written in (load, removed):
        stored = await read_back(stack.cluster().bootstrap, f"dc1.{written.topic}")
        assert violations(written.history, stored) == [], f"{written.topic}, LOGFERRY_SEED={seed}"
