"""What the mirror records of a partition: its checkpoint, its offset history, and the lane that writes both. Pure.

Offsets differ between clusters, since each has its own control records; the order never does. So the history is stored
as *ranges*: records with consecutive offsets on both sides, split at each hole on either. Each transaction of the
mirror writes one *block* of them per partition. A block is found without reading the whole history: each holds
pointers to earlier ones, as a skip list does: the last one, the last whose number is a multiple of 4, of 16 and so on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple
from zlib import crc32

from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.contract.varint import read_varint, varint

VERSION: Final = 1
# Version, original topic id, block number.
_BLOCK: Final = struct.Struct(">B16sq")
_STRIDE: Final = 4
_KEY_END: Final = struct.Struct(">i")
# Version, original topic id, local topic id, next original and local offset, last batch: base, epoch, crc, timestamp.
_STATE: Final = struct.Struct(">B16s16sqqqiIq")


class OffsetRange(NamedTuple):
    """``size`` records: ``source`` + i in the original partition is ``local`` + i in the mirrored one."""

    source: int
    local: int
    size: int


@dataclass(frozen=True, slots=True)
class HistoryBlock:
    """The ranges of one transaction, in order, and pointers to earlier blocks. ``source_id``: its original topic."""

    source_id: bytes
    number: int
    pointers: tuple[BlockPointer, ...]
    ranges: tuple[OffsetRange, ...]

    def encode(self) -> bytes:
        flat = [len(self.pointers), *chain(*self.pointers)]
        source = local = 0
        for span in self.ranges:
            flat += (span.source - source, span.local - local, span.size)
            source, local = span.source + span.size, span.local + span.size
        return _BLOCK.pack(VERSION, self.source_id, self.number) + b"".join(map(varint, flat))

    @classmethod
    def decode(cls, raw: bytes) -> HistoryBlock:
        """Raises DamagedMirrorState."""
        try:
            version, source_id, number = _BLOCK.unpack_from(raw)
            _check_version(version)
            count, *rest = decode_numbers(raw[_BLOCK.size :])
            pointers, rest = pointers_of(rest[: 3 * count]), rest[3 * count :]
            ranges: list[OffsetRange] = []
            source = local = 0
            for index in range(0, len(rest), 3):
                source, local, size = source + rest[index], local + rest[index + 1], rest[index + 2]
                ranges.append(OffsetRange(source, local, size))
                source, local = source + size, local + size
            if not ranges:
                raise ValueError("it has no ranges")
        except (struct.error, IndexError, ValueError) as error:
            raise DamagedMirrorState(f"a history block of {len(raw)} bytes cannot be decoded: {error}") from None
        return cls(source_id, number, pointers, tuple(ranges))


def merged(ranges: Iterable[OffsetRange]) -> tuple[OffsetRange, ...]:
    """Joins neighbours that follow each other on both sides."""
    found: list[OffsetRange] = []
    for span in ranges:
        if found:
            last = found[-1]
            if (last.source + last.size, last.local + last.size) == span[:2]:
                found[-1] = OffsetRange(last.source, last.local, last.size + span.size)
                continue
        found.append(span)
    return tuple(found)


def within(ranges: Iterable[OffsetRange], first: int, last: int) -> list[OffsetRange]:
    """The parts of the ranges with local offsets from the first to the last."""
    return [*composed(ranges, [OffsetRange(first, first, last + 1 - first)])]


def composed(first: Iterable[OffsetRange], second: Iterable[OffsetRange]) -> tuple[OffsetRange, ...]:
    """Composes two steps: from the source of the ``first`` to the local side of the ``second``, whose source is the
    local side of the first. Both are in order; offsets in only one of them are left out.
    """
    found: list[OffsetRange] = []
    steps, wanted = iter(first), iter(second)
    one, two = next(steps, None), next(wanted, None)
    while one is not None and two is not None:
        start, end = max(one.local, two.source), min(one.local + one.size, two.source + two.size)
        if start < end:
            found.append(OffsetRange(one.source + start - one.local, two.local + start - two.source, end - start))
        if one.local + one.size <= two.source + two.size:
            one = next(steps, None)
        else:
            two = next(wanted, None)
    return merged(found)


def pointers_after(number: int, before: Sequence[BlockPointer], last: BlockPointer) -> tuple[BlockPointer, ...]:
    """The pointers of the block after ``last``, which has this number and the pointers ``before``.

    To the last block, then to the last one whose number is a multiple of 4, of 16, …, at the end to block 0.
    """
    found: list[BlockPointer] = []
    step = 1
    while True:
        found.append(last if number % step == 0 else before[min(len(found), len(before) - 1)])
        if step > number:
            return tuple(found)
        step *= _STRIDE


def step_towards(pointers: Sequence[BlockPointer], offset: int, *, of_source: bool) -> tuple[BlockPointer | None, bool]:
    """The block to go to, from one that begins after the offset, or from the end; None: all begin after the offset.

    And whether it is the one: it holds the offset, or the one after it begins behind the offset.
    """
    later: BlockPointer | None = None
    for pointer in pointers:
        if (pointer.source if of_source else pointer.local) <= offset:
            return (later or pointer), later is None
        later = pointer
    return later, False


class DamagedMirrorState(ValueError):
    """A checkpoint or history block that cannot be decoded; the text says which."""


class BlockPointer(NamedTuple):
    """An earlier history block: its offset in the history topic, and the first offsets of its first range."""

    offset: int
    source: int
    local: int


def pointers_of(flat: Sequence[int]) -> tuple[BlockPointer, ...]:
    if len(flat) % 3:
        raise ValueError("pointers are cut off")
    return tuple(BlockPointer(*flat[index : index + 3]) for index in range(0, len(flat), 3))


def decode_numbers(raw: bytes) -> list[int]:
    """Raises ValueError when the last one is cut off."""
    found, at = [], 0
    while at < len(raw):
        try:
            value, at = read_varint(raw, at)
        except IndexError:
            raise ValueError("a number is cut off") from None
        found.append(value)
    return found


def _check_version(version: int) -> None:
    if version != VERSION:
        raise ValueError(f"it is of version {version}; this program reads version {VERSION}")


class OriginalPosition(NamedTuple):
    """The topic where the records were written first, and the offset there after the last mirrored one."""

    id: bytes
    next_offset: int


@dataclass(frozen=True, slots=True)
class MirrorCheckpoint:
    """How far a partition is mirrored.

    ``source_next``: the next remote offset to read; ``local_next``: the offset after the last record copied here. The
    last batch proves that the remote log is still the one that was read: ``last_base`` -1: there is none;
    ``last_epoch``: of the last batch passed, control batches too. ``blocks``: the number of history blocks, and
    ``pointers``: those of the next one. ``chained``: the remote partition is a copy itself; the history refers to this
    original then, and to the remote partition otherwise.
    """

    source_id: bytes
    local_id: bytes
    source_next: int
    local_next: int
    last_base: int
    last_epoch: int
    last_crc: int
    last_ms: int
    blocks: int
    pointers: tuple[BlockPointer, ...]
    chained: OriginalPosition | None = None

    @property
    def original(self) -> OriginalPosition:
        """The original that the history refers to."""
        return self.chained or OriginalPosition(self.source_id, self.source_next)

    def encode(self) -> bytes:
        ids, last = (self.source_id, self.local_id), (self.last_base, self.last_epoch, self.last_crc, self.last_ms)
        fixed = _STATE.pack(VERSION, *ids, self.source_next, self.local_next, *last)
        chained = () if self.chained is None else (self.chained.next_offset, int.from_bytes(self.chained.id))
        return fixed + b"".join(map(varint, [self.blocks, *chain(*self.pointers), *chained]))

    @classmethod
    def decode(cls, raw: bytes) -> MirrorCheckpoint:
        """Raises DamagedMirrorState."""
        try:
            version, source_id, local_id, source, local, base, epoch, crc, last_ms = _STATE.unpack_from(raw)
            _check_version(version)
            blocks, *rest = decode_numbers(raw[_STATE.size :])
            chained = None
            if len(rest) % 3 == 2:
                *rest, next_offset, original_id = rest
                chained = OriginalPosition(original_id.to_bytes(16), next_offset)
            pointers = pointers_of(rest)
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise DamagedMirrorState(f"a checkpoint of {len(raw)} bytes cannot be decoded: {error}") from None
        return cls(source_id, local_id, source, local, base, epoch, crc, last_ms, blocks, pointers, chained)


def mirror_lane_of(topic: str, partition: int, lanes: int) -> int:
    """The mirror's lane that writes a partition."""
    return (crc32(topic.encode()) + partition) % lanes


def partitions_of_lane(topic: str, partitions: int, lane: int, lanes: int) -> range:
    """The partitions of a topic that the lane writes. None of a lane that is no more, since there are fewer now."""
    if lane >= lanes:
        return range(0)
    return range((lane - mirror_lane_of(topic, 0, lanes)) % lanes, partitions, lanes)


def checkpoint_key(topic: str, partition: int) -> bytes:
    """The key of a checkpoint or a history block."""
    return topic.encode() + b"\0" + _KEY_END.pack(partition)


def partition_of_key(key: bytes) -> TopicPartition:
    """Raises DamagedMirrorState."""
    if len(key) < 6 or key[-5] != 0:
        raise DamagedMirrorState(f"a key of {len(key)} bytes does not name a partition")
    return key[:-5].decode(), _KEY_END.unpack(key[-4:])[0]
