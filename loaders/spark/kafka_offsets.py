"""What Kafka holds of the topics to load: ids, first and last stable offsets, by Kafka's own client in the JVM.

Read-only; every call may be repeated. Raises KafkaAway when no broker answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Final

from logferry.gateway.contract.chunk import Malformed, split_topic
from logferry.loaders.errors import TopicChanged
from logferry.loaders.jvm_errors import released, sorted_errors
from logferry.loaders.planning.plan import PartitionOffsets, TopicPartition, TopicView
from pyspark.sql import SparkSession

_CLIENT: Final = {"request.timeout.ms": "5000", "default.api.timeout.ms": "15000", "client.id": "logferry-load"}


class KafkaTopics:
    """The topics of one cluster."""

    def __init__(self, jvm: Any, admin: Any, bootstrap_servers: str) -> None:
        self._jvm = jvm
        self._admin = admin
        self.bootstrap_servers = bootstrap_servers

    def names(self, patterns: Sequence[str]) -> list[str]:
        """The topics that the patterns mean: ``<dc>.<topic>`` only, and no compacted ones (their records vanish).

        Raises TopicChanged for a compacted one that is named without wildcards.
        """
        with sorted_errors(f"listing the topics of {self.bootstrap_servers}"):
            existing = set(self._admin.listTopics().names().get())
            found = {name for name in existing if _is_full(name) and matches(name, patterns)}
            compacted = set(self._compacted(sorted(found)))
        for name in (p for p in patterns if not is_pattern(p)):
            if name in compacted:
                raise TopicChanged(f"{name} is compacted: its records vanish, so it cannot be loaded exactly")
        return sorted(found - compacted)

    def views(self, topics: Iterable[str]) -> dict[str, TopicView]:
        """The topics as they are now; those that do not exist are left out."""
        wanted = sorted(set(topics))
        with sorted_errors(f"asking {self.bootstrap_servers} for offsets"):
            described = self._describe(wanted)
            partitions = [
                self._jvm.org.apache.kafka.common.TopicPartition(name, info.partition())
                for name, topic in described.items()
                for info in topic.partitions()
            ]
            spec = self._jvm.org.apache.kafka.clients.admin.OffsetSpec
            earliest = self._offsets(partitions, spec.earliest())
            stable = self._offsets(partitions, spec.latest())
        views = {}
        for name, topic in described.items():
            numbers = [info.partition() for info in topic.partitions()]
            offsets = {n: PartitionOffsets(earliest[name, n], stable[name, n]) for n in numbers}
            views[name] = TopicView(name, topic.topicId().toString(), offsets)
        return views

    def first_since(self, partitions: Iterable[TopicPartition], ms: int) -> dict[TopicPartition, int | None]:
        """Of each partition the first offset whose time is not before ``ms``, be it of a control record; None: all that
        is committed is older. What comes behind it may be older all the same.
        """
        made = [self._jvm.org.apache.kafka.common.TopicPartition(*key) for key in sorted(set(partitions))]
        with sorted_errors(f"asking {self.bootstrap_servers} for offsets by time"):
            spec = self._jvm.org.apache.kafka.clients.admin.OffsetSpec.forTimestamp(ms)
            found = self._offsets(made, spec)
        return {TopicPartition(*key): None if offset < 0 else offset for key, offset in found.items()}

    def ids(self, topics: Iterable[str]) -> dict[str, str]:
        """The topics' ids now; those that do not exist are left out."""
        with sorted_errors(f"asking {self.bootstrap_servers} for topics"):
            return {name: topic.topicId().toString() for name, topic in self._describe(sorted(set(topics))).items()}

    def _describe(self, topics: list[str]) -> dict[str, Any]:
        existing = set(self._admin.listTopics().names().get())
        names = self._jvm.java.util.ArrayList()
        for name in topics:
            if name in existing:
                names.add(name)
        return dict(self._admin.describeTopics(names).allTopicNames().get())

    def _offsets(self, partitions: list[Any], spec: Any) -> dict[tuple[str, int], int]:
        """Read_committed: the latest offset is the last stable one, before the first open transaction."""
        asked = self._jvm.java.util.HashMap()
        for partition in partitions:
            asked.put(partition, spec)
        level = self._jvm.org.apache.kafka.common.IsolationLevel.READ_COMMITTED
        options = self._jvm.org.apache.kafka.clients.admin.ListOffsetsOptions(level)
        answers = self._admin.listOffsets(asked, options).all().get()
        return {(e.getKey().topic(), e.getKey().partition()): e.getValue().offset() for e in answers.entrySet()}

    def _compacted(self, topics: list[str]) -> Iterator[str]:
        resource = self._jvm.org.apache.kafka.common.config.ConfigResource
        kind = getattr(resource, "Type").TOPIC  # noqa: B009
        asked = self._jvm.java.util.ArrayList()
        for name in topics:
            asked.add(resource(kind, name))
        for entry in self._admin.describeConfigs(asked).all().get().entrySet():
            if "compact" in str(entry.getValue().get("cleanup.policy").value()):
                yield entry.getKey().name()


@contextmanager
def kafka_topics(spark: SparkSession, bootstrap_servers: str) -> Iterator[KafkaTopics]:
    """A client of the cluster. Raises KafkaAway when the address cannot be used."""
    jvm: Any = spark._jvm
    with sorted_errors(f"connecting to Kafka at {bootstrap_servers}"):
        properties = jvm.java.util.Properties()
        for name, value in {"bootstrap.servers": bootstrap_servers, **_CLIENT}.items():
            properties.put(name, value)
        admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)
    try:
        yield KafkaTopics(jvm, admin, bootstrap_servers)
    finally:
        with released():
            admin.close(jvm.java.time.Duration.ofSeconds(5))


def is_pattern(text: str) -> bool:
    return any(c in text for c in "*?[")


def matches(topic: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(topic, pattern) for pattern in patterns)


def _is_full(name: str) -> bool:
    try:
        split_topic(name)
    except Malformed:
        return False
    return True
