"""What a topic needs so that nothing that is acknowledged in it is lost with a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from logferry.gateway.kafka.metadata_request import TopicMetadata


class Durability(NamedTuple):
    """Replicas of each partition, and how many of them must have a record before it is acknowledged."""

    replicas: int
    in_sync: int


DURABLE: Final = Durability(replicas=3, in_sync=2)


def replication(accepted: Sequence[str], brokers: int) -> Durability:
    """What a topic is created with. Fewer than `DURABLE` only where that weakness is accepted by name.

    ``brokers``: those that are up; a broker that is down for a moment makes no topic weak for good.
    """
    replicas, in_sync = DURABLE
    if "replication" in accepted:
        replicas = min(replicas, max(1, brokers))
    if "min-isr" in accepted:
        in_sync = min(in_sync, max(1, replicas - 1))
    return Durability(replicas, min(in_sync, replicas))


def weakness(topic: TopicMetadata, settings: Mapping[str, str], accepted: Sequence[str]) -> str | None:
    """What is too weak and not accepted by name, and what to do about it; None: the topic is durable."""
    replicas = min(len(p.replicas) for p in topic.partitions)
    in_sync = int(settings["min.insync.replicas"])
    weak = {
        "replication": (
            replicas < DURABLE.replicas,
            f"its partitions have {replicas} replicas, needed are {DURABLE.replicas}",
        ),
        "min-isr": (in_sync < DURABLE.in_sync, f"min.insync.replicas={in_sync}, needed is {DURABLE.in_sync}"),
        "unclean-election": (
            settings["unclean.leader.election.enable"] != "false",
            "unclean.leader.election.enable=true, needed is false",
        ),
    }
    refused = {name: text for name, (is_weak, text) in weak.items() if is_weak and name not in accepted}
    if not refused:
        return None
    texts = "; ".join(f"{name} ({text})" for name, text in refused.items())
    names = ", ".join(f'"{name}"' for name in refused)
    return (
        f"Kafka's {topic.name} is too weak for exactly-once delivery: {texts}. "
        f"Strengthen it, or accept it by name: accept_weak_kafka = [{names}]"
    )
