"""How the stops of one lane end: by themselves, after a while or when the cause is gone, or by an operator's resume."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from logferry.gateway.contract.mirror_state import MirrorCheckpoint, OriginalPosition
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.mirror.copy.partition import MirroredPartition, StopReason

REJECTED: Final = "write-rejected"
# Stop kind → seconds until the lane retries.
RETRY_AFTER_S: Final = {REJECTED: 60.0, "target-unreadable": 60.0, "origin-unknown": 5.0, "fetch-rejected": 5.0}
# A broker knows of altered settings so soon.
_KNOWN_MS: Final = 1000
# Retried when Kafka here takes records of the partition again (`PartitionHealth`).
UNAVAILABLE: Final = "target-unavailable"


@dataclass(slots=True)
class RetriedStops:
    """By partition. They outlive a failure of the lane.

    ``tried``: those that ended by a retry, until something is committed. The same stop again is the same: it keeps its
    time, and is not logged.
    """

    clock_ms: Callable[[], int]
    present: dict[TopicPartition, StopReason] = field(default_factory=dict)
    _since_ms: dict[TopicPartition, int] = field(default_factory=dict)
    tried: dict[TopicPartition, StopReason] = field(default_factory=dict)

    def add(self, tp: TopicPartition, stop: StopReason) -> StopReason:
        """Returns it; with its first time if it continues one that was retried."""
        before = self.tried.pop(tp, None)
        if stop.kind != UNAVAILABLE and stop.kind not in RETRY_AFTER_S:
            self.present.pop(tp, None)
            return stop
        self._since_ms[tp] = stop.since_ms
        if before is not None and before.kind == stop.kind:
            stop = replace(stop, since_ms=before.since_ms)
        self.present[tp] = stop
        return stop

    def forget(self, tp: TopicPartition) -> None:
        """An operator resumed it."""
        self.present.pop(tp, None)
        self.tried.pop(tp, None)

    def due(
        self, is_available: Callable[[TopicPartition], bool], altered_ms: Mapping[str, int]
    ) -> Iterator[TopicPartition]:
        """Removes those to retry now. ``altered_ms``: when the settings of a topic here were altered."""
        for tp, stop in list(self.present.items()):
            waited_ms = self.clock_ms() - self._since_ms[tp]
            is_due = is_available(tp) if stop.kind == UNAVAILABLE else waited_ms > RETRY_AFTER_S[stop.kind] * 1000
            if stop.kind == REJECTED and altered_ms.get(tp[0], 0) + _KNOWN_MS > self._since_ms[tp]:
                is_due = True
            if is_due:
                self.tried[tp] = self.present.pop(tp)
                yield tp

    def committed(self, tp: TopicPartition) -> None:
        """Records of it are committed: a later stop is a new one."""
        self.tried.pop(tp, None)


class CannotResume(Exception):
    """The text says why, and what can be done."""


@dataclass(slots=True, eq=False)
class Resume:
    """A partition's resume, until its turn in the lane's order: after the batches that were fetched before the stop.

    ``original``: where ``source_next`` is in the original of a copy of a copy; None: it is taken from its original.
    """

    partition: MirroredPartition
    source_next: int
    original: OriginalPosition | None
    done: asyncio.Future[None]

    def is_of(self, partition: MirroredPartition | None) -> bool:
        """Whether it is for this partition, which is another object after a failure of the lane, and as it was."""
        before, stop = self.partition, self.partition.stop
        if partition is None or partition.stop is None or stop is None:
            return False
        ids = (partition.source_id, partition.local_id, partition.stop.kind)
        if ids != (before.source_id, before.local_id, stop.kind):
            return False
        self.partition = partition
        return True

    def refuse(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(CannotResume(why))

    def checkpoint(self) -> MirrorCheckpoint:
        """What to commit, given what is committed now."""
        partition, before = self.partition, self.partition.checkpoint
        fresh = MirrorCheckpoint(partition.source_id, partition.local_id, self.source_next, 0, -1, -1, 0, 0, 0, ())
        if before is None or before.local_id != partition.local_id:
            return fresh
        if before.source_id == partition.source_id:
            after = replace(before, source_next=self.source_next, last_base=-1, last_epoch=-1)
        else:
            after = replace(fresh, local_next=before.local_next)
        # The history continues while the original is the same, by whichever way it is copied.
        if self.original is not None and self.original.id == before.original.id:
            return replace(after, chained=self.original, blocks=before.blocks, pointers=before.pointers)
        return after


async def original_position(history: OffsetTranslation, tp: TopicPartition, at: int) -> OriginalPosition:
    """Raises CannotResume."""
    try:
        return OriginalPosition((await history.checkpoint(tp)).original.id, await history.to_original(tp, at))
    except Problem as problem:
        raise CannotResume(problem.detail) from None
