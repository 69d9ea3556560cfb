"""What operators and loaders leave at the gateway, by name, in a compacted topic with one partition: the subscriptions
of `logferry deliver`, and the reports of tables. So every worker has it, and a restart loses nothing.

Whoever changes an entry writes it whole, so of two changes at the same moment the later one holds. A record that cannot
be decoded harms its own entry alone: a subscription delivers nothing then, and is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

from aiokafka import AIOKafkaProducer, errors
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
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


async def create_store(
    kafka: KafkaClient, topic: str, accepted: Sequence[str], configs: Mapping[str, str] | None = None
) -> None:
    """Creates the topic of one partition if it is missing. Raises KafkaError."""
    brokers = len((await kafka.describe([])).brokers)
    replicas, in_sync = replication(accepted, brokers)
    settings = {**_CONFIGS, **(configs or {}), "min.insync.replicas": str(in_sync)}
    try:
        await kafka.create_topic(topic, 1, replicas, settings)
    except errors.TopicAlreadyExistsError:
        return
    async with asyncio.timeout(_CREATED_S):
        while True:
            found = (await kafka.describe([topic])).topics.get(topic)
            if found is not None and found.partitions[0].leader >= 0:
                return
            await asyncio.sleep(_PAUSE_S)


class Stored(Protocol):
    def encode(self) -> bytes: ...


_Entry = TypeVar("_Entry", bound=Stored)


class CompactedStore(Generic[_Entry]):
    """``entries``: those that were read last. ``unreadable``: names, each with the reason. ``held_bytes``: of entries.

    ``decode`` raises ValueError. ``configs``: of the topic, besides those of every such topic.
    """

    def __init__(
        self,
        kafka: KafkaClient,
        topic: str,
        accepted: Sequence[str],
        decode: Callable[[bytes], _Entry],
        configs: Mapping[str, str] | None = None,
    ) -> None:
        self._kafka, self.topic, self._accepted, self._decode = kafka, topic, accepted, decode
        self._configs = configs
        self._sizes: dict[str, int] = {}
        self.entries: dict[str, _Entry] = {}
        self.unreadable: dict[str, str] = {}
        self._position: int | None = None
        self._lock = asyncio.Lock()

    async def create(self) -> None:
        """Creates the topic if it is missing. Raises KafkaError."""
        await create_store(self._kafka, self.topic, self._accepted, self._configs)

    async def refresh(self) -> dict[str, _Entry]:
        """The entries as they are now. Without the topic there are none. Raises KafkaError."""
        async with self._lock:
            try:
                while not await self._read(0):
                    pass
            except errors.UnknownTopicOrPartitionError:
                self.entries, self.unreadable, self._sizes, self._position = {}, {}, {}, None
        return self.entries

    async def wait(self) -> None:
        """Returns when there may be something new, or after a moment. Raises KafkaError."""
        async with self._lock:
            await self._read(_WAIT_MS)

    async def _read(self, wait_ms: int) -> bool:
        """Whether all that was there is read."""
        if self._position is None:
            self._position = await self._kafka.offset(self.topic, 0, EARLIEST)
            self.entries, self.unreadable, self._sizes = {}, {}, {}
        try:
            fetched = await self._kafka.fetch(self.topic, 0, self._position, max_bytes=_FETCH_BYTES, wait_ms=wait_ms)
        except errors.OffsetOutOfRangeError:
            self._position = None
            return False
        if fetched.records:
            self.entries = dict(self.entries)
        for record in fetched.records:
            self._apply((record.key or b"").decode("utf-8", "replace"), record.value)
        self._position = fetched.next_offset
        return fetched.at_end

    def _apply(self, name: str, value: bytes | None) -> None:
        self.entries.pop(name, None)
        self.unreadable.pop(name, None)
        self._sizes.pop(name, None)
        if value is None:
            return
        self._sizes[name] = len(value)
        try:
            self.entries[name] = self._decode(value)
        except ValueError as error:
            self.unreadable[name] = f"its record cannot be decoded: {error}"

    @property
    def held_bytes(self) -> int:
        return sum(self._sizes.values())

    async def put(self, name: str, stored: _Entry | None) -> None:
        """Writes the entry; None removes it. Returns when it is durable. Raises KafkaError."""
        value = None if stored is None else stored.encode()
        async with AIOKafkaProducer(acks="all", enable_idempotence=True, **self._kafka.options) as producer:
            await producer.send_and_wait(self.topic, value, key=name.encode(), partition=0)
