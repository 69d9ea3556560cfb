"""Records of topics for all units of a worker, fetched and decoded once, and the memory that their batches share.

* A page is what one fetch brought. Those that were used last are kept, up to a limit of bytes, so that a hundred
  subscriptions to one topic cost Kafka one read.
* The pages after the one that is read are fetched meanwhile, a few, while such pages do not take most of the room.
* One look at the ends of all partitions, some times a second, tells who has something to read: a partition without news
  costs nothing more.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.contract.names import TopicPartition, split_topic
from logferry.gateway.delivery.batch import BatchShape, cut, size_of
from logferry.gateway.kafka.client import ELECTION_S, LATEST, KafkaClient
from logferry.gateway.limits import FairShare
from logferry.gateway.reading.formats import Row, row_of

# Compressed; some MiB of log lines. What lies behind the limit of decoded bytes is fetched again.
_FETCH_BYTES: Final = 1 << 19
_STOP_BYTES: Final = 8 << 20
# The usual size of a page, for how many may be read ahead; of a partition, and in all for this part of the room.
_PAGE_BYTES: Final = 3 << 20
_PAGES_AHEAD: Final = 2
_PART_AHEAD: Final = 0.75
_INLINE_RECORDS: Final = 50
_LOOK_S: Final = 0.05
_IDLE_LOOK_S: Final = 0.25
_IDLE_AFTER_S: Final = 5.0
# The end is known, but its leader does not give it yet.
_BEHIND_S: Final = 0.02


class TopicPage(NamedTuple):
    """The chunks from ``start`` on, and where the next page begins."""

    start: int
    end: int
    rows: list[Row]
    size_bytes: int

    def after(self, offset: int) -> list[Row]:
        return (
            self.rows if offset <= self.start else self.rows[bisect_left(self.rows, offset, key=lambda row: row[3]) :]
        )


class TopicPages:
    """``kept_bytes``: so many bytes of pages are kept."""

    def __init__(self, kafka: KafkaClient, kept_bytes: int) -> None:
        self._kafka, self._kept_bytes = kafka, kept_bytes
        self._kept: OrderedDict[tuple[TopicPartition, int], TopicPage] = OrderedDict()
        self._starts: dict[TopicPartition, list[int]] = {}
        self._size = 0
        self._fetching: dict[tuple[TopicPartition, int], asyncio.Task[TopicPage]] = {}
        # Fetched before they were asked for, or being fetched: how many pages ahead.
        self._ahead: dict[tuple[TopicPartition, int], int] = {}
        self._followed: dict[TopicPartition, int] = {}
        self.ends: dict[TopicPartition, int] = {}
        self._news: dict[TopicPartition, asyncio.Event] = {}
        # A partition is followed whose end was not looked at.
        self._look = asyncio.Event()

    # ---- the ends of partitions -----------------------------------------------------------------------------------

    def follow(self, tp: TopicPartition) -> None:
        self._followed[tp] = self._followed.get(tp, 0) + 1
        if tp not in self.ends:
            self._look.set()

    def unfollow(self, tp: TopicPartition) -> None:
        left = self._followed.pop(tp) - 1
        if left:
            self._followed[tp] = left
        else:
            self.ends.pop(tp, None)
            self._news.pop(tp, None)

    async def watch(self) -> None:
        """Looks at the ends until it is cancelled."""
        moved_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() - moved_s >= _IDLE_AFTER_S:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_LOOK_S - _LOOK_S):
                        await self._look.wait()
            self._look.clear()
            with suppress(errors.KafkaError, OSError, TimeoutError):
                followed = list(self._followed)
                ends = await self._kafka.offsets(followed, LATEST, ELECTION_S) if followed else {}
                if self._moved(ends):
                    moved_s = time.monotonic()

    def _moved(self, ends: dict[TopicPartition, int]) -> bool:
        moved = [tp for tp, end in ends.items() if end != self.ends.get(tp) and tp in self._followed]
        for tp in moved:
            self.ends[tp] = ends[tp]
            if (news := self._news.pop(tp, None)) is not None:
                news.set()
        return bool(moved)

    async def has_more(self, tp: TopicPartition, offset: int) -> None:
        """Returns when the partition has something at the offset or after it. An end that is cut back wakes, too."""
        while (end := self.ends.get(tp)) is None or end == offset:
            await self._news.setdefault(tp, asyncio.Event()).wait()

    # ---- pages ----------------------------------------------------------------------------------------------------

    async def read(self, tp: TopicPartition, offset: int) -> TopicPage:
        """A page with the offset in it; without chunks where there are none. Raises KafkaError: OffsetOutOfRangeError,
        CorruptBatch and others."""
        page = self._find(tp, offset)
        if page is None:
            page = await asyncio.shield(self._begin(tp, offset))
        self._ahead.pop((tp, page.start), None)
        self._read_ahead(tp, page.end, 1)
        return page

    def _begin(self, tp: TopicPartition, offset: int) -> asyncio.Task[TopicPage]:
        fetching = self._fetching.get((tp, offset))
        if fetching is None:
            fetching = self._fetching[tp, offset] = asyncio.create_task(self._fetch(tp, offset))
            fetching.add_done_callback(partial(self._fetched, (tp, offset)))
        return fetching

    def _fetched(self, key: tuple[TopicPartition, int], fetching: asyncio.Task[TopicPage]) -> None:
        """Keeps the page, unless its topic was forgotten meanwhile: then it may be of another one."""
        failed = fetching.cancelled() or fetching.exception() is not None
        if self._fetching.get(key) is fetching:
            del self._fetching[key]
            if not failed and (page := fetching.result()).end > page.start:
                self._keep(key[0], page)
                if depth := self._ahead.get(key):
                    self._read_ahead(key[0], page.end, depth + 1)
                return
        self._ahead.pop(key, None)

    def _read_ahead(self, tp: TopicPartition, offset: int, depth: int) -> None:
        """Begins to fetch the next page that is missing, if there is something. Errors are found when it is read."""
        key = tp, offset
        if depth > _PAGES_AHEAD or self.ends.get(tp, 0) <= offset or key in self._fetching:
            return
        if (page := self._find(tp, offset)) is not None:
            self._read_ahead(tp, page.end, depth + 1)
        elif _PAGE_BYTES * (len(self._ahead) + 1) <= self._kept_bytes * _PART_AHEAD:
            self._ahead[key] = depth
            self._begin(tp, offset)

    def _find(self, tp: TopicPartition, offset: int) -> TopicPage | None:
        for start in reversed(self._starts.get(tp, ())):
            if start <= offset:
                page = self._kept[tp, start]
                if offset < page.end:
                    self._kept.move_to_end((tp, start))
                    return page
                return None
        return None

    async def _fetch(self, tp: TopicPartition, offset: int) -> TopicPage:
        fetched = await self._kafka.fetch(*tp, offset, max_bytes=_FETCH_BYTES, stop_bytes=_STOP_BYTES)
        topic, number = tp
        dc, _ = split_topic(topic)

        def rows() -> list[Row]:
            found = (row_of(dc, topic, number, record) for record in fetched.records)
            return [row for row in found if row is not None]

        decoded = rows() if len(fetched.records) <= _INLINE_RECORDS else await asyncio.to_thread(rows)
        return TopicPage(offset, fetched.next_offset, decoded, sum(map(size_of, decoded)))

    def _keep(self, tp: TopicPartition, page: TopicPage) -> None:
        if (old := self._kept.pop((tp, page.start), None)) is not None:
            self._size -= old.size_bytes
        else:
            starts = self._starts.setdefault(tp, [])
            starts.insert(bisect_left(starts, page.start), page.start)
        self._kept[tp, page.start] = page
        self._size += page.size_bytes
        while self._size > self._kept_bytes and len(self._kept) > 1:
            self._drop(*next(iter(self._kept)))

    def _drop(self, tp: TopicPartition, start: int) -> None:
        self._size -= self._kept.pop((tp, start)).size_bytes
        self._ahead.pop((tp, start), None)
        starts = self._starts[tp]
        starts.remove(start)
        if not starts:
            del self._starts[tp]

    def forget(self, topics: Iterable[str]) -> None:
        """Drops the pages of topics that were deleted or recreated."""
        gone = set(topics)
        for tp, start in [key for key in self._kept if key[0][0] in gone]:
            self._drop(tp, start)
        for key in [key for key in self._fetching if key[0][0] in gone]:
            del self._fetching[key]
            self._ahead.pop(key, None)
        for tp in [tp for tp in self.ends if tp[0] in gone]:
            del self.ends[tp]


async def next_batch(
    pages: TopicPages,
    tp: TopicPartition,
    start: int,
    shape: BatchShape,
    max_bytes: int,
    max_wait_s: float,
    waits: Callable[[], None],
) -> tuple[int, list[Row]]:
    """Where the next batch from ``start`` on ends, and its chunks; waits for some. Without any: there are none so far.

    ``waits``: called when there is nothing to read now. Raises as `TopicPages.read` does.
    """
    found, at, deadline = list[Row](), start, None
    while True:
        if pages.ends.get(tp, at) == at:
            waits()
        try:
            async with asyncio.timeout_at(deadline):
                await pages.has_more(tp, at)
        except TimeoutError:
            return at, found
        page = await pages.read(tp, at)
        found += [row for row in page.after(at) if shape.takes(row)]
        _, end = cut(found, max_bytes)
        if end is not None:
            return end, [row for row in found if row[3] < end]
        if page.end == at:
            await asyncio.sleep(_BEHIND_S)
        at = page.end
        if found and deadline is None:
            deadline = asyncio.get_running_loop().time() + max_wait_s
        elif not found and at > start and pages.ends.get(tp) == at:
            return at, found


async def rows_between(pages: TopicPages, tp: TopicPartition, start: int, end: int, shape: BatchShape) -> list[Row]:
    """The chunks of a batch that was planned before. Raises as `TopicPages.read` does."""
    found, at = list[Row](), start
    while at < end:
        page = await pages.read(tp, at)
        if page.end == at:
            await asyncio.sleep(_BEHIND_S)
        found += [row for row in page.after(at) if row[3] < end and shape.takes(row)]
        at = page.end
    return found


class BatchRoom:
    """The bytes of batches, shared fairly: a slow receiver takes none of the others'.

    What a subscription holds alone may be as large as it is.
    """

    def __init__(self, limit: int) -> None:
        self._shares = FairShare(limit)
        self._freed = asyncio.Event()

    @property
    def used(self) -> int:
        return self._shares.used

    def fits(self, name: str, size: int) -> bool:
        return size <= self._shares.room(name) or not self._shares.of_token(name)

    def try_take(self, name: str, size: int) -> bool:
        if not self.fits(name, size):
            return False
        self._shares.take(name, size)
        return True

    async def take(self, name: str, size: int) -> None:
        """Returns when there is room."""
        while not self.try_take(name, size):
            freed = self._freed
            await freed.wait()

    def give(self, name: str, size: int) -> None:
        self._shares.give(name, size)
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()


class PlannedRows:
    """The chunks of a unit's planned batches that are in memory, by the end of the batch, counted in the room.

    The batch that is sent next goes first: while it waits for room nothing else of the unit is kept. Batches behind it
    would hold the room that it waits for, and would never be sent.
    """

    def __init__(self, room: BatchRoom, name: str) -> None:
        self._room, self._name = room, name
        self._rows: dict[int, list[Row]] = {}
        self._waits = False

    def has_room(self, max_bytes: int) -> bool:
        return not self._waits and self._room.fits(self._name, max_bytes)

    def keep(self, end: int, rows: list[Row]) -> bool:
        """Whether there was room."""
        kept = not self._waits and self._room.try_take(self._name, sum(map(size_of, rows)))
        if kept:
            self._rows[end] = rows
        return kept

    def put_back(self, end: int, rows: list[Row]) -> None:
        """What `get` gave, instead of `give`."""
        self._rows[end] = rows

    def give(self, rows: list[Row]) -> None:
        self._room.give(self._name, sum(map(size_of, rows)))

    def drop(self) -> None:
        rows, self._rows = self._rows, {}
        for one in rows.values():
            self.give(one)

    async def get(self, end: int, read: Callable[[], Awaitable[list[Row]]]) -> list[Row]:
        """The chunks of the batch to send, kept or by ``read``, counted from now on. Reads twice where it waits."""
        rows = self._rows.pop(end, None)
        if rows is not None:
            return rows
        rows = await read()
        size = sum(map(size_of, rows))
        if self._room.try_take(self._name, size):
            return rows
        rows, self._waits = [], True
        self.drop()
        try:
            await self._room.take(self._name, size)
        finally:
            self._waits = False
        try:
            return await read()
        except BaseException:
            self._room.give(self._name, size)
            raise
