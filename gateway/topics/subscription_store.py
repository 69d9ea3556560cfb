"""The subscriptions of `logferry deliver`, in a compacted topic with one partition, by name.

Whoever changes one writes it whole, so of two changes at the same moment the later one holds. A record that cannot be
decoded harms its own subscription alone: that delivers nothing, and is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from aiokafka import AIOKafkaProducer, errors
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.gateway.subscriptions import StoredSubscription
from logferry.gateway.topics.health import replication

_FETCH_BYTES: Final = 1 << 20
_WAIT_MS: Final = 2000
_PAUSE_S: Final = 0.05
_CREATED_S: Final = 15.0
_CONFIGS: Final = {
    "cleanup.policy": "compact",
    "compression.type": "producer",
    "unclean.leader.election.enable": "false",
}


def subscriptions_topic(prefix: str, dc: str) -> str:
    return f"{prefix}.deliver.{dc}.subscriptions"


class SubscriptionStore:
    """``subscriptions``: those that were read last. ``unreadable``: names, each with the reason."""

    def __init__(self, kafka: KafkaClient, topic: str, accepted: Sequence[str]) -> None:
        self._kafka, self.topic, self._accepted = kafka, topic, accepted
        self.subscriptions: dict[str, StoredSubscription] = {}
        self.unreadable: dict[str, str] = {}
        self._position: int | None = None
        self._lock = asyncio.Lock()

    async def create(self) -> None:
        """Creates the topic if it is missing. Raises KafkaError."""
        brokers = len((await self._kafka.describe([])).brokers)
        replicas, in_sync = replication(self._accepted, brokers)
        try:
            await self._kafka.create_topic(self.topic, 1, replicas, {**_CONFIGS, "min.insync.replicas": str(in_sync)})
        except errors.TopicAlreadyExistsError:
            return
        async with asyncio.timeout(_CREATED_S):
            while True:
                found = (await self._kafka.describe([self.topic])).topics.get(self.topic)
                if found is not None and found.partitions[0].leader >= 0:
                    return
                await asyncio.sleep(_PAUSE_S)

    async def refresh(self) -> dict[str, StoredSubscription]:
        """The subscriptions as they are now. Without the topic there are none. Raises KafkaError."""
        async with self._lock:
            try:
                while not await self._read(0):
                    pass
            except errors.UnknownTopicOrPartitionError:
                self.subscriptions, self.unreadable, self._position = {}, {}, None
        return self.subscriptions

    async def wait(self) -> None:
        """Returns when there may be something new, or after a moment. Raises KafkaError."""
        async with self._lock:
            await self._read(_WAIT_MS)

    async def _read(self, wait_ms: int) -> bool:
        """Whether all that was there is read."""
        if self._position is None:
            self._position = await self._kafka.offset(self.topic, 0, EARLIEST)
            self.subscriptions, self.unreadable = {}, {}
        try:
            fetched = await self._kafka.fetch(self.topic, 0, self._position, max_bytes=_FETCH_BYTES, wait_ms=wait_ms)
        except errors.OffsetOutOfRangeError:
            self._position = None
            return False
        if fetched.records:
            self.subscriptions = dict(self.subscriptions)
        for record in fetched.records:
            self._apply((record.key or b"").decode("utf-8", "replace"), record.value)
        self._position = fetched.next_offset
        return fetched.at_end

    def _apply(self, name: str, value: bytes | None) -> None:
        self.subscriptions.pop(name, None)
        self.unreadable.pop(name, None)
        if value is None:
            return
        try:
            self.subscriptions[name] = StoredSubscription.decode(value)
        except ValueError as error:
            self.unreadable[name] = f"its record cannot be decoded: {error}"

    async def put(self, name: str, stored: StoredSubscription | None) -> None:
        """Writes the subscription; None removes it. Returns when it is durable. Raises KafkaError."""
        value = None if stored is None else stored.encode()
        async with AIOKafkaProducer(acks="all", enable_idempotence=True, **self._kafka.options) as producer:
            await producer.send_and_wait(self.topic, value, key=name.encode(), partition=0)
