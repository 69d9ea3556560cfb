"""What a worker of `deliver` knows: the subscriptions, the topics that they name, and their receivers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.delivery_state import UnitKey
from logferry.gateway.contract.names import Cursor, TopicPartition
from logferry.gateway.delivery.config import DeliverConfig
from logferry.gateway.delivery.metrics import forget_subscription
from logferry.gateway.delivery.pages import TopicPages
from logferry.gateway.delivery.sender import BatchSender
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.kafka.error_codes import TOPIC_AUTHORIZATION_FAILED
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.reading.assignment import matcher
from logferry.gateway.subscriptions import AllowedAddresses, NumberedReplay, PushSubscription, StoredSubscription
from logferry.gateway.topics.compacted_store import CompactedStore
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.gateway.topics.health import PartitionHealth, weakness

_TOPICS_S: Final = 2.0
_RETRY_S: Final = 1.0
# Not a pattern.
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(slots=True, eq=False)
class SubscriptionView:
    """``changed``: called when subscriptions or topics may be others."""

    kafka: KafkaClient
    config: DeliverConfig
    store: CompactedStore[StoredSubscription]
    translation: OffsetTranslation
    pages: TopicPages
    changed: Callable[[], None]
    health: PartitionHealth = field(default_factory=PartitionHealth)
    is_known: bool = False
    # Topics that Kafka does not let this worker see: those seen before, and those that a subscription names in full.
    hidden: frozenset[str] = frozenset()
    _topics: dict[str, TopicMetadata] = field(default_factory=dict)
    _matched: dict[str, tuple[list[str], list[TopicMetadata]]] = field(default_factory=dict)
    _senders: dict[str, tuple[PushSubscription, BatchSender]] = field(default_factory=dict)
    _facts: dict[str, TopicFacts] = field(default_factory=dict)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def subscriptions(self) -> dict[str, StoredSubscription]:
        return self.store.entries

    # ---- what changes -----------------------------------------------------------------------------------------------

    async def follow_subscriptions(self) -> None:
        """Until it is cancelled."""
        while True:
            before = self.store.entries
            try:
                await self.store.wait()
            except (errors.KafkaError, OSError, TimeoutError):
                await asyncio.sleep(_RETRY_S)
            if self.store.entries is not before and self.is_known:
                self._match()

    async def follow_topics(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                found = (await self.kafka.describe()).topics
                known = self.config.known_dcs
                topics = {name: topic for name, topic in found.items() if name.partition(".")[0] in known}
                replaced = [name for name, topic in self._topics.items() if topics.get(name, topic).id != topic.id]
                self.pages.forget(replaced)
                await self._find_hidden(topics.keys())
                if topics != self._topics:
                    self._matched = {}
                self._topics, self.is_known = topics, True
                self._match()
            except (errors.KafkaError, OSError, TimeoutError) as error:
                log.event("topics_not_visible", error=repr(error))
            await asyncio.sleep(_TOPICS_S)

    async def _find_hidden(self, visible: Set[str]) -> None:
        wanted = {name for one in self.subscriptions.values() for name in one.definition.topics}
        missing = {*self._topics, *self.hidden, *filter(_TOPIC.fullmatch, wanted)} - visible
        errors_of = (await self.kafka.describe(sorted(missing))).errors if missing else {}
        hidden = frozenset(name for name, code in errors_of.items() if code == TOPIC_AUTHORIZATION_FAILED)
        new, self.hidden = hidden - self.hidden, hidden
        for name in sorted(new):
            log.event("topics_not_visible", error=f"Kafka hides {name}: grant Read on it")

    @property
    def warnings(self) -> list[str]:
        """For the status."""
        return [f"Kafka hides {name}, so nothing of it is delivered: grant Read on it" for name in sorted(self.hidden)]

    def _match(self) -> None:
        """Called often: units that changed nothing ignore it."""
        for name in list(self._senders):
            if name not in self.subscriptions:
                self._close(self._senders.pop(name)[1])
                forget_subscription(name)
        for name in self._matched.keys() - self.subscriptions.keys():
            del self._matched[name]
        self.changed()

    def topics_of(self, name: str) -> list[TopicMetadata]:
        """Thousands of subscriptions may look at thousands of topics: each does it when either changed."""
        patterns = self.subscriptions[name].definition.topics
        known = self._matched.get(name)
        if known is None or known[0] != patterns:
            fits = matcher(tuple(patterns)).match
            known = self._matched[name] = patterns, [topic for topic in self._topics.values() if fits(topic.name)]
        return known[1]

    def is_gone(self, key: UnitKey) -> bool:
        """Whether the state of the unit serves nobody any more."""
        return key.subscription not in self.subscriptions and key.subscription not in self.store.unreadable

    def sender(self, name: str) -> BatchSender:
        definition = self.subscriptions[name].definition
        known = self._senders.get(name)
        if known is not None and known[0] == definition:
            return known[1]
        if known is not None:
            self._close(known[1])
        sender = BatchSender(definition, self.config.secrets_dir, AllowedAddresses(self.config.allowed_networks))
        self._senders[name] = definition, sender
        return sender

    def _close(self, sender: BatchSender) -> None:
        task = asyncio.create_task(sender.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        senders, self._senders = self._senders, {}
        await asyncio.gather(*(sender.close() for _, sender in senders.values()), *self._closing)

    # ---- positions --------------------------------------------------------------------------------------------------

    async def first_position(self, key: UnitKey, stored: StoredSubscription) -> int:
        """Where a new unit begins. A partition that is newer than its subscription is delivered whole."""
        tp = key.topic, key.partition
        if stored.definition.start == "earliest":
            return await self.kafka.offset(*tp, EARLIEST)
        return await self._at_time(tp, stored.created_ms)

    async def _at_time(self, tp: TopicPartition, time_ms: int) -> int:
        # The end is asked for first: what is written in between is after the time.
        end = await self.kafka.offset(*tp, LATEST)
        found = await self.kafka.offset(*tp, time_ms)
        return found if found >= 0 else end

    async def position(self, replay: NumberedReplay, tp: TopicPartition) -> int:
        """Where a replay begins in the partition. Raises KafkaError."""
        wanted = replay.position
        if wanted.cursor is not None:
            try:
                return (await self.translation.of_cursors([Cursor.parse(wanted.cursor)]))[tp]
            except Problem as problem:
                raise errors.KafkaError(problem.detail) from None
        if wanted.time_ms is not None:
            return await self._at_time(tp, wanted.time_ms)
        if isinstance(wanted.offset, int):
            return wanted.offset
        return await self.kafka.offset(*tp, EARLIEST if wanted.offset == "earliest" else LATEST)

    # ---- dead letters -----------------------------------------------------------------------------------------------

    async def letters(self, name: str) -> str | None:
        """Why the dead-letter topic takes nothing now; None: it takes records."""
        topic = f"{self.config.dc}.{name}"
        try:
            view = await self.kafka.describe_topic(topic)
            settings = (await self.kafka.configs([topic]))[topic]
        except errors.UnknownTopicOrPartitionError:
            return f"there is no topic {topic}; create it: logferry topics create {name} --partitions 4"
        except (errors.KafkaError, OSError, TimeoutError) as error:
            return f"Kafka does not answer: {error!r}"
        limits = int(settings["max.message.bytes"]), int(settings["min.insync.replicas"])
        weak = weakness(view, settings, self.config.accept_weak_kafka)
        self._facts[topic] = TopicFacts(topic, view.id, len(view.partitions), *limits, weak)
        refused = [why for p in view.partitions if (why := self.health.why(topic, p.partition)) is not None]
        return weak or next(iter({**self.health.judge(view, limits[1])}.values()), None) or next(iter(refused), None)

    def facts(self, topic: str) -> TopicFacts:
        """Those that `letters` found last."""
        return self._facts[topic]

    def min_in_sync(self, topic: str) -> int:
        known = self._facts.get(topic)
        return 1 if known is None else known.min_in_sync
