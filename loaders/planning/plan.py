"""Which offsets the next batch reads, and when a run reaches its limits. Pure: what is committed and what Kafka holds
in, ranges out; the clock is passed in.

The law of this file: a partition's next range starts where its last one ended, in the same incarnation of the topic,
or the topic is stopped with the reason. There is no way from a known topic back to its earliest offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class Range(NamedTuple):
    """The offsets [start, end) of one partition; control records and holes are among them.

    ``topic_id``: Kafka's own id of the topic, as Kafka's tools print it; it changes when the topic is recreated.
    """

    topic: str
    partition: int
    topic_id: str
    start: int
    end: int

    @property
    def key(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def at_rest(self) -> Range:
        """The same position, without anything to read."""
        return self._replace(start=self.end)


def one_a_partition(ranges: Sequence[Range]) -> list[list[Range]]:
    """The ranges in parts with at most one of each partition; mostly a single part."""
    found: list[dict[TopicPartition, Range]] = []
    for r in ranges:
        free = next((chosen for chosen in found if r.key not in chosen), None)
        if free is None:
            found.append(free := {})
        free[r.key] = r
    return [list(chosen.values()) for chosen in found]


class PartitionOffsets(NamedTuple):
    """``earliest``: the first offset retained. ``stable``: the last stable offset, the end for committed reads."""

    earliest: int
    stable: int


class TopicOffsets(NamedTuple):
    """A topic as Kafka holds it now."""

    topic: str
    topic_id: str
    partitions: Mapping[int, PartitionOffsets]


class StoppedTopic(NamedTuple):
    """A topic that is no longer loaded, and why."""

    topic: str
    reason: str


class BatchPlan(NamedTuple):
    """``ranges``: every partition ever seen, also without anything to read, so that an entry has all positions."""

    ranges: tuple[Range, ...]
    stopped: tuple[StoppedTopic, ...]

    @property
    def records(self) -> int:
        return sum(r.size for r in self.ranges)


def plan(
    committed: Sequence[Range],
    views: Mapping[str, TopicOffsets],
    wanted: Iterable[str],
    max_records: int,
    targets: Mapping[TopicPartition, int] | None = None,
) -> BatchPlan:
    """The next batch: at most ``max_records`` offsets, shared fairly among the partitions that have some.

    ``committed``: the ranges of the last batch, whose ends are the positions. ``views``: what Kafka has of the wanted
    topics. ``targets``: where to stop; partitions that are not in it wait for the next call. A topic that is not
    wanted keeps its positions untouched.
    """
    stopped: list[StoppedTopic] = []
    resting = {r.key: r.at_rest for r in committed}
    ready: list[Range] = []
    by_topic: dict[str, list[Range]] = {}
    for r in resting.values():
        by_topic.setdefault(r.topic, []).append(r)
    for topic in sorted(set(wanted)):
        known = by_topic.get(topic, [])
        reason = changed(topic, known, views.get(topic))
        if reason is not None:
            stopped.append(StoppedTopic(topic, reason))
            continue
        view, positions = views[topic], {r.partition: r.end for r in known}
        for partition, offsets in sorted(view.partitions.items()):
            start = positions.get(partition, offsets.earliest)
            end = offsets.stable
            if targets is not None:
                end = min(end, targets.get(TopicPartition(topic, partition), start))
            ready.append(Range(topic, partition, view.topic_id, start, max(start, end)))
    for r, share in zip(ready, fair_shares([r.size for r in ready], max_records), strict=True):
        resting[r.key] = r._replace(end=r.start + share)
    return BatchPlan(tuple(sorted(resting.values())), tuple(stopped))


def changed(topic: str, known: Sequence[Range], view: TopicOffsets | None) -> str | None:
    """Why Kafka's offsets do not continue the positions (the ranges' ends); None when they do."""
    if view is None:
        return f"{topic} {'no longer exists' if known else 'does not exist'}"
    for r in known:
        if reason := _discontinued(r, r.end, view):
            return reason
    seen = {r.partition for r in known}
    for partition, have in view.partitions.items():
        if known and partition not in seen and have.earliest > 0:
            return f"{topic}: records of the new partition {partition} were removed before they were loaded"
    return None


def unreadable(ranges: Iterable[Range], views: Mapping[str, TopicOffsets]) -> str | None:
    """Why ranges that are in the ledger cannot be read exactly; None when they can."""
    for r in ranges:
        if not r.size:
            continue
        view = views.get(r.topic)
        if view is None:
            return f"{r.topic} no longer exists"
        if reason := _discontinued(r, r.start, view) or _discontinued(r, r.end, view):
            return reason
    return None


def replaced(ranges: Iterable[Range], ids: Mapping[str, str]) -> str | None:
    """Why the records read may not be those of the ledger; None when every topic is still the same."""
    for r in ranges:
        if ids.get(r.topic) != r.topic_id:
            return f"{r.topic} was removed or recreated while it was read"
    return None


def _discontinued(r: Range, offset: int, view: TopicOffsets) -> str | None:
    """Why the partition cannot be read from ``offset`` on; None when it can."""
    if r.topic_id != view.topic_id:
        return (
            f"{r.topic} was recreated, or this is another cluster: its id is {view.topic_id}, "
            f"the ledger has {r.topic_id}"
        )
    have = view.partitions.get(r.partition)
    if have is None:
        return f"{r.topic} no longer has partition {r.partition}"
    if have.earliest > offset:
        removed = f"{offset} to {have.earliest - 1}"
        return f"{r.topic}: the records {removed} of partition {r.partition} were removed before they were loaded"
    if have.stable < offset:
        return (
            f"{r.topic}: partition {r.partition} ends at {have.stable}, the ledger has {offset}: its log was truncated"
        )
    return None


def fair_shares(wants: Sequence[int], budget: int) -> list[int]:
    """Splits ``budget``: no share exceeds its demand, and small demands are met before large ones."""
    shares = [0] * len(wants)
    order = sorted(range(len(wants)), key=lambda i: wants[i])
    for served, i in enumerate(order):
        shares[i] = min(wants[i], budget // (len(order) - served))
        budget -= shares[i]
    return shares


# The assumed size of an offset before any was read.
_GUESS_BYTES: Final = 256 << 10
_GROWTH: Final = 8


class Limits(NamedTuple):
    """The limits of one run: offsets and bytes of each table, ``seconds`` of the run. None: no limit."""

    offsets: int | None = None
    bytes: int | None = None
    seconds: float | None = None


@dataclass
class BatchSizer:
    """Cuts a backlog into batches of about ``batch_bytes``, by the offsets' sizes so far; ``max_records`` at most.

    ``offsets``, ``bytes``: what the run has loaded of the table. A batch in the ledger is never cut for the limits.
    """

    max_records: int
    batch_bytes: int
    limits: Limits = field(default_factory=Limits)
    now: Callable[[], float] = lambda: 0.0
    is_stopped: Callable[[], bool] = lambda: False
    started: float = 0.0
    average: float = _GUESS_BYTES
    offsets: int = 0
    bytes: int = 0
    _last: int = 0

    def next_offsets(self) -> int:
        """How many offsets the next batch reads at most; at least one."""
        average = max(self.average, 1.0)
        wanted = min(self.max_records, int(self.batch_bytes / average))
        if self._last:
            # One batch of small chunks does not prove that all are small.
            wanted = min(wanted, self._last * _GROWTH)
        if self.limits.offsets is not None:
            wanted = min(wanted, self.limits.offsets - self.offsets)
        if self.limits.bytes is not None:
            wanted = min(wanted, int((self.limits.bytes - self.bytes) / average))
        return max(1, wanted)

    def saw(self, offsets: int, size: int) -> None:
        """Takes note of a batch's offsets, control records included, and bytes."""
        self.offsets += offsets
        self.bytes += size
        if offsets:
            self.average = (self.average + size / offsets) / 2 if self._last else size / offsets
            self._last = offsets

    def reached(self) -> str | None:
        """Why no further batch is to be planned; None: continue."""
        if self.is_stopped():
            return "stopped"
        spent = (self.offsets, self.bytes, self.now() - self.started)
        for limit, used, said in zip(self.limits, spent, ("{:,} records", "{:,} bytes", "{:g} s"), strict=True):
            if limit is not None and used >= limit:
                return f"the limit of {said.format(limit)} is reached"
        return None
