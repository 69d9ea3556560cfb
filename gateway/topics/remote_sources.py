"""Sources of other data centres: what was acknowledged there, and how much of it the mirror has brought here.

What was acknowledged stands in the copy of that gateway's state topic. It may be ahead of the copy of the data, or
behind it, so what is here is looked for in the data itself, from its end backwards.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.contract.chunk import Malformed, chunk_of_record, lane_of
from logferry.gateway.contract.offset_history import Place
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.lanes.dedup import Source, SourceState
from logferry.gateway.topics.offset_translation import Translation

_FETCH_BYTES: Final = 1 << 20
_FIRST_STEP: Final = 256
# So much is looked through at most; a source that wrote its last chunk before that is not told of.
_LOOK_BYTES: Final = 64 << 20
# The clocks of the workers of one data centre differ by less.
_CLOCKS_MS: Final = 60_000


class Brought(NamedTuple):
    """``state``: as last heard. ``mirrored``: the source's last seqno that is here; None: none, or nobody knows."""

    state: SourceState
    mirrored: int | None


@dataclass(slots=True)
class MovedSources:
    """By the copies that the mirror writes here; ``prefix`` is the same in all data centres."""

    kafka: Kafka
    prefix: str
    translation: Translation
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def find(self, dc: str, source: Source) -> Brought | None:
        """None: nothing was heard of it. Raises Problem ``not-mirrored``, KafkaError."""
        topic = f"{self.prefix}.gateway.{dc}.state"
        try:
            lanes = len((await self.kafka.describe_topic(topic)).partitions)
        except errors.UnknownTopicOrPartitionError:
            raise Problem("not-mirrored", f"no mirror brings the sources of {dc} here") from None
        async with self._one_at_a_time:
            state = await self._state((topic, lane_of(source.key, lanes)), source.state_key())
            if state is None:
                return None
            return await self._brought((source.topic, state.partition), source, state)

    async def _state(self, place: Place, key: bytes) -> SourceState | None:
        found: bytes | None = None
        position = await self.kafka.offset(*place, EARLIEST)
        while True:
            fetched = await self.kafka.fetch(*place, position, max_bytes=_FETCH_BYTES)
            for record in fetched.records:
                if record.key == key:
                    found = record.value
            position = fetched.next_offset
            if fetched.at_end:
                return None if found is None else SourceState.decode(found)

    async def _brought(self, place: Place, source: Source, state: SourceState) -> Brought:
        try:
            progress = await self.translation.progress(place)
        except Problem:
            return Brought(state, None)
        if state.recorded is None or progress.original.id != state.topic_id:
            return Brought(state, None)
        if progress.last_ms > state.written_ms + _CLOCKS_MS:
            # What the mirror has passed was written later, and the order is kept.
            return Brought(state, state.recorded)
        seen = await self._last_seqno(place, source.source_id.encode())
        if seen is not None and seen > state.recorded:
            state = state._replace(recorded=seen)
        return Brought(state, seen)

    async def _last_seqno(self, place: Place, key: bytes) -> int | None:
        first, end = await self.kafka.offset(*place, EARLIEST), await self.kafka.offset(*place, LATEST)
        step, room = _FIRST_STEP, _LOOK_BYTES
        while end > first and room > 0:
            start = position = max(first, end - step)
            found: int | None = None
            while position < end:
                fetched = await self.kafka.fetch(*place, position, max_bytes=_FETCH_BYTES)
                for record in fetched.records:
                    room -= len(record.value or b"")
                    if record.key == key and record.offset < end:
                        try:
                            found = chunk_of_record(record.value or b"", record.headers).seqno
                        except Malformed:
                            continue
                position = fetched.next_offset
            if found is not None:
                return found
            end, step = start, 2 * step
        return None
