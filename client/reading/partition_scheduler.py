"""Reading without a consumer: the next page request, and the chunks that came. Pure.

* One page of a partition is requested at a time, each from the end of the page before. So nothing is left out or
  doubled however often a response is lost. `position` follows the delivered chunks, not the fetched ones.
* At most ``slots`` pages are under way or wait for delivery: that bounds the memory of a reader.
* Partitions take turns. If there are no more of them than slots, each has a long poll open. Otherwise those without
  news wait only so long that a round takes about a second, and not at all while another one has news.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from logferry.client.reading.decode import ReceivedChunk
from logferry.client.reading.subscription import LONG_POLL_MS, Partition, Position, ReadOffset

ROUND_MS = 1000
SHORTEST_WAIT_MS = 10


class PageRequest(NamedTuple):
    """One request: ``partition`` from ``offset`` on."""

    partition: Partition
    offset: int
    wait_ms: int


@dataclass
class _Turn:
    """The state of a partition. ``end``: reading stops there; None: never."""

    offset: int
    end: int | None
    is_asked: bool = False
    has_news: bool = True
    not_before: float = 0.0
    failures: int = 0

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.offset >= self.end


class _Page(NamedTuple):
    partition: Partition
    chunks: deque[ReceivedChunk]
    next_offset: int


class PartitionScheduler:
    """The partitions of a reader without a consumer."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._turns: dict[Partition, _Turn] = {}
        self._order: deque[Partition] = deque()
        self._pages: deque[_Page] = deque()
        self._places: dict[Partition, ReadOffset] = {}
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

    # ---- requests out, pages in ------------------------------------------------------------------------------

    def next_request(self, now: float) -> PageRequest | None:
        """The next request, now under way; None: there is none before `due`, or before a page is delivered."""
        under_way = sum(turn.is_asked for turn in self._turns.values())
        if under_way + len(self._pages) >= self._slots:
            return None
        for _ in range(len(self._order)):
            partition = self._order[0]
            self._order.rotate(-1)
            turn = self._turns[partition]
            if not (turn.is_asked or turn.is_done or now < turn.not_before):
                wait_ms = self._wait_ms(turn)
                turn.is_asked = True
                return PageRequest(partition, turn.offset, wait_ms)
        return None

    def _wait_ms(self, asked: _Turn) -> int:
        if asked.end is not None or asked.has_news:
            return 0
        open_turns = [turn for turn in self._turns.values() if not turn.is_done]
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
        turn.is_asked, turn.failures, turn.not_before = False, 0, 0.0
        turn.has_news = next_offset > turn.offset
        turn.offset = max(next_offset, turn.offset)
        if turn.has_news:
            self._pages.append(_Page(ask.partition, fresh, turn.offset))

    def fail(self, ask: PageRequest) -> int:
        """No page came. Returns how often in a row; `hold` must follow, with the time of the retry."""
        turn = self._turns[ask.partition]
        turn.failures += 1
        return turn.failures

    def hold(self, ask: PageRequest, until: float) -> None:
        turn = self._turns[ask.partition]
        turn.is_asked, turn.not_before = False, until

    # ---- chunks out ------------------------------------------------------------------------------------------

    def next_chunk(self) -> ReceivedChunk | None:
        """The next chunk to deliver, in the order of its partition; None: none has come yet. `reach` follows."""
        while self._pages:
            page = self._pages[0]
            if page.chunks:
                return page.chunks.popleft()
            self._pages.popleft()
            self.freed += 1
            self._places[page.partition] = ReadOffset(page.next_offset)
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
