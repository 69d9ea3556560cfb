"""Which lanes are this worker's. Membership, failure detection and balance are a plain Kafka consumer group's.

The workers are the members of a group on the state topic: who is assigned partition k owns lane k. This is for
liveness alone; that two workers who both believe they own a lane do no harm, the fence sees to.

Each rebalance first reports every lane as revoked, so that is ignored: lanes are served until the new assignment
says which are really gone. A worker that slept through an assignment may be given the same lanes again and cannot
tell who had them meanwhile: those are opened anew. Where the others are is read from the group, whose members carry
their URL as client id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition, errors
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from logferry.gateway import log
from logferry.gateway.course import now_ms
from logferry.gateway.errors import LaneLost
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.consumer_groups import Groups, Refused
from logferry.gateway.lanes.lifecycle import KeptLane
from logferry.gateway.links import leave
from logferry.gateway.reading.assignment import Member

_HEARTBEAT_MS: Final = 300
_VIEW_INTERVAL_S: Final = 2.0
_VIEW_RETRY_S: Final = 0.05
_NEWS_S: Final = 0.1
# A worker that lives finishes what it has of a lane that it gives away; a fence at once would make that unknown.
_GRACE_S: Final = 0.2
_HAND_OVER_S: Final = 3.0
_CLOSE_DEADLINE_S: Final = 25.0
_NEVER_MS: Final = 2**31 - 1


@dataclass(slots=True)
class GroupView:
    """The group's members when it was seen last, and why it was not seen since.

    ``rebalances``: how many the worker knew of before it looked; -1: it never did.
    """

    members: list[str] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    seen_ms: int | None = None
    error: str | None = None
    rebalances: int = -1


LaneT = TypeVar("LaneT", bound=KeptLane)


class Membership(Protocol):
    """Of the workers' group: its id, the topic whose partitions are the lanes, and how soon a dead one is missed."""

    @property
    def group(self) -> str: ...

    @property
    def state_topic(self) -> str: ...

    @property
    def session_timeout_ms(self) -> int: ...


class Ownership(ConsumerRebalanceListener, Generic[LaneT]):  # type: ignore[misc]
    """Opens and closes lanes as the group assigns them, and knows the owners of the others.

    ``make_lane``: by its number and the seconds that its last owner is given to finish.
    """

    def __init__(self, config: Membership, url: str, kafka: Kafka, make_lane: Callable[[int, float], LaneT]) -> None:
        self._config, self.url, self._kafka, self._make_lane = config, url, kafka, make_lane
        self._consumer = AIOKafkaConsumer(
            group_id=config.group,
            client_id=url,
            partition_assignment_strategy=[StickyPartitionAssignor],
            session_timeout_ms=config.session_timeout_ms,
            heartbeat_interval_ms=_HEARTBEAT_MS,
            max_poll_interval_ms=_NEVER_MS,
            enable_auto_commit=False,
            # Nothing is ever read here: the partitions are paused, the group is all that is wanted.
            auto_offset_reset="latest",
            **kafka.options,
        )
        self._groups = Groups(kafka)
        self.lanes: dict[int, LaneT] = {}
        self.view = GroupView()
        self._rebalances = 0
        self._assigned: frozenset[int] | None = None
        self._membership: tuple[str, int] | None = None
        self._changed = asyncio.Condition()
        self._look_again = asyncio.Event()
        self._running: dict[asyncio.Task[None], LaneT] = {}
        self._background: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        # Whose the lanes are until now is known before any of them is given to this worker.
        await self._look()
        self._consumer.subscribe([self._config.state_topic], listener=self)
        await self._consumer.start()
        self.keep_up(self._view())

    def keep_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that goes on until `stop`; should it end by an error, the worker ends."""
        task = asyncio.create_task(work)
        self._background.append(task)
        task.add_done_callback(self._ended)

    async def leave(self) -> None:
        """Finishes what runs, then leaves the group, so that the lanes move at once; where to is still followed.

        Returns when the others have them. Each of those knew by then that the owners were changing.
        """
        for lane in self.lanes.values():
            lane.close()
        if self._running:
            await asyncio.wait(self._running, timeout=_CLOSE_DEADLINE_S)
        await leave(self._consumer)
        self._assigned = None
        self._rebalances += 1
        self._look_again.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_HAND_OVER_S), self._changed:
                await self._changed.wait_for(lambda: not self.is_changing)

    async def stop(self) -> None:
        tasks = [*self._running, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- what others ask --------------------------------------------------------------------------------------

    def held(self) -> list[LaneT]:
        """The lanes of this worker by number, those too that it is about to give away."""
        return sorted({*self.lanes.values(), *self._running.values()}, key=lambda lane: lane.number)

    @property
    def is_settled(self) -> bool:
        """An assignment was received and its lanes serve."""
        return self._assigned is not None and all(
            number in self.lanes and self.lanes[number].state == "serving" for number in self._assigned
        )

    def owner(self, lane: int) -> str | None:
        """The URL of another worker that the group gave the lane to; None while that is not known."""
        owner = self.view.owners.get(lane)
        return None if owner == self.url else owner

    @property
    def is_changing(self) -> bool:
        """The owners are as they were before the last rebalance."""
        return self.view.rebalances < self._rebalances

    def is_worker(self, url: str) -> bool:
        return url == self.url or url in self.view.owners.values()

    def other_workers(self) -> list[str]:
        """The URLs of the other workers that hold lanes."""
        return sorted(set(self.view.owners.values()) - {self.url})

    async def wait_for_news(self) -> None:
        """Returns when lanes were assigned here or are known to be elsewhere, or after a moment."""
        self._look_again.set()
        async with self._changed:
            await self._wait_for_change(_NEWS_S)

    async def is_taken_from(self, owner: str, lane: int) -> None:
        """Returns when the lane is known to be another worker's than the owner's, or nobody's."""

        def is_taken() -> bool:
            # What this worker had before it left is not its own any more.
            held = self.lanes.get(lane)
            return (held is not None and held.is_open) or self.view.owners.get(lane) != owner

        async with self._changed:
            await self._changed.wait_for(is_taken)

    async def confirm(self, lane: int) -> None:
        """Returns when the group confirms in its present generation that the lane is ours. Raises LaneLost."""
        while True:
            assigned = self._assigned
            if assigned is None or lane not in assigned:
                raise LaneLost(f"the group gave lane {lane} to another worker")
            membership = self._membership
            try:
                if membership is not None and self._present_membership() == membership:
                    # A commit is fenced by the group's generation, that is what makes it a confirmation. Not by way of
                    # the consumer, which forgets who it is when a commit comes too late, joins as somebody else, and
                    # the group waits for the one it was.
                    member = Member(generation=membership[1], id=membership[0])
                    await self._groups.commit(self._config.group, member, {(self._config.state_topic, lane): 0})
                    if self._present_membership() == membership == self._membership:
                        return
            except Refused:
                pass
            async with self._changed:
                if self._assigned is assigned:
                    await self._wait_for_change(1)

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    # ---- the group's word -------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        self._rebalances += 1

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        partitions = list(assigned)
        self._consumer.pause(*partitions)
        lanes = frozenset(p.partition for p in partitions)
        gone = (self._assigned or frozenset()) - lanes
        new = lanes - (self._assigned or frozenset())
        before, self._membership = self._membership, self._present_membership()
        self._assigned = lanes
        if before is not None and self._membership != (before[0], before[1] + 1):
            for number in lanes - new:
                self.lanes[number].doubt()
        log.event("info", "lanes_assigned", lanes=sorted(lanes), new=sorted(new), gone=sorted(gone))
        async with self._changed:
            self._changed.notify_all()
        for number in gone:
            self.lanes.pop(number).close()
        for number in sorted(lanes):
            if number in new or self.lanes[number].state == "closed":
                self._open(number)
        self._look_again.set()

    def _present_membership(self) -> tuple[str, int]:
        """The member that the group knows this worker as, and the generation of its assignment."""
        coordinator = self._consumer._coordinator
        return coordinator.member_id, coordinator.generation

    def _open(self, number: int) -> None:
        nobody_had_it = self.view.rebalances >= 0 and number not in self.view.owners
        grace_s = 0.0 if nobody_had_it else _GRACE_S
        lane = self._make_lane(number, grace_s)
        self.lanes[number] = lane
        task = asyncio.create_task(lane.run(), name=f"lane-{number}")
        self._running[task] = lane
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A lane that ends with an error that nobody foresaw ends the worker: its outcome is unknown to all."""
        self._running.pop(task, None)
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception() or RuntimeError(task.get_name()))

    async def _view(self) -> None:
        while True:
            self._look_again.clear()
            interval_s = _VIEW_INTERVAL_S if await self._look() else _VIEW_RETRY_S
            try:
                async with asyncio.timeout(interval_s):
                    await self._look_again.wait()
            except TimeoutError:
                continue

    async def _look(self) -> bool:
        """Looks up the owners. False while the group is changing, or does not answer: the old ones are kept then."""
        rebalances = self._rebalances
        try:
            found = await self._kafka.group_assignment(self._config.group, self._config.state_topic)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            if self.view.error is None:
                log.event("warning", "group_view_failed", error=repr(error))
            self.view.error = repr(error)
            return False
        if found is None:
            return False
        owners = {lane: url for url, lanes in found.items() for lane in lanes}
        is_news = (owners, rebalances) != (self.view.owners, self.view.rebalances)
        self.view = GroupView(sorted(found), owners, now_ms(), rebalances=rebalances)
        if is_news:
            async with self._changed:
                self._changed.notify_all()
        return True
