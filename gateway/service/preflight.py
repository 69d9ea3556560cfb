"""Before a worker serves: Kafka's settings carry the promise, and the state topic is what it must be.

Weak settings are refused by name; a configuration may accept a weakness by that name (`accept_weak_kafka`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.config import ConfigError
from logferry.gateway.errors import WeakKafka
from logferry.gateway.identity import LaneIdentity
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.metadata_request import ClusterView, TopicView
from logferry.gateway.kafka.produce_request import BrokerAbilities

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


class LaneSettings(Protocol):
    """Of those who keep lanes."""

    @property
    def state_topic(self) -> str: ...

    @property
    def lanes(self) -> int: ...

    @property
    def accept_weak_kafka(self) -> Sequence[str]: ...

    def lane(self, number: int, /) -> LaneIdentity: ...


async def check(kafka: Kafka, config: LaneSettings, written: tuple[str, ...]) -> None:
    """Creates the state topic where it is missing, then checks it, the transaction log, and what is ``written`` to.

    The latter are prefixes of topics. Raises WeakKafka or ConfigError, naming the setting.
    """
    check_abilities(await kafka.abilities())
    topic = config.state_topic
    view = await kafka.describe([])
    if topic not in (await kafka.describe([topic])).topics:
        await _create_state_topic(kafka, config, len(view.brokers))
    state = await appeared(kafka, topic)
    _check_state(config, state, (await kafka.configs([topic]))[topic])
    await kafka.find_transaction_coordinator(config.lane(0).transactional_id)
    await appeared(kafka, "__transaction_state")
    present = [name for name in (await kafka.describe()).topics if name.startswith(written)]
    for name in (topic, "__transaction_state", *present):
        await _check_durability(kafka, config, name)


def check_abilities(brokers: dict[str, BrokerAbilities]) -> None:
    """Raises WeakKafka, naming the broker that is too old."""
    for address, broker in brokers.items():
        if not broker.suffices:
            raise WeakKafka(
                f"the broker {address} is too old: wanted is Kafka 4.1 or newer with transaction.version 2, "
                f"it has Produce {broker.produce} (13), EndTxn {broker.end_txn} (5) and transaction.version "
                f"{broker.transactions}. Upgrade it, or raise the feature: kafka-features.sh upgrade --feature "
                "transaction.version=2"
            )


async def _create_state_topic(kafka: Kafka, config: LaneSettings, brokers: int) -> None:
    settings = {**_STATE_CONFIGS, "min.insync.replicas": "2" if brokers >= 3 else "1"}
    try:
        await kafka.create_topic(config.state_topic, config.lanes, min(3, brokers), settings)
        log.event("info", "state_topic_created", topic=config.state_topic, lanes=config.lanes)
    except errors.TopicAlreadyExistsError:
        return


async def appeared(kafka: Kafka, topic: str) -> TopicView:
    """The topic, once each of its partitions has a leader."""
    view: ClusterView = await kafka.describe([topic])
    while topic not in view.topics or any(p.leader < 0 for p in view.topics[topic].partitions):
        view = await kafka.describe([topic])
    return view.topics[topic]


def _check_state(config: LaneSettings, state: TopicView, settings: dict[str, str]) -> None:
    if len(state.partitions) != config.lanes:
        raise ConfigError(
            f"lanes: {config.lanes} is configured, but {state.name} has {len(state.partitions)} partitions; "
            "the number of lanes is fixed when the state topic is created"
        )
    wrong = []
    if settings["cleanup.policy"] != "compact":
        wrong.append(f"cleanup.policy={settings['cleanup.policy']}, wanted compact")
    if int(settings["segment.bytes"]) > _SEGMENT_BYTES:
        wrong.append(f"segment.bytes={settings['segment.bytes']}, wanted at most {_SEGMENT_BYTES}")
    if float(settings["min.cleanable.dirty.ratio"]) > 0.2:
        wrong.append(f"min.cleanable.dirty.ratio={settings['min.cleanable.dirty.ratio']}, wanted at most 0.2")
    if int(settings["delete.retention.ms"]) < _TOMBSTONES_MS:
        wrong.append(f"delete.retention.ms={settings['delete.retention.ms']}, wanted at least {_TOMBSTONES_MS}")
    if wrong:
        raise WeakKafka(f"{state.name}: " + "; ".join(wrong) + ". Set these on the topic and start again")


async def _check_durability(kafka: Kafka, config: LaneSettings, topic: str) -> None:
    """Three replicas, two of them in sync, no unclean election."""
    view = await kafka.describe_topic(topic)
    settings = (await kafka.configs([topic]))[topic]
    replicas = min(len(p.replicas) for p in view.partitions)
    in_sync = int(settings["min.insync.replicas"])
    weak = {
        "replication": (replicas < 3, f"its partitions have {replicas} replicas, wanted are 3"),
        "min-isr": (in_sync < 2, f"min.insync.replicas={in_sync}, wanted is 2"),
        "unclean-election": (
            settings["unclean.leader.election.enable"] != "false",
            "unclean.leader.election.enable=true, wanted is false",
        ),
    }
    refused = [
        f"{name} ({text})" for name, (is_weak, text) in weak.items() if is_weak and name not in config.accept_weak_kafka
    ]
    if refused:
        names = ", ".join(f'"{text.split(" ")[0]}"' for text in refused)
        raise WeakKafka(
            f"Kafka's {topic} is weaker than the promise needs: {'; '.join(refused)}. "
            f"Strengthen it, or accept it by name: accept_weak_kafka = [{names}]"
        )
