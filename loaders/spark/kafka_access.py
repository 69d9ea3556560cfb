"""Kafka through its own clients in the JVM: the options of a connection; ids and offsets of the topics to load.

PEM files are passed by their content, so that executors need no copy. A token is passed by its path: it is renewed, and
its file must exist on each host of the executors. Secrets are options of a read alone: they are in no configuration of
the session, which Spark's page and event log show. The files of the connection are read at each call. A renewed
password, token or certificate takes effect with the next.

Read-only; every call may be repeated. Raises KafkaUnavailable when no broker answers, KafkaRefused when Kafka refuses
the certificate, the credentials or a right, LoaderConfigError when a file of the connection cannot be used.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from logferry.gateway.config import ConfigError, KafkaSettings
from logferry.gateway.tls import kafka_options, one_line_secret
from logferry.loaders.errors import LoaderConfigError, SparkFailed, TopicChanged
from logferry.loaders.jvm_errors import released, sorted_errors
from logferry.loaders.planning.plan import PartitionOffsets, TopicOffsets, TopicPartition
from logferry.loaders.planning.position_plan import is_full
from pyspark.sql import SparkSession

_SECURITY: Final = "org.apache.kafka.common.security"
_PASSWORD_LOGIN: Final = {
    "PLAIN": f"{_SECURITY}.plain.PlainLoginModule",
    "SCRAM-SHA-256": f"{_SECURITY}.scram.ScramLoginModule",
    "SCRAM-SHA-512": f"{_SECURITY}.scram.ScramLoginModule",
}
_TOKEN_LOGIN: Final = f"{_SECURITY}.oauthbearer.OAuthBearerLoginModule"
_TOKEN_HANDLER: Final = f"{_SECURITY}.oauthbearer.OAuthBearerLoginCallbackHandler"
# An answer about an offset, as Java writes it.
_OFFSET: Final = re.compile(r"([\w.-]+)-(\d+)=\w+\(offset=(-?\d+),")
# A topic of a list, and the partitions of one that is described, as Java writes them.
_LISTED: Final = re.compile(r"\(name=([\w.-]+), topicId=([\w-]+), internal=")
_NAMED: Final = re.compile(r"\(name=([\w.-]+), internal=|\(partition=(\d+), leader=")
_PKCS8: Final = "-----BEGIN PRIVATE KEY-----"


def jvm_options(settings: KafkaSettings) -> dict[str, str]:
    """The settings of a Kafka client in the JVM, from the files as they are now. Raises LoaderConfigError, which names
    the setting and the file, never a secret.
    """
    try:
        kafka_options(settings)
        return {
            "bootstrap.servers": settings.bootstrap_servers,
            "security.protocol": settings.security_protocol,
            **_encryption(settings),
            **_login(settings),
        }
    except ConfigError as error:
        raise LoaderConfigError(str(error)) from None


def described(settings: KafkaSettings) -> str:
    """The cluster, and who connects, for messages."""
    who = f", as {settings.sasl_username}" if settings.sasl_username else ""
    how = "" if settings.security_protocol == "PLAINTEXT" else f" ({settings.security_protocol}{who})"
    return f"{settings.bootstrap_servers}{how}"


def _encryption(settings: KafkaSettings) -> dict[str, str]:
    found: dict[str, str] = {}
    if settings.ca_file is not None:
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": settings.ca_file.read_text()}
    if settings.cert_file is not None and settings.key_file is not None:
        found |= {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": settings.cert_file.read_text()}
        found["ssl.keystore.key"] = key = settings.key_file.read_text()
        if _PKCS8 not in key:
            raise LoaderConfigError(
                f"kafka.key_file: {settings.key_file}: Java reads PKCS #8 only; convert the key: "
                "openssl pkcs8 -topk8 -nocrypt -in OLD -out NEW"
            )
    return found


def _login(settings: KafkaSettings) -> dict[str, str]:
    if not settings.is_authenticated:
        return {}
    found = {"sasl.mechanism": settings.sasl_mechanism}
    if settings.sasl_token_file is not None:
        token = one_line_secret(settings.sasl_token_file, "kafka.sasl_token_file")
        # Clients with the same options share one login, and a login keeps its token: the digest tells tokens apart.
        digest = hashlib.sha256(token.encode()).hexdigest()
        return found | {
            "sasl.jaas.config": f'{_TOKEN_LOGIN} required digest="{digest}";',
            "sasl.login.callback.handler.class": _TOKEN_HANDLER,
            "sasl.oauthbearer.token.endpoint.url": settings.sasl_token_file.absolute().as_uri(),
        }
    if settings.sasl_username is None or settings.sasl_password_file is None:
        raise LoaderConfigError(f"kafka: {settings.sasl_mechanism} needs sasl_username and sasl_password_file")
    password = one_line_secret(settings.sasl_password_file, "kafka.sasl_password_file")
    module, user = _PASSWORD_LOGIN[settings.sasl_mechanism], _quoted(settings.sasl_username)
    return found | {"sasl.jaas.config": f"{module} required username={user} password={_quoted(password)};"}


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_CLIENT: Final = {"request.timeout.ms": "5000", "default.api.timeout.ms": "15000", "client.id": "logferry-load"}


class _Described(NamedTuple):
    id: str
    partitions: Sequence[int]


def described_topics(answer: str) -> dict[str, list[int]]:
    """The partitions of each topic in an answer of Java's client, printed."""
    found: dict[str, list[int]] = {}
    numbers: list[int] = []
    for name, number in _NAMED.findall(answer):
        if name:
            found[name] = numbers = []
        else:
            numbers.append(int(number))
    return {name: sorted(numbers) for name, numbers in found.items()}


class KafkaTopics:
    """The topics of one cluster. For several threads."""

    def __init__(self, jvm: Any, settings: KafkaSettings) -> None:
        self._jvm, self.settings = jvm, settings
        self.bootstrap_servers = settings.bootstrap_servers
        self._where = described(settings)
        self._lock = threading.Lock()
        # The newest last. The one before it stays: another thread may still use it.
        self._admins: list[tuple[dict[str, str], Any]] = []

    def options(self) -> dict[str, str]:
        """The connection, for clients in the JVM, from its files as they are now. Holds secrets."""
        return jvm_options(self.settings)

    def close(self) -> None:
        with self._lock, released():
            for _, admin in self._admins:
                admin.close(self._jvm.java.time.Duration.ofSeconds(5))

    @property
    def _admin(self) -> Any:
        options = self.options()
        with self._lock:
            if not self._admins or self._admins[-1][0] != options:
                with sorted_errors(f"connecting to Kafka at {self._where}"):
                    client = self._jvm.org.apache.kafka.clients.admin.AdminClient.create({**options, **_CLIENT})
                self._admins.append((options, client))
            if len(self._admins) > 2:
                self._admins.pop(0)[1].close(self._jvm.java.time.Duration.ofSeconds(5))
            return self._admins[-1][1]

    def names(self, patterns: Sequence[str]) -> list[str]:
        """The topics that match: ``<dc>.<topic>`` only, and no compacted ones (their records vanish).

        Raises TopicChanged for a compacted one that is named without wildcards.
        """
        with sorted_errors(f"listing the topics of {self._where}"):
            existing = self._existing()
        found = {name for name in existing if is_full(name) and matches(name, patterns)}
        with sorted_errors(f"reading the configuration of {listed(found)} at {self._where}"):
            compacted = self._compacted(found)
        for name in (p for p in patterns if not is_pattern(p)):
            if name in compacted:
                raise TopicChanged(f"{name} is compacted: Kafka removes records, so it cannot be loaded exactly")
        return sorted(found - compacted)

    def views(self, topics: Iterable[str]) -> dict[str, TopicOffsets]:
        """The topics as they are now; missing ones are omitted. Four requests, however many partitions there are."""
        with sorted_errors(f"fetching offsets from {self._where}"):
            described = self._describe(topics)
            partitions = [TopicPartition(name, n) for name, topic in described.items() for n in topic.partitions]
            spec = self._jvm.org.apache.kafka.clients.admin.OffsetSpec
            earliest = self._offsets(partitions, spec.earliest())
            stable = self._offsets(partitions, spec.latest())
        return {
            name: TopicOffsets(
                name, topic.id, {n: PartitionOffsets(earliest[name, n], stable[name, n]) for n in topic.partitions}
            )
            for name, topic in described.items()
        }

    def ends(self, topics: Iterable[str]) -> dict[TopicPartition, int]:
        """The end of each partition, records of open transactions included; missing topics are omitted."""
        with sorted_errors(f"fetching offsets from {self._where}"):
            described = self._describe(topics)
            partitions = [TopicPartition(name, n) for name, topic in described.items() for n in topic.partitions]
            latest = self._jvm.org.apache.kafka.clients.admin.OffsetSpec.latest()
            found = self._offsets(partitions, latest, "READ_UNCOMMITTED")
        return {TopicPartition(*key): offset for key, offset in found.items()}

    def first_since(self, partitions: Iterable[TopicPartition], ms: int) -> dict[TopicPartition, int | None]:
        """The first offset of each partition whose time is not before ``ms``, control records included; None: all
        committed records are older. Later records may be older all the same.
        """
        made = sorted(set(partitions))
        with sorted_errors(f"fetching offsets by time from {self._where}"):
            spec = self._jvm.org.apache.kafka.clients.admin.OffsetSpec.forTimestamp(ms)
            found = self._offsets(made, spec)
        return {TopicPartition(*key): None if offset < 0 else offset for key, offset in found.items()}

    def ids(self, topics: Iterable[str]) -> dict[str, str]:
        """The topics' ids now; missing topics are omitted."""
        with sorted_errors(f"fetching topics from {self._where}"):
            wanted, existing = sorted(set(topics)), self._existing()
            self._check_absent([name for name in wanted if name not in existing])
            return {name: existing[name] for name in wanted if name in existing}

    def _describe(self, topics: Iterable[str]) -> dict[str, _Described]:
        """The topics that exist, by name."""
        ids = self.ids(topics)
        answer: str = self._admin.describeTopics(list(ids)).allTopicNames().get().toString()
        found = described_topics(answer)
        if found.keys() != ids.keys() or not all(found.values()):
            raise SparkFailed(f"this Kafka client describes topics in another way: {answer[:500]}")
        return {name: _Described(ids[name], found[name]) for name in ids}

    def _check_absent(self, names: list[str]) -> None:
        """Kafka lists no topic without the right to describe it: that is an error here, lest the topic pass for a
        removed one.
        """
        missing = self._admin.describeTopics(names).topicNameValues()
        for name in names:
            with suppress(TopicChanged), sorted_errors(f"looking for {name} at {self._where}"):
                missing.get(name).get()

    def _existing(self) -> dict[str, str]:
        """The ids of all topics. In one call: py4j would iterate by a call for each, and end by an exception."""
        answer: str = self._admin.listTopics().listings().get().toString()
        found = dict(_LISTED.findall(answer))
        if len(found) != answer.count("topicId="):
            raise SparkFailed(f"this Kafka client lists topics in another way: {answer[:500]}")
        return found

    def _offsets(
        self, partitions: Sequence[TopicPartition], spec: Any, isolation: str = "READ_COMMITTED"
    ) -> dict[tuple[str, int], int]:
        """With read_committed, the latest offset is the last stable one, before the first open transaction."""
        level = getattr(self._jvm.org.apache.kafka.common.IsolationLevel, isolation)
        options = self._jvm.org.apache.kafka.clients.admin.ListOffsetsOptions(level)
        answers = self._admin.listOffsets(self._each(partitions, spec), options).all().get()
        found = {(name, int(n)): int(offset) for name, n, offset in _OFFSET.findall(answers.toString())}
        if len(found) != len(partitions):
            raise SparkFailed(f"this Kafka client names offsets in another way: {answers.toString()[:500]}")
        return found

    def _each(self, partitions: Sequence[TopicPartition], value: Any) -> Any:
        """Java's map of each partition to the value, in few calls: each call of py4j takes 0.1 ms."""
        topics: dict[str, dict[str, int]] = {}
        for topic, number in partitions:
            topics.setdefault(topic, {})[str(number)] = 0
        made = self._jvm.org.apache.spark.sql.kafka010.JsonUtils.partitionOffsets(json.dumps(topics))
        converters, scala = self._jvm.scala.jdk.javaapi.CollectionConverters, self._jvm.scala
        values = converters.asScala(self._jvm.java.util.Collections.nCopies(len(partitions), value)).toSeq()
        same_type = getattr(getattr(scala, "$less$colon$less$"), "MODULE$").refl()
        return converters.asJava(made.keys().toSeq().zip(values).toMap(same_type))

    def _compacted(self, topics: Collection[str]) -> set[str]:
        resource = self._jvm.org.apache.kafka.common.config.ConfigResource
        kind = getattr(resource, "Type").TOPIC  # noqa: B009
        resources = {name: resource(kind, name) for name in topics}
        configs = self._admin.describeConfigs(list(resources.values())).all().get()
        policies = {name: str(configs.get(it).get("cleanup.policy").value()) for name, it in resources.items()}
        return {name for name, policy in policies.items() if "compact" in policy}


@contextmanager
def kafka_topics(spark: SparkSession, settings: KafkaSettings) -> Iterator[KafkaTopics]:
    """A client of the cluster. Raises LoaderConfigError when a file of the connection cannot be used."""
    jvm: Any = spark._jvm
    kafka = KafkaTopics(jvm, settings)
    kafka.options()
    try:
        yield kafka
    finally:
        kafka.close()


def is_pattern(text: str) -> bool:
    return any(c in text for c in "*?[")


def matches(topic: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(topic, pattern) for pattern in patterns)


def listed(topics: Collection[str]) -> str:
    """The first ones, for messages."""
    return f"{', '.join(sorted(topics)[:3])}{' and others' if len(topics) > 3 else ''}"
