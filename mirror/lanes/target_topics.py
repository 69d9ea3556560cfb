"""The topics here that others are mirrored into: created like their originals, and grown with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.metadata_request import TopicView

# What a topic here has in common with its original.
_ALIKE: Final = (
    "retention.ms",
    "retention.bytes",
    "cleanup.policy",
    "max.message.bytes",
    "segment.bytes",
    "segment.ms",
    "min.cleanable.dirty.ratio",
    "max.compaction.lag.ms",
    "delete.retention.ms",
)
# A batch is a few bytes larger here when it had to be encoded again.
_ROOM_BYTES: Final = 4096
_LOOK_S: Final = 30.0
_APPEAR_S: Final = 2.0
_LOOK_AGAIN_S: Final = 0.05


class Targets:
    """``known``: by name, as they were when they were looked at last. ``batch_bytes``: the largest batch there.

    They are looked at when the originals change, when a write failed (`doubt`), and now and then: to describe
    thousands of partitions is costly.
    """

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self.known: dict[str, TopicView] = {}
        self.compacted: set[str] = set()
        self.batch_bytes: dict[str, int] = {}
        self._made_for: dict[str, dict[str, int]] = {}
        self._look_at = 0.0

    def doubt(self) -> None:
        """They may not be what they were."""
        self._look_at = 0.0

    async def ensure(self, remote: Kafka, wanted: dict[str, TopicView]) -> None:
        """Creates and grows what is missing of the ``wanted``, which are described as they are there.

        Raises KafkaError; calling again is safe, also by several workers at once.
        """
        shape = {name: len(topic.partitions) for name, topic in wanted.items()}
        of = remote.cluster_id or ""
        now = time.monotonic()
        if self._made_for.get(of) == shape and now < self._look_at:
            return
        await self._ensure(remote, wanted)
        if self._lacks(shape):
            self._made_for.pop(of, None)
        else:
            self._made_for[of], self._look_at = shape, now + _LOOK_S

    def _lacks(self, shape: Mapping[str, int]) -> bool:
        """Whether one of these topics, or of their partitions, was not seen here."""
        return any(name not in self.known or len(self.known[name].partitions) < size for name, size in shape.items())

    async def _ensure(self, remote: Kafka, wanted: dict[str, TopicView]) -> None:
        view = await self._kafka.describe()
        missing = [topic for name, topic in wanted.items() if name not in view.topics]
        small = [
            topic
            for name, topic in wanted.items()
            if name in view.topics and len(view.topics[name].partitions) < len(topic.partitions)
        ]
        unseen = [name for name in wanted if name not in self.known]
        settings = await remote.configs(unseen) if unseen else {}
        self.batch_bytes.update({name: int(found["max.message.bytes"]) for name, found in settings.items()})
        self.compacted.update(name for name, found in settings.items() if "compact" in found["cleanup.policy"])
        for topic in missing:
            await self._create(topic, settings.get(topic.name) or (await remote.configs([topic.name]))[topic.name])
        for topic in small:
            try:
                await self._kafka.grow_topic(topic.name, len(topic.partitions))
                log.event("info", "target_grown", topic=topic.name, partitions=len(topic.partitions))
            except errors.InvalidPartitionsError:
                continue  # another worker was first
        topics = view.topics
        if missing or small:
            topics = topics | await self._appeared({topic.name: len(topic.partitions) for topic in missing + small})
        self.known.update({name: topics[name] for name in wanted if name in topics})
        for name in wanted:
            if name not in topics:
                self.known.pop(name, None)

    async def _appeared(self, shape: Mapping[str, int]) -> dict[str, TopicView]:
        """What was just made, once all of it is seen, or after a while what is: brokers hear of it a moment later."""
        until = time.monotonic() + _APPEAR_S
        while True:
            found = (await self._kafka.describe(sorted(shape))).topics
            if all(name in found and len(found[name].partitions) >= size for name, size in shape.items()):
                return found
            if time.monotonic() > until:
                return found
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _create(self, topic: TopicView, settings: dict[str, str]) -> None:
        brokers = len((await self._kafka.describe([])).brokers)
        configs = {name: settings[name] for name in _ALIKE}
        configs["max.message.bytes"] = str(int(configs["max.message.bytes"]) + _ROOM_BYTES)
        configs |= {
            "compression.type": "producer",
            "unclean.leader.election.enable": "false",
            "min.insync.replicas": "2" if brokers >= 3 else "1",
            # Records keep the time at which they were written there.
            "message.timestamp.type": "CreateTime",
        }
        try:
            await self._kafka.create_topic(topic.name, len(topic.partitions), min(3, brokers), configs)
            log.event("info", "target_created", topic=topic.name, partitions=len(topic.partitions))
        except errors.TopicAlreadyExistsError:
            return
