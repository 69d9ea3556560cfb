"""The record of the number of the gateway's lanes, and of the states that a change of it moves. Pure.

It is in the topic of this number and, by the same transaction, in each partition of the state topic. Where there is
none, the number is the one that the configuration has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

COUNT_KEY: Final = b"lanes"
# Of the header of a tombstone: the state of the key is in another partition since, of the lane that the value names.
MOVED: Final = "moved"
_VERSION: Final = 1
_COUNT: Final = struct.Struct(">BIIQ")


def is_moved(headers: Iterable[tuple[str, bytes]]) -> bool:
    """Whether a tombstone has them because its state moved, and not because its source was forgotten."""
    return any(name == MOVED for name, _ in headers)


class LaneCount(NamedTuple):
    """``before``: the number before the last change. ``epoch``: of the newest record, the highest; 0: there is none."""

    lanes: int
    before: int
    epoch: int

    def is_as(self, other: LaneCount) -> bool:
        """Whether no state has moved between the two. The first record names the number that was there before it."""
        return (self.lanes, max(1, self.epoch)) == (other.lanes, max(1, other.epoch))

    def encode(self) -> bytes:
        return _COUNT.pack(_VERSION, *self)

    @classmethod
    def decode(cls, raw: bytes) -> LaneCount:
        """Raises ValueError: another version or length, or no lane."""
        if len(raw) != _COUNT.size or raw[0] != _VERSION:
            raise ValueError(f"number of lanes of {len(raw)} bytes and version {raw[:1].hex()}")
        _, lanes, before, epoch = _COUNT.unpack(raw)
        if not (lanes and before and epoch):
            raise ValueError(f"number of lanes {lanes}, before {before}, epoch {epoch}")
        return cls(lanes, before, epoch)
