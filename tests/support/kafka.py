"""Topics that are altered, or deleted and recreated while brokers and workers come and go.

Committed positions of consumer groups, set and read by Kafka's own requests."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import aiohttp
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.errors import KafkaError, NoError, UnknownTopicOrPartitionError
from aiokafka.protocol.admin import DescribeConfigsRequest
from logferry.gateway.kafka.client import KafkaClient
from logferry.ops.stack.kafka_cluster import KafkaCluster

_PATIENCE_S = 120
_PAUSE_S = 0.1
_DONE = (NoError.errno, UnknownTopicOrPartitionError.errno)


async def delete_topic(bootstrap: str, topic: str) -> bytes:
    """Deletes a full topic, which must be there; returns its id when no broker that answers knows of it any more."""
    async with asyncio.timeout(_PATIENCE_S):
        gone = await _id(bootstrap, topic)
        while gone is None:
            await asyncio.sleep(_PAUSE_S)
            gone = await _id(bootstrap, topic)
        while True:
            with suppress(KafkaError, TimeoutError):
                admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
                await admin.start()
                try:
                    response = await admin.delete_topics([topic])
                finally:
                    await admin.close()
                if response.topic_error_codes[0][1] in _DONE and not await _is_known(bootstrap, topic):
                    return gone
            await asyncio.sleep(_PAUSE_S)


async def alter_topic(bootstrap: str, topic: str, **settings: str) -> None:
    """Sets ``max_message_bytes="1000"``, and so on; returns when every broker goes by it.

    Kafka acknowledges a change that its brokers only learn of later, and a broker shows it shortly before it goes by
    it: another change that it shows afterwards says that the first one is in force.
    """
    kafka = KafkaClient({"bootstrap_servers": bootstrap}, "tests")
    await kafka.start()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            wanted = {name.replace("_", "."): value for name, value in settings.items()}
            for changes in (wanted, {"file.delete.delay.ms": str(random.randrange(50_000, 60_000))}):
                await kafka.alter_topic(topic, changes)
                for node, _, _ in kafka.brokers():
                    while not changes.items() <= (await _settings_at(kafka, node, topic)).items():  # noqa: ASYNC110
                        await asyncio.sleep(_PAUSE_S)
    finally:
        await kafka.close()


async def _settings_at(kafka: KafkaClient, node: int, topic: str) -> dict[str, str]:
    [(code, _, _, _, entries)] = (
        await kafka.send(node, DescribeConfigsRequest([(ConfigResourceType.TOPIC, topic, None)]))
    ).resources
    assert code == 0, code
    return {entry[0]: entry[1] for entry in entries}


async def make_topic(url: str, name: str, partitions: int = 4) -> str:
    """Creates the topic through a worker, repeating a 503 as any client does; returns its full name."""
    async with asyncio.timeout(_PATIENCE_S), aiohttp.ClientSession() as session:
        while True:
            async with session.put(f"{url}/v1/topics/{name}", json={"partitions": partitions}) as response:
                if response.status != 503:
                    assert response.status in (200, 201), await response.text()
                    return f"dc1.{name}"
                await asyncio.sleep(float(response.headers["Retry-After"]))


async def recreate_topic(bootstrap: str, topic: str, urls: list[str], partitions: int, gone: bytes) -> None:
    """Through any worker that answers; returns when all leaders know the new one instead of the one that is gone."""
    name = topic.partition(".")[2]
    async with asyncio.timeout(_PATIENCE_S), aiohttp.ClientSession() as session:
        while await _id(bootstrap, topic) in (None, gone):
            for url in urls:
                with suppress(aiohttp.ClientError):
                    async with session.put(f"{url}/v1/topics/{name}", json={"partitions": partitions}):
                        break
            await asyncio.sleep(_PAUSE_S)


async def until_replaced(bootstrap: str, topic: str, gone: bytes) -> None:
    """Until all leaders know the topic by another id than that of the one that is gone."""
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            if await _id(bootstrap, topic) not in (None, gone):
                return
            await asyncio.sleep(_PAUSE_S)


async def until_grown(bootstrap: str, topic: str, partitions: int) -> None:
    """Until a broker shows so many partitions with leaders: a producer refuses one that it does not see."""
    kafka = KafkaClient({"bootstrap_servers": bootstrap}, "tests")
    await kafka.start()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                view = (await kafka.describe([topic])).topics.get(topic)
                if view is not None and sum(p.leader >= 0 for p in view.partitions) >= partitions:
                    return
                await asyncio.sleep(_PAUSE_S)
    finally:
        await kafka.close()


async def _is_known(bootstrap: str, topic: str) -> bool:
    """Raises KafkaError or TimeoutError when nobody answers."""
    kafka = KafkaClient({"bootstrap_servers": bootstrap}, "tests")
    try:
        await kafka.start()
        return topic in (await kafka.describe([topic])).topics
    finally:
        await kafka.close()


async def _id(bootstrap: str, topic: str) -> bytes | None:
    """None: the topic is not there, or its leaders do not agree."""
    kafka = KafkaClient({"bootstrap_servers": bootstrap}, "tests")
    try:
        await kafka.start()
        view = (await kafka.describe([topic])).topics.get(topic)
        if view is None:
            return None
        return (await kafka.ids_at_leaders((topic, p.partition) for p in view.partitions)).get(topic)
    except (KafkaError, TimeoutError):
        return None
    finally:
        await kafka.close()


async def committed(cluster: KafkaCluster, group: str, topic: str, number: int = 0) -> int | None:
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(group)
        place = TopicPartition(topic, number)
        return None if place not in found else int(found[place].offset)
    finally:
        await admin.close()


async def commit(cluster: KafkaCluster, group: str, topic: str, offset: int, number: int = 0) -> None:
    place = TopicPartition(topic, number)
    async with AIOKafkaConsumer(
        bootstrap_servers=cluster.bootstrap, group_id=group, enable_auto_commit=False
    ) as reader:
        reader.assign([place])
        await reader.commit({place: offset})


async def becomes(cluster: KafkaCluster, group: str, topic: str, wanted: int) -> bool:
    """Waits until it is so; TimeoutError when it does not come."""
    async with asyncio.timeout(60):
        while await committed(cluster, group, topic) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return True
