"""Committed positions of consumers, carried here from where their topics come from.

A consumer that moves goes on where it was there, as far as that is mirrored: some records again, but never a gap.

* Only forward, and only for a group that has no members here: one that reads here knows better.
* Never beyond what is mirrored, so nothing that comes later is skipped.
* By the owner of the partition's lane alone, so that two never carry different things.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

from aiokafka import errors
from aiokafka.protocol.admin import ListGroupsRequest
from logferry.gateway import log
from logferry.gateway.contract.offset_history import Place
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import Kafka, raise_for
from logferry.gateway.kafka.consumer_groups import Groups, Refused
from logferry.gateway.reading.assignment import NOBODY
from logferry.gateway.topics.offset_translation import Translation
from logferry.mirror.copy.partition import MirroredPartition
from logferry.mirror.lanes.chain import Chains
from logferry.mirror.remote.cluster import Link

_INTERVAL_S: Final = 3.0
_CONSUMER: Final = "consumer"
_WITHOUT_MEMBERS: Final = ("Empty", "Dead")


class Carrier:
    """``partitions``: those of this worker's lanes at the moment. ``carried``: how many positions were set so far."""

    def __init__(
        self,
        kafka: Kafka,
        links: dict[str, Link],
        translation: Translation,
        chained: Chains,
        partitions: Callable[[], Iterable[MirroredPartition]],
    ) -> None:
        self._kafka, self._links, self._translation, self._partitions = kafka, links, translation, partitions
        self._chained = chained
        self._groups = Groups(kafka)
        self._seen: dict[tuple[str, Place], int] = {}
        self.carried = 0

    async def run(self) -> None:
        """Until cancelled. What cannot be carried now is tried again the next time."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            for link in self._links.values():
                try:
                    await self._carry(link)
                except (errors.KafkaError, OSError, TimeoutError, Problem, Refused) as error:
                    log.event("warning", "positions_not_carried", dc=link.remote.dc, error=repr(error))

    async def _carry(self, link: Link) -> None:
        mine = {p.place: p for p in self._partitions() if p.dc == link.remote.dc and p.keeps_history and p.progress}
        if not mine:
            return
        there = Groups(link.kafka)
        for group in await _groups(link.kafka):
            committed = await there.committed(group)
            news = {
                place: offset
                for place, offset in committed.items()
                if place in mine and self._seen.get((group, place)) != offset
            }
            if news:
                await self._carry_group(group, news, mine)

    async def _carry_group(self, group: str, positions: dict[Place, int], mine: dict[Place, MirroredPartition]) -> None:
        if (await self._groups.view(group)).state not in _WITHOUT_MEMBERS:
            return
        present = await self._groups.committed(group)
        wanted: dict[Place, int] = {}
        reached: dict[Place, int] = {}
        for place, offset in positions.items():
            books = self._chained.of(mine[place])
            original = offset if books is None else await books.to_original(place, offset)
            here = await self._translation.to_here(place, original)
            if here is None:
                # It read beyond what is mirrored: as far as that goes, and again the next time.
                here = (await self._translation.progress(place)).local_next
            else:
                reached[place] = offset
            if here > present.get(place, -1):
                wanted[place] = here
        if wanted:
            # Kafka refuses it should the group have a member by now.
            await self._groups.commit(group, NOBODY, wanted)
            self.carried += len(wanted)
        self._seen.update({(group, place): offset for place, offset in reached.items()})


async def _groups(kafka: Kafka) -> list[str]:
    """The consumer groups of a cluster, from each of its brokers."""
    found: set[str] = set()
    for node, _, _ in kafka.brokers():
        response: Any = await kafka.send(node, ListGroupsRequest())
        raise_for(response.error_code, f"the groups of broker {node}")
        # Read sessions are plain consumers; the workers' own groups carry nothing that is mirrored.
        found.update(group for group, kind in (entry[:2] for entry in response.groups) if kind in (_CONSUMER, ""))
    return sorted(found)
