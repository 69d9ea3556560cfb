"""What push delivery still needs: the positions that its workers committed, by subscription.

A partition is needed from the least position of its shards on. It is needed whole while a shard has no state of the
present subscription and topic, or a replay that an operator asked for is not followed yet: its position may go back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from aiokafka import errors
from logferry.gateway.contract.delivery_state import DeliveryState, UnitKey
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.gateway.subscriptions import StoredSubscription
from logferry.gateway.topics.compacted_store import CompactedStore, subscriptions_topic

_FETCH_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class DeliveryNeeds:
    """``ids``: of the topics as they are now. ``unreadable``: subscriptions that cannot be decoded, with the reason."""

    subscriptions: Mapping[str, StoredSubscription]
    states: Mapping[UnitKey, DeliveryState]
    ids: Mapping[str, bytes]
    unreadable: Mapping[str, str]

    def check(self, pattern: str) -> None:
        """Raises LookupError where it is not known what the subscriptions of this name or pattern need."""
        for name, why in self.unreadable.items():
            if fnmatchcase(name, pattern):
                raise LookupError(f"subscription {name}: {why}")
        if not any(mark in pattern for mark in "*?[") and pattern not in self.subscriptions:
            raise LookupError(f"there is no subscription {pattern}")

    def of(self, pattern: str, tp: TopicPartition) -> dict[str, int | None]:
        """The position of each of the subscriptions that takes the topic; None: it needs all."""
        return {
            f"deliver {name}": self._position(name, stored, tp)
            for name, stored in self.subscriptions.items()
            if fnmatchcase(name, pattern) and any(fnmatchcase(tp[0], one) for one in stored.definition.topics)
        }

    def _position(self, name: str, stored: StoredSubscription, tp: TopicPartition) -> int | None:
        positions = []
        for shard in range(stored.definition.shards):
            state = self.states.get(UnitKey(name, *tp, shard))
            if state is None or (state.subscription_id, state.topic_id) != (stored.id, self.ids.get(tp[0])):
                return None
            if any(one.number > state.replay and one.position.fits(*tp) for one in stored.replays):
                return None
            positions.append(state.position)
        return min(positions)


class DeliveryPositions:
    """Reads the topics of `deliver`; what was read stays, so that the next look reads what is new alone."""

    def __init__(self, kafka: KafkaClient, prefix: str, dc: str) -> None:
        self._kafka = kafka
        self._topics = f"{prefix}.deliver.{dc}.state", subscriptions_topic(prefix, dc)
        self._lock = asyncio.Lock()
        self._forget({})

    def _forget(self, ids: dict[str, bytes]) -> None:
        self._ids = ids
        self._store = CompactedStore(self._kafka, self._topics[1], (), StoredSubscription.decode)
        self._states: dict[int, dict[UnitKey, DeliveryState]] = {}
        self._next: dict[int, int] = {}

    async def read(self, ids: Mapping[str, bytes]) -> DeliveryNeeds:
        """As they are now. Raises LookupError without the topics, KafkaError, OSError, TimeoutError.

        Cancelled, it keeps what was read until then.
        """
        async with self._lock:
            found = (await self._kafka.describe(list(self._topics))).topics
            if missing := [topic for topic in self._topics if topic not in found]:
                raise LookupError(f"no topic {missing[0]} is visible: deliver has not run here, or a right is missing")
            own = {topic: found[topic].id for topic in self._topics}
            if own != self._ids:
                self._forget(own)
            # Before the subscriptions: a replay that is followed meanwhile counts as not followed.
            await asyncio.gather(*map(self._read_lane, range(len(found[self._topics[0]].partitions))))
            subscriptions = await self._store.refresh()
            states = {key: state for lane in self._states.values() for key, state in lane.items()}
            return DeliveryNeeds(subscriptions, states, ids, dict(self._store.unreadable))

    async def _read_lane(self, lane: int) -> None:
        topic, is_read = self._topics[0], False
        while not is_read:
            if lane not in self._next:
                self._next[lane], self._states[lane] = await self._kafka.offset(topic, lane, EARLIEST), {}
            try:
                fetched = await self._kafka.fetch(topic, lane, self._next[lane], max_bytes=_FETCH_BYTES)
            except errors.OffsetOutOfRangeError:
                del self._next[lane]
                continue
            for record in fetched.records:
                self._apply(self._states[lane], record.key or b"", record.value)
            self._next[lane], is_read = fetched.next_offset, fetched.at_end

    def _apply(self, states: dict[UnitKey, DeliveryState], raw: bytes, value: bytes | None) -> None:
        """What cannot be decoded is as if it were not there: the partition is needed whole."""
        try:
            key = UnitKey.decode(raw)
        except ValueError:
            return
        states.pop(key, None)
        try:
            if value is not None:
                states[key] = DeliveryState.decode(value)
        except ValueError:
            return
