"""An operator's resume of a stopped partition, until its turn in the order of the lane's commits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from logferry.gateway.contract.mirror_checkpoint import MirrorCheckpoint, OriginalPosition
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.topics.offset_translation import OffsetTranslation
from logferry.mirror.copy.partition import MirroredPartition


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
