"""From an offset of an original partition to the same record in its copy here, and back: exact, by the mirror's books.

Both directions are of *positions*: an offset names the next record, so one that falls on a control record or into a
hole is the record after it. Read on demand: of the history a few chapters, of the progress what is new since it was
asked for last.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from aiokafka import errors
from logferry.gateway.contract.offset_history import (
    Chapter,
    Place,
    Progress,
    Run,
    Signpost,
    key_of,
    lane_of,
    place_of,
    step_towards,
    within,
)
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, Kafka

_FETCH_BYTES: Final = 1 << 18
# A chapter is found by its offset; what comes with it is read in vain.
_CHAPTER_BYTES: Final = 4096
_CHAPTERS_KEPT: Final = 4096
_AROUND: Final = 16
_LOOK_AGAIN_S: Final = 0.05
_NEWS_S: Final = 5.0


class Translation:
    """Of the topics that a mirror writes here."""

    def __init__(self, kafka: Kafka, prefix: str, dc: str) -> None:
        self._kafka = kafka
        self._state_topic = f"{prefix}.mirror.{dc}.state"
        self._pairs_topic = f"{prefix}.mirror.{dc}.pairs"
        self._progress: dict[Place, Progress] = {}
        self._read_to: dict[int, int] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._chapters: dict[tuple[Place, int], Chapter] = {}
        self._state_id, self._lanes = b"", 0

    async def to_here(self, place: Place, original: int) -> int | None:
        """The position here; None: it is not mirrored so far. Raises Problem ``not-mirrored`` or ``out-of-range``."""
        progress = await self.progress(place)
        end = progress.original.next_offset
        if original >= end:
            return progress.local_next if original == end else None
        return await self._find(place, progress, original, of_source=True)

    async def wait_for(self, place: Place, original: int, wait_s: float) -> int | None:
        """`to_here`, and up to so long for it to be mirrored."""
        deadline = time.monotonic() + wait_s
        while True:
            found = await self.to_here(place, original)
            if found is not None or time.monotonic() >= deadline:
                return found
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def to_original(self, place: Place, here: int, last: int | None = None) -> int:
        """The position in the original. ``last``: the record that was read before ``here``, if any: it was mirrored,
        so the books are waited for when they are behind it.
        """
        deadline = time.monotonic() + _NEWS_S
        progress = await self.progress(place)
        while last is not None and progress.local_next <= last:
            if time.monotonic() > deadline:
                raise Problem("kafka-unavailable", f"the books of the mirror are behind {place[0]}-{place[1]}")
            await asyncio.sleep(_LOOK_AGAIN_S)
            progress = await self.progress(place)
        if here >= progress.local_next:
            return progress.original.next_offset
        return await self._find(place, progress, here, of_source=False)

    async def originals(self, place: Place, first: int, last: int) -> tuple[Progress, list[Run]] | None:
        """The runs that speak of records here from the ``first`` to the ``last``; None: the books are not so far yet.

        Raises Problem ``not-mirrored`` or ``out-of-range``.
        """
        progress = await self.progress(place)
        if progress.local_next <= last:
            return None
        found: list[Run] = []
        chapter, _ = await self._chapter_of(place, progress, last, of_source=False)
        while chapter is not None:
            found[:0] = chapter.runs
            if chapter.runs[0].local <= first or not chapter.signposts:
                break
            chapter = await self._chapter(place, chapter.signposts[0])
        return progress, within(found, first, last)

    async def progress(self, place: Place) -> Progress:
        """As it is committed now. Raises Problem ``not-mirrored``."""
        not_mirrored = Problem("not-mirrored", f"no mirror writes {place[0]}-{place[1]} here")
        try:
            view = await self._kafka.describe_topic(self._state_topic)
        except errors.UnknownTopicOrPartitionError:
            raise not_mirrored from None
        if view.id != self._state_id:
            self._state_id, self._lanes = view.id, len(view.partitions)
            self._read_to, self._progress, self._chapters = {}, {}, {}
        lane = lane_of(*place, self._lanes)
        async with self._locks.setdefault(lane, asyncio.Lock()):
            await self._catch_up(lane)
        found = self._progress.get(place)
        if found is None:
            raise not_mirrored
        return found

    async def _catch_up(self, lane: int) -> None:
        topic = self._state_topic
        position = self._read_to.get(lane)
        if position is None:
            position = await self._kafka.offset(topic, lane, EARLIEST)
        while True:
            try:
                fetched = await self._kafka.fetch(topic, lane, position, max_bytes=_FETCH_BYTES)
            except errors.OffsetOutOfRangeError:
                position = await self._kafka.offset(topic, lane, EARLIEST)
                continue
            for record in fetched.records:
                place = place_of(record.key or b"")
                if record.value is None:
                    self._progress.pop(place, None)
                else:
                    self._progress[place] = Progress.decode(record.value)
            position = self._read_to[lane] = fetched.next_offset
            if fetched.at_end:
                return

    async def _find(self, place: Place, progress: Progress, offset: int, *, of_source: bool) -> int:
        """The first record at or after the offset, on the other side; it lies before the progress."""
        chapter, after = await self._chapter_of(place, progress, offset, of_source=of_source)
        for run in () if chapter is None else chapter.runs:
            here, there = (run.source, run.local) if of_source else (run.local, run.source)
            if offset < here + run.size:
                return there + max(0, offset - here)
        return after

    async def _chapter_of(
        self, place: Place, progress: Progress, offset: int, *, of_source: bool
    ) -> tuple[Chapter | None, int]:
        """The last one that begins at or before the offset, and where that after it begins on the other side.

        None: the offset is before the first record of all.
        """
        posts = progress.signposts
        after = progress.local_next if of_source else progress.original.next_offset
        while True:
            step = step_towards(posts, offset, of_source=of_source)
            if step is None:
                return None, after
            chapter = await self._chapter(place, step.post)
            if chapter.source_id != progress.original.id:
                raise _gone(place, offset)
            if step.is_it:
                return chapter, after
            posts, after = chapter.signposts, step.post.local if of_source else step.post.source

    async def _chapter(self, place: Place, post: Signpost) -> Chapter:
        offset = post.offset
        known = self._chapters.get((place, offset))
        if known is not None:
            return known
        lane = lane_of(*place, self._lanes)
        # Foretold before it was written: a control record that Kafka left out moves it a little to the front.
        for around, max_bytes in ((0, _CHAPTER_BYTES), (_AROUND, _FETCH_BYTES)):
            start = max(0, offset - around)
            try:
                fetched = await self._kafka.fetch(self._pairs_topic, lane, start, max_bytes=max_bytes)
            except errors.OffsetOutOfRangeError:
                raise _gone(place, offset) from None
            for record in fetched.records:
                chapter = Chapter.decode(record.value or b"") if record.key == key_of(*place) else None
                if chapter is not None and chapter.runs[0][:2] == (post.source, post.local):
                    if len(self._chapters) >= _CHAPTERS_KEPT:
                        self._chapters.pop(next(iter(self._chapters)))
                    return self._chapters.setdefault((place, offset), chapter)
        raise errors.KafkaError(f"{self._pairs_topic}-{lane} has no chapter of {place[0]}-{place[1]} near {offset}")


def _gone(place: Place, offset: int) -> Problem:
    return Problem("out-of-range", f"what offset {offset} of {place[0]}-{place[1]} was is not kept any more")
