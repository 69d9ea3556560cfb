"""Committed positions of consumer groups, set and read by Kafka's own requests."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from logferry.ops.stack.kafka_cluster import Cluster


async def committed(cluster: Cluster, group: str, topic: str, number: int = 0) -> int | None:
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(group)
        place = TopicPartition(topic, number)
        return None if place not in found else int(found[place].offset)
    finally:
        await admin.close()


async def commit(cluster: Cluster, group: str, topic: str, offset: int, number: int = 0) -> None:
    place = TopicPartition(topic, number)
    async with AIOKafkaConsumer(
        bootstrap_servers=cluster.bootstrap, group_id=group, enable_auto_commit=False
    ) as reader:
        reader.assign([place])
        await reader.commit({place: offset})


async def becomes(cluster: Cluster, group: str, topic: str, wanted: int) -> bool:
    """Waits until it is so; TimeoutError when it does not come."""
    async with asyncio.timeout(60):
        while await committed(cluster, group, topic) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return True
