"""A lane of the mirror in a small world: two clusters in memory, and a producer that writes into one of them.

The lane, its transactions and partitions are the real ones. `MirrorWorld.fails` and `MirrorWorld.unavailable` make the
producer fail as Kafka does.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import errors
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.record_batch import FetchedRecords, KafkaRecord, Stamp, committed_records
from logferry.gateway.kafka.record_requests import FetchedPartition
from logferry.gateway.kafka.requests import ClusterMetadata, PartitionMetadata, TopicMetadata
from logferry.gateway.kafka.transactional_producer import NotCommitted
from logferry.gateway.lanes import lifecycle
from logferry.mirror.config import MirrorConfig
from logferry.mirror.copy.partition import MirroredPartition
from logferry.mirror.lanes import lane as mirror_lane
from logferry.mirror.lanes.chain import ChainHistories
from logferry.mirror.lanes.lane import MirrorLane
from logferry.mirror.lanes.target_topics import TargetTopics
from logferry.mirror.remote import MemoryBudget

from tests.support.lane_requests import FixedLanes
from tests.unit.mirror.copy.test_batch_rewrite import encoded, record

TOPIC = "dc1.t"
SETTINGS = {
    **dict.fromkeys(("retention.ms", "retention.bytes", "segment.bytes", "segment.ms"), "1000000"),
    **dict.fromkeys(("min.cleanable.dirty.ratio", "max.compaction.lag.ms", "delete.retention.ms"), "1"),
    **dict.fromkeys(("message.timestamp.before.max.ms", "message.timestamp.after.max.ms"), "3600000"),
    "cleanup.policy": "delete",
    "max.message.bytes": "1048588",
    "min.insync.replicas": "1",
}


def topic(name: str, partitions: int, mark: str = "", leader: int = 1) -> TopicMetadata:
    """``mark``: another one is another incarnation of the topic."""
    views = tuple(PartitionMetadata(number, leader, 0, (1, 2, 3), (1, 2, 3)) for number in range(partitions))
    return TopicMetadata(name, f"{name}{mark}".encode().ljust(16)[:16], False, views)


class MemoryCluster:
    """A cluster as `KafkaClient` shows it; of records it has those of state topics alone."""

    def __init__(self, cluster_id: str, *topics: TopicMetadata) -> None:
        self.cluster_id = cluster_id
        self.risks: list[str] = []
        self.topics = {one.name: one for one in topics}
        self.settings: dict[str, dict[str, str]] = {one.name: dict(SETTINGS) for one in topics}
        self.records: dict[TopicPartition, list[KafkaRecord]] = {}
        self.ranges: dict[TopicPartition, tuple[int, int]] = {}
        # What is answered to who asks for the topic's settings, or creates it.
        self.refuses: dict[str, Exception] = {}
        # What is answered to who reads the partition's records.
        self.unreadable: dict[TopicPartition, Exception] = {}
        # Topics that are there, and that this client may not describe.
        self.hidden: set[str] = set()
        self.altered: list[tuple[str, dict[str, str]]] = []

    def add(self, made: TopicMetadata, settings: dict[str, str] | None = None) -> None:
        self.topics[made.name] = made
        self.settings[made.name] = {**SETTINGS, **(settings or {})}

    async def create_topic(self, name: str, partitions: int, _replicas: int, settings: dict[str, str]) -> None:
        if name in self.refuses:
            raise self.refuses[name]
        if name in self.hidden:
            raise errors.TopicAlreadyExistsError(name)
        self.add(topic(name, partitions, "-copy"), settings)

    async def alter_topic(self, name: str, settings: dict[str, str]) -> None:
        self.altered.append((name, dict(settings)))
        self.settings[name] |= settings

    async def describe(self, names: list[str] | None = None) -> ClusterMetadata:
        seen = {name: view for name, view in self.topics.items() if name not in self.hidden}
        found = {name: view for name, view in seen.items() if names is None or name in names}
        denied = dict.fromkeys(self.hidden & set(names or ()), errors.TopicAuthorizationFailedError.errno)
        return ClusterMetadata(self.cluster_id, {1: ("k", 9092)}, found, denied)

    async def describe_topic(self, name: str) -> TopicMetadata:
        return self.topics[name]

    async def configs(self, names: list[str]) -> dict[str, dict[str, str]]:
        for name in names:
            if name in self.refuses:
                raise self.refuses[name]
        return {name: dict(self.settings[name]) for name in names}

    async def offset(self, name: str, number: int, time_ms: int) -> int:
        first, end = self.ranges.get((name, number), (0, len(self.records.get((name, number), ()))))
        return first if time_ms == -2 else end

    async def offsets(self, tps: list[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        return {tp: await self.offset(*tp, time_ms) for tp in tps}

    async def fetch(self, name: str, number: int, position: int, *, max_bytes: int) -> FetchedRecords:
        if (name, number) in self.unreadable:
            raise self.unreadable[name, number]
        found = self.records[name, number][position:]
        return FetchedRecords(found, position + len(found), position + len(found))


def in_memory(cluster_id: str, *topics: TopicMetadata) -> Any:
    """In the place of a `KafkaClient`."""
    return MemoryCluster(cluster_id, *topics)


class MemoryLink:
    """The remote of a lane: hands each followed partition what its log holds from the position on."""

    def __init__(self, config: MirrorConfig, kafka: Any) -> None:
        self.remote, self.kafka = config.remotes[0], kafka
        self.topics = dict(kafka.topics)
        self.sources: frozenset[str] = frozenset()
        self.logs: dict[TopicPartition, list[bytes]] = {}
        self.budget: MemoryBudget | None = None
        self.followed: set[MirroredPartition] = set()
        self.refreshes = 0

    def refresh_soon(self) -> None:
        self.refreshes += 1

    async def offset(self, tp: TopicPartition, time_ms: int) -> int:
        return int(await self.kafka.offset(*tp, time_ms))

    def follow(self, partition: MirroredPartition) -> None:
        self.followed.add(partition)
        partition.on_change = self.deliver
        self.deliver(partition)

    def unfollow(self, partition: MirroredPartition) -> None:
        self.followed.discard(partition)
        partition.on_change = lambda _: None

    def write(self, number: int, count: int, name: str = TOPIC) -> None:
        """So many records more, a batch each."""
        log = self.logs.setdefault((name, number), [])
        log += [encoded(offset, [record(offset)]) for offset in range(len(log), len(log) + count)]
        for partition in [one for one in self.followed if one.tp == (name, number)]:
            self.deliver(partition)

    def deliver(self, partition: MirroredPartition) -> None:
        asyncio.get_running_loop().call_soon(self.deliver_now, partition)

    def deliver_now(self, partition: MirroredPartition) -> None:
        log = self.logs.get(partition.tp, [])
        wanted = partition.wanted() if partition in self.followed else None
        if wanted is None or wanted.offset >= len(log):
            return
        raw = memoryview(b"".join(log[wanted.offset :]))
        found = FetchedPartition(partition.source_id, partition.number, 0, len(log), len(log), 0, [], raw, None)
        added = partition.take(found)
        if self.budget is not None:
            self.budget.take(added)


class MirrorWorld:
    """``written``: the records of each committed partition here. ``producers``: made one after the other.

    ``fails``: called with each part that is to be written; what it raises, the producer raises.
    """

    def __init__(self, partitions: int = 2, number: int = 0, **settings: Any) -> None:
        kafka = {"bootstrap_servers": "k:9092"}
        given = {"dc": "dc2", "kafka": kafka, "remote": [{"dc": "dc1", "kafka": kafka}], "lanes": 1, **settings}
        self.config = MirrorConfig.model_validate(given)
        own = (topic(self.config.state_topic, 1), topic(self.config.history_topic, 1))
        self.here = in_memory("here", topic(TOPIC, partitions, "-copy"), *own)
        self.there = in_memory("there", topic(TOPIC, partitions))
        self.link: Any = MemoryLink(self.config, self.there)
        self.links: Any = {"dc1": self.link}
        self.targets = TargetTopics(self.here)
        self.budget = self.link.budget = MemoryBudget(1 << 20)
        self.unavailable: dict[TopicPartition, str] = {}
        self.fails: Callable[[TopicPartition], None] = lambda tp: None
        self.written: dict[TopicPartition, int] = {}
        self.producers: list[MemoryProducer] = []
        self.before: list[Any] = []
        self.lane = MirrorLane(
            number=number,
            confirm_ownership=self._confirm,
            config=self.config,
            kafka=self.here,
            targets=self.targets,
            links=self.links,
            budget=self.budget,
            chains=ChainHistories({}),
            lanes=FixedLanes(self.here, self.config),
        )

    async def _confirm(self, number: int) -> None: ...

    def partition(self, number: int, name: str = TOPIC) -> MirroredPartition:
        return self.lane.partitions[name, number]

    def copied(self, number: int) -> int:
        """The records of the partition that are committed here."""
        return self.written.get((TOPIC, number), 0)

    def stops(self) -> dict[int, str]:
        """The kinds by partition."""
        return {number: one.stop.kind for (_, number), one in self.lane.partitions.items() if one.stop is not None}

    @asynccontextmanager
    async def running(self, patch: pytest.MonkeyPatch) -> AsyncIterator[None]:
        """The lane serves meanwhile."""
        patch.setattr(mirror_lane, "TransactionalProducer", self._make_producer)
        patch.setattr(lifecycle, "BACKOFF_S", (0.0,))
        await self.targets.ensure(self.there, self.link.topics)
        task = asyncio.create_task(self.lane.run())
        try:
            await until(lambda: self.lane.state == "serving")
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _make_producer(self, kafka: Any, lane: Any, before: Any = None, change: Any = None) -> MemoryProducer:
        self.before.append(before)
        self.producers.append(MemoryProducer(self, lane, len(self.producers)))
        return self.producers[-1]


class MemoryProducer:
    """A `TransactionalProducer` that writes into the world when it commits."""

    is_troubled = False
    throttled_s = 0.0
    state_topic_id, state_end = bytes(16), 0

    def __init__(self, world: MirrorWorld, lane: Any, number: int) -> None:
        self._world, self.lane = world, lane
        self.producers = {lane.transactional_id: number}
        self._open: list[tuple[TopicPartition, list[bytes]]] = []

    async def fence(self) -> None: ...

    async def settled(self) -> None:
        await asyncio.sleep(0)

    async def discard(self) -> None: ...

    async def write(self, parts: Iterable[Any]) -> None:
        await asyncio.sleep(0)
        for part in parts:
            self._world.fails(part.tp)
            if part.tp in self._world.unavailable:
                raise NotCommitted("no leader", unavailable={part.tp: self._world.unavailable[part.tp]})
            batches = []
            while part.rest:
                batch = part.rest.popleft()
                part.offsets.append((batch.first, batch.first))
                batches.append(b"".join(bytes(piece) for piece in batch.pieces(Stamp(1, 0, batch.first))))
            self._open.append((part.tp, batches))

    async def commit(self) -> None:
        await asyncio.sleep(0)
        for tp, batches in self._open:
            for raw in map(bytearray, batches):
                base = self._world.written.get(tp, 0)
                struct.pack_into(">q", raw, 0, base)
                records = committed_records(bytes(raw), (), base)[0]
                self._world.written[tp] = base + len(records)
                if tp[0] == self.lane.state[0]:
                    self._world.here.records.setdefault(tp, []).extend(records)
        self._open.clear()


async def until(condition: Callable[[], object], within_s: float = 10) -> None:
    """Returns when it is true; the loop runs meanwhile."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
