"""Creates the local topics that are mirrored into, like their originals; grows and alters them with these.

Settings that belong to the data centre are never copied: replicas, ``min.insync.replicas``, throttles, tiers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.kafka.client import PASSING, KafkaClient
from logferry.gateway.kafka.error_codes import TOPIC_AUTHORIZATION_FAILED
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.lanes.lifecycle import now_ms
from logferry.gateway.topics.health import PartitionHealth, replication

ALIKE: Final = (
    *("retention.ms", "retention.bytes", "cleanup.policy", "max.message.bytes", "segment.bytes", "segment.ms"),
    *("min.cleanable.dirty.ratio", "min.compaction.lag.ms", "max.compaction.lag.ms", "delete.retention.ms"),
)
_MAX_BYTES: Final = "max.message.bytes"
_ANY_TIME_MS: Final = str(2**63 - 1)
# A batch that is encoded again may be a few bytes larger.
_ROOM_BYTES: Final = 4096
_REFRESH_S: Final = 30.0
_SETTINGS_S: Final = 60.0
_TOPICS_A_REQUEST: Final = 500
_APPEAR_S: Final = 2.0
_POLL_S: Final = 0.05
_EVERY_COPY: Final = {
    "compression.type": "producer",
    # Records keep the time at which they were written to the original.
    "message.timestamp.type": "CreateTime",
    # The original took them.
    "message.timestamp.before.max.ms": _ANY_TIME_MS,
    "message.timestamp.after.max.ms": _ANY_TIME_MS,
}


def settings_of_copy(original: Mapping[str, str]) -> dict[str, str]:
    """Of a copy, by the settings of its original; a name that the original's Kafka does not know is left out."""
    found = {name: original[name] for name in ALIKE if name in original}
    return found | {_MAX_BYTES: str(int(original[_MAX_BYTES]) + _ROOM_BYTES)} | _EVERY_COPY


def changes_of_copy(original: Mapping[str, str], copy: Mapping[str, str]) -> dict[str, str]:
    """What must change, so that the copy has its settings. It may take larger batches than its original."""
    wanted = settings_of_copy(original)
    if _MAX_BYTES in copy and int(copy[_MAX_BYTES]) >= int(wanted[_MAX_BYTES]):
        del wanted[_MAX_BYTES]
    return {name: value for name, value in wanted.items() if copy.get(name, value) != value}


class TargetTopics:
    """``known``: by name, as of the last refresh. ``batch_bytes``: the largest batch there. ``health``: the partitions
    that take nothing now. ``errors``: why a topic cannot be created, grown or described; the others are not concerned.
    ``unaltered``: why the settings of a topic cannot be made like its original's; it is written all the same.
    ``altered_ms``: when they were made so, by the host's clock.

    Refreshed when the originals change, when a write failed (`invalidate`), and every half minute, settings every
    minute: describing thousands of partitions is costly. ``alters``: settings are kept alike after the creation.
    ``replicas``: of a copy that is created.
    """

    def __init__(
        self, kafka: KafkaClient, accept_weak_kafka: Sequence[str] = (), *, alters: bool = True, replicas: int = 3
    ) -> None:
        self._kafka, self._accepted, self._alters, self._replicas = kafka, accept_weak_kafka, alters, replicas
        self.known: dict[str, TopicMetadata] = {}
        self.errors: dict[str, str] = {}
        self.unaltered: dict[str, str] = {}
        self.altered_ms: dict[str, int] = {}
        self.health = PartitionHealth()
        self.compacted: set[str] = set()
        self.batch_bytes: dict[str, int] = {}
        self._settings_due: dict[str, float] = {}
        self._in_sync: dict[str, int] = {}
        # By the id of the remote cluster: the topics that were ensured, and until when that holds.
        self._ensured: dict[str, tuple[dict[str, int], float]] = {}

    def min_in_sync(self, topic: str) -> int:
        """So many replicas must have a record before it is acknowledged."""
        return self._in_sync.get(topic, 1)

    def invalidate(self) -> None:
        """The next `ensure` of each remote describes them again."""
        self._ensured.clear()

    def reread(self, topic: str) -> None:
        """The next `ensure` compares the settings of the topic with its original's, too."""
        self._settings_due.pop(topic, None)
        self.invalidate()

    async def ensure(
        self, remote: KafkaClient, wanted: dict[str, TopicMetadata], there: Callable[[str], str] = lambda name: name
    ) -> None:
        """Creates and grows the local topics for the ``wanted`` remote ones. ``there``: their names in the remote.

        Raises KafkaError; calling again is safe, also by several workers at once.
        """
        shape = {name: len(topic.partitions) for name, topic in wanted.items()}
        of = remote.cluster_id or ""
        now = time.monotonic()
        ensured, until = self._ensured.get(of, ({}, 0.0))
        if ensured == shape and now < until:
            return
        # Before the look: a write that fails meanwhile (`invalidate`) asks for one more.
        self._ensured[of] = shape, now + _REFRESH_S
        try:
            await self._ensure(remote, wanted, there)
        except BaseException:
            self._ensured.pop(of, None)
            raise
        sizes = {name: len(topic.partitions) for name, topic in self.known.items()}
        if any(sizes.get(name, -1) < size for name, size in shape.items() if name not in self.errors):
            self._ensured.pop(of, None)

    async def _ensure(self, remote: KafkaClient, wanted: dict[str, TopicMetadata], there: Callable[[str], str]) -> None:
        view = await self._kafka.describe()
        missing = [topic for name, topic in wanted.items() if name not in view.topics]
        present = ((topic, view.topics[name]) for name, topic in wanted.items() if name in view.topics)
        small = [topic for topic, here in present if len(here.partitions) < len(topic.partitions)]
        for name in wanted:
            self.errors.pop(name, None)
        now = time.monotonic()
        due = [name for name in wanted if name not in self.known or now >= self._settings_due.get(name, 0.0)]
        settings = await self._settings(remote, due, there)
        self.batch_bytes.update({name: int(found["max.message.bytes"]) for name, found in settings.items()})
        # Also one that is not compacted any more may have lost batches by it.
        self.compacted.update(name for name, found in settings.items() if "compact" in found["cleanup.policy"])
        self._know(wanted, view.topics)
        for topic in missing:
            found = settings.get(topic.name) or (await self._settings(remote, [topic.name], there)).get(topic.name)
            if found is not None:
                with self._blamed(topic.name):
                    await self._create(topic, found)
        for topic in small:
            with self._blamed(topic.name), suppress(errors.InvalidPartitionsError):  # another worker was first
                await self._kafka.grow_topic(topic.name, len(topic.partitions))
                log.event("target_grown", topic=topic.name, partitions=len(topic.partitions))
        made = {topic.name: len(topic.partitions) for topic in missing + small if topic.name not in self.errors}
        topics = view.topics | (await self._appeared(made) if made else {})
        self._know(wanted, topics)
        here = await self._settings(self._kafka, [name for name in due if name in topics])
        if self._alters:
            for name in (name for name in due if name in topics and name not in here and name in self.errors):
                self._not_altered(name, "they cannot be read here", self.errors[name])
        for name, of_it in here.items():
            self._in_sync[name] = int(of_it["min.insync.replicas"])
            if name in settings and self._alters:
                await self._alter(name, changes_of_copy(settings[name], of_it))
            if name in settings:
                self._settings_due[name] = now + _SETTINGS_S
        for name in self.known.keys() & wanted.keys():
            self.health.judge(self.known[name], self.min_in_sync(name))

    def _know(self, wanted: Iterable[str], topics: Mapping[str, TopicMetadata]) -> None:
        """Those among them whose original's settings are known."""
        for name in wanted:
            if name in topics and name in self.batch_bytes:
                self.known[name] = topics[name]
            else:
                self.known.pop(name, None)

    @contextmanager
    def _blamed(self, topic: str) -> Iterator[None]:
        """An error that is the topic's own is noted; one of the whole cluster is raised."""
        try:
            yield
        except PASSING:
            raise
        except errors.KafkaError as error:
            self.errors[topic] = repr(error)

    async def _settings(
        self, kafka: KafkaClient, topics: list[str], there: Callable[[str], str] = lambda name: name
    ) -> dict[str, dict[str, str]]:
        """Those of the topics; one whose settings cannot be read is missing. ``there``: their names in that cluster."""
        found: dict[str, dict[str, str]] = {}
        for start in range(0, len(topics), _TOPICS_A_REQUEST):
            asked = topics[start : start + _TOPICS_A_REQUEST]
            try:
                settings = await kafka.configs([there(topic) for topic in asked])
                found |= {topic: settings[there(topic)] for topic in asked}
            except PASSING:
                raise
            except errors.KafkaError:
                for topic in asked:
                    with self._blamed(topic):
                        found[topic] = (await kafka.configs([there(topic)]))[there(topic)]
        return found

    async def _alter(self, topic: str, changes: Mapping[str, str]) -> None:
        """A refusal is noted, and tried again in a minute."""
        names = ", ".join(changes)
        try:
            if changes:
                await self._kafka.alter_topic(topic, changes)
                log.event("target_altered", topic=topic, settings=names)
                self.altered_ms[topic] = now_ms()
            self.unaltered.pop(topic, None)
        except PASSING:
            raise
        except errors.KafkaError as error:
            self._not_altered(topic, names, repr(error))

    def _not_altered(self, topic: str, settings: str, error: str) -> None:
        why = f"{settings}: {error}"
        if self.unaltered.get(topic) != why:
            self.unaltered[topic] = why
            log.event("target_not_altered", topic=topic, settings=settings, error=error)

    async def _appeared(self, shape: Mapping[str, int]) -> dict[str, TopicMetadata]:
        """The topics just created, once all of them are visible or `_APPEAR_S` passed: brokers learn of them late."""
        until = time.monotonic() + _APPEAR_S
        while True:
            view = await self._kafka.describe(sorted(shape))
            for name, code in view.errors.items():
                if code == TOPIC_AUTHORIZATION_FAILED:
                    self.errors[name] = "it is here, but Kafka hides it from the mirror: grant the rights on it"
            found = view.topics
            wanted = ((name, size) for name, size in shape.items() if name not in self.errors)
            is_there = all(name in found and len(found[name].partitions) >= size for name, size in wanted)
            if is_there or time.monotonic() > until:
                return found
            await asyncio.sleep(_POLL_S)

    async def _create(self, topic: TopicMetadata, settings: dict[str, str]) -> None:
        brokers = len((await self._kafka.describe([])).brokers)
        replicas, in_sync = replication(self._accepted, min(brokers, self._replicas))
        # More than the least: where brokers may be too few, as many as there are.
        replicas = max(replicas, min(self._replicas, brokers if "replication" in self._accepted else self._replicas))
        configs = settings_of_copy(settings)
        configs |= {"unclean.leader.election.enable": "false", "min.insync.replicas": str(in_sync)}
        with suppress(errors.TopicAlreadyExistsError):
            await self._kafka.create_topic(topic.name, len(topic.partitions), replicas, configs)
            log.event("target_created", topic=topic.name, partitions=len(topic.partitions))
