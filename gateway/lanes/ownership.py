"""The lanes of this worker. Membership, failure detection and balance are those of a Kafka consumer group.

The workers are the members of a group on the state topic: the member that is assigned partition k owns lane k. The
group decides about liveness alone; two workers that both believe they own a lane do no harm, because of the fence.

Each rebalance first reports every lane as revoked, which is ignored: lanes are served until the new assignment shows
which are really gone. A worker that missed an assignment may be given the same lanes again and cannot know who owned
them meanwhile: those are reopened. The owners of the other lanes are read from the group, whose members have their
URL as client id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import aiokafka
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, errors
from logferry.gateway import log
from logferry.gateway.config import ServiceConfig
from logferry.gateway.errors import LaneLost
from logferry.gateway.kafka.aiokafka_internals import assignor_of, group_member, leave_group, rejoin
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.consumer_groups import CommitRefused, ConsumerGroups, Membership
from logferry.gateway.kafka.types import GroupMember
from logferry.gateway.lanes.lifecycle import LaneLifecycle, now_ms

_HEARTBEAT_MS: Final = 300
_VIEW_INTERVAL_S: Final = 2.0
_VIEW_RETRY_S: Final = 0.05
_NEWS_S: Final = 0.1
# A live worker finishes the transaction of a lane that it gives up; an immediate fence would make that unknown.
_GRACE_S: Final = 0.2
_HAND_OVER_S: Final = 3.0
_CLOSE_DEADLINE_S: Final = 25.0
_NEVER_MS: Final = 2**31 - 1


@dataclass(slots=True)
class WorkerGroup:
    """The group's members at the last look-up, and the error of look-ups since.

    ``rebalances``: the rebalances that the worker knew of before that look-up; -1: there was none.
    """

    members: list[str] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    seen_ms: int | None = None
    error: str | None = None
    rebalances: int = -1


LaneT = TypeVar("LaneT", bound=LaneLifecycle[Any])


class Ownership(ConsumerRebalanceListener, Generic[LaneT]):  # type: ignore[misc]
    """Opens and closes lanes as the group assigns them, and knows the owners of the others.

    ``make_lane``: takes what `LaneLifecycle` needs, by name. ``lanes``: how many there are now.
    """

    def __init__(
        self,
        config: ServiceConfig,
        url: str,
        kafka: KafkaClient,
        make_lane: Callable[..., LaneT],
        lanes: Callable[[], int],
    ) -> None:
        self._config, self.url, self._kafka, self._make_lane = config, url, kafka, make_lane
        self.number_of_lanes = lanes
        self._consumer = AIOKafkaConsumer(
            group_id=config.group,
            client_id=url,
            partition_assignment_strategy=[assignor_of(config.state_topic, lanes)],
            session_timeout_ms=config.session_timeout_ms,
            heartbeat_interval_ms=_HEARTBEAT_MS,
            max_poll_interval_ms=_NEVER_MS,
            enable_auto_commit=False,
            # Nothing is read: the partitions are paused, only the group is used.
            auto_offset_reset="latest",
            **kafka.options,
        )
        self._groups = ConsumerGroups(kafka)
        self.lanes: dict[int, LaneT] = {}
        self.view = WorkerGroup()
        self._rebalances = 0
        self._assigned: frozenset[int] | None = None
        self._membership = Membership(self._consumer)
        self._member: GroupMember | None = None
        self._changed = asyncio.Condition()
        self._refresh_now = asyncio.Event()
        self._running: dict[asyncio.Task[None], LaneT] = {}
        self._background: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        # The present owners are known before any lane is assigned to this worker.
        await self._refresh_view()
        self._consumer.subscribe([self._config.state_topic], listener=self)
        await self._consumer.start()
        self.run_in_background(self._follow_group())

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs until `stop`; if it fails, the worker ends."""
        task = asyncio.create_task(work)
        self._background.append(task)
        task.add_done_callback(self._ended)

    def reassign(self) -> None:
        """The number of lanes has changed: the group assigns them again."""
        rejoin(self._consumer)

    async def leave(self) -> None:
        """Finishes the running transactions, then leaves the group, so that the lanes move at once.

        Returns when other workers own them. Each of those knew by then that the owners were changing.
        """
        for lane in self.lanes.values():
            lane.close()
        if self._running:
            await asyncio.wait(self._running, timeout=_CLOSE_DEADLINE_S)
        await leave_group(self._consumer)
        self._assigned = None
        self._rebalances += 1
        self._refresh_now.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_HAND_OVER_S), self._changed:
                await self._changed.wait_for(lambda: not self.is_changing)

    async def stop(self) -> None:
        tasks = [*self._running, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the owners of lanes --------------------------------------------------------------------------------------

    def held(self) -> list[LaneT]:
        """The lanes of this worker by number, including those that it is about to give up."""
        return sorted({*self.lanes.values(), *self._running.values()}, key=lambda lane: lane.number)

    @property
    def is_settled(self) -> bool:
        """An assignment was received and its lanes serve."""
        return self._assigned is not None and all(
            number in self.lanes and self.lanes[number].state == "serving" for number in self._assigned
        )

    def owner(self, lane: int) -> str | None:
        """The URL of the other worker that owns the lane; None while that is not known."""
        owner = self.view.owners.get(lane)
        return None if owner == self.url else owner

    @property
    def is_changing(self) -> bool:
        """The known owners are those from before the last rebalance."""
        return self.view.rebalances < self._rebalances

    def other_workers(self) -> list[str]:
        """The URLs of the other workers that hold lanes."""
        return sorted(set(self.view.owners.values()) - {self.url})

    async def wait_for_news(self) -> None:
        """Returns when lanes were assigned here or are known to be elsewhere, or after a moment."""
        self._refresh_now.set()
        async with self._changed:
            await self._wait_for_change(_NEWS_S)

    async def is_taken_from(self, owner: str, lane: int) -> None:
        """Returns when the lane is known to be another worker's than the owner's, or nobody's."""

        def is_taken() -> bool:
            # This worker no longer owns the lanes that it had before it left.
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
            member = self._member
            with suppress(CommitRefused):
                if member is not None and self._present_member() == member:
                    # A commit is fenced by the group's generation, which makes it a confirmation. Not by way of the
                    # consumer: it forgets its member id when a commit comes too late, joins as a new member, and the
                    # group waits for the old one.
                    await self._groups.commit(self._config.group, member, {(self._config.state_topic, lane): 0})
                    if self._present_member() == member == self._member:
                        return
            async with self._changed:
                if self._assigned is assigned:
                    await self._wait_for_change(1)

    async def _wait_for_change(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    # ---- calls from the group -------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Iterable[aiokafka.TopicPartition]) -> None:
        self._rebalances += 1

    async def on_partitions_assigned(self, assigned: Iterable[aiokafka.TopicPartition]) -> None:
        partitions = list(assigned)
        self._consumer.pause(*partitions)
        lanes = frozenset(p.partition for p in partitions)
        gone = (self._assigned or frozenset()) - lanes
        new = lanes - (self._assigned or frozenset())
        before, self._member = self._member, self._present_member()
        self._membership.confirmed()
        self._assigned = lanes
        if before is not None and self._member != before._replace(generation=before.generation + 1):
            for number in lanes - new:
                self.lanes[number].invalidate()
        log.event("lanes_assigned", lanes=sorted(lanes), new=sorted(new), gone=sorted(gone))
        async with self._changed:
            self._changed.notify_all()
        for number in gone:
            self.lanes.pop(number).close()
        for number in sorted(lanes):
            if number in new or self.lanes[number].state == "closed":
                self._open(number)
        self._refresh_now.set()

    def _present_member(self) -> GroupMember:
        """The member that the group knows this worker as, and the generation of its assignment."""
        return group_member(self._consumer)

    def _open(self, number: int) -> None:
        nobody_had_it = self.view.rebalances >= 0 and number not in self.view.owners
        grace_s = 0.0 if nobody_had_it else _GRACE_S
        lane = self._make_lane(number=number, grace_s=grace_s, confirm_ownership=self.confirm)
        self.lanes[number] = lane
        task = asyncio.create_task(lane.run(), name=f"lane-{number}")
        self._running[task] = lane
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A lane that ends with an unexpected error ends the worker."""
        self._running.pop(task, None)
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception() or RuntimeError(task.get_name()))

    async def _follow_group(self) -> None:
        while True:
            self._refresh_now.clear()
            self._membership.renew()
            interval_s = _VIEW_INTERVAL_S if await self._refresh_view() else _VIEW_RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._refresh_now.wait()

    async def _refresh_view(self) -> bool:
        """Refreshes the owners. False while the group is changing or does not answer: the old ones remain then."""
        rebalances = self._rebalances
        try:
            found = await self._kafka.group_assignment(self._config.group, self._config.state_topic)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            if self.view.error is None:
                log.event("group_view_failed", error=repr(error))
            self.view.error = repr(error)
            return False
        if found is None:
            return False
        owners = {lane: url for url, lanes in found.items() for lane in lanes}
        is_news = (owners, rebalances) != (self.view.owners, self.view.rebalances)
        self.view = WorkerGroup(sorted(found), owners, now_ms(), rebalances=rebalances)
        if is_news:
            async with self._changed:
                self._changed.notify_all()
        return True
