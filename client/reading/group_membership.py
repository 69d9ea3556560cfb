"""Reading as a consumer: what the frames of its sessions say, and which chunks are handed out. Pure.

* A session begins with each partition where the consumer's committed position stands. Chunks that were handed out
  already, and not committed, come again then: they are dropped here. Only one that starts below what was committed
  was set back on purpose, by `PUT …/offsets`, and is read again.
* A commit is made in the name of the last assignment, and of its partitions alone: the gateway refuses it when that
  has passed.
* A position given at the start lies above whatever the consumer has committed: what is below it is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from logferry.client.reading.decode import Chunk, chunk_of
from logferry.client.reading.position import At, Partition, Position
from logferry.client.reading.requests import problem

Frame = Mapping[str, Any]


class Revoked(Exception):
    """Not an error: the partitions were taken away, and what was handed out may be committed for a moment."""


def has_news(frames: Sequence[Frame]) -> bool:
    """Whether a session comes to more than its opening and an error: then the next one need not be waited for long."""
    return any(frame.get("frame") not in ("session", "error") for frame in frames)


class Membership:
    """A reader's part in its consumer, over all of its sessions."""

    def __init__(self, stored: Mapping[Partition, At], follow: bool) -> None:
        self.session = ""
        self._follow = follow
        self._generation = -1
        self._frames: deque[Frame] = deque()
        self._places = dict(stored)
        self._assigned: dict[Partition, int] = {}
        self._committed: dict[Partition, int] = {}
        self._owed: set[Partition] = set()  # handed out, not committed
        self._waiting: set[Partition] = set()
        self._is_over = False
        self.freed = 0  # so often all frames were handed out, and there was room for more

    @property
    def position(self) -> Position:
        return Position(self._places)

    @property
    def assigned(self) -> frozenset[Partition]:
        return frozenset(self._assigned)

    # ---- frames in, chunks out -------------------------------------------------------------------------------

    def feed(self, frames: Sequence[Any]) -> None:
        """Raises ValueError for what is no frame."""
        if not all(isinstance(frame, dict) for frame in frames):
            raise ValueError("not a session of a gateway")
        self._frames.extend(frames)

    @property
    def has_frames(self) -> bool:
        return bool(self._frames)

    def next_chunk(self) -> Chunk | None:
        """The next chunk to hand out; None: none has come yet. Raises `Revoked`, `Again` where the session ended and
        another one may go on, and what the caller must hear of.
        """
        while self._frames:
            frame = self._frames.popleft()
            self.freed += not self._frames
            kind = frame.get("frame")
            if kind == "chunk":
                chunk = chunk_of(frame)
                self._waiting.add((chunk.topic, chunk.partition))
                if chunk.offset >= self._places.get((chunk.topic, chunk.partition), At(0)).offset:
                    return chunk
            elif kind == "session":
                self.session, self._assigned = str(frame["session"]), {}
            elif kind == "assigned":
                self._assign(frame)
            elif kind == "revoked":
                raise Revoked
            elif kind == "caught_up":
                self._catch_up(frame)
            elif kind == "error":
                raise problem(frame.get("problem"))
        return None

    def _assign(self, frame: Frame) -> None:
        self._generation = frame["generation"]
        self._assigned = {(p["topic"], p["partition"]): p["offset"] for p in frame["partitions"]}
        self._waiting = set(self._assigned)
        for partition, start in self._assigned.items():
            place = self._places.get(partition)
            if place is None or start > place.offset or start < self._committed.get(partition, 0):
                self._places[partition] = At(start)
            self._committed[partition] = start
        if not self._follow and not self._assigned:
            self._is_over = True

    def _catch_up(self, frame: Frame) -> None:
        for p in frame["partitions"]:
            partition = p["topic"], p["partition"]
            self._waiting.discard(partition)
            if partition in self._assigned and p["offset"] > self._places[partition].offset:
                self._places[partition] = At(p["offset"])
        if not self._follow and self._assigned and not self._waiting:
            self._is_over = True

    def at(self, chunk: Chunk) -> At:
        """Where the chunk's partition stands."""
        return self._places.get((chunk.topic, chunk.partition), At(chunk.offset))

    def reach(self, chunk: Chunk, at: At) -> None:
        """So far it was handed out."""
        self._places[chunk.topic, chunk.partition] = at
        self._owed.add((chunk.topic, chunk.partition))

    @property
    def is_over(self) -> bool:
        """With ``follow`` off: all that the session holds was read to its end, or others hold it all."""
        return self._is_over

    # ---- commits ---------------------------------------------------------------------------------------------

    def to_commit(self) -> dict[str, Any] | None:
        """The body of a commit of all that was handed out; None: there is nothing to commit."""
        positions = [
            {"topic": topic, "partition": number, "offset": at.offset}
            for (topic, number), at in sorted(self._places.items())
            if (topic, number) in self._assigned and at.offset > self._committed[topic, number]
        ]
        return {"generation": self._generation, "positions": positions} if positions else None

    def committed(self, body: Mapping[str, Any]) -> None:
        """The commit with that body was taken."""
        for p in body["positions"]:
            partition = p["topic"], p["partition"]
            self._committed[partition] = max(p["offset"], self._committed.get(partition, 0))
            if self._places[partition].offset <= p["offset"]:
                self._owed.discard(partition)

    def lost(self) -> list[Partition]:
        """Partitions of which chunks were handed out that can't be committed any more; each is told once."""
        lost = sorted(self._owed - self._assigned.keys())
        self._owed.difference_update(lost)
        return lost
