"""Changes the number of the lanes of gateway or mirror while it runs (`logferry lanes --to`).

One Kafka transaction moves the states of sources or copies to their new lanes and writes the new number. Killed before
its commit, the old number holds; after it the new one. Its steps:

* prepare: what is not seen by anybody, the partitions and the topic of the number. It may be repeated.
* begin: the transaction is open. From now on the workers open no lane before it has ended or its time is over.
* fence: all lanes. What they had under way has ended, and all that they committed is read.
* write, commit: Kafka refuses the commit where a worker opened a lane meanwhile, which fences this transaction.

ops/docs/decisions/0035 says why no other order is safe.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, Protocol, TypeVar

from aiokafka import errors
from logferry.gateway.config import Config
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.errors import LaneUnreadable
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.record_batch import CODECS, batches
from logferry.gateway.kafka.transactional_producer import (
    Encodable,
    Fenced,
    NotCommitted,
    OutcomeUnknown,
    PartitionBatches,
    TransactionalProducer,
)
from logferry.gateway.kafka.types import Record
from logferry.gateway.lanes.replay import replay_states
from logferry.gateway.service.lane_states import COPIES, SOURCES, LaneStates, moves
from logferry.gateway.service.preflight import LaneSettings, create_topic, wait_until_created
from logferry.gateway.topics.present_lanes import Laned, PresentLanes, change_identity

_BATCH_BYTES: Final = 1 << 20
# Lanes that are fenced or read at once.
_AT_ONCE: Final = 8
# Partitions that are written at once.
_WRITTEN_AT_ONCE: Final = 8
# A transaction may take so long, and so much longer for each state. Writers wait as long where it is killed.
_TIMEOUT_S: Final = 15.0
_TIMEOUT_S_A_STATE: Final = 50e-6
_MOST_S: Final = 900.0  # Kafka's transaction.max.timeout.ms
_ATTEMPTS: Final = 4
_PAUSE_S: Final = 0.1
# Workers learn of a change, and open their lanes again, within some seconds of each other.
_QUIET_S: Final = 4.0
_OPENING_S: Final = 60.0
_COUNT_CONFIGS: Final = {
    "cleanup.policy": "compact",
    "compression.type": "producer",
    "unclean.leader.election.enable": "false",
}
_CODEC: Final = CODECS["zstd"]
_INTERFERED: Final = (NotCommitted, OutcomeUnknown, errors.KafkaError, OSError, TimeoutError)
_T = TypeVar("_T")


class ChangeRefused(Exception):
    """The number of lanes is as it was, or that is not known, and why."""


class Changed(NamedTuple):
    """``moved``: states that are in another lane now. ``paused_s``: for so long nothing could be recorded."""

    before: int
    moved: int
    paused_s: float


class ChangedConfig(Laned, LaneSettings, Protocol):
    """Of the gateway, or of a mirror."""


class LaneChange:
    """One change to so many lanes. `run` may be repeated, by this process or another one."""

    def __init__(self, kafka: KafkaClient, config: ChangedConfig, to: int, say: Callable[[str], None]) -> None:
        self._kafka, self._config, self._to, self._say = kafka, config, to, say
        self._present = PresentLanes(kafka, config)
        self._kind, self._topics, self._lane_sources = COPIES, [config.state_topic], sys.maxsize
        if isinstance(config, Config):
            self._kind, self._lane_sources = SOURCES, config.limits.lane_sources
            self._topics.append(config.staging_topic)
        self._lanes: list[LaneStates] = []
        self._producer: TransactionalProducer | None = None
        self._began_s = 0.0

    async def run(self) -> Changed:
        """Raises ChangeRefused: the number is as it was, or the text says that this is not known."""
        attempt = 1
        while True:
            try:
                return await self._attempt(attempt)
            except LaneUnreadable as error:
                raise ChangeRefused(f"a lane cannot be read: {error}") from None
            except _INTERFERED as error:
                why = str(error) or type(error).__name__
                if attempt == _ATTEMPTS:
                    is_unknown = isinstance(error, OutcomeUnknown)
                    what = "it is not known whether the number changed" if is_unknown else "the number has not changed"
                    raise ChangeRefused(
                        f"{what}: {why}. Repeat the command; it needs workers that do not start or stop meanwhile, and "
                        "brokers that are up"
                    ) from None
            self._say(f"a worker or broker came in between ({why}); again, once the lanes are open")
            await self._wait_until_open()
            attempt += 1

    async def _attempt(self, attempt: int) -> Changed:
        before = await self._present.read()
        if before.lanes == self._to and before.epoch:
            return Changed(before.lanes, 0, 0.0)
        is_committed = False
        try:
            before = await self.prepare(attempt)
            if before.lanes == self._to:
                return Changed(before.before, 0, 0.0)
            await self.begin()
            await self.fence()
            moved = await self.write()
            await self.commit()
            is_committed = True
            return Changed(before.lanes, moved, time.monotonic() - self._began_s)
        finally:
            await self._end(is_committed)

    # ---- the steps ------------------------------------------------------------------------------------------------

    async def prepare(self, attempt: int) -> LaneCount:
        """Reads the lanes for the first time, and makes room for the new ones. Returns the present number."""
        config, kafka = self._config, self._kafka
        state = await kafka.describe_topic(config.state_topic)
        count = await self._present.read()
        if not count.epoch and len(state.partitions) != config.lanes:
            raise ChangeRefused(f"lanes: {config.lanes} is configured; {state.name} has {len(state.partitions)}")
        await create_topic(kafka, config, self._present.topic, 1, _COUNT_CONFIGS)
        await wait_until_created(kafka, self._present.topic)
        self._lanes = [LaneStates(number, self._kind) for number in range(count.lanes)]
        self._say(f"reading {count.lanes} lanes")
        await _each(self._lanes, self._read)
        states = sum(len(lane.states) for lane in self._lanes)
        self._check_room(states)
        timeout_s = min((_TIMEOUT_S + _TIMEOUT_S_A_STATE * states) * attempt, _MOST_S)
        self._producer = TransactionalProducer(kafka, change_identity(config, int(timeout_s * 1000)))
        await self._wait_for_another()
        await self._producer.fence()
        # Only now nobody else changes it.
        present = await self._present.read()
        if present != count:
            raise NotCommitted("another change came first")
        self._check_epochs(count)
        if not count.epoch:
            # It stops the lanes that an older version opens from now on: that cannot read it, and would not fence us.
            count = LaneCount(count.lanes, count.lanes, 1)
            await self._write({lane.number: [] for lane in self._lanes}, count)
            await self._producer.commit()
            self._present.take(count)
        topics = (await kafka.describe(self._topics)).topics
        for topic in topics.values():
            if len(topic.partitions) < self._to:
                await kafka.grow_topic(topic.name, self._to)
        for name in topics:
            await self._wait_for_partitions(name)
        return count

    async def begin(self) -> None:
        """Opens the transaction, with its first record."""
        count = self._present.count
        await self._present_producer.settled()
        self._say(f"{sum(len(lane.states) for lane in self._lanes)} states are read; the lanes stop")
        self._began_s = time.monotonic()
        self._after = LaneCount(self._to, count.lanes, count.epoch + 1)
        await self._produce({self._present.topic: {0: [(COUNT_KEY, self._after.encode(), [])]}})

    async def fence(self) -> None:
        """Ends all that the lanes have under way, and reads what they have committed."""
        await _each(self._lanes, self._fence)

    async def write(self) -> int:
        # Only behind the fences is surely all read that the lanes have.
        self._check_epochs(self._present.count)
        records, moved = await asyncio.to_thread(moves, self._lanes, self._to)
        self._check_room(sum(len(lane.states) for lane in self._lanes))
        partitions = len((await self._kafka.describe_topic(self._config.state_topic)).partitions)
        await self._write({number: records.get(number, []) for number in range(partitions)}, self._after, is_begun=True)
        return moved

    async def commit(self) -> None:
        with self._ended_where_fenced():
            await self._present_producer.commit()

    # ---- their parts ----------------------------------------------------------------------------------------------

    @property
    def _present_producer(self) -> TransactionalProducer:
        if self._producer is None:
            raise NotCommitted("the change has not begun")
        return self._producer

    def _check_epochs(self, count: LaneCount) -> None:
        """Raises ChangeRefused where the lanes know of a change that their topic does not."""
        if any(lane.epoch > count.epoch for lane in self._lanes):
            raise ChangeRefused(
                f"{self._present.topic} does not hold the number by which the lanes were written: it was deleted, or "
                "may not be read"
            )

    def _check_room(self, states: int) -> None:
        """Raises ChangeRefused where the new lanes would hardly have room."""
        if states > 0.9 * self._lane_sources * self._to:
            limit = f"lane_sources = {self._lane_sources}"
            raise ChangeRefused(f"{states} states are too many for {self._to} lanes with {limit}")

    async def _wait_for_another(self) -> None:
        """Until the change of another command is over, which ours would undo, as that would undo ours."""
        is_said = False
        while await self._present.is_changing():
            if not is_said:
                self._say("another change is under way, or was killed; its end is waited for")
                is_said = True
            await asyncio.sleep(_PAUSE_S)

    async def _wait_until_open(self) -> None:
        """Until no worker has opened a lane for a while: that would end the next attempt, too. For a minute at most."""
        now_s = since_s = time.monotonic()
        until_s, last = now_s + _OPENING_S, None
        while now_s < min(until_s, since_s + _QUIET_S):
            await asyncio.sleep(_PAUSE_S)
            now_s, before, last = time.monotonic(), last, None
            with suppress(*_INTERFERED):
                last = await self._present.last_fence()
            if last is None or last != before:
                since_s = now_s

    async def _read(self, lane: LaneStates, up_to: int = 0) -> None:
        topic = self._config.state_topic
        lane.position = await replay_states(self._kafka, topic, lane.number, lane.apply, up_to, start=lane.position)

    async def _fence(self, lane: LaneStates) -> None:
        producer = TransactionalProducer(self._kafka, self._config.lane(lane.number))
        try:
            await producer.fence()
            await self._read(lane, producer.state_end)
        finally:
            await producer.discard()

    async def _write(self, states: dict[int, list[Record]], count: LaneCount, *, is_begun: bool = False) -> None:
        """The number first: what stands behind it in a partition is of the new number."""
        own: Record = (COUNT_KEY, count.encode(), [])
        numbers = sorted(states)
        if not is_begun:
            await self._produce({self._present.topic: {0: [own]}})
        for first in range(0, len(numbers), _WRITTEN_AT_ONCE):
            some = numbers[first : first + _WRITTEN_AT_ONCE]
            await self._produce({self._config.state_topic: {number: [own, *states[number]] for number in some}})

    async def _produce(self, records: dict[str, dict[int, list[Record]]]) -> None:
        now_ms, parts = self._kafka.clock.now_ms(), list[PartitionBatches]()
        for topic, by_partition in records.items():
            topic_id = (await self._kafka.describe_topic(topic)).id
            for number, found in by_partition.items():
                written = await asyncio.to_thread(_encoded, found, now_ms)
                parts.append(PartitionBatches(topic, number, topic_id, written))
        with self._ended_where_fenced():
            await self._present_producer.write(parts)

    @contextmanager
    def _ended_where_fenced(self) -> Iterator[None]:
        """Whoever fenced the transaction has ended it. To fence that one in turn would undo another change."""
        try:
            yield
        except Fenced:
            self._began_s = 0.0
            raise

    async def _wait_for_partitions(self, topic: str) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                if len((await wait_until_created(self._kafka, topic)).partitions) >= self._to:
                    return
                await asyncio.sleep(_PAUSE_S)

    async def _end(self, is_committed: bool) -> None:
        """Ends a transaction that was not committed at once, so that the lanes continue."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        await producer.discard()
        if is_committed or not self._began_s:
            return
        self._began_s = 0.0
        last = TransactionalProducer(self._kafka, change_identity(self._config))
        try:
            with suppress(*_INTERFERED):
                await last.fence()
        finally:
            await last.discard()


async def _each(lanes: Iterable[_T], do: Callable[[_T], Awaitable[None]]) -> None:
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(lane: _T) -> None:
        async with room:
            await do(lane)

    tasks = [asyncio.create_task(one(lane)) for lane in lanes]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _encoded(records: list[Record], now_ms: int) -> deque[Encodable]:
    return deque(batches(records, _BATCH_BYTES, now_ms, _CODEC))
