"""The checkpoint of a mirrored partition in the mirror's state topic, and the lane that writes it: its bytes. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple
from zlib import crc32

from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.contract.offset_history import (
    VERSION,
    BlockPointer,
    DamagedMirrorState,
    decode_numbers,
    pointers_of,
)
from logferry.gateway.contract.varint import varint

_KEY_END: Final = struct.Struct(">i")
# Version, original topic id, local topic id, next original and local offset, last batch: base, epoch, crc, timestamp.
_STATE: Final = struct.Struct(">B16s16sqqqiIq")


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
            if version != VERSION:
                raise DamagedMirrorState(f"a checkpoint of version {version}; this program reads version {VERSION}")
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
    """The partitions of a topic that the lane writes."""
    return range((lane - mirror_lane_of(topic, 0, lanes)) % lanes, partitions, lanes)


def checkpoint_key(topic: str, partition: int) -> bytes:
    """The key of a checkpoint or a history block."""
    return topic.encode() + b"\0" + _KEY_END.pack(partition)


def partition_of_key(key: bytes) -> TopicPartition:
    """Raises DamagedMirrorState."""
    if len(key) < 6 or key[-5] != 0:
        raise DamagedMirrorState(f"a key of {len(key)} bytes does not name a partition")
    return key[:-5].decode(), _KEY_END.unpack(key[-4:])[0]
