"""A topic of one data centre, and a mirror that copies it alone into another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from logferry.ops.stack.processes import Setting

from tests.support.kafka import until_grown
from tests.support.mirror import Centres, Mirror, differences_in_the_end


@contextmanager
def mirroring(mirror: Mirror) -> Iterator[str]:
    """The URL of a worker that serves its lanes."""
    worker, deadline = mirror.start(), time.monotonic() + 60
    try:
        while not worker.is_ready():
            assert worker.child.running, worker.child.log_tail()
            assert time.monotonic() < deadline, worker.child.log_tail()
            time.sleep(0.05)
        yield worker.url
    finally:
        worker.child.stop(15)


class World:
    """A topic of dc1 in dc1's Kafka, written to without the gateway, and a mirror of it alone."""

    def __init__(self, stack: Centres, name: str, folder: Path) -> None:
        self.there, self.here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
        self.name, self.topic = name, f"dc1.{name}"
        self.stack, self.folder = stack, folder
        self.configure()

    def configure(self, workers: int = 1, **settings: Setting) -> None:
        self.mirror = Mirror(self.stack, self.folder, self.name, workers, "dc2", **settings)

    async def create(self, partitions: int = 1, **configs: str) -> None:
        await self.admin(self.there, "create_topics", [NewTopic(self.topic, partitions, 1, topic_configs=configs)])

    async def admin(self, bootstrap: str, call: str, *arguments: Any) -> None:
        client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await client.start()
        try:
            await getattr(client, call)(*arguments)
        finally:
            await client.close()
        if call == "create_partitions":
            for topic, wanted in arguments[0].items():
                await until_grown(bootstrap, topic, wanted.total_count)

    async def write(self, *values: bytes, partition: int = 0, **options: Any) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.there, acks="all", **options) as producer:
            sent = [await producer.send(self.topic, value, partition=partition) for value in values]
            await asyncio.gather(*sent)

    async def differences(self) -> list[str]:
        return await differences_in_the_end((self.there, self.topic), (self.here, self.topic))

    async def state(self, url: str, wanted: str, partition: int = 0, topic: str = "") -> dict[str, Any]:
        """What the worker says of the partition once its state, or why it stopped, is the one that is wanted."""
        status: dict[str, Any] = {}
        try:
            async with aiohttp.ClientSession() as session, asyncio.timeout(60):
                while True:
                    async with session.get(f"{url}/v1/status") as answer:
                        status = await answer.json()
                    for found in status["partitions"]:
                        is_it = (found["topic"], found["partition"]) == (topic or self.topic, partition)
                        if is_it and wanted in (found["state"], found.get("stop", {}).get("kind")):
                            return dict(found)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not {wanted}: {status}") from None

    async def resume(self, url: str, start: str | int, partition: int = 0) -> tuple[int, dict[str, Any]]:
        """Repeats a 503, as any client does: the lane may be opened again after what has stopped the partition."""
        body = {"topic": self.topic, "partition": partition, "from": start}
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                async with session.post(f"{url}/v1/resume", json=body) as answer:
                    if answer.status != 503:
                        return answer.status, await answer.json(content_type=None)
                await asyncio.sleep(0.1)


async def settings_of(bootstrap: str, topic: str) -> dict[str, str]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    try:
        [answer] = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    finally:
        await client.close()
    return {entry[0]: entry[1] for entry in answer.resources[0][4]}
