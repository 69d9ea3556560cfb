"""Partitions of a read session that stop alone, while the others are read.

* **Without a leader** when the session got them: they have no start, and are no part of what the session holds. As soon
  as one has a leader, the session joins the group again, and they are assigned.
* **With a record that cannot be decoded**: Kafka gives it again each time. The partition is paused before it, the
  reader gets a ``damaged`` frame, and the session looks again every `_LOOK_AGAIN_S`: a mended one continues.

aiokafka says that decoding failed, not in which partition, and drops records of others that it had taken. So all go
back to where they were delivered to. Those that had records are paused until the gateway's own decoder has looked at
them; then records are taken one by one for a while, so that all that lie before the damaged one are delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final

import aiokafka
from aiokafka import AIOKafkaConsumer, errors
from logferry.gateway import log
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.aiokafka_internals import fetched_partitions, rejoin
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.gateway.kafka.record_batch import CorruptBatch
from logferry.gateway.reading import formats
from logferry.gateway.reading.assignment import HeldPartitions, undecodable
from logferry.gateway.reading.formats import Frame

_LOOK_AGAIN_S: Final = 2.0
_LOOK_BYTES: Final = 1 << 16
_DEADLINE_S: Final = 5.0

# Of each partition that answered: its next offset, or why that cannot be decoded; and whether one has a leader again.
Looks = tuple[dict[TopicPartition, int | Problem], bool]


class StoppedPartitions:
    """Those of one assignment. `step` and `set_aside` are for its time alone."""

    def __init__(
        self,
        session_id: str,
        held: HeldPartitions,
        leaderless: Collection[TopicPartition],
        kafka: KafkaClient,
        consumer: AIOKafkaConsumer,
    ) -> None:
        self.held = held
        self._session_id, self._kafka, self._consumer = session_id, kafka, consumer
        self._leaderless = sorted(leaderless)
        self._paused: set[TopicPartition] = set()
        self._announced: set[TopicPartition] = set()
        self._looking: asyncio.Task[Looks] | None = None
        self._now = asyncio.get_running_loop().time
        self._look_at = self._one_by_one_until = 0.0
        for topic, number in self._leaderless:
            log.event("session_partition_leaderless", session=session_id, topic=topic, partition=number)

    @property
    def is_one_by_one(self) -> bool:
        """Whether records are to be taken one by one."""
        return self._now() < self._one_by_one_until

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def set_aside(self) -> None:
        """aiokafka has failed to decode a record."""
        suspects = fetched_partitions(self._consumer) & self.held.starts.keys()
        for topic, number in self.held.starts.keys() - self._paused:
            partition = aiokafka.TopicPartition(topic, number)
            self._consumer.seek(partition, self.held.reached[topic, number])
            if (topic, number) in suspects:
                self._consumer.pause(partition)
        self._paused |= suspects
        self._look_at = 0.0

    def step(self) -> list[Frame]:
        """To be called often: looks at those that stopped, without waiting, and resumes them. The frames due."""
        if self._looking is None:
            if (self._paused or self._leaderless) and self._now() >= self._look_at:
                at = {partition: self.held.reached[partition] for partition in self._paused}
                self._looking = asyncio.create_task(self._look(at))
            return []
        if not self._looking.done():
            return []
        seen, is_led = self._looking.result()
        self._looking, self._look_at = None, self._now() + _LOOK_AGAIN_S
        if is_led:
            rejoin(self._consumer)
        frames = []
        for (topic, number), found in seen.items():
            if isinstance(found, Problem):
                if (topic, number) not in self._announced:
                    self._announced.add((topic, number))
                    offset = self.held.reached[topic, number]
                    frames.append(formats.damaged((topic, number), offset, found))
                    facts = {"session": self._session_id, "topic": topic, "partition": number, "offset": offset}
                    log.event("session_partition_damaged", **facts)
                continue
            if (topic, number) not in self._announced:
                # The damaged record is behind this one, or in another partition.
                self._one_by_one_until = self._look_at
            self._announced.discard((topic, number))
            self._paused.discard((topic, number))
            self.held.reach((topic, number), found)
            self._consumer.seek(aiokafka.TopicPartition(topic, number), found)
            self._consumer.resume(aiokafka.TopicPartition(topic, number))
        return frames

    async def _look(self, at: Mapping[TopicPartition, int]) -> Looks:
        seen: dict[TopicPartition, int | Problem] = {}
        for (topic, number), offset in at.items():
            with suppress(errors.KafkaError, TimeoutError):
                async with asyncio.timeout(_DEADLINE_S):
                    seen[topic, number] = await self._next(topic, number, offset)
        with suppress(errors.KafkaError, TimeoutError):
            async with asyncio.timeout(_DEADLINE_S):
                return seen, bool(self._leaderless and await self._kafka.offsets(self._leaderless, EARLIEST, 0.0))
        return seen, False

    async def _next(self, topic: str, number: int, offset: int) -> int | Problem:
        """Of the next record. aiokafka also stops at a control batch with a wrong checksum: that is passed."""
        try:
            fetched = await self._kafka.fetch(topic, number, offset, max_bytes=_LOOK_BYTES, stop_bytes=1)
        except CorruptBatch as error:
            return undecodable((topic, number), error)
        return fetched.records[0].offset if fetched.records else fetched.next_offset
