"""The cluster at one look: brokers, directories, replicas and partitions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from logferry.gateway.contract.names import TopicPartition


class DirId(NamedTuple):
    """A log directory of a broker."""

    broker: int
    path: str

    def __str__(self) -> str:
        return f"{self.broker}:{self.path}"


class BrokerState(NamedTuple):
    """``silent``: why it gave no answer to this look; None: it answered."""

    id: int
    address: str
    rack: str
    silent: str | None = None


class DirState(NamedTuple):
    """``error``: Kafka's error code, 0 where the directory works; sizes are those of its file system."""

    id: DirId
    error: int
    total_bytes: int
    usable_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.usable_bytes

    @property
    def free_percent(self) -> float:
        return 100 * self.usable_bytes / self.total_bytes if self.total_bytes > 0 else 100.0


class ReplicaState(NamedTuple):
    """``is_future``: it is being copied to this directory from another one of its broker."""

    tp: TopicPartition
    dir: DirId
    size_bytes: int
    lag: int
    is_future: bool


class PartitionState(NamedTuple):
    """``adding``, ``removing``: of a reassignment that is under way."""

    tp: TopicPartition
    leader: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    min_in_sync: int
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.leader >= 0 and set(self.replicas) <= set(self.isr)

    @property
    def name(self) -> str:
        return f"{self.tp[0]}-{self.tp[1]}"


@dataclass(frozen=True)
class ClusterView:
    """``at_s``: of the monotonic clock. ``settings``, ``ids``: of the topics."""

    at_s: float
    brokers: Mapping[int, BrokerState]
    dirs: Mapping[DirId, DirState]
    replicas: Sequence[ReplicaState]
    partitions: Mapping[TopicPartition, PartitionState]
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ids: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def by_broker(self) -> dict[tuple[TopicPartition, int], ReplicaState]:
        """The present replicas, without those that are being copied."""
        return {(r.tp, r.dir.broker): r for r in self.replicas if not r.is_future}

    @cached_property
    def sizes(self) -> dict[TopicPartition, int]:
        """The size of the largest replica."""
        found: dict[TopicPartition, int] = {}
        for replica in self.replicas:
            found[replica.tp] = max(found.get(replica.tp, 0), replica.size_bytes)
        return found

    @cached_property
    def futures(self) -> dict[tuple[TopicPartition, int], ReplicaState]:
        return {(r.tp, r.dir.broker): r for r in self.replicas if r.is_future}

    def answers(self, broker: int) -> bool:
        return broker in self.brokers and self.brokers[broker].silent is None

    def failed_dirs(self, broker: int) -> list[DirId]:
        return [d.id for d in self.dirs.values() if d.id.broker == broker and d.error]

    def is_lost(self, tp: TopicPartition, broker: int) -> bool:
        """Whether the broker's replica is in a directory that failed: it answers, and does not have the replica.

        A replica in sync is one that is only now being made.
        """
        partition = self.partitions[tp]
        is_missing = (tp, broker) not in self.by_broker and (broker not in partition.isr or partition.leader < 0)
        return is_missing and self.answers(broker) and bool(self.failed_dirs(broker))

    def in_dir(self, place: DirId) -> Iterator[ReplicaState]:
        return (replica for replica in self.replicas if replica.dir == place)

    @property
    def is_calm(self) -> bool:
        """Every broker answers, and every partition has a leader and enough replicas in sync."""
        return all(broker.silent is None for broker in self.brokers.values()) and all(
            p.leader >= 0 and len(p.isr) >= p.min_in_sync for p in self.partitions.values()
        )
