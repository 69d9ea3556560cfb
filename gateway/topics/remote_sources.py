"""Sources of other data centres: the states acknowledged there, and how much of each source the mirror brought here.

The acknowledged state is in the copy of that gateway's state topic. It may be ahead of the copy of the data, or
behind it, so the last chunk here is searched in the data itself, from its end backwards.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.gateway.contract.names import Malformed, TopicPartition, lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.topics.offset_translation import OffsetTranslation

_FETCH_BYTES: Final = 1 << 20
_FIRST_STEP: Final = 256
# At most so much is searched; a source whose last chunk is before that is reported without one.
_LOOK_BYTES: Final = 64 << 20
# The clocks of the workers of one data centre differ by less.
_CLOCKS_MS: Final = 60_000


class RemoteSourceState(NamedTuple):
    """``state``: as acknowledged last. ``mirrored``: the source's last seqno here; None: none, or not known."""

    state: SourceState
    mirrored: int | None


@dataclass(slots=True)
class RemoteSources:
    """Reads the copies that the mirror writes here; ``prefix`` is the same in all data centres."""

    kafka: KafkaClient
    prefix: str
    translation: OffsetTranslation
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def find(self, dc: str, source: SourceIdentity) -> RemoteSourceState | None:
        """None: the source is not known. Raises Problem ``not-mirrored``, KafkaError."""
        topic = f"{self.prefix}.gateway.{dc}.state"
        try:
            lanes = len((await self.kafka.describe_topic(topic)).partitions)
        except errors.UnknownTopicOrPartitionError:
            raise Problem("not-mirrored", f"no mirror copies the source states of {dc} here") from None
        async with self._one_at_a_time:
            state = await self._state((topic, lane_of(source.key, lanes)), source.state_key())
            if state is None:
                return None
            return await self._brought((source.topic, state.partition), source, state)

    async def _state(self, tp: TopicPartition, key: bytes) -> SourceState | None:
        found: bytes | None = None
        position = await self.kafka.offset(*tp, EARLIEST)
        while True:
            fetched = await self.kafka.fetch(*tp, position, max_bytes=_FETCH_BYTES)
            for record in fetched.records:
                if record.key == key:
                    found = record.value
            position = fetched.next_offset
            if fetched.at_end:
                return None if found is None else SourceState.decode(found)

    async def _brought(self, tp: TopicPartition, source: SourceIdentity, state: SourceState) -> RemoteSourceState:
        try:
            checkpoint = await self.translation.checkpoint(tp)
        except Problem:
            return RemoteSourceState(state, None)
        if state.recorded is None or checkpoint.original.id != state.topic_id:
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
                fetched = await self.kafka.fetch(*tp, position, max_bytes=_FETCH_BYTES)
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
