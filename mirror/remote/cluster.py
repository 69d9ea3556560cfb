"""The way to one remote data centre: its topics, and a fetcher for each of its brokers.

A fetcher has a connection and a fetch session of its own, so the stall of one broker holds up no other. What it asks
for is what its partitions want at the moment: those with enough in memory are left out until there is room.

Where there are many partitions, those that nothing came from for a while have a fetcher of their own. A broker looks at
all partitions of a session whenever one of them has news, so a few busy ones among thousands would keep it busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.kafka.fetch_request import (
    MOVED,
    NO_ERROR,
    OFFSET_OUT_OF_RANGE,
    UNKNOWN_TOPIC,
    Fetched,
    FetchSession,
    Found,
    TopicPartition,
)
from logferry.gateway.kafka.metadata_request import TopicView
from logferry.mirror.config import Limits, Remote
from logferry.mirror.copy.partition import MirroredPartition
from logferry.mirror.remote.flow_control import Budget, Pace

_FETCH_WAIT_MS: Final = 250
_QUIET_WAIT_MS: Final = 1000
# From how many partitions on, and for how long nothing came.
_MANY: Final = 500
_QUIET_S: Final = 20.0
_REFRESH_S: Final = 5.0
_RETRY_S: Final = 0.2
_LONGEST_RETRY_S: Final = 2.0


@dataclass(slots=True)
class Trouble:
    """Why a link waits, and since when (Unix ms). ``ended_ms`` None: it lasts. ``is_fault`` False: it is meant to."""

    reason: str
    since_ms: int
    ended_ms: int | None = None
    is_fault: bool = True


class Link:
    """``sources``: state topics that come along. ``on_topics`` is called with all that is taken, after each look."""

    def __init__(
        self,
        remote: Remote,
        kafka: Kafka,
        limits: Limits,
        budget: Budget,
        sources: frozenset[str],
        on_topics: Callable[[Link, dict[str, TopicView]], Awaitable[None]],
    ) -> None:
        self.remote, self.kafka, self.limits, self.budget = remote, kafka, limits, budget
        self.sources = sources
        self.pace = Pace(remote.bytes_per_s)
        self.topics: dict[str, TopicView] = {}
        self.trouble: Trouble | None = None
        self.waited: Trouble | None = None
        self.fetched_bytes = 0
        self._on_topics = on_topics
        self._followed: set[MirroredPartition] = set()
        self._fetchers: dict[tuple[int, bool], Fetcher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._look_again = asyncio.Event()
        self._crashed: BaseException | None = None

    async def run(self) -> None:
        """Looks at the topics now and then, and keeps each partition with the fetcher of its leader."""
        try:
            await self._connect()
            while True:
                self._look_again.clear()
                if self._crashed is not None:
                    raise self._crashed
                await self._refresh()
                try:
                    async with asyncio.timeout(_REFRESH_S):
                        await self._look_again.wait()
                    # Once every retry at most, whoever asks.
                    await asyncio.sleep(_RETRY_S)
                except TimeoutError:
                    continue
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self) -> None:
        """A data centre that is away is waited for: the others go on."""
        pause = _RETRY_S
        while True:
            try:
                await self.kafka.start()
                return self.is_well()
            except (errors.KafkaError, OSError, TimeoutError) as error:
                self.is_troubled(f"{self.remote.dc} does not answer: {error!r}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY_S)

    async def _refresh(self) -> None:
        try:
            view = await self.kafka.describe()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            self.is_troubled(f"{self.remote.dc} does not answer: {error!r}")
            return
        taken = (topic for topic in view.topics.values() if self.remote.takes(topic.name) or topic.name in self.sources)
        self.topics = {topic.name: topic for topic in taken}
        await self._on_topics(self, self.topics)
        quiet_before = time.monotonic() - _QUIET_S if len(self._followed) >= _MANY else 0.0
        for partition in self._followed:
            partition.is_quiet = partition.heard_at < quiet_before
            self._assign(partition)

    # ---- partitions -------------------------------------------------------------------------------------------

    def follow(self, partition: MirroredPartition) -> None:
        """Fetches it from now on, whenever it wants something."""
        self._followed.add(partition)
        partition.on_change = self._changed
        self._assign(partition)

    def unfollow(self, partition: MirroredPartition) -> None:
        self._followed.discard(partition)
        partition.on_change = lambda _: None
        for fetcher in self._fetchers.values():
            fetcher.leave(partition)

    def _changed(self, partition: MirroredPartition) -> None:
        for fetcher in self._fetchers.values():
            if partition.key in fetcher.partitions:
                fetcher.changed(partition)

    def _assign(self, partition: MirroredPartition) -> None:
        view = self.topics.get(partition.topic)
        leader = -1
        if view is not None and view.id == partition.source_id and partition.number < len(view.partitions):
            leader = view.partitions[partition.number].leader
        of = (leader, partition.is_quiet)
        for key, fetcher in self._fetchers.items():
            if key != of:
                fetcher.leave(partition)
        if leader >= 0:
            if of not in self._fetchers:
                self._start(*of)
            self._fetchers[of].join(partition)

    def has_news(self, partition: MirroredPartition) -> None:
        """It is quiet no more."""
        partition.is_quiet = False
        self._assign(partition)

    def _start(self, node: int, is_quiet: bool) -> None:
        fetcher = self._fetchers[node, is_quiet] = Fetcher(self, node, is_quiet)
        task = asyncio.create_task(fetcher.run(), name=f"fetch-{self.remote.dc}-{node}{'-quiet' * is_quiet}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A fetcher that ends by an error that nobody foresaw ends the worker."""
        self._tasks.discard(task)
        if not task.cancelled():
            self._crashed = task.exception()
            self._look_again.set()

    def look_again(self) -> None:
        """Leaders moved, or a topic is not what it was."""
        self._look_again.set()

    # ---- how it fares -----------------------------------------------------------------------------------------

    def is_troubled(self, reason: str) -> None:
        now = int(time.time() * 1000)
        if self.trouble is None or self.trouble.ended_ms is not None:
            self.trouble = Trouble(reason, now)
            log.event("warning", "link_waits", dc=self.remote.dc, reason=reason)
        self.trouble.reason = reason

    def is_well(self) -> None:
        if self.trouble is not None and self.trouble.ended_ms is None:
            self.trouble.ended_ms = int(time.time() * 1000)
            log.event("info", "link_goes_on", dc=self.remote.dc, after_ms=self.trouble.ended_ms - self.trouble.since_ms)

    def waits(self, reason: str) -> None:
        """As it is told to: for room, or by its limit."""
        self.waited = Trouble(reason, int(time.time() * 1000), is_fault=False)

    def waits_no_more(self) -> None:
        if self.waited is not None and self.waited.ended_ms is None:
            self.waited.ended_ms = int(time.time() * 1000)

    @property
    def silent_s(self) -> float:
        """How long something that was asked there has not been answered; what happens there is not known since."""
        asked = [fetcher.asked_at for fetcher in self._fetchers.values() if fetcher.asked_at is not None]
        if self.trouble is not None and self.trouble.ended_ms is None:
            asked.append(self.trouble.since_ms / 1000)
        return max(0.0, time.time() - min(asked, default=time.time()))

    @property
    def last_wait(self) -> Trouble | None:
        """The last of both kinds; None: it never had to."""
        found = [wait for wait in (self.trouble, self.waited) if wait is not None]
        return max(found, key=lambda wait: (wait.ended_ms is None, wait.is_fault, wait.since_ms), default=None)


class Fetcher:
    """Fetches what one broker leads, of the busy partitions or of the quiet ones."""

    def __init__(self, link: Link, node: int, is_quiet: bool) -> None:
        self._link, self._node = link, node
        self._wait_ms, self._line = (_QUIET_WAIT_MS, "quiet") if is_quiet else (_FETCH_WAIT_MS, "")
        self.asked_at: float | None = None
        self.partitions: dict[TopicPartition, MirroredPartition] = {}
        self._session = FetchSession()
        self._wanted = asyncio.Event()
        self._ranges: set[asyncio.Task[None]] = set()
        self._looking: set[TopicPartition] = set()

    def join(self, partition: MirroredPartition) -> None:
        if self.partitions.get(partition.key) is not partition:
            self.partitions[partition.key] = partition
            self.changed(partition)

    def leave(self, partition: MirroredPartition) -> None:
        if self.partitions.get(partition.key) is partition:
            del self.partitions[partition.key]
            self._session.drop(partition.key)

    def changed(self, partition: MirroredPartition) -> None:
        wanted = None if partition.key in self._looking else partition.wanted()
        if wanted is None:
            self._session.drop(partition.key)
        else:
            self._session.want(partition.key, wanted)
            self._wanted.set()

    async def run(self) -> None:
        pause = _RETRY_S
        try:
            while True:
                await self._room()
                if not self._session.wanted:
                    self._wanted.clear()
                    await self._wanted.wait()
                    continue
                try:
                    fetched = await self._fetch()
                except (errors.KafkaError, OSError, TimeoutError) as error:
                    self._session.lost()
                    self._link.is_troubled(f"broker {self._node} of {self._link.remote.dc} does not answer: {error!r}")
                    self._link.look_again()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_RETRY_S)
                    continue
                if not self._session.answered(fetched):
                    continue
                pause = _RETRY_S
                self._link.is_well()
                for found in fetched.found:
                    self._hand_over(found)
        finally:
            for task in self._ranges:
                task.cancel()

    async def _room(self) -> None:
        """Returns when something may come, by memory and by the link's limit."""
        link = self._link
        if link.budget.is_full:
            link.waits(f"{link.budget.limit_bytes:,} bytes wait to be committed here (limits.waiting_bytes)")
            await link.budget.room()
            link.waits_no_more()
        wait_s = link.pace.wait_s()
        if wait_s > 0:
            link.waits(f"it may take {link.remote.bytes_per_s:,.0f} bytes a second (bytes_per_s)")
            await asyncio.sleep(wait_s)
            link.waits_no_more()

    async def _fetch(self) -> Fetched:
        if self.asked_at is None:
            self.asked_at = time.time()
        request = self._session.request(self._wait_ms, self._link.limits.fetch_bytes)
        answer = await self._link.kafka.channels.ask(self._node, request, self._line)
        self.asked_at = None
        return answer

    def _hand_over(self, found: Found) -> None:
        partition = self.partitions.get((found.topic_id, found.partition))
        asked = self._session.asked.get((found.topic_id, found.partition))
        if partition is None or asked is None or asked.offset != partition.position:
            return  # it went elsewhere meanwhile
        if found.code == NO_ERROR:
            size = len(found.records)
            self._link.fetched_bytes += size
            self._link.pace.take(size)
            self._link.budget.take(partition.take(found))
            if size:
                partition.heard_at = time.monotonic()
                if partition.is_quiet:
                    self._link.has_news(partition)
                else:
                    self.changed(partition)
        elif found.code == OFFSET_OUT_OF_RANGE:
            self._look_up_range(partition)
        elif found.code in UNKNOWN_TOPIC or found.code in MOVED:
            self.leave(partition)
            self._link.look_again()
        else:
            self._link.is_troubled(f"{partition.topic}-{partition.number}: Kafka says {found.code}")
            self._link.look_again()

    def _look_up_range(self, partition: MirroredPartition) -> None:
        self._looking.add(partition.key)
        self.changed(partition)
        task: asyncio.Task[None] = asyncio.create_task(self._range(partition))
        self._ranges.add(task)
        task.add_done_callback(self._ranges.discard)

    async def _range(self, partition: MirroredPartition) -> None:
        kafka, place = self._link.kafka, partition.place
        try:
            first = await kafka.offset(*place, EARLIEST)
            end = await kafka.offset(*place, LATEST)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            self._link.is_troubled(f"{self._link.remote.dc} does not answer: {error!r}")
        else:
            partition.out_of_range(first, end)
        finally:
            self._looking.discard(partition.key)
            if self.partitions.get(partition.key) is partition:
                self.changed(partition)
