"""What a topic needs so that nothing that is acknowledged in it is lost with a broker, and what takes nothing now.

A partition takes nothing without a leader, with too few replicas in sync, or when its leader does not answer. Requests
for it are refused before they are drafted, so that nothing else in its lane waits for it.

* *Opened* by what a transaction met, and by what Kafka's metadata shows when the facts of a topic are loaded.
* *Closed* when Kafka shows a leader with enough replicas in sync, and that leader answers for the partition. A
  partition that is reported again soon after that stays refused longer each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.client import LATEST, KafkaClient
from logferry.gateway.kafka.requests import TopicMetadata

# A durable topic has so many replicas, and so many of them have what is acknowledged.
_REPLICAS: Final = 3
_IN_SYNC: Final = 2
_LOOK_S: Final = 0.5
_ANSWER_S: Final = 2.0
# How long a partition is refused at least, by how often it was reported within `_SOON_S` of having been closed.
_REFUSED_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
_SOON_S: Final = 60.0


def replication(accepted: Sequence[str], brokers: int) -> tuple[int, int]:
    """What a topic is created with: replicas, and how many must have a record before it is acknowledged.

    Fewer than durable only where that weakness is accepted by name. ``brokers``: those that are up; a broker that is
    down for a moment makes no topic weak for good.
    """
    replicas, in_sync = _REPLICAS, _IN_SYNC
    if "replication" in accepted:
        replicas = min(replicas, max(1, brokers))
    if "min-isr" in accepted:
        in_sync = min(in_sync, max(1, replicas - 1))
    return replicas, min(in_sync, replicas)


def weakness(topic: TopicMetadata, settings: Mapping[str, str], accepted: Sequence[str]) -> str | None:
    """What is too weak and not accepted by name, and what to do about it; None: the topic is durable."""
    replicas = min(len(p.replicas) for p in topic.partitions)
    in_sync = int(settings["min.insync.replicas"])
    weak = {
        "replication": (replicas < _REPLICAS, f"its partitions have {replicas} replicas, needed are {_REPLICAS}"),
        "min-isr": (in_sync < _IN_SYNC, f"min.insync.replicas={in_sync}, needed is {_IN_SYNC}"),
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


@dataclass(slots=True)
class RefusedPartition:
    """``closed_s`` None: it is refused now. Times of the monotonic clock, but for ``since_ms``."""

    why: str
    since_ms: int
    until_s: float
    count: int = 0
    closed_s: float | None = None


@dataclass(slots=True)
class PartitionHealth:
    clock_s: Callable[[], float] = time.monotonic
    _known: dict[TopicPartition, RefusedPartition] = field(default_factory=dict)
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    def refuse(self, partitions: Mapping[TopicPartition, str]) -> None:
        """Refuses the partitions from now on, each for its reason."""
        now = self.clock_s()
        for tp, why in partitions.items():
            known = self._known.get(tp)
            if known is not None and known.closed_s is None:
                known.why = why
                continue
            is_soon = known is not None and known.closed_s is not None and now - known.closed_s < _SOON_S
            count = known.count + 1 if known is not None and is_soon else 0
            until_s = now + _REFUSED_S[min(count, len(_REFUSED_S) - 1)]
            self._known[tp] = RefusedPartition(why, int(time.time() * 1000), until_s, count)
            log.event("partition_refused", topic=tp[0], partition=tp[1], why=why)
            self._opened.set()

    def why(self, topic: str, partition: int) -> str | None:
        """Why the partition is refused; None: it is not."""
        if not self._known:
            return None
        known = self._known.get((topic, partition))
        return None if known is None or known.closed_s is not None else known.why

    def refused(self) -> dict[TopicPartition, RefusedPartition]:
        return {tp: known for tp, known in self._known.items() if known.closed_s is None}

    def judge(self, topic: TopicMetadata, min_in_sync: int) -> dict[TopicPartition, str]:
        """The partitions of the topic that take nothing, by the brokers' metadata; refused from now on."""
        found: dict[TopicPartition, str] = {}
        for partition in topic.partitions:
            if partition.leader < 0:
                found[topic.name, partition.partition] = "it has no leader"
            elif len(partition.isr) < min_in_sync:
                why = f"{len(partition.isr)} of its replicas are in sync, min.insync.replicas is {min_in_sync}"
                found[topic.name, partition.partition] = why
        self.refuse(found)
        return found

    def accept(self, partitions: Iterable[TopicPartition]) -> None:
        """The partitions are written to again."""
        now = self.clock_s()
        for tp in partitions:
            known = self._known.get(tp)
            if known is not None and known.closed_s is None and now >= known.until_s:
                known.closed_s = now
                log.event("partition_accepted", topic=tp[0], partition=tp[1])
        for tp, known in list(self._known.items()):
            if known.closed_s is not None and now - known.closed_s > _SOON_S:
                del self._known[tp]

    async def watch(self, kafka: KafkaClient, min_in_sync: Callable[[str], int]) -> None:
        """Looks twice a second at the refused partitions, while there are some."""
        while True:
            if not self.refused():
                self._opened.clear()
                await self._opened.wait()
            await asyncio.sleep(_LOOK_S)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    view = await kafka.describe(sorted({topic for topic, _ in self.refused()}))
            except (errors.KafkaError, OSError, TimeoutError):
                continue
            led: list[TopicPartition] = []
            for tp in self.refused():
                topic = view.topics.get(tp[0])
                if topic is None or tp[1] >= len(topic.partitions):
                    self.accept([tp])  # it is gone: the topic's facts say so
                elif tp not in self.judge(topic, min_in_sync(tp[0])):
                    led.append(tp)
            answered = await asyncio.gather(*(_answers(kafka, tp) for tp in led))
            self.accept(tp for tp, is_there in zip(led, answered, strict=True) if is_there)


async def _answers(kafka: KafkaClient, tp: TopicPartition) -> bool:
    """Whether the partition's leader answers for it."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await kafka.offset(*tp, LATEST)
    except (errors.KafkaError, OSError, TimeoutError):
        return False
    return True
