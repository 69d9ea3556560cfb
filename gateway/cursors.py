"""Cursors as positions of consumers: from a place in the original to the offset here, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from aiokafka import errors
from logferry.gateway.contract.chunk import Cursor, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.reading.formats import Partition
from logferry.gateway.topics.offset_translation import Translation

_WAIT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Cursors:
    """At the data centre ``dc``."""

    dc: str
    translation: Translation

    async def here(self, cursors: Iterable[Cursor]) -> dict[Partition, int]:
        """The offsets here; what the mirror has not brought yet is waited for, a little.

        Raises Problem ``behind``, ``not-mirrored``, ``out-of-range``.
        """
        cursors = list(cursors)
        offsets = await asyncio.gather(*map(self._here, cursors))
        return {(cursor.topic, cursor.partition): at for cursor, at in zip(cursors, offsets, strict=True)}

    async def _here(self, cursor: Cursor) -> int:
        if split_topic(cursor.topic)[0] == self.dc:
            return cursor.offset
        place = (cursor.topic, cursor.partition)
        found = await self.translation.wait_for(place, cursor.offset, _WAIT_S)
        if found is None:
            reached = (await self.translation.progress(place)).original.next_offset
            raise Problem("behind", f"the mirror has brought {cursor.topic}:{cursor.partition}:{reached}, not {cursor}")
        return found

    async def of(self, offsets: Mapping[Partition, int]) -> list[str]:
        """Those of positions here. One that nobody can tell is left out: of a copy that no mirror made, or too old."""
        found = await asyncio.gather(*(self._of(partition, at) for partition, at in sorted(offsets.items())))
        return [str(cursor) for cursor in found if cursor is not None]

    async def _of(self, partition: Partition, offset: int) -> Cursor | None:
        if split_topic(partition[0])[0] == self.dc:
            return Cursor(*partition, offset)
        try:
            return Cursor(*partition, await self.translation.to_original(partition, offset))
        except (errors.KafkaError, OSError, Problem):
            return None
