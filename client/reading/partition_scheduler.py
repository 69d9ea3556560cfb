"""Reading without a consumer: which partition is asked next and for how long, and the chunks that came. Pure.

* A partition is asked for one page at a time, each from where the page before ended; so nothing is left out or doubled
  however often an answer is lost. `position` follows what is handed out, not what was fetched.
* At most ``slots`` pages are under way or wait to be handed out: that is what a reader holds in memory.
* Partitions take turns. With no more of them than slots, each has a long poll open. With more, those without news wait
  only so long that a round takes about a second, and not at all while any other has news.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from logferry.client.reading.decode import Chunk
from logferry.client.reading.position import At, Partition, Position
from logferry.client.reading.subscription import LONG_POLL_MS

ROUND_MS = 1000
SHORTEST_WAIT_MS = 10


class Ask(NamedTuple):
    """One request: ``partition`` from ``offset`` on."""

    partition: Partition
    offset: int
    wait_ms: int


@dataclass
class _Turn:
    """How it stands with a partition. ``end``: reading stops there, None: never."""

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
    chunks: deque[Chunk]
    next_offset: int


class Rotation:
    """The partitions of a reader without a consumer."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._turns: dict[Partition, _Turn] = {}
        self._order: deque[Partition] = deque()
        self._pages: deque[_Page] = deque()
        self._places: dict[Partition, At] = {}
        self.freed = 0  # pages that were handed out: so often there was room for another

    def add(self, partition: Partition, at: At, end: int | None) -> None:
        """A partition to read from there on; one that is known already stays as it is."""
        if partition not in self._turns:
            self._turns[partition] = _Turn(at.offset, end)
            self._places[partition] = at
            self._order.append(partition)

    def __contains__(self, partition: Partition) -> bool:
        return partition in self._turns

    @property
    def position(self) -> Position:
        return Position(self._places)

    # ---- requests out, pages in ------------------------------------------------------------------------------

    def next_ask(self, now: float) -> Ask | None:
        """The next request, which counts as under way; None: nothing to do before `due`, or before a page is handed
        out."""
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
                return Ask(partition, turn.offset, wait_ms)
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
        """When `next_ask` is to be asked again though nothing happened; None: not at all."""
        later = [turn.not_before for turn in self._turns.values() if not turn.is_asked and turn.not_before > now]
        return min(later, default=None)

    def take(self, ask: Ask, chunks: Iterable[Chunk], next_offset: int) -> None:
        """The page that answered: from now on the partition is asked behind it."""
        turn = self._turns[ask.partition]
        fresh = deque(chunk for chunk in chunks if chunk.offset >= ask.offset)
        turn.is_asked, turn.failures, turn.not_before = False, 0, 0.0
        turn.has_news = next_offset > turn.offset
        turn.offset = max(next_offset, turn.offset)
        if turn.has_news:
            self._pages.append(_Page(ask.partition, fresh, turn.offset))

    def fail(self, ask: Ask) -> int:
        """No page came. Returns how often that was so; then `hold` says when to ask again."""
        turn = self._turns[ask.partition]
        turn.failures += 1
        return turn.failures

    def hold(self, ask: Ask, until: float) -> None:
        turn = self._turns[ask.partition]
        turn.is_asked, turn.not_before = False, until

    # ---- chunks out ------------------------------------------------------------------------------------------

    def next_chunk(self) -> Chunk | None:
        """The next chunk to hand out, in the order of its partition; None: none has come yet. `reach` follows."""
        while self._pages:
            page = self._pages[0]
            if page.chunks:
                return page.chunks.popleft()
            self._pages.popleft()
            self.freed += 1
            self._places[page.partition] = At(page.next_offset)
        return None

    def at(self, chunk: Chunk) -> At:
        """Where the chunk's partition stands."""
        return self._places[chunk.topic, chunk.partition]

    def reach(self, chunk: Chunk, at: At) -> None:
        """So far it was handed out."""
        self._places[chunk.topic, chunk.partition] = at

    @property
    def is_over(self) -> bool:
        """Everything up to the ends was handed out."""
        return not self._pages and all(turn.is_done for turn in self._turns.values())
