"""A lane's producer with what it needs around it: a topic, a state topic, drafts to write, and what was committed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.group_commit import GroupCommit
from logferry.gateway.lanes.transaction import Draft, WriteChunks
from logferry.gateway.service.preflight import wait_until_created
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.ops.stack.kafka_cluster import KafkaCluster

LIMIT = 1 << 20
# Kafka writes the markers of a commit after it has answered.
_MARKERS_S = 60


class Lane:
    """What a producer needs around it: a topic, a state topic, and drafts to write."""

    def __init__(self, kafka: KafkaClient, config: Config, topic: TopicMetadata) -> None:
        self.kafka, self.config = kafka, config
        self.facts = TopicFacts(topic.name, topic.id, len(topic.partitions), LIMIT)
        self.topics = TopicCatalog(kafka, config)
        self.table = SourceTable()
        self._made: list[GroupCommit] = []
        self._found: list[int] = []
        self._position = 0

    async def producer(self, kafka: KafkaClient | None = None) -> GroupCommit:
        """``kafka``: of another user."""
        producer = GroupCommit(kafka or self.kafka, self.topics, self.config, 0)
        self._made.append(producer)
        await producer.fence()
        return producer

    def draft(self, *seqnos: int, size: int = 10, source: str = "a", facts: TopicFacts | None = None) -> Draft:
        facts = facts or self.facts
        chunks = [Chunk(seqno, None, None, {}, b"%d " % seqno * size) for seqno in seqnos]
        draft = Draft(self.table, int(time.time() * 1000))
        draft.add(WriteChunks(facts, SourceIdentity(facts.name, None, source), None, chunks, size))
        return draft

    async def committed(self, count: int) -> list[int]:
        """The committed values of partition 0, by the numbers at their heads, as soon as there are so many or more."""
        async with asyncio.timeout(_MARKERS_S):
            while len(self._found) < count:
                fetched = await self.kafka.fetch(self.facts.name, 0, self._position, max_bytes=LIMIT, wait_ms=100)
                self._found += [int((record.value or b"").split(b" ", 1)[0]) for record in fetched.records]
                self._position = fetched.next_offset
        return self._found

    async def close(self) -> None:
        for producer in self._made:
            await producer.discard()


@asynccontextmanager
async def lane(cluster: KafkaCluster, name: str, partitions: int = 1) -> AsyncIterator[Lane]:
    config = Config.model_validate(
        {"dc": "dc1", "prefix": name[-64:].strip("-"), "lanes": 1, "kafka": {"bootstrap_servers": cluster.bootstrap}}
    )
    kafka = KafkaClient({"bootstrap_servers": cluster.bootstrap}, name)
    await kafka.start()
    made: Lane | None = None
    try:
        for topic in (config.state_topic, f"dc1.{name}"):
            await kafka.create_topic(topic, partitions if topic.startswith("dc1.") else 1, 1, {})
            view = await wait_until_created(kafka, topic)
        made = Lane(kafka, config, view)
        yield made
    finally:
        if made is not None:
            await made.close()
        await kafka.close()
