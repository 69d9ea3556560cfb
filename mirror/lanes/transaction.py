"""The transactions of a mirror lane: record batches, blocks of the offset history, and checkpoints, committed together.

Killed before the commit: nothing of a transaction is in any log. After it: all of it is. So the checkpoints always
say exactly what was copied, and the offset history names the original of every record that was.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.contract.mirror_state import (
    BlockPointer,
    HistoryBlock,
    MirrorCheckpoint,
    OffsetRange,
    OriginalPosition,
    checkpoint_key,
    composed,
    merged,
    mirror_lane_of,
    partition_of_key,
    pointers_after,
)
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.client import EARLIEST, LATEST, PASSING, KafkaClient
from logferry.gateway.kafka.record_batch import CODECS, batches
from logferry.gateway.kafka.requests import NO_ID
from logferry.gateway.kafka.transactional_producer import NotCommitted, PartitionBatches, TransactionalProducer
from logferry.gateway.kafka.types import Record, grouped
from logferry.gateway.lanes.replay import replay_states
from logferry.mirror.config import MirrorConfig
from logferry.mirror.copy.batch_rewrite import CoalescedBatch, CopiedBatch, coalesced
from logferry.mirror.copy.partition import MirroredPartition
from logferry.mirror.lanes.chain import ChainHistories, ChainOrigin, ChainStopped
from logferry.mirror.lanes.stops import UNAVAILABLE
from logferry.mirror.lanes.target_topics import TargetTopics
from logferry.mirror.remote import MemoryBudget

_FETCH_BYTES: Final = 1 << 18
_BATCH_BYTES: Final = 1 << 20
_CODEC: Final = CODECS["zstd"]

Taken = dict[MirroredPartition, list[CopiedBatch]]
Origins = dict[MirroredPartition, ChainOrigin]


@dataclass(slots=True, eq=False, kw_only=True)
class LaneTransactions:
    """Those of one lane from a fence to the next failure. Any exception ends it; nothing is taken twice then.

    After a failure everything is fetched again, from where the checkpoints in the log say.
    """

    config: MirrorConfig
    kafka: KafkaClient
    targets: TargetTopics
    budget: MemoryBudget
    chains: ChainHistories
    producer: TransactionalProducer
    # Partitions whose batches are written as they are, since Kafka rejected coalesced ones.
    uncoalesced: set[TopicPartition]
    checkpoints: dict[TopicPartition, MirrorCheckpoint] = field(default_factory=dict)
    # The number of lanes that the replay found: it decides which partitions the lane copies.
    count: LaneCount
    history_id: bytes = NO_ID
    # The partitions of the history, which the copies share by a number that never changes.
    histories: int = 1
    ready: dict[MirroredPartition, None] = field(default_factory=dict)
    # Partitions that advanced over control and aborted records alone.
    passed: dict[MirroredPartition, None] = field(default_factory=dict)
    taken_bytes: int = 0

    async def replay(self) -> None:
        """Reads the checkpoints; to be called first, after the producer's fence. Raises KafkaError."""
        history = await self.kafka.describe_topic(self.config.history_topic)
        self.history_id, self.histories = history.id, len(history.partitions)
        found = await read_lane(self.kafka, *self.producer.lane.state, self.producer.state_end)
        self.checkpoints = found.checkpoints
        if found.lanes is not None and found.lanes.epoch > self.count.epoch:
            self.count = found.lanes

    # ---- the input of a transaction ---------------------------------------------------------------------------

    async def take_batches(self) -> tuple[Taken, Origins]:
        """The batches of the next transaction, and the origins of those that are copies of copies.

        A partition that takes nothing here stops before it can fail a transaction. What finds no place in this one
        comes first in the next.
        """
        room, taken = self.config.limits.transaction_bytes, Taken()
        for partition in list(self.ready):
            if room <= 0:
                break
            del self.ready[partition]
            why = self.targets.health.why(*partition.tp)
            if why is not None:
                self.budget.give(partition.rewind())
                partition.halt(UNAVAILABLE, why)
                continue
            found = partition.take_batches(room)
            if found:
                size = sum(batch.size_bytes for batch in found)
                taken[partition] = found
                self.taken_bytes += size
                room -= size
            if partition.waiting:
                self.ready[partition] = None
            partition.on_change(partition)
        await self._check_target_empty(taken)
        return taken, await self._origins(taken)

    async def _check_target_empty(self, taken: Taken) -> None:
        """A copy without a checkpoint must be empty: the mirror that wrote it may have lost its state."""
        unknown = [partition for partition in taken if partition.checkpoint is None and not partition.is_known_empty]
        if not unknown:
            return
        stops = await stops_of_targets(self.kafka, [partition.tp for partition in unknown])
        for partition in unknown:
            if partition.tp in stops:
                self._requeue(partition, taken)
                partition.halt(*stops[partition.tp])
            else:
                partition.is_known_empty = True

    async def _origins(self, taken: Taken) -> Origins:
        """Where copies of copies come from; partitions whose origin is not known now are taken out again."""
        chained = [partition for partition in taken if partition.is_chained]
        found = await asyncio.gather(*(self.chains.origin(p, taken[p]) for p in chained), return_exceptions=True)
        origins: Origins = {}
        for partition, origin in zip(chained, found, strict=True):
            if isinstance(origin, ChainStopped):
                self._requeue(partition, taken)
                partition.halt(origin.kind, str(origin))
            elif isinstance(origin, BaseException):
                raise origin
            elif origin is not None:
                origins[partition] = origin
        return origins

    def _requeue(self, partition: MirroredPartition, taken: Taken) -> None:
        """The partition's batches are fetched again when it resumes."""
        given = sum(batch.size_bytes for batch in taken.pop(partition))
        self.taken_bytes -= given
        self.budget.give(given + partition.rewind())

    async def commit(self, taken: Taken, origins: Origins) -> None:
        """Writes and commits the batches. Raises NotCommitted or OutcomeUnknown."""
        written = {
            partition: list(coalesced(found, self._batch_bytes(partition))) for partition, found in taken.items()
        }
        parts = {
            partition: PartitionBatches(partition.topic, partition.number, partition.local_id, deque(of_it))
            for partition, of_it in written.items()
        }
        await self.producer.write(list(parts.values()))
        advances: dict[MirroredPartition, tuple[HistoryBlock | None, MirrorCheckpoint]] = {}
        for partition, found in taken.items():
            ranges = merged(copied_ranges(written[partition], parts[partition]))
            advances[partition] = _advanced(partition, found[-1], ranges, origins.get(partition))
        blocks = {partition.tp: block for partition, (block, _) in advances.items() if block is not None}
        offsets = await self.write_history(blocks)
        checkpoints = {
            partition.tp: after if block is None else _behind(after, block, offsets[partition.tp])
            for partition, (block, after) in advances.items()
        }
        await self.write_state(checkpoints)
        await self.producer.commit()
        self.checkpoints |= checkpoints
        for partition, found in taken.items():
            partition.checkpoint = checkpoints[partition.tp]
            partition.retried = None
            partition.under_way = False
            if partition.passed is not None:
                partition.on_passed(partition)
            partition.copied_records += sum(batch.size for batch in found)
            partition.copied_bytes += sum(batch.size_bytes for batch in found)
        self.budget.give(self.taken_bytes)
        self.taken_bytes = 0

    async def commit_passed(self, partitions: Mapping[TopicPartition, MirroredPartition]) -> None:
        """Commits positions behind the last record, so that a cursor past the markers there is valid here.

        ``partitions``: those that the lane has by now; others are left out.
        """
        passed, self.passed = self.passed, {}
        after: dict[MirroredPartition, MirrorCheckpoint] = {}
        for partition in passed:
            reached, done = partition.passed, partition.checkpoint
            if reached is not None and done is not None and partitions.get(partition.tp) is partition:
                after[partition] = replace(done, source_next=reached.offset, last_epoch=reached.epoch)
        if after:
            await self.commit_checkpoints({partition.tp: checkpoint for partition, checkpoint in after.items()})
        for partition, checkpoint in after.items():
            partition.checkpoint, partition.retried = checkpoint, None

    async def commit_checkpoints(self, checkpoints: Mapping[TopicPartition, MirrorCheckpoint]) -> None:
        """A transaction of checkpoints alone. Raises NotCommitted or OutcomeUnknown."""
        await self.write_state(checkpoints)
        await self.producer.commit()
        self.checkpoints.update(checkpoints)

    async def write_history(self, blocks: Mapping[TopicPartition, HistoryBlock]) -> dict[TopicPartition, int]:
        """Writes the blocks into the transaction. Returns their offsets. Raises NotCommitted or Fenced.

        Other lanes may write to the same partitions of the history, so the offsets are those that Kafka names.
        """
        tps = grouped((mirror_lane_of(*tp, self.histories), tp) for tp in blocks)
        parts = {
            number: _encoded(
                (self.config.history_topic, number),
                self.history_id,
                [(checkpoint_key(*tp), blocks[tp].encode(), []) for tp in found],
            )
            for number, found in tps.items()
        }
        if parts:
            await self.producer.write(list(parts.values()))
        offsets: dict[TopicPartition, int] = {}
        for number, part in parts.items():
            for index, tp in enumerate(tps[number]):
                first, base = max(one for one in part.offsets if one[0] <= index)
                if base < 0:
                    raise NotCommitted(f"{part.topic}-{part.number}: the offset of a history block is not known")
                offsets[tp] = base + index - first
        return offsets

    async def write_state(self, checkpoints: Mapping[TopicPartition, MirrorCheckpoint]) -> None:
        """Writes checkpoints into the transaction. Raises NotCommitted or Fenced."""
        states: list[Record] = [(checkpoint_key(*tp), after.encode(), []) for tp, after in checkpoints.items()]
        await self.producer.write([_encoded(self.producer.lane.state, self.producer.state_topic_id, states)])

    def _batch_bytes(self, partition: MirroredPartition) -> int:
        """The limit of a coalesced batch; 0: none is coalesced, since that was rejected."""
        if partition.tp in self.uncoalesced:
            return 0
        return min(_BATCH_BYTES, self.targets.batch_bytes.get(partition.topic, 0))


def _encoded(tp: TopicPartition, topic_id: bytes, records: list[Record]) -> PartitionBatches:
    return PartitionBatches(*tp, topic_id, deque(batches(records, _BATCH_BYTES, int(time.time() * 1000), _CODEC)))


def _advanced(
    partition: MirroredPartition,
    last: CopiedBatch,
    ranges: Sequence[OffsetRange],
    origin: ChainOrigin | None,
) -> tuple[HistoryBlock | None, MirrorCheckpoint]:
    """The partition's block of the history, where it keeps one, and its checkpoint after the ``last`` batch, which does
    not lead to that block yet (`_behind`).

    ``ranges``: of the batches written, from the remote's offsets to those here.
    """
    before, chained = partition.checkpoint, None
    local_next = ranges[-1].local + ranges[-1].size
    source_id = partition.source_id if origin is None else origin.id
    old = None if before is None or before.original.id != source_id else before
    number, pointers = (0, ()) if old is None else (old.blocks, old.pointers)
    if origin is not None:
        ranges = composed(origin.ranges, ranges)
        next_offset = 0 if old is None else old.original.next_offset
        chained = OriginalPosition(source_id, ranges[-1].source + ranges[-1].size if ranges else next_offset)
    block = None
    if ranges and partition.keeps_history:
        block = HistoryBlock(source_id, number, pointers, tuple(ranges))
    return block, MirrorCheckpoint(
        source_id=partition.source_id,
        local_id=partition.local_id,
        source_next=partition.taken_to.offset,
        local_next=local_next,
        last_base=last.base,
        last_epoch=partition.taken_to.epoch,
        last_crc=last.crc,
        last_ms=last.last_ms,
        blocks=number,
        pointers=pointers,
        chained=chained,
    )


def _behind(checkpoint: MirrorCheckpoint, block: HistoryBlock, offset: int) -> MirrorCheckpoint:
    """The checkpoint that leads to the block, which is the last one."""
    pointer = BlockPointer(offset, block.ranges[0].source, block.ranges[0].local)
    pointers = pointers_after(block.number, block.pointers, pointer)
    return replace(checkpoint, blocks=block.number + 1, pointers=pointers)


class LaneContent(NamedTuple):
    """The committed checkpoint of each partition; ``lanes``: their number, if it was changed."""

    checkpoints: dict[TopicPartition, MirrorCheckpoint]
    lanes: LaneCount | None


async def read_lane(kafka: KafkaClient, topic: str, lane: int, up_to: int = 0) -> LaneContent:
    """Raises as `replay_states` does."""
    found, count = dict[TopicPartition, MirrorCheckpoint](), list[LaneCount]()

    def apply(key: bytes, value: bytes | None) -> None:
        if key == COUNT_KEY and value is not None:
            count.append(LaneCount.decode(value))
            return
        tp = partition_of_key(key)
        if value is None:
            found.pop(tp, None)
        else:
            found[tp] = MirrorCheckpoint.decode(value)

    await replay_states(kafka, topic, lane, apply, up_to, "logferry lanes --mirror")
    return LaneContent(found, count[-1] if count else None)


async def stops_of_targets(kafka: KafkaClient, tps: list[TopicPartition]) -> dict[TopicPartition, tuple[str, str]]:
    """Kind and detail of the stop of each partition that is not known to be empty; aborted records do not count.

    Raises the errors that pass, and OSError.
    """
    try:
        ends, firsts = await kafka.offsets(tps, LATEST), await kafka.offsets(tps, EARLIEST)
        occupied = [tp for tp in tps if ends[tp] > 0 and (firsts[tp] > 0 or await _has_record(kafka, tp, ends[tp]))]
    except PASSING:
        raise
    except errors.KafkaError as error:
        if len(tps) > 1:  # by one of them, which stops alone
            return {tp: stop for one in tps for tp, stop in (await stops_of_targets(kafka, [one])).items()}
        [(topic, number)] = tps
        return {tps[0]: ("target-unreadable", f"whether {topic}-{number} is empty here cannot be read: {error!r}")}
    return {
        (topic, number): ("target-not-empty", f"{topic}-{number} has records here and no checkpoint")
        for topic, number in occupied
    }


async def _has_record(kafka: KafkaClient, tp: TopicPartition, end: int) -> bool:
    position = 0
    while position < end:
        fetched = await kafka.fetch(*tp, position, max_bytes=_FETCH_BYTES)
        if fetched.records:
            return True
        position = fetched.next_offset
    return False


def copied_ranges(found: list[CoalescedBatch], part: PartitionBatches) -> Iterator[OffsetRange]:
    """The offsets that the batches got, in the order of writing. Raises NotCommitted where one is not known."""
    for written, (_, local) in zip(found, part.offsets, strict=True):
        if local < 0:
            raise NotCommitted(f"{part.topic}-{part.number}: the offset of a batch is not known")
        for span in (span for batch in written.batches for span in batch.ranges):
            yield OffsetRange(span.source, local, span.size)
            local += span.size
