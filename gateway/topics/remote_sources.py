"""The sources of other data centres, by the copies of their state topics, and what the mirror brought here of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount, is_moved
from logferry.gateway.contract.mirror_state import MirrorCheckpoint
from logferry.gateway.contract.names import Malformed, TopicPartition, lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.topics.copies import OffsetTranslation

_SEARCH_BYTES: Final = 1 << 20
_FIRST_STEP: Final = 256
# At most so much is searched; a source whose last chunk is before that is reported without one.
_LOOK_BYTES: Final = 64 << 20
# The clocks of the workers of one data centre differ by less.
_CLOCKS_MS: Final = 60_000


class RemoteSourceState(NamedTuple):
    """``state``: as acknowledged last. ``mirrored``: the source's last seqno here; None: none, or not known."""

    state: SourceState
    mirrored: int | None


class _Found(NamedTuple):
    """What the copy of a lane has of a source, also of one that moved on, and of the number of lanes."""

    state: SourceState | None = None
    is_known: bool = False
    has_moved: bool = False
    lanes: LaneCount | None = None


@dataclass(slots=True)
class RemoteSources:
    """The states of sources of other data centres, and how much of each source the mirror brought here.

    The acknowledged state is in the copy of that gateway's state topic. It may be ahead of the copy of the data, or
    behind it, so the last chunk here is searched in the data itself, from its end backwards. ``prefix`` is the same in
    all data centres.
    """

    kafka: KafkaClient
    prefix: str
    translation: OffsetTranslation
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def find(self, dc: str, source: SourceIdentity) -> RemoteSourceState | None:
        """None: the source is not known. Raises Problem ``not-mirrored`` or ``behind``, KafkaError."""
        topic = f"{self.prefix}.gateway.{dc}.state"
        try:
            lanes = len((await self.kafka.describe_topic(topic)).partitions)
        except errors.UnknownTopicOrPartitionError:
            raise Problem("not-mirrored", f"no mirror copies the source states of {dc} here") from None
        async with self._one_at_a_time:
            state = await self._state_in(topic, source, lanes)
            if state is None:
                return None
            return await self._brought((source.topic, state.partition), source, state)

    async def _state_in(self, topic: str, source: SourceIdentity, partitions: int) -> SourceState | None:
        """In the copy of the lane that the source has now, by the number of lanes that the partitions name.

        They are copied one by one: a state that has moved may be in the copy of its lane before alone.
        """
        looked = dict[int, _Found]()

        async def look(lane: int) -> _Found:
            if lane not in looked:
                is_there = lane < partitions  # the mirror creates it soon
                looked[lane] = await self._look((topic, lane), source.state_key()) if is_there else _Found()
            return looked[lane]

        found = await look(lane_of(source.key, partitions))
        count = found.lanes or (None if found.is_known else (await look(0)).lanes)
        if count is None:
            return found.state
        for lanes in (count.lanes, count.before):
            found = await look(lane_of(source.key, lanes))
            if found.is_known:
                return found.state
        newest = max((one.lanes for one in looked.values() if one.lanes), key=attrgetter("epoch"))
        here = (await look(lane_of(source.key, newest.lanes))).lanes
        if any(one.has_moved for one in looked.values()) and (here is None or here.epoch < newest.epoch):
            raise Problem("behind", "the source's state moved to another lane, of which the copy here is behind")
        return None

    async def _look(self, tp: TopicPartition, key: bytes) -> _Found:
        found, is_known, has_moved = None, False, False
        count: LaneCount | None = None
        position = await self.kafka.offset(*tp, EARLIEST)
        while True:
            fetched = await self.kafka.fetch(*tp, position, max_bytes=_SEARCH_BYTES)
            for record in fetched.records:
                if record.key == key and (record.value is not None or not is_moved(record.headers)):
                    found, is_known, has_moved = record.value, True, False
                elif record.key == key:
                    has_moved = True
                elif record.key == COUNT_KEY and record.value is not None:
                    with suppress(ValueError):
                        count = LaneCount.decode(record.value)
            position = fetched.next_offset
            if fetched.at_end:
                try:
                    state = None if found is None else SourceState.decode(found)
                    return _Found(state, is_known, has_moved, count)
                except ValueError as error:
                    detail = f"{tp[0]}-{tp[1]}: the state of {key[1:]!r} cannot be decoded: {error}"
                    raise Problem("kafka-unavailable", detail) from None

    async def _brought(self, tp: TopicPartition, source: SourceIdentity, state: SourceState) -> RemoteSourceState:
        checkpoint: MirrorCheckpoint | None = None
        with suppress(Problem):
            checkpoint = await self.translation.checkpoint(tp)
        if checkpoint is None or state.recorded is None or checkpoint.original.id != state.topic_id:
            return RemoteSourceState(state, None)
        if checkpoint.last_ms > state.written_ms + _CLOCKS_MS:
            # The mirror has passed records that were written later, and it keeps the order.
            return RemoteSourceState(state, state.recorded)
        seen = await self._last_seqno(tp, source.source_id.encode())
        if seen is not None and seen > state.recorded:
            state = state._replace(recorded=seen)
        return RemoteSourceState(state, seen)

    async def _last_seqno(self, tp: TopicPartition, key: bytes) -> int | None:
        first, end = await self.kafka.offset(*tp, EARLIEST), await self.kafka.offset(*tp, LATEST)
        step, room = _FIRST_STEP, _LOOK_BYTES
        while end > first and room > 0:
            start = position = max(first, end - step)
            found: int | None = None
            while position < end:
                fetched = await self.kafka.fetch(*tp, position, max_bytes=_SEARCH_BYTES)
                for record in fetched.records:
                    room -= len(record.value or b"")
                    if record.key == key and record.offset < end:
                        with suppress(Malformed):
                            found = chunk_of_record(record.value or b"", record.headers).seqno
                position = fetched.next_offset
            if found is not None:
                return found
            end, step = start, 2 * step
        return None
