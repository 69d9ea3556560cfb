"""Offsets between an original and its copy that a mirror brought here, translated exactly by its offset history.

Both directions translate *positions*: an offset names the next record, so one that falls on a control record or into
a hole means the record after it. Read on demand: a few blocks of the history, and the checkpoints written since the
last call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from aiokafka import errors
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.contract.mirror_state import (
    BlockPointer,
    DamagedMirrorState,
    HistoryBlock,
    MirrorCheckpoint,
    OffsetRange,
    checkpoint_key,
    mirror_lane_of,
    partition_of_key,
    step_towards,
    within,
)
from logferry.gateway.contract.names import Cursor, TopicPartition, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.gateway.kafka.record_batch import CorruptBatch

# A position, or the checkpoint behind a record, is waited for so long.
_WAIT_S: Final = 5.0

_FETCH_BYTES: Final = 1 << 18
# A block is found by its offset; what else is fetched with it is not used.
_BLOCK_BYTES: Final = 4096
_MAX_BLOCKS: Final = 4096
_AROUND: Final = 16
_POLL_S: Final = 0.05


class OffsetTranslation:
    """For the topics that a mirror writes here, in the data centre ``dc``."""

    def __init__(self, kafka: KafkaClient, prefix: str, dc: str) -> None:
        self._kafka, self._dc = kafka, dc
        self._state_topic = f"{prefix}.mirror.{dc}.state"
        self._history_topic = f"{prefix}.mirror.{dc}.pairs"
        # By lane: a change of the number of lanes writes a checkpoint into one and removes it from another.
        self._checkpoints: dict[int, dict[TopicPartition, MirrorCheckpoint]] = {}
        self._read_to: dict[int, int] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._blocks: dict[tuple[TopicPartition, int], HistoryBlock] = {}
        self._state_id, self._histories, self._knowing = b"", 0, asyncio.Lock()
        # Epoch and number of the lanes, and the epoch that each partition shows.
        self._count, self._epochs = (0, 0), dict[int, int]()

    async def to_here(self, tp: TopicPartition, original: int) -> int | None:
        """The position here; None: it is not mirrored so far. Raises Problem ``not-mirrored`` or ``out-of-range``."""
        checkpoint = await self.checkpoint(tp)
        end = checkpoint.original.next_offset
        if original >= end:
            return checkpoint.local_next if original == end else None
        return await self._find(tp, checkpoint, original, of_source=True)

    async def wait_for(self, tp: TopicPartition, original: int, wait_s: float) -> int | None:
        """`to_here`, and up to so long for it to be mirrored."""
        deadline = time.monotonic() + wait_s
        while True:
            found = await self.to_here(tp, original)
            if found is not None or time.monotonic() >= deadline:
                return found
            await asyncio.sleep(_POLL_S)

    async def to_original(self, tp: TopicPartition, here: int, last: int | None = None) -> int:
        """The position in the original. ``last``: the record that was read before ``here``, if any: it was mirrored,
        so its checkpoint is waited for.
        """
        deadline = time.monotonic() + _WAIT_S
        while (checkpoint := await self.checkpoint(tp)).local_next <= (-1 if last is None else last):
            if time.monotonic() > deadline:
                detail = f"the mirror's checkpoint of {tp[0]}-{tp[1]} is behind the record read"
                raise Problem("kafka-unavailable", detail)
            await asyncio.sleep(_POLL_S)
        if here >= checkpoint.local_next:
            return checkpoint.original.next_offset
        return await self._find(tp, checkpoint, here, of_source=False)

    async def originals(
        self, tp: TopicPartition, first: int, last: int
    ) -> tuple[MirrorCheckpoint, list[OffsetRange]] | None:
        """The ranges of the records here from the ``first`` to the ``last``; None: the checkpoint is not there yet.

        Raises Problem ``not-mirrored`` or ``out-of-range``.
        """
        checkpoint = await self.checkpoint(tp)
        if checkpoint.local_next <= last:
            return None
        found: list[OffsetRange] = []
        block, _, _ = await self._block_of(tp, checkpoint, last, of_source=False)
        while block is not None:
            found[:0] = block.ranges
            if block.ranges[0].local <= first or not block.pointers:
                break
            block = await self._earlier(tp, block.pointers[0], block.number)
        return checkpoint, within(found, first, last)

    async def histories(self) -> int:
        """The partitions of the offset history. Raises KafkaError."""
        await self._know_lanes()
        return self._histories

    async def mirrored(self, history: int) -> list[TopicPartition]:
        """The partitions whose blocks are in that partition of the history. Raises KafkaError."""
        await self._know_lanes()
        while True:
            count = self._count
            for lane in range(count[1]):
                await self._caught_up(lane)
            if count == self._count:  # else some may have moved to a lane that was read before
                found = [tp for lane in range(count[1]) for tp in self._checkpoints.get(lane, {})]
                return [tp for tp in found if mirror_lane_of(*tp, self._histories) == history]

    async def history_offset(self, tp: TopicPartition, here: int) -> int | None:
        """The history is needed from here on for the records from ``here`` on; None: there is none of them."""
        checkpoint = await self.checkpoint(tp)
        if here >= checkpoint.local_next or not checkpoint.blocks:
            return None
        _, _, at = await self._block_of(tp, checkpoint, here, of_source=False)
        return max(0, at - _AROUND)

    async def checkpoint(self, tp: TopicPartition) -> MirrorCheckpoint:
        """As it is committed now. Raises Problem ``not-mirrored``."""
        not_mirrored = Problem("not-mirrored", f"no mirror writes {tp[0]}-{tp[1]} here")
        try:
            await self._know_lanes()
        except errors.UnknownTopicOrPartitionError:
            raise not_mirrored from None
        while True:
            count = self._count
            lane = mirror_lane_of(*tp, count[1])
            await self._caught_up(lane)
            found = self._checkpoints.get(lane, {}).get(tp)
            if count == self._count:  # else it may be in another lane now
                break
        if found is None:
            raise not_mirrored
        return found

    async def _know_lanes(self) -> None:
        """Raises UnknownTopicOrPartitionError where no mirror writes here."""
        view = await self._kafka.describe_topic(self._state_topic)
        if view.id == self._state_id:
            return
        async with self._knowing:
            if view.id == self._state_id:
                return
            histories = len((await self._kafka.describe_topic(self._history_topic)).partitions)
            self._count, self._histories = (0, len(view.partitions)), histories
            self._read_to, self._checkpoints, self._blocks, self._epochs = {}, {}, {}, {}
            await self._caught_up(0)  # there may be partitions that are no lanes
            self._state_id = view.id

    async def _caught_up(self, lane: int) -> None:
        """Waits for a partition that does not show the last change of the number yet. Raises Problem."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            async with self._locks.setdefault(lane, asyncio.Lock()):
                await self._catch_up(lane)
            if self._epochs.get(lane, 0) >= self._count[0]:
                return
            if time.monotonic() > deadline:
                raise Problem("kafka-unavailable", f"{self._state_topic}-{lane} does not show the number of lanes yet")
            await asyncio.sleep(_POLL_S)

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
                self._apply(lane, record.key or b"", record.value)
            position = self._read_to[lane] = fetched.next_offset
            if fetched.at_end:
                return

    def _apply(self, lane: int, key: bytes, value: bytes | None) -> None:
        """One that cannot be decoded stops its lane of the mirror; here its partition alone has none meanwhile."""
        known = self._checkpoints.setdefault(lane, {})
        with suppress(ValueError):
            if key == COUNT_KEY and value is not None:
                count = LaneCount.decode(value)
                self._count = max(self._count, (count.epoch, count.lanes))
                self._epochs[lane] = count.epoch
                return
            tp = partition_of_key(key)
            known.pop(tp, None)
            if value is not None:
                known[tp] = MirrorCheckpoint.decode(value)

    async def _find(self, tp: TopicPartition, checkpoint: MirrorCheckpoint, offset: int, *, of_source: bool) -> int:
        """The first record at or after the offset, on the other side; the offset is before the checkpoint."""
        block, after, _ = await self._block_of(tp, checkpoint, offset, of_source=of_source)
        for span in () if block is None else block.ranges:
            here, there = (span.source, span.local) if of_source else (span.local, span.source)
            if offset < here + span.size:
                return there + max(0, offset - here)
        return after

    async def _block_of(
        self, tp: TopicPartition, checkpoint: MirrorCheckpoint, offset: int, *, of_source: bool
    ) -> tuple[HistoryBlock | None, int, int]:
        """The last one that begins at or before the offset, where that after it begins on the other side, and its
        offset in the history.

        None: the offset is before the first record of all.
        """
        pointers, at = checkpoint.pointers, 0
        number, after = checkpoint.blocks, checkpoint.local_next if of_source else checkpoint.original.next_offset
        while True:
            pointer, is_it = step_towards(pointers, offset, of_source=of_source)
            if pointer is None:
                return None, after, at
            block, at = await self._earlier(tp, pointer, number), pointer.offset
            if block.source_id != checkpoint.original.id:
                raise _gone(tp, offset)
            if is_it:
                return block, after, at
            number, pointers, after = block.number, block.pointers, pointer.local if of_source else pointer.source

    async def _earlier(self, tp: TopicPartition, pointer: BlockPointer, number: int) -> HistoryBlock:
        """The block before the one of this number: so each walk ends. Raises Problem ``kafka-unavailable``."""
        block = await self._block(tp, pointer)
        if block.number < number:
            return block
        where = f"{self._history_topic}-{mirror_lane_of(*tp, self._histories)}"
        detail = f"{where}: the history blocks of {tp[0]}-{tp[1]} near offset {pointer.offset} lead in a circle"
        raise Problem("kafka-unavailable", detail)

    async def _block(self, tp: TopicPartition, pointer: BlockPointer) -> HistoryBlock:
        """Waits for a block behind the open transaction of another lane, which Kafka does not show before that ends.

        Raises Problem ``kafka-unavailable`` where it is not there, or cannot be decoded.
        """
        deadline = time.monotonic() + _WAIT_S
        while (known := self._blocks.get((tp, pointer.offset))) is None:
            found, damage, end = await self._fetched(tp, pointer)
            if found is not None:
                if len(self._blocks) >= _MAX_BLOCKS:
                    self._blocks.pop(next(iter(self._blocks)))
                return self._blocks.setdefault((tp, pointer.offset), found)
            if end > pointer.offset or time.monotonic() > deadline:
                where = f"{self._history_topic}-{mirror_lane_of(*tp, self._histories)}"
                detail = f"{where} has no history block of {tp[0]}-{tp[1]} near offset {pointer.offset}{damage}"
                raise Problem("kafka-unavailable", detail)
            await asyncio.sleep(_POLL_S)
        return known

    async def _fetched(self, tp: TopicPartition, pointer: BlockPointer) -> tuple[HistoryBlock | None, str, int]:
        """The block; where it is not found, what is there in its place. And the end of what is committed there."""
        lane, damage, end = mirror_lane_of(*tp, self._histories), "", pointer.offset + 1
        # Before the number of lanes could change, its offset was predicted: it may be a little to the front of that.
        for around, max_bytes in ((0, _BLOCK_BYTES), (_AROUND, _FETCH_BYTES)):
            start = max(0, pointer.offset - around)
            try:
                fetched = await self._kafka.fetch(self._history_topic, lane, start, max_bytes=max_bytes)
            except errors.OffsetOutOfRangeError:
                detail = f"the offset history of {tp[0]}-{tp[1]} does not reach back so far: the records are gone here"
                raise Problem("out-of-range", detail) from None
            except CorruptBatch as error:
                damage = f": {error}"
                continue
            end = fetched.last_stable
            for record in (one for one in fetched.records if one.key == checkpoint_key(*tp)):
                try:
                    block = HistoryBlock.decode(record.value or b"")
                except DamagedMirrorState as error:
                    damage = f"; at offset {record.offset}: {error}"
                    continue
                if block.ranges[0][:2] == (pointer.source, pointer.local):
                    return block, "", end
        return None, damage, end

    # ---- cursors ----------------------------------------------------------------------------------------------

    async def of_cursors(self, cursors: Iterable[Cursor]) -> dict[TopicPartition, int]:
        """The offsets here; positions that are not mirrored yet are waited for up to `_WAIT_S`.

        Raises Problem ``behind``, ``not-mirrored``, ``out-of-range``.
        """
        cursors = list(cursors)
        offsets = await asyncio.gather(*map(self._of_cursor, cursors))
        return {(cursor.topic, cursor.partition): at for cursor, at in zip(cursors, offsets, strict=True)}

    async def _of_cursor(self, cursor: Cursor) -> int:
        if split_topic(cursor.topic)[0] == self._dc:
            return cursor.offset
        tp = (cursor.topic, cursor.partition)
        found = await self.wait_for(tp, cursor.offset, _WAIT_S)
        if found is None:
            reached = cursor._replace(offset=(await self.checkpoint(tp)).original.next_offset)
            raise Problem("behind", f"{cursor} is not mirrored yet; the mirror has reached {reached}")
        return found

    async def cursors_of(self, offsets: Mapping[TopicPartition, int]) -> list[str]:
        """The cursors of positions here; without those of copies that no mirror wrote, or of history that is gone."""
        found = await asyncio.gather(*(self._cursor_of(partition, at) for partition, at in sorted(offsets.items())))
        return [str(cursor) for cursor in found if cursor is not None]

    async def _cursor_of(self, partition: TopicPartition, offset: int) -> Cursor | None:
        if split_topic(partition[0])[0] == self._dc:
            return Cursor(*partition, offset)
        with suppress(errors.KafkaError, OSError, Problem):
            return Cursor(*partition, await self.to_original(partition, offset))
        return None


def _gone(tp: TopicPartition, offset: int) -> Problem:
    return Problem("out-of-range", f"the offset history no longer holds offset {offset} of {tp[0]}-{tp[1]}")
