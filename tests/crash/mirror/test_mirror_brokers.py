"""Clusters of three brokers: each is killed in turn, and an election that loses records cuts the original back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from logferry.gateway.kafka.client import KafkaClient
from logferry.ops.cli.main import main as command
from logferry.ops.stack.stack import Stack

from tests.support.checker import read_back, violations
from tests.support.clients import Load
from tests.support.mirror import (
    Log,
    differences_in_the_end,
    make_topic,
    pairs_by_history,
    read_log,
    stopped,
    true_pairs,
)
from tests.support.raw_load import RawLoad

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder, dcs=("dc1", "dc2"), brokers=3, workers=2, mirrors=2, restart=False, heap="192m") as stack:
        yield stack


async def copied(stack: Stack, topic: str, more: int) -> None:
    """Waits until so many more offsets of the topic are in dc2: the faults meet a mirror that is at work."""

    async def now() -> int:
        async with aiohttp.ClientSession() as session:
            for url in stack.urls("dc2"):
                async with session.get(f"{url}/v1/topics/{topic}") as answer:
                    if answer.status == 200:
                        return sum(int(offsets["next"]) for offsets in (await answer.json())["offsets"])
        return 0

    wanted = await now() + more
    async with asyncio.timeout(120):
        while await now() < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.timeout(600)
async def test_each_broker_killed_in_turn_in_either_cluster(stack: Stack) -> None:
    """Topics of one partition and of 64, and one that strangers write in batches of one and of 10,000 records."""
    narrow, wide, raw = [
        await make_topic(stack, name, count) for name, count in (("narrow", 1), ("wide", 64), ("raw", 3))
    ]
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    async with (
        Load("narrow", stack.urls("dc1"), seed=71, sources=8) as narrow_load,
        Load("wide", stack.urls("dc1"), seed=72, sources=24) as wide_load,
        RawLoad(there, raw, 3, pause_s=1.0) as strangers,
    ):
        for dc in ("dc2", "dc1"):
            for node in (1, 2, 3):
                await copied(stack, wide, 200)
                await asyncio.to_thread(stack.restart, f"{dc}/kafka-{node}")
        for topic in (narrow, wide, raw):
            await copied(stack, topic, 50)
    assert strangers.aborted > 0
    for topic, load in ((narrow, narrow_load), (wide, wide_load), (raw, None)):
        assert await differences_in_the_end((there, topic), (here, topic), 120) == []
        if load is not None:
            assert violations(load.history, await read_back(here, topic)) == []
        original, copy = await read_log(there, topic), await read_log(here, topic)
        history = await pairs_by_history(here, "logferry.mirror.dc2.pairs")
        assert {number: history[topic, number] for number in original} == true_pairs(original, copy)


class CutBack:
    """A topic with two replicas, the second of which misses records, comes back alone, and leads."""

    def __init__(self, stack: Stack, name: str) -> None:
        self._stack, self.topic = stack, f"dc1.{name}"
        self._kafka = stack.cluster("dc1")

    async def create(self) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._kafka.bootstrap)
        await admin.start()
        weak = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
        await admin.create_topics([NewTopic(self.topic, -1, -1, replica_assignments={0: [1, 2]}, topic_configs=weak)])
        await admin.close()

    async def write(self, *values: bytes) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self._kafka.bootstrap, acks="all") as producer:
            for value in values:
                await producer.send_and_wait(self.topic, value, partition=0)

    async def led_by(self, node: int) -> None:
        kafka = KafkaClient({"bootstrap_servers": self._kafka.bootstrap}, "tests")
        await kafka.start()
        try:
            async with asyncio.timeout(60):
                while (await kafka.describe_topic(self.topic)).partitions[0].leader != node:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        finally:
            await kafka.close()

    async def lose(self, *values: bytes, copied: Any) -> None:
        """The values are written, and read by who reads (``copied`` waits for that), and lost."""
        self._kafka.kill(2)
        await self.write(*values)
        await copied()
        self._kafka.kill(1)
        await asyncio.to_thread(self._kafka.restart, 2)
        await self.led_by(2)

    async def mend(self) -> None:
        await asyncio.to_thread(self._kafka.restart, 1)


def values(log: Log) -> list[bytes | None]:
    return [record.value for _, record in log.get(0, [])]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("meanwhile", ["running", "stopped"])
async def test_an_original_that_is_cut_back_is_not_gone_on_from_in_silence(
    stack: Stack, meanwhile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lost records stay in the copy. What came in their place comes when an operator resumes it, nothing twice."""
    original = CutBack(stack, f"cut-{meanwhile}")
    here = stack.cluster("dc2").bootstrap
    await original.create()
    await original.write(b"0", b"1")
    mirrors = ("dc2/mirror-0", "dc2/mirror-1")

    async def has(*wanted: bytes) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    if values(await read_log(here, original.topic)) == list(wanted):
                        return
                except (AssertionError, KeyError):
                    pass  # it is not made yet
                await asyncio.sleep(0.1)

    try:
        await has(b"0", b"1")

        async def copied_and_stopped() -> None:
            await has(b"0", b"1", b"lost 2", b"lost 3")
            if meanwhile == "stopped":
                for name in mirrors:
                    await asyncio.to_thread(stack.child(name).stop, 15)

        await original.lose(b"lost 2", b"lost 3", copied=copied_and_stopped)
        # As long as what was there, or longer: the offsets alone do not tell.
        await original.write(b"other 2", b"other 3", b"other 4")
        await original.mend()
        if meanwhile == "stopped":
            for name in mirrors:
                await asyncio.to_thread(stack.restart, name)
        stop = await stopped(stack.urls("dc2", "mirror"), original.topic)
        assert stop["kind"] == "log-truncated"
        assert values(await read_log(here, original.topic)) == [b"0", b"1", b"lost 2", b"lost 3"]
        resume = ["mirror", "resume", original.topic, "0", "--from", "2", "--url", stack.urls("dc2", "mirror")[0]]
        assert await asyncio.to_thread(command, resume) == 0
        assert "resumes at 2" in capsys.readouterr().out
        await has(b"0", b"1", b"lost 2", b"lost 3", b"other 2", b"other 3", b"other 4")
        await original.write(b"other 5")
        await has(b"0", b"1", b"lost 2", b"lost 3", b"other 2", b"other 3", b"other 4", b"other 5")
    finally:
        for name in ("dc1/kafka-1", "dc1/kafka-2", "dc1/kafka-3", *mirrors):
            if not stack.child(name).running:
                await asyncio.to_thread(stack.restart, name)
