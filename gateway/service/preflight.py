"""Before a worker serves: the first connection to Kafka, and checks of its settings and of the state topic.

Each weakness has a name, by which a configuration may accept it (`accept_weak_kafka`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.config import Config, ConfigError
from logferry.gateway.contract.lane_count import LaneCount
from logferry.gateway.errors import WeakKafka
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.requests import BrokerAbilities, ClusterMetadata, TopicMetadata
from logferry.gateway.kafka.types import LaneIdentity
from logferry.gateway.lanes.staging_topic import grown
from logferry.gateway.topics.catalog import MAX_MESSAGE_BYTES
from logferry.gateway.topics.health import replication, weakness

_CONNECT_DEADLINE_S: Final = 30.0
_LAG_S: Final = 0.1
_T = TypeVar("_T")
# A broker's answer to a wrong password; waiting does not help.
_REFUSED: Final = "Authentication failed"

_VERIFICATION: Final = "transaction.partition.verification.enable"
_AUTO_CREATE: Final = "auto.create.topics.enable"
_DAY_MS: Final = 86_400_000
# The active segment is never compacted and each transaction rewrites states: replay stays bounded by the number of
# sources, not of writes, only while segments are small and cleaned early. This is some 100,000 states.
_SEGMENT_BYTES: Final = 2 << 20
# A tombstone, and the marker of each transaction, stay for so long after the states that they ended are compacted.
_TOMBSTONES_MS: Final = 2 * _DAY_MS
_STATE_CONFIGS: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": str(_SEGMENT_BYTES),
    "segment.ms": str(_DAY_MS // 24),
    "min.cleanable.dirty.ratio": "0.2",
    "max.compaction.lag.ms": str(_DAY_MS // 12),
    "delete.retention.ms": str(_TOMBSTONES_MS),
    "compression.type": "producer",
    "unclean.leader.election.enable": "false",
}


# The lanes free its space. Where they may not, the retention does, which is longer than any transaction takes.
_STAGING_CONFIGS: Final = {
    "cleanup.policy": "delete",
    "segment.bytes": str(32 << 20),
    "segment.ms": str(_DAY_MS // 144),
    "retention.ms": str(_DAY_MS // 4),
    "max.message.bytes": str(MAX_MESSAGE_BYTES),
    "compression.type": "producer",
    "unclean.leader.election.enable": "false",
}


class LaneSettings(Protocol):
    @property
    def state_topic(self) -> str: ...

    @property
    def lanes(self) -> int: ...

    @property
    def accept_weak_kafka(self) -> Sequence[str]: ...

    def lane(self, number: int, /) -> LaneIdentity: ...


async def check(
    kafka: KafkaClient, config: LaneSettings, written: tuple[str, ...], count: LaneCount | None = None
) -> None:
    """Creates the state topic if it is missing, then checks it, the transaction log, and the topics to write to.

    ``written``: prefixes of the latter; a service that judges each topic when it writes to it names none. ``count``:
    the present number of lanes, where it can be changed. Raises WeakKafka or ConfigError, naming the setting.
    """
    check_abilities(await kafka.abilities())
    await _check_brokers(kafka, config.accept_weak_kafka)
    topic = config.state_topic
    if await create_topic(kafka, config, topic, config.lanes, _STATE_CONFIGS):
        log.event("state_topic_created", topic=topic, lanes=config.lanes)
    state = await wait_until_created(kafka, topic)
    check_state(config, state, count, (await _known_everywhere(partial(kafka.configs, [topic])))[topic])
    await kafka.find_transaction_coordinator(config.lane(0).transactional_id)
    await wait_until_created(kafka, "__transaction_state")
    present = [name for name in (await kafka.describe()).topics if name.startswith(written)] if written else []
    for name in (topic, "__transaction_state", *present):
        view = await _known_everywhere(partial(kafka.describe_topic, name))
        settings = await _known_everywhere(partial(kafka.configs, [name]))
        found = weakness(view, settings[name], config.accept_weak_kafka)
        if found is not None:
            raise WeakKafka(found)


async def make_staging_topic(kafka: KafkaClient, config: Config, lanes: int) -> None:
    """Creates the staging topic if it is missing, then checks it. Raises WeakKafka or ConfigError."""
    topic = config.staging_topic
    if await create_topic(kafka, config, topic, lanes, _STAGING_CONFIGS):
        log.event("staging_topic_created", topic=topic, lanes=lanes)
    await wait_until_created(kafka, topic)
    view = await grown(kafka, topic, lanes)
    settings = (await _known_everywhere(partial(kafka.configs, [topic])))[topic]
    if settings["cleanup.policy"] != "delete":
        raise ConfigError(f"{topic}: needed is cleanup.policy=delete")
    found = weakness(view, settings, config.accept_weak_kafka)
    if found is not None:
        raise WeakKafka(found)


async def _known_everywhere(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Asks again while a broker does not know a topic that another one has just named: it lags behind."""
    started = time.monotonic()
    while True:
        try:
            return await ask()
        except errors.UnknownTopicOrPartitionError:
            if time.monotonic() - started > _CONNECT_DEADLINE_S:
                raise
        await asyncio.sleep(_LAG_S)


def check_abilities(brokers: dict[str, BrokerAbilities]) -> None:
    """Raises WeakKafka, naming the broker that is too old."""
    for address, broker in brokers.items():
        if broker.produce < 13 or broker.end_txn < 5 or broker.transactions < 2:
            raise WeakKafka(
                f"the broker {address} is too old: Kafka 4.1 or newer with transaction.version 2 is needed, "
                f"it has Produce {broker.produce} (13), EndTxn {broker.end_txn} (5) and transaction.version "
                f"{broker.transactions}. Upgrade it, or raise the feature: kafka-features.sh upgrade --feature "
                "transaction.version=2"
            )


async def _check_brokers(kafka: KafkaClient, accepted: Sequence[str]) -> None:
    """Sets ``kafka.risks``. Raises WeakKafka; settings that may not be read are logged."""
    try:
        brokers = await kafka.broker_settings()
    except errors.KafkaError as error:
        log.event("broker_settings_hidden", reason=repr(error))
        return
    kafka.risks = broker_risks(brokers, accepted)
    if creating := [node for node, settings in sorted(brokers.items()) if settings.get(_AUTO_CREATE) == "true"]:
        log.event("topics_created_by_use", brokers=creating, setting=f"{_AUTO_CREATE}=true")


def broker_risks(brokers: Mapping[int, Mapping[str, str]], accepted: Sequence[str]) -> list[str]:
    """What the brokers' settings risk, each with a remedy. Raises WeakKafka, naming the broker."""
    for node, settings in sorted(brokers.items()):
        if settings.get(_VERIFICATION) == "false" and "partition-verification" not in accepted:
            raise WeakKafka(
                f"Kafka's broker {node}: {_VERIFICATION}=false, needed is true: else it takes stray records. "
                'Set it, or accept it by name: accept_weak_kafka = ["partition-verification"]'
            )
    if all(settings.get(_AUTO_CREATE) != "true" for settings in brokers.values()):
        return []
    what = "a deleted topic may come back, empty and weak, as Kafka creates topics that are asked for"
    return [f"{what}: set {_AUTO_CREATE}=false on the brokers"]


async def create_topic(
    kafka: KafkaClient, config: LaneSettings, topic: str, partitions: int, settings: dict[str, str]
) -> bool:
    """Creates a topic; False: it exists. Raises WeakKafka where brokers are missing."""
    if topic in (await kafka.describe([topic])).topics:
        return False
    brokers = len((await kafka.describe([])).brokers)
    replicas, in_sync = replication(config.accept_weak_kafka, brokers)
    try:
        await kafka.create_topic(topic, partitions, replicas, {**settings, "min.insync.replicas": str(in_sync)})
    except errors.TopicAlreadyExistsError:
        return False
    except errors.InvalidReplicationFactorError:
        weak = {
            "replication": f"needed are 3 replicas, {brokers} of the cluster's brokers are up",
            "min-isr": "needed is min.insync.replicas=2 with a broker to spare",
        }
        refused = {name: text for name, text in weak.items() if name not in config.accept_weak_kafka}
        names = ", ".join(f'"{name}"' for name in refused)
        raise WeakKafka(
            f"{topic} cannot be created: "
            + "; ".join(f"{name} ({text})" for name, text in refused.items())
            + f". Start more brokers, or accept it by name: accept_weak_kafka = [{names}]"
        ) from None
    return True


async def wait_until_created(kafka: KafkaClient, topic: str) -> TopicMetadata:
    """The topic, once each of its partitions has a leader. Raises LeaderNotAvailableError after half a minute."""
    started = time.monotonic()
    while True:
        view: ClusterMetadata = await kafka.describe([topic])
        if topic in view.topics and all(p.leader >= 0 for p in view.topics[topic].partitions):
            return view.topics[topic]
        if time.monotonic() - started > _CONNECT_DEADLINE_S:
            why = (
                "has partitions without a leader"
                if topic in view.topics
                else "is not visible: it does not exist, or this service has no right to describe it"
            )
            raise errors.LeaderNotAvailableError(f"Kafka's {topic} {why}")
        await asyncio.sleep(_LAG_S)


def check_state(config: LaneSettings, state: TopicMetadata, count: LaneCount | None, settings: dict[str, str]) -> None:
    """Raises ConfigError or WeakKafka: the topic cannot hold the states of these lanes."""
    if count is not None and count.epoch:
        if len(state.partitions) < count.lanes:
            raise ConfigError(f"{state.name} has {len(state.partitions)} partitions for {count.lanes} lanes")
    elif len(state.partitions) != config.lanes:
        raise ConfigError(
            f"lanes: {config.lanes} is configured, but {state.name} has {len(state.partitions)} partitions; "
            "set the number with which the state topic was created; `logferry lanes --to` changes it, and leaves it in "
            f"{state.name.removesuffix('.state')}.lanes, which the service must be allowed to read"
        )
    needed: tuple[tuple[str, Callable[[str], bool], str], ...] = (
        ("cleanup.policy", lambda value: value == "compact", "compact"),
        ("segment.bytes", lambda value: int(value) <= _SEGMENT_BYTES, f"at most {_SEGMENT_BYTES}"),
        ("min.cleanable.dirty.ratio", lambda value: float(value) <= 0.2, "at most 0.2"),
        ("delete.retention.ms", lambda value: int(value) >= _TOMBSTONES_MS, f"at least {_TOMBSTONES_MS}"),
    )
    wrong = [f"{name}={settings[name]}, needed is {what}" for name, fits, what in needed if not fits(settings[name])]
    if wrong:
        raise WeakKafka(f"{state.name}: " + "; ".join(wrong) + ". Set these on the topic and start again")


class _Heard(logging.Handler):
    """The last message of a logger: aiokafka reports there alone why a broker rejected it."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


async def connect_to_kafka(kafka: KafkaClient, deadline_s: float = _CONNECT_DEADLINE_S) -> None:
    """Connects, also to brokers that are still starting. Raises KafkaError: none answers, or one rejects us."""
    heard, logger = _Heard(logging.ERROR), logging.getLogger("aiokafka")
    logger.addHandler(heard)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    return await kafka.start()
                except (errors.KafkaError, OSError) as error:
                    if _REFUSED in heard.text:
                        raise errors.KafkaError(f"{kafka.options['bootstrap_servers']}: {heard.text}") from None
                    log.event("kafka_unreachable", error=heard.text or str(error))
                    await asyncio.sleep(1)
    except TimeoutError:
        servers = kafka.options["bootstrap_servers"]
        reason = f": {heard.text}" if heard.text else ""
        raise errors.KafkaError(f"no broker of {servers} answered within {deadline_s:g} s{reason}") from None
    finally:
        logger.setLevel(logging.CRITICAL)
        logger.removeHandler(heard)
