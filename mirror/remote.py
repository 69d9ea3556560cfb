"""One remote data centre: its topics, and a fetcher for each of its brokers.

Each fetcher has its own connection and fetch session, so a stalled broker delays no other. It fetches the partitions
that have room in memory at the moment; the others are left out until there is room.

Where there are many partitions, those without records for a while have fetchers of their own. A broker examines all
partitions of a session whenever one of them has records, so a few busy ones among thousands would keep it busy.
All links of a worker share one budget of memory for batches that are not committed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka import error_codes
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.kafka.record_requests import FetchedPartition, FetchSession
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.kafka.types import TopicIdPartition
from logferry.gateway.lanes.lifecycle import now_ms
from logferry.gateway.limits import TokenBucket
from logferry.mirror.config import Limits, Remote
from logferry.mirror.copy.partition import MirroredPartition

# From so many partitions on, those without records for so long are fetched apart.
_MANY: Final = 500
_QUIET_S: Final = 20.0
_REFRESH_S: Final = 5.0
_FETCH_WAIT_MS: Final = 250
_QUIET_WAIT_MS: Final = 1000
_RETRY_S: Final = 0.2
_LONGEST_RETRY_S: Final = 2.0
# A new leader does not know its end yet (KIP-207).
_OFFSET_NOT_AVAILABLE: Final = 78
# What fails beside the fetchers.
_TOPICS: Final = "topics"
_PASSING: Final = error_codes.NO_SUCH_TOPIC | error_codes.LEADER_CHANGED | {_OFFSET_NOT_AVAILABLE}


@dataclass(slots=True)
class RemoteWait:
    """Why and since when (Unix ms) a remote is waited for. ``ended_ms`` None: still. ``is_fault`` False: by a limit."""

    reason: str
    since_ms: int
    ended_ms: int | None = None
    is_fault: bool = True


class RemoteCluster:
    """``sources``: state topics to copy, too. ``on_topics`` is called with all mirrored topics after each refresh.

    ``topics``: by the names of their copies, which all here go by; the remote is asked by the names that it has.
    """

    def __init__(
        self,
        remote: Remote,
        kafka: KafkaClient,
        limits: Limits,
        budget: MemoryBudget,
        sources: frozenset[str],
        on_topics: Callable[[RemoteCluster, dict[str, TopicMetadata]], Awaitable[None]],
    ) -> None:
        self.remote, self.kafka, self.limits, self.budget = remote, kafka, limits, budget
        self.sources = sources
        rate = remote.bytes_per_s
        # Its rate is this worker's part of the limit.
        self.bucket = None if rate is None else TokenBucket(rate, 0.0, time.monotonic())
        self.topics: dict[str, TopicMetadata] = {}
        self.fault: RemoteWait | None = None
        self.throttle: RemoteWait | None = None
        self.fetched_bytes = 0
        # Copies without a checkpoint whose first records the remote had removed, and where they begin.
        self.begun_later: dict[TopicPartition, int] = {}
        self._on_topics = on_topics
        self._followed: set[MirroredPartition] = set()
        self._fetchers: dict[tuple[int, bool], Fetcher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refresh_now = asyncio.Event()
        self._crashed: BaseException | None = None
        # What fails at the moment: fetchers, `_TOPICS`.
        self._failing: set[object] = set()

    async def run(self) -> None:
        """Refreshes the topics every few seconds, and keeps each partition with the fetcher of its leader."""
        try:
            await self._connect()
            pause = _RETRY_S
            while True:
                self._refresh_now.clear()
                if self._crashed is not None:
                    raise self._crashed
                await self._refresh()
                try:
                    async with asyncio.timeout(_REFRESH_S):
                        await self._refresh_now.wait()
                except TimeoutError:
                    pause = _RETRY_S
                    continue
                # Describing all topics is costly: less often while brokers answer with other leaders than it shows.
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self) -> None:
        """Waits for a data centre that does not answer; the others continue."""
        pause = _RETRY_S
        while True:
            try:
                await self.kafka.start()
                return self.report_recovery(_TOPICS)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                self.report_failure(f"{self.remote.dc} does not answer: {error!r}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY_S)

    async def _refresh(self) -> None:
        try:
            view = await self.kafka.describe()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            self.report_failure(f"{self.remote.dc} does not answer: {error!r}")
            return
        copies = ((self.remote.here(name, self.sources), topic) for name, topic in view.topics.items())
        self.topics = {copy: topic._replace(name=copy) for copy, topic in copies if copy is not None}
        self._failing.discard(_TOPICS)  # it is added again where they fail
        await self._on_topics(self, self.topics)
        if _TOPICS not in self._failing:
            self.report_recovery(_TOPICS)
        are_many, quiet_before = len(self._followed) >= _MANY, time.monotonic() - _QUIET_S
        for partition in self._followed:
            partition.is_quiet = are_many and partition.heard_at < quiet_before
            self._assign(partition)
        self._share_limit()

    async def offset(self, tp: TopicPartition, time_ms: int) -> int:
        """As `KafkaClient.offset`; ``tp``: of the copy."""
        return await self.kafka.offset(self.remote.there(tp[0]), tp[1], time_ms)

    def follow(self, partition: MirroredPartition) -> None:
        """Fetches it from now on, whenever it has room."""
        self._followed.add(partition)
        partition.on_change = self._changed
        self._assign(partition)
        self._share_limit()

    def unfollow(self, partition: MirroredPartition) -> None:
        self._followed.discard(partition)
        partition.on_change = lambda _: None
        for fetcher in self._fetchers.values():
            fetcher.leave(partition)
        self._share_limit()

    def _share_limit(self) -> None:
        """Of the link's limit each worker has the part of its partitions: the lanes share them, and overlap nowhere.

        While lanes move, a worker may follow partitions that another one is still about to give up.
        """
        limit = self.remote.bytes_per_s
        if self.bucket is not None and limit is not None:
            self.bucket.wait_s(time.monotonic())  # what was saved until now
            partitions = sum(len(topic.partitions) for topic in self.topics.values())
            self.bucket.rate = limit * max(1, len(self._followed)) / max(1, partitions, len(self._followed))

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
            (self._fetchers.get(of) or self._start(*of)).join(partition)

    def _start(self, node: int, is_quiet: bool) -> Fetcher:
        fetcher = self._fetchers[node, is_quiet] = Fetcher(self, node, is_quiet)
        task = asyncio.create_task(fetcher.run(), name=f"fetch-{self.remote.dc}-{node}{'-quiet' * is_quiet}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return fetcher

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A fetcher that ends by an unexpected error ends the worker."""
        self._tasks.discard(task)
        if not task.cancelled():
            self._crashed = task.exception()
            self._refresh_now.set()

    def refresh_soon(self) -> None:
        """Leaders moved, or a topic changed: the topics are refreshed at once."""
        self._refresh_now.set()

    def report_failure(self, reason: str, by: object = _TOPICS) -> None:
        """``by``: what failed; the link waits until each of those that failed answers again."""
        self._failing.add(by)
        if self.fault is None or self.fault.ended_ms is not None:
            self.fault = RemoteWait(reason, now_ms())
            log.event("link_waits", dc=self.remote.dc, reason=reason)
        self.fault.reason = reason

    def report_recovery(self, by: object) -> None:
        self._failing.discard(by)
        if self.fault is not None and self.fault.ended_ms is None and not self._failing:
            self.fault.ended_ms = now_ms()
            log.event("link_recovered", dc=self.remote.dc, after_ms=self.fault.ended_ms - self.fault.since_ms)

    async def wait_for(self, limit: Awaitable[object], reason: str) -> None:
        """It waits by its own limits: for memory, or by its rate."""
        wait = self.throttle = RemoteWait(reason, now_ms(), is_fault=False)
        await limit
        wait.ended_ms = now_ms()

    @property
    def silent_s(self) -> float:
        """How long a request to it has been without an answer; its state is unknown since."""
        asked = [fetcher.asked_at for fetcher in self._fetchers.values() if fetcher.asked_at is not None]
        if self.fault is not None and self.fault.ended_ms is None:
            asked.append(self.fault.since_ms / 1000)
        return max(0.0, time.time() - min(asked, default=time.time()))

    @property
    def last_wait(self) -> RemoteWait | None:
        """The last wait of either kind; None: there was none."""
        found = filter(None, (self.fault, self.throttle))
        return max(found, key=lambda wait: (wait.ended_ms is None, wait.is_fault, wait.since_ms), default=None)


class Fetcher:
    """Fetches the partitions that one broker leads: either the busy ones or the quiet ones."""

    def __init__(self, link: RemoteCluster, node: int, is_quiet: bool) -> None:
        self._link, self._node = link, node
        self._wait_ms, self._line = (_QUIET_WAIT_MS, "quiet") if is_quiet else (_FETCH_WAIT_MS, "")
        self.asked_at: float | None = None
        self.partitions: dict[TopicIdPartition, MirroredPartition] = {}
        self._session = FetchSession()
        self._wanted = asyncio.Event()
        # The look-ups of what the broker has of partitions whose position is outside of it.
        self._looking: dict[TopicIdPartition, asyncio.Task[None]] = {}

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
        pause, refused = _RETRY_S, 0
        try:
            while True:
                await self._room()
                if not self._session.wanted:
                    # It has nothing that could be asked of the broker, which may be gone for good.
                    self.asked_at = None
                    self._link.report_recovery(self)
                    self._wanted.clear()
                    await self._wanted.wait()
                    continue
                try:
                    self.asked_at = self.asked_at or time.time()
                    request = self._session.request(self._wait_ms, self._link.limits.fetch_bytes)
                    fetched = await self._link.kafka.channels.ask(self._node, request, self._line)
                    self.asked_at = None
                except (errors.KafkaError, OSError, TimeoutError) as error:
                    self._session.lost()
                    wrong = f"does not answer: {error!r}"
                else:
                    if self._session.answered(fetched):
                        pause, refused = _RETRY_S, 0
                        self._link.report_recovery(self)
                        for found in fetched.found:
                            self._hand_over(found)
                        continue
                    refused += 1
                    if refused == 1:
                        continue  # it forgot the session, which begins again
                    wrong = f"answers fetches with error code {fetched.code}, {errors.for_code(fetched.code).__name__}"
                self._link.report_failure(f"broker {self._node} of {self._link.remote.dc} {wrong}", self)
                self._link.refresh_soon()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY_S)
        finally:
            for task in self._looking.values():
                task.cancel()

    async def _room(self) -> None:
        """Returns when memory and the remote's rate limit allow a fetch."""
        link = self._link
        if not link.budget.room.is_set():
            why = f"{link.budget.limit_bytes:,} bytes wait to be committed here (limits.waiting_bytes)"
            await link.wait_for(link.budget.room.wait(), why)
        wait_s = 0.0 if link.bucket is None else link.bucket.wait_s(time.monotonic())
        if wait_s > 0:
            why = f"the rate limit of the link is {link.remote.bytes_per_s:,.0f} bytes a second (bytes_per_s)"
            await link.wait_for(asyncio.sleep(wait_s), why)

    def _hand_over(self, found: FetchedPartition) -> None:
        partition = self.partitions.get(found.key)
        asked = self._session.asked.get(found.key)
        if partition is None or asked is None or asked.offset != partition.position or partition.stop is not None:
            return  # it was reassigned meanwhile, or the request was of the one whose place it took
        if found.code == error_codes.NONE:
            size = len(found.records)
            self._link.fetched_bytes += size
            if self._link.bucket is not None:
                self._link.bucket.take(size)
            self._link.budget.take(partition.take(found))
            if size:
                partition.heard_at = time.monotonic()
                if partition.is_quiet:
                    partition.is_quiet = False
                    self._link.follow(partition)  # it moves to the busy fetcher
                else:
                    self.changed(partition)
        elif found.code == error_codes.OFFSET_OUT_OF_RANGE:
            self._looking[partition.key] = asyncio.create_task(self._range(partition))
            self.changed(partition)
        elif found.code in _PASSING:
            self.leave(partition)
            self._link.refresh_soon()
        else:
            why = f"error code {found.code}, {errors.for_code(found.code).__name__}"
            partition.halt("fetch-rejected", f"{self._link.remote.dc} answers a fetch with {why}")

    async def _range(self, partition: MirroredPartition) -> None:
        """Judges the position by what the remote has. Nothing for one that stopped, or was replaced, meanwhile."""
        tp, before, wrong, first, end = partition.tp, partition.position, "", 0, 0
        try:
            try:
                first, end = await self._link.offset(tp, EARLIEST), await self._link.offset(tp, LATEST)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                wrong = f"{self._link.remote.dc} does not say which offsets of {partition.name} it has: {error!r}"
            if partition.stop is not None or self.partitions.get(partition.key) is not partition:
                return
            if wrong:
                partition.halt("fetch-rejected", wrong)
            else:
                partition.out_of_range(first, end)
            if partition.checkpoint is None and partition.position > before:
                self._link.begun_later[tp] = first
                log.event("copy_begins_later", topic=tp[0], partition=tp[1], dc=partition.dc, first=first)
            elif partition.stop is None and partition.position == before:
                self._link.refresh_soon()  # the broker asked does not lead it any more, or has not caught up
                await asyncio.sleep(_RETRY_S)
        finally:
            self._looking.pop(partition.key, None)
            if now := self.partitions.get(partition.key):
                self.changed(now)


class MemoryBudget:
    """Bytes fetched and not committed. May exceed the limit by the fetches in flight when it was reached.

    ``room``: set while there is some.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.room = asyncio.Event()
        self.room.set()

    def take(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        if self.used_bytes >= self.limit_bytes:
            self.room.clear()

    def give(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        if self.used_bytes < self.limit_bytes:
            self.room.set()
