"""A worker of the mirror that dies or is stopped: how long no record of its partitions comes, at most."""

from __future__ import annotations

import asyncio
import itertools
import signal
import statistics
import time
from collections.abc import Iterator

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from logferry.ops.stack.stack import Stack

from tests.support.mirror import differences_in_the_end, make_topic

# Two in each lane.
_PARTITIONS = 8
_EVERY_S = 0.03


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder, dcs=("dc1", "dc2"), mirrors=2, restart=False) as stack:
        yield stack


class Flow:
    """``async with``: a record goes into each partition of the original all the time, and of each partition of the
    copy is noted when it moved on.
    """

    def __init__(self, stack: Stack, topic: str) -> None:
        self._places = [TopicPartition(topic, number) for number in range(_PARTITIONS)]
        self._there, self._here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
        self._moved: dict[TopicPartition, list[float]] = {place: [] for place in self._places}

    async def __aenter__(self) -> Flow:
        self._producer = AIOKafkaProducer(bootstrap_servers=self._there)
        self._consumer = AIOKafkaConsumer(bootstrap_servers=self._here, isolation_level="read_committed")
        await self._producer.start()
        await self._consumer.start()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._watch())]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._producer.stop()
        await self._consumer.stop()

    async def _write(self) -> None:
        for number in itertools.count():
            for place in self._places:
                await self._producer.send(place.topic, b"%d" % number, partition=place.partition)
            await asyncio.sleep(_EVERY_S)  # the pace of the writer

    async def _watch(self) -> None:
        ends: dict[TopicPartition, int] = {}
        while True:
            found = await self._consumer.end_offsets(self._places)
            now = time.monotonic()
            for place, end in found.items():
                if end > ends.get(place, 0):
                    ends[place] = end
                    self._moved[place].append(now)
            await asyncio.sleep(_EVERY_S / 3)

    async def all_move(self, since: float, times: int = 5) -> None:
        """Returns when each partition has moved on so often since then."""
        async with asyncio.timeout(60):
            while any(sum(at > since for at in moved) < times for moved in self._moved.values()):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    def pauses_s(self, since: float) -> list[float]:
        """The longest of each partition."""
        series = ([at for at in moved if at > since - 1] for moved in self._moved.values())
        return sorted(max(after - before for before, after in itertools.pairwise(times)) for times in series)


@pytest.mark.long
async def test_killed_and_stopped(stack: Stack) -> None:
    """Of two workers one is killed, comes back, and the other one is stopped; then both have had a turn."""
    topic = await make_topic(stack, "flowing", _PARTITIONS)
    stopped: list[float] = []
    killed: list[float] = []
    async with Flow(stack, topic) as flow:
        await flow.all_move(0)
        for name in ("dc2/mirror-0", "dc2/mirror-1"):
            began = time.monotonic()
            stack.kill(name, signal.SIGKILL)
            # Its session has to end first: no record of its partitions comes meanwhile.
            await flow.all_move(began + 7)
            killed += flow.pauses_s(began)
            await asyncio.to_thread(stack.restart, name)
            began = time.monotonic()
            await flow.all_move(began)
            stack.kill(name, signal.SIGTERM)
            assert await asyncio.to_thread(stack.child(name).wait_for_end, 30)
            await flow.all_move(time.monotonic())
            stopped += flow.pauses_s(began)
            await asyncio.to_thread(stack.restart, name)
            await flow.all_move(time.monotonic())
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    assert await differences_in_the_end((there, topic), (here, topic)) == []
    for what, pauses in (("killed", killed), ("stopped", stopped)):
        print(f"{what}: median {statistics.median(pauses):.2f} s, at most {max(pauses):.2f} s")
    assert max(killed) <= 10
    assert statistics.median(killed) > _EVERY_S, "what was killed was at work"
    assert statistics.median(stopped) < 1
    assert statistics.quantiles(stopped, n=10)[-1] < 2
