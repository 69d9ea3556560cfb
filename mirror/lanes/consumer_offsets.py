"""Synchronises the committed offsets of consumer groups from the remote data centres to this one.

A consumer that moves here continues where it was, as far as that is mirrored: it may read some records again, but
never skips one.

* Offsets only move forward, and only for groups without members here: a live consumer here knows better.
* Never beyond what is mirrored, so nothing that arrives later is skipped.
* Each group is carried by one worker: the owner of the lane to which its name falls. Two workers that both believe to
  be it, while lanes move, do no harm: the offset may be set a little too far back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.consumer_groups import CommitRefused, Committed, ConsumerGroups
from logferry.gateway.kafka.types import NO_MEMBER
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.mirror.lanes.chain import ChainHistories
from logferry.mirror.remote import RemoteCluster

_INTERVAL_S: Final = 3.0
_LONGEST_PAUSE_S: Final = 60.0
# A broker that takes longer for the positions of its groups is left to the next round.
_BROKER_S: Final = 10.0
_GROUPS_A_REQUEST: Final = 100
# Groups that are looked at here at the same time.
_AT_ONCE: Final = 16
_WITHOUT_MEMBERS: Final = ("Empty", "Dead")
_PASSING: Final = (errors.KafkaError, OSError, TimeoutError, Problem, CommitRefused)


@dataclass(slots=True)
class CarriedGroup:
    """``seen``: the positions there that were carried. After an error the group is left alone until ``due_at``."""

    seen: dict[TopicPartition, int] = field(default_factory=dict)
    pause_s: float = 0.0
    due_at: float = 0.0

    def failed(self, now: float) -> None:
        self.pause_s = min(max(2 * self.pause_s, _INTERVAL_S), _LONGEST_PAUSE_S)
        self.due_at = now + self.pause_s


class ConsumerOffsetSync:
    """``owns``: whether a group is this worker's at the moment."""

    def __init__(
        self,
        kafka: KafkaClient,
        links: dict[str, RemoteCluster],
        translation: OffsetTranslation,
        chained: ChainHistories,
        owns: Callable[[str], bool],
    ) -> None:
        self._links, self._translation, self._owns = links, translation, owns
        self._chained = chained
        self._groups = ConsumerGroups(kafka)
        # This worker's groups of each broker, by data centre and broker.
        self._known: dict[tuple[str, int], dict[str, CarriedGroup]] = {}

    async def run(self) -> None:
        """Until cancelled. An offset that cannot be set now is tried again in a later round."""
        await asyncio.gather(*map(self._follow, self._links.values()))

    async def _follow(self, link: RemoteCluster) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.sync(link)

    async def sync(self, link: RemoteCluster) -> None:
        """One round. A group or a broker that does not answer is left to a later one; the others are carried."""
        await asyncio.gather(*(self._sync_broker(link, node) for node, _, _ in link.kafka.brokers()))

    async def _sync_broker(self, link: RemoteCluster, node: int) -> None:
        there, now, of = ConsumerGroups(link.kafka), time.monotonic(), (link.remote.dc, node)
        committed: dict[str, Committed] = {}
        try:
            async with asyncio.timeout(_BROKER_S):
                before, listed = self._known.get(of, {}), sorted(await there.states_at(node))
                known = {group: before.get(group) or CarriedGroup() for group in listed if self._owns(group)}
                self._known[of] = known
                due = [group for group, one in known.items() if one.due_at <= now]
                for start in range(0, len(due), _GROUPS_A_REQUEST):
                    committed |= await there.committed_at(node, due[start : start + _GROUPS_A_REQUEST])
        except _PASSING as error:
            log.event("positions_not_carried", dc=link.remote.dc, broker=node, error=repr(error))
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def carry(group: str, positions: Committed) -> None:
            async with at_once:
                await self._carry(link, group, known[group], positions)

        await asyncio.gather(*(carry(group, positions) for group, positions in committed.items()))

    async def _carry(self, link: RemoteCluster, group: str, known: CarriedGroup, positions: Committed) -> None:
        try:
            if isinstance(positions, errors.KafkaError):
                raise positions
            mirrored = link.topics.keys() - link.sources
            named = {(link.remote.here(topic) or "", number): at for (topic, number), at in positions.items()}
            changed = {tp: at for tp, at in named.items() if tp[0] in mirrored and known.seen.get(tp) != at}
            if changed:
                await self._sync_group(link, group, known, changed)
            known.pause_s = 0.0
        except _PASSING as error:
            known.failed(time.monotonic())
            log.event("positions_not_carried", dc=link.remote.dc, group=group, error=repr(error))

    async def _sync_group(
        self, link: RemoteCluster, group: str, known: CarriedGroup, positions: dict[TopicPartition, int]
    ) -> None:
        if (await self._groups.view(group)).state not in _WITHOUT_MEMBERS:
            return
        present = await self._groups.committed(group)
        wanted: dict[TopicPartition, int] = {}
        reached: dict[TopicPartition, int] = {}
        damaged: Problem | None = None
        for tp, offset in positions.items():
            try:
                here = await self._here(link, tp, offset)
                if here is None:
                    # The group read beyond what is mirrored: set to the end of that, and again in the next round.
                    here = (await self._translation.checkpoint(tp)).local_next
                else:
                    reached[tp] = offset
            except Problem as problem:
                # Of this partition alone: nothing of it is mirrored yet, or its history is gone, or cannot be read now.
                if problem.kind == "kafka-unavailable":
                    damaged = problem
                elif problem.kind != "not-mirrored":
                    reached[tp] = offset
                    log.event("positions_not_carried", dc=link.remote.dc, group=group, error=str(problem))
                continue
            if here > present.get(tp, -1):
                wanted[tp] = here
        if wanted:
            # Kafka rejects it if the group has a member by now.
            await self._groups.commit(group, NO_MEMBER, wanted)
        known.seen.update(reached)
        if damaged is not None:
            raise damaged

    async def _here(self, link: RemoteCluster, tp: TopicPartition, offset: int) -> int | None:
        """The position here of one in the remote; None: it is not mirrored so far. Raises Problem and KafkaError."""
        history = self._chained.histories.get(link.remote.dc) if link.remote.is_chained(tp[0]) else None
        original = offset if history is None else await history.to_original(tp, offset)
        return await self._translation.to_here(tp, original)
