"""Reading as a consumer: the frames of its sessions, and the chunks to deliver. Pure.

* A session begins each partition at the consumer's committed position. Chunks that were delivered and not committed
  come again then: they are dropped here. Only a partition that starts below its committed position was set back on
  purpose, by `PUT …/offsets`, and is read again.
* A commit names the last assignment, and its partitions alone: the gateway refuses it once that assignment has ended.
* A start position overrides a lower committed one: chunks below it are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from logferry.client.reading.decode import ReceivedChunk, decode_chunk
from logferry.client.reading.requests import error_of_problem
from logferry.client.reading.subscription import Partition, Position, ReadOffset

Frame = Mapping[str, Any]


class PartitionsRevoked(Exception):
    """Not an error: the partitions move to another reader, and delivered chunks can be committed for a moment."""


def has_news(frames: Sequence[Frame]) -> bool:
    """Whether a session has more than its opening and an error: then the next one needs no long pause."""
    return any(frame.get("frame") not in ("session", "error") for frame in frames)


class GroupMembership:
    """A reader's membership in its consumer's group, over all of its sessions."""

    def __init__(self, stored: Mapping[Partition, ReadOffset], follow: bool) -> None:
        self.session = ""
        self._follow = follow
        self._generation = -1
        self._frames: deque[Frame] = deque()
        self._places = dict(stored)
        self._assigned: dict[Partition, int] = {}
        self._committed: dict[Partition, int] = {}
        self._owed: set[Partition] = set()  # delivered, not committed
        self._waiting: set[Partition] = set()
        self.is_over = False  # without `follow`: all assigned were read to their ends, or others have all of them
        self.freed = 0  # how often all frames were taken, so that there was room for more

    @property
    def position(self) -> Position:
        return Position(self._places)

    # ---- frames in, chunks out -------------------------------------------------------------------------------

    def feed(self, frames: Sequence[Any]) -> None:
        """Raises ValueError if one is no frame."""
        if not all(isinstance(frame, dict) for frame in frames):
            raise ValueError("not a session of a gateway")
        self._frames.extend(frames)

    @property
    def has_frames(self) -> bool:
        return bool(self._frames)

    def next_chunk(self) -> ReceivedChunk | None:
        """The next chunk to deliver; None: none has come yet.

        Raises `PartitionsRevoked`, `RetryLater` where the session ended and another one may follow, and errors for the
        caller.
        """
        while self._frames:
            frame = self._frames.popleft()
            self.freed += not self._frames
            kind = frame.get("frame")
            if kind == "chunk":
                chunk = decode_chunk(frame)
                self._waiting.add((chunk.topic, chunk.partition))
                if chunk.offset >= self._places.get((chunk.topic, chunk.partition), ReadOffset(0)).offset:
                    return chunk
            elif kind == "session":
                self.session, self._assigned = str(frame["session"]), {}
            elif kind == "assigned":
                self._assign(frame)
            elif kind == "revoked":
                raise PartitionsRevoked
            elif kind == "caught_up":
                self._catch_up(frame)
            elif kind == "error":
                raise error_of_problem(frame.get("problem"))
        return None

    def _assign(self, frame: Frame) -> None:
        self._generation = frame["generation"]
        self._assigned = {(p["topic"], p["partition"]): p["offset"] for p in frame["partitions"]}
        self._waiting = set(self._assigned)
        for partition, start in self._assigned.items():
            place = self._places.get(partition)
            if place is None or start > place.offset or start < self._committed.get(partition, 0):
                self._places[partition] = ReadOffset(start)
            self._committed[partition] = start
        if not self._follow and not self._assigned:
            self.is_over = True

    def _catch_up(self, frame: Frame) -> None:
        for p in frame["partitions"]:
            partition = p["topic"], p["partition"]
            self._waiting.discard(partition)
            if partition in self._assigned and p["offset"] > self._places[partition].offset:
                self._places[partition] = ReadOffset(p["offset"])
        if not self._follow and self._assigned and not self._waiting:
            self.is_over = True

    def at(self, chunk: ReceivedChunk) -> ReadOffset:
        """The position of the chunk's partition."""
        return self._places.get((chunk.topic, chunk.partition), ReadOffset(chunk.offset))

    def reach(self, chunk: ReceivedChunk, at: ReadOffset) -> None:
        """The chunk was delivered up to ``at``."""
        self._places[chunk.topic, chunk.partition] = at
        self._owed.add((chunk.topic, chunk.partition))

    # ---- commits ---------------------------------------------------------------------------------------------

    def to_commit(self) -> dict[str, Any] | None:
        """The body of a commit of all delivered chunks; None: there is nothing to commit."""
        positions = [
            {"topic": topic, "partition": number, "offset": at.offset}
            for (topic, number), at in sorted(self._places.items())
            if (topic, number) in self._assigned and at.offset > self._committed[topic, number]
        ]
        return {"generation": self._generation, "positions": positions} if positions else None

    def committed(self, body: Mapping[str, Any]) -> None:
        """The gateway has taken the commit with this body."""
        for p in body["positions"]:
            partition = p["topic"], p["partition"]
            self._committed[partition] = max(p["offset"], self._committed.get(partition, 0))
            if self._places[partition].offset <= p["offset"]:
                self._owed.discard(partition)

    def lost(self) -> list[Partition]:
        """Partitions whose delivered chunks cannot be committed any more; each is returned once."""
        lost = sorted(self._owed - self._assigned.keys())
        self._owed.difference_update(lost)
        return lost
