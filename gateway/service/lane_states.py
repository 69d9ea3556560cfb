"""What lanes have recorded of sources, or of a mirror's copies, and how another number of lanes divides it.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from logferry.gateway.contract.lane_count import COUNT_KEY, MOVED, LaneCount
from logferry.gateway.contract.mirror_state import MirrorCheckpoint, mirror_lane_of, partition_of_key
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import FENCE_KEY, source_of_record
from logferry.gateway.contract.upload_state import UPLOAD_KIND, UploadState
from logferry.gateway.kafka.types import Record


def key_of(key: bytes) -> str:
    """The key that determines the lane of a state, receipt or upload. Raises ValueError."""
    return key[1:].decode() if key[:1] == UPLOAD_KIND else source_of_record(key).key


def _carried(key: bytes, value: bytes) -> bytes:
    """An upload that is not committed is gone where its lane changes, as if it had come too late: its pieces are in the
    lane's partition of another topic. Its new lane knows that it was there."""
    if key[:1] != UPLOAD_KIND:
        return value
    upload = UploadState.decode(value)
    return value if upload.commit is not None else upload.as_gone().encode()


def _decoded(key: bytes, value: bytes) -> bytes:
    MirrorCheckpoint.decode(value)
    return value


class Kind(NamedTuple):
    """``lane_of``: of a key, with so many lanes. ``carried``: the value in another lane. Both raise ValueError or
    struct.error for what nobody writes."""

    lane_of: Callable[[bytes, int], int]
    carried: Callable[[bytes, bytes], bytes]


SOURCES = Kind(lambda key, lanes: lane_of(key_of(key), lanes), _carried)
COPIES = Kind(lambda key, lanes: mirror_lane_of(*partition_of_key(key), lanes), _decoded)


@dataclass(slots=True)
class LaneStates:
    """What one lane has recorded: the newest value of each key. ``position``: it is read up to there. ``epoch``: of
    the newest number of lanes in it."""

    number: int
    kind: Kind = SOURCES
    states: dict[bytes, bytes] = field(default_factory=dict)
    position: int | None = None
    epoch: int = 0

    def apply(self, key: bytes, value: bytes | None) -> None:
        """Raises ValueError or struct.error for what cannot be moved."""
        if key == COUNT_KEY and value is not None:
            self.epoch = max(self.epoch, LaneCount.decode(value).epoch)
        if key in (FENCE_KEY, COUNT_KEY):
            return
        if value is None:
            self.states.pop(key, None)
            return
        self.kind.lane_of(key, 1)
        self.kind.carried(key, value)
        self.states[key] = value


def moves(lanes: Iterable[LaneStates], to: int) -> tuple[dict[int, list[Record]], int]:
    """The records by partition that move the states to their new lanes, and how many states move."""
    found: dict[int, list[Record]] = {}
    moved = 0
    for lane in lanes:
        for key, value in lane.states.items():
            new = lane.kind.lane_of(key, to)
            if new == lane.number:
                continue
            found.setdefault(lane.number, []).append((key, None, [(MOVED, b"%d" % new)]))
            found.setdefault(new, []).append((key, lane.kind.carried(key, value), []))
            moved += 1
    return found, moved
