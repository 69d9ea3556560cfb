"""The chunks that are fetched ahead of a reader: without a consumer in pages, with one in sessions. Pure.

Without a consumer:

* One page of a partition is requested at a time, each from the end of the page before. So nothing is left out or
  doubled however often a response is lost. `position` follows the delivered chunks, not the fetched ones.
* At most ``slots`` pages are under way or wait for delivery: that bounds the memory of a reader.
* Partitions take turns. If there are no more of them than slots, each has a long poll open. Otherwise those without
  news wait only so long that a round takes about a second, and not at all while another one has news.

With a consumer:

* A session begins each partition at the consumer's committed position. Chunks that were delivered and not committed
  come again then: they are dropped here. Only a partition that starts below its committed position was set back on
  purpose, by `PUT …/offsets`, and is read again.
* A commit names the last assignment, and its partitions alone: the gateway refuses it once that assignment has ended.
* A start position overrides a lower committed one: chunks below it are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from logferry.client.errors import Rejected
from logferry.client.reading.decode import ReceivedChunk, decode_chunk
from logferry.client.reading.requests import RetryLater, error_of_problem
from logferry.client.reading.subscription import LONG_POLL_MS, Partition, Position, ReadOffset

ROUND_MS = 1000
SHORTEST_WAIT_MS = 10


class PageRequest(NamedTuple):
    """One request: ``partition`` from ``offset`` on. ``move``: how often the partition was set elsewhere before it."""

    partition: Partition
    offset: int
    wait_ms: int
    move: int = 0


@dataclass
class _Turn:
    """The state of a partition. ``end``: reading stops there; None: never. ``moves``: pages asked for before the last
    one no longer count."""

    offset: int
    end: int | None
    is_asked: bool = False
    has_news: bool = True
    not_before: float = 0.0
    failures: int = 0
    moves: int = 0
    is_paused: bool = False

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.offset >= self.end


class PartitionScheduler:
    """The partitions of a reader without a consumer."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._turns: dict[Partition, _Turn] = {}
        self._order: deque[Partition] = deque()
        self._pages: deque[tuple[Partition, deque[ReceivedChunk], int]] = deque()  # each with the next offset
        self._places: dict[Partition, ReadOffset] = {}
        self._under_way = 0
        self.freed = 0  # pages that were delivered: so often there was room for another one

    def add(self, partition: Partition, at: ReadOffset, end: int | None) -> None:
        """A partition to read from ``at`` on; a known one stays as it is."""
        if partition not in self._turns:
            self._turns[partition] = _Turn(at.offset, end)
            self._places[partition] = at
            self._order.append(partition)

    @property
    def position(self) -> Position:
        return Position(self._places)

    def move(self, partition: Partition, at: ReadOffset) -> None:
        """Reads the partition from ``at`` on; what was fetched ahead of it is dropped. Raises KeyError."""
        turn = self._turns[partition]
        turn.moves += 1
        turn.is_asked = False  # its answer no longer counts
        turn.offset, turn.has_news, turn.not_before = at.offset, True, 0.0
        self._places[partition] = at
        before = len(self._pages)
        self._pages = deque(page for page in self._pages if page[0] != partition)
        self.freed += before - len(self._pages)

    def pause(self, partition: Partition, is_paused: bool) -> None:
        """Nothing of a paused partition is delivered or fetched. Raises KeyError."""
        turn = self._turns[partition]
        if is_paused and not turn.is_paused:
            self.move(partition, self._places[partition])
        turn.is_paused = is_paused

    # ---- requests out, pages in ------------------------------------------------------------------------------

    def next_request(self, now: float) -> PageRequest | None:
        """The next request, now under way; None: there is none before `due`, or before a page is delivered."""
        if self._under_way + len(self._pages) >= self._slots:
            return None
        for _ in range(len(self._order)):
            partition = self._order[0]
            self._order.rotate(-1)
            turn = self._turns[partition]
            if not (turn.is_asked or turn.is_done or turn.is_paused or now < turn.not_before):
                wait_ms = self._wait_ms(turn)
                turn.is_asked = True
                self._under_way += 1
                return PageRequest(partition, turn.offset, wait_ms, turn.moves)
        return None

    def _wait_ms(self, asked: _Turn) -> int:
        if asked.end is not None or asked.has_news:
            return 0
        open_turns = [turn for turn in self._turns.values() if not (turn.is_done or turn.is_paused)]
        if len(open_turns) <= self._slots:
            return LONG_POLL_MS
        if any(turn.has_news for turn in open_turns):
            return 0
        return max(ROUND_MS * self._slots // len(open_turns), SHORTEST_WAIT_MS)

    def due(self, now: float) -> float | None:
        """When to call `next_request` again if nothing happens; None: not at all."""
        later = [turn.not_before for turn in self._turns.values() if not turn.is_asked and turn.not_before > now]
        return min(later, default=None)

    def take(self, ask: PageRequest, chunks: Iterable[ReceivedChunk], next_offset: int) -> None:
        """The page of a request: the next one of the partition begins behind it."""
        turn = self._turns[ask.partition]
        fresh = deque(chunk for chunk in chunks if chunk.offset >= ask.offset)
        self._under_way -= 1
        if not self.is_current(ask):
            return
        turn.is_asked, turn.failures, turn.not_before = False, 0, 0.0
        turn.has_news = next_offset > turn.offset
        turn.offset = max(next_offset, turn.offset)
        if turn.has_news:
            self._pages.append((ask.partition, fresh, turn.offset))

    def fail(self, ask: PageRequest, again: RetryLater, now: float) -> None:
        """No page came: the partition is asked again after a pause, which grows."""
        self._under_way -= 1
        if not self.is_current(ask):
            return
        turn = self._turns[ask.partition]
        turn.failures += 1
        turn.is_asked, turn.not_before = False, now + again.pause_s(turn.failures)

    def is_current(self, ask: PageRequest) -> bool:
        """Whether the partition was not set elsewhere since the request began."""
        return ask.move == self._turns[ask.partition].moves

    # ---- chunks out ------------------------------------------------------------------------------------------

    def next_chunk(self) -> ReceivedChunk | None:
        """The next chunk to deliver, in the order of its partition; None: none has come yet. `reach` follows."""
        while self._pages:
            partition, chunks, next_offset = self._pages[0]
            if chunks:
                return chunks.popleft()
            self._pages.popleft()
            self.freed += 1
            self._places[partition] = ReadOffset(next_offset)
        return None

    def at(self, chunk: ReceivedChunk) -> ReadOffset:
        """The position of the chunk's partition."""
        return self._places[chunk.topic, chunk.partition]

    def reach(self, chunk: ReceivedChunk, at: ReadOffset) -> None:
        """The chunk was delivered up to ``at``."""
        self._places[chunk.topic, chunk.partition] = at

    @property
    def is_over(self) -> bool:
        """Everything up to the ends was delivered."""
        return not self._pages and all(turn.is_done for turn in self._turns.values())


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
        self.frames: deque[Frame] = deque()
        self._places = dict(stored)
        self._assigned: dict[Partition, int] = {}
        self._committed: dict[Partition, int] = {}
        self._owed: set[Partition] = set()  # delivered, not committed
        self._waiting: set[Partition] = set()
        self._damaged: dict[Partition, Any] = {}  # stopped by a record that cannot be decoded
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
        self.frames.extend(frames)

    def next_chunk(self) -> ReceivedChunk | None:
        """The next chunk to deliver; None: none has come yet.

        Raises `PartitionsRevoked`, `RetryLater` where the session ended and another one may follow, and errors for the
        caller.
        """
        while self.frames:
            frame = self.frames.popleft()
            self.freed += not self.frames
            kind = frame.get("frame")
            if kind == "chunk":
                chunk = decode_chunk(frame)
                self._waiting.add((chunk.topic, chunk.partition))
                self._damaged.pop((chunk.topic, chunk.partition), None)
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
            elif kind == "damaged":
                self._damaged[frame["topic"], frame["partition"]] = frame["problem"]
                self._check_damaged()
            elif kind == "error":
                raise error_of_problem(frame.get("problem"))
        return None

    def _assign(self, frame: Frame) -> None:
        self._generation = frame["generation"]
        self._assigned = {(p["topic"], p["partition"]): p["offset"] for p in frame["partitions"]}
        leaderless = {(p["topic"], p["partition"]) for p in frame.get("waiting", ())}
        self._waiting, self._damaged = self._assigned.keys() | leaderless, {}
        for partition, start in self._assigned.items():
            place = self._places.get(partition)
            if place is None or start > place.offset or start < self._committed.get(partition, 0):
                self._places[partition] = ReadOffset(start)
            self._committed[partition] = start
        if not self._follow and not self._waiting:
            self.is_over = True

    def _catch_up(self, frame: Frame) -> None:
        for p in frame["partitions"]:
            partition = p["topic"], p["partition"]
            self._waiting.discard(partition)
            if partition in self._assigned and p["offset"] > self._places[partition].offset:
                self._places[partition] = ReadOffset(p["offset"])
        if not self._follow and self._assigned and not self._waiting:
            self.is_over = True
        self._check_damaged()

    def _check_damaged(self) -> None:
        """Raises the problem of a partition that cannot be read, once the others were read to their ends."""
        if not self._follow and self._waiting and self._waiting <= self._damaged.keys():
            problem = self._damaged[min(self._waiting)]
            raise Rejected(problem["detail"], "kafka-unavailable", 503)

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
