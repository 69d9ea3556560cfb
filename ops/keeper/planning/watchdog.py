"""The watchdog: what is wrong in the cluster, since when, and why; and how fast its directories fill. Pure.

A finding has a key that stays while it lasts, so that its beginning is known and its end is seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logferry.ops.keeper.planning.cluster_view import ClusterView, DirId, PartitionState

# Kinds of findings, worst first, each with its severity: "wrong" needs an operator, "note" passes or is known.
KINDS: Final = {
    "leaderless": "wrong",
    "under-min-isr": "wrong",
    "dir-failed": "wrong",
    "broker-silent": "wrong",
    "dir-low": "wrong",
    "dir-fills": "wrong",
    "cannot-move": "wrong",
    "cannot-delete": "wrong",
    "reader-unknown": "wrong",
    "under-replicated": "note",
    "dir-retired": "note",
}
_MOST_SAMPLES: Final = 500


class ClusterFinding(NamedTuple):
    """``what`` is the key: broker, directory or partition. ``since_ms``: Unix time of the first look that saw it."""

    kind: str
    what: str
    why: str
    since_ms: int = 0

    @property
    def is_wrong(self) -> bool:
        return KINDS[self.kind] == "wrong"


@dataclass(slots=True)
class KnownFindings:
    """The findings of the last look, each with its beginning."""

    present: dict[tuple[str, str], ClusterFinding] = field(default_factory=dict)

    def update(self, found: list[ClusterFinding], now_ms: int) -> tuple[list[ClusterFinding], list[ClusterFinding]]:
        """The new findings, and those that are over."""
        before = self.present
        order = list(KINDS)
        self.present = {}
        for one in sorted(found, key=lambda finding: (order.index(finding.kind), finding.what)):
            known = before.get((one.kind, one.what))
            self.present[one.kind, one.what] = one._replace(since_ms=known.since_ms if known else now_ms)
        new = [one for key, one in self.present.items() if key not in before]
        return new, [one for key, one in before.items() if key not in self.present]


@dataclass(slots=True)
class Growth:
    """The growth of each directory in bytes per second, by a line through the samples of ``window_s``."""

    window_s: float
    _samples: dict[DirId, deque[tuple[float, int]]] = field(default_factory=dict)

    def add(self, view: ClusterView) -> None:
        for state in view.dirs.values():
            if state.error:
                continue
            samples = self._samples.setdefault(state.id, deque(maxlen=_MOST_SAMPLES))
            samples.append((view.at_s, state.used_bytes))
            while samples and samples[0][0] < view.at_s - self.window_s:
                samples.popleft()

    def rate(self, place: DirId) -> float | None:
        """None: the samples are too few, or of a quarter of the window at most."""
        samples = self._samples.get(place)
        if not samples or len(samples) < 3 or samples[-1][0] - samples[0][0] < self.window_s / 4:
            return None
        middle_s = sum(at for at, _ in samples) / len(samples)
        middle = sum(used for _, used in samples) / len(samples)
        spread = sum((at - middle_s) ** 2 for at, _ in samples)
        return sum((at - middle_s) * (used - middle) for at, used in samples) / spread if spread else None

    def full_in_s(self, view: ClusterView, place: DirId) -> float | None:
        """Seconds until nothing is free; None: it does not grow, or that is not known yet."""
        rate = self.rate(place)
        return view.dirs[place].usable_bytes / rate if rate is not None and rate > 0 else None


class Thresholds(NamedTuple):
    low_free_percent: float
    full_within_s: float


def watch(view: ClusterView, growth: Growth, retired: Mapping[DirId, str], limits: Thresholds) -> list[ClusterFinding]:
    """All findings of this look. ``retired``: directories that are taken out of service, with the reason."""
    return [*_brokers(view), *_dirs(view, growth, retired, limits), *_partitions(view)]


def _brokers(view: ClusterView) -> Iterator[ClusterFinding]:
    for broker in view.brokers.values():
        if broker.silent is not None:
            yield ClusterFinding("broker-silent", f"broker {broker.id}", f"{broker.address}: {broker.silent}")


def _dirs(
    view: ClusterView, growth: Growth, retired: Mapping[DirId, str], limits: Thresholds
) -> Iterator[ClusterFinding]:
    for state in view.dirs.values():
        if state.error:
            lost = sum(
                view.is_lost(p.tp, state.id.broker) for p in view.partitions.values() if _has(p, state.id.broker)
            )
            yield ClusterFinding(
                "dir-failed", str(state.id), f"Kafka's error {state.error}; {lost} replicas are lost with it"
            )
            continue
        if state.id in retired:
            left = sum(1 for _ in view.in_dir(state.id))
            yield ClusterFinding("dir-retired", str(state.id), f"{retired[state.id]}; {left} replicas are left in it")
            continue
        if state.free_percent < limits.low_free_percent:
            yield ClusterFinding("dir-low", str(state.id), f"{state.free_percent:.1f} % are free")
        left_s = growth.full_in_s(view, state.id)
        if left_s is not None and left_s < limits.full_within_s:
            rate = growth.rate(state.id) or 0.0
            why = f"full in {left_s:.0f} s at {rate:.0f} bytes/s; {state.usable_bytes} bytes are free"
            yield ClusterFinding("dir-fills", str(state.id), why)


def _has(partition: PartitionState, broker: int) -> bool:
    return broker in partition.replicas


def _partitions(view: ClusterView) -> Iterator[ClusterFinding]:
    for partition in view.partitions.values():
        missing = [broker for broker in partition.replicas if broker not in partition.isr]
        if not missing and partition.leader >= 0 and len(partition.isr) >= partition.min_in_sync:
            continue
        why = "; ".join(f"replica {broker}: {_why_missing(view, partition, broker)}" for broker in missing)
        if partition.leader < 0:
            yield ClusterFinding("leaderless", partition.name, why or "its leader is being elected")
        elif len(partition.isr) < partition.min_in_sync:
            text = f"{len(partition.isr)} in sync, min.insync.replicas is {partition.min_in_sync}"
            yield ClusterFinding("under-min-isr", partition.name, f"{text}; {why}" if why else text)
        else:
            yield ClusterFinding("under-replicated", partition.name, why)


def _why_missing(view: ClusterView, partition: PartitionState, broker: int) -> str:
    if broker not in view.brokers:
        return "its broker is not registered"
    if (silent := view.brokers[broker].silent) is not None:
        return f"its broker is silent: {silent}"
    if view.is_lost(partition.tp, broker):
        return "its directory failed"
    replica = view.by_broker.get((partition.tp, broker))
    if broker in partition.adding:
        return "it is being added" + (f", {replica.lag} records behind" if replica else "")
    return "its broker does not have it yet" if replica is None else f"{replica.lag} records behind"
