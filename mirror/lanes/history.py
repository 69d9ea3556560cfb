"""Bounds the offset history: removes the blocks that lead only to records which are not here any more.

A cursor of a record that is retained here is translated as before; one of a record that retention removed is
``out-of-range`` either way. What was written within ``history_retention_ms`` is kept in any case.

A walk along the history goes only to the block of the offset that is looked for and to later ones (see
`contract.mirror_state`). So nothing ever asks for a block before the one of the first record that is retained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.aiokafka_internals import admin
from logferry.gateway.kafka.client import EARLIEST, ELECTION_S, LATEST, PASSING, KafkaClient, raise_for
from logferry.gateway.lanes.lifecycle import now_ms
from logferry.gateway.topics.copies import OffsetTranslation

_LONGEST_PAUSE_S: Final = 3600.0
_SHORTEST_PAUSE_S: Final = 1.0
# So many looks fit into the time for which blocks are kept.
_LOOKS: Final = 24
_DELETE_MS: Final = 10_000


class HistoryRetention:
    """Of one worker's part of it. ``topic``: of the history."""

    def __init__(self, kafka: KafkaClient, translation: OffsetTranslation, topic: str, retention_ms: int) -> None:
        self._kafka, self._translation, self._topic, self._retention_ms = kafka, translation, topic, retention_ms
        self.pause_s = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, retention_ms / 1000 / _LOOKS))
        self._removed_to: dict[int, int] = {}
        self._refused: dict[int, str] = {}

    async def prune(self, lanes: Container[int], number_of_lanes: int) -> None:
        """One look, at the partitions of the history that fall to these lanes. One that cannot be looked at, or may not
        be pruned, keeps its blocks until the next look."""
        try:
            histories = await self._translation.histories()
        except PASSING:
            return
        for number in range(histories):
            if number % number_of_lanes not in lanes:
                continue
            try:
                needed = await self.needed(number)
                if needed > self._removed_to.get(number, 0):
                    await self._remove(number, needed)
            except (errors.KafkaError, OSError, TimeoutError, Problem) as error:
                if self._refused.get(number) != repr(error):
                    self._refused[number] = repr(error)
                    log.event("history_not_pruned", partition=number, error=repr(error))
            else:
                self._refused.pop(number, None)

    async def needed(self, number: int) -> int:
        """The offset of the first block that is needed."""
        # First: the blocks of a copy that is begun meanwhile are behind it.
        needed = await self._kafka.offset(self._topic, number, LATEST)
        recent = await self._kafka.offset(self._topic, number, now_ms() - self._retention_ms)
        if recent >= 0:
            needed = min(needed, recent)
        topics = (await self._kafka.describe()).topics
        present = [tp for tp in await self._translation.mirrored(number) if tp[0] in topics]  # others were deleted
        firsts = await self._kafka.offsets(present, EARLIEST, give_up_s=ELECTION_S)
        for tp in present:
            if tp not in firsts:
                raise errors.LeaderNotAvailableError(f"{tp[0]}-{tp[1]} has no leader")
            at = await self._translation.history_offset(tp, firsts[tp])
            if at is not None:
                needed = min(needed, at)
        return needed

    async def _remove(self, number: int, before: int) -> None:
        request = admin.DeleteRecordsRequest([(self._topic, [(number, before)])], _DELETE_MS)
        leader = await self._kafka.present_leader(self._topic, number)
        try:
            answer = await self._kafka.send(leader, request)
            raise_for(answer.topics[0][1][0][2], f"{self._topic}-{number}")
        except errors.KafkaError:
            self._kafka.forget_leader(self._topic, number)
            raise
        self._removed_to[number] = before
        log.event("history_pruned", partition=number, before=before)


async def prune_history(retention: HistoryRetention, lanes: Container[int], number_of_lanes: Callable[[], int]) -> None:
    """Until cancelled. ``lanes``: those of this worker, at each time."""
    while True:
        await asyncio.sleep(retention.pause_s)
        await retention.prune(lanes, number_of_lanes())
