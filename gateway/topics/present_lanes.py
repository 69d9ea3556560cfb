"""The number of the lanes of gateway or mirror as it is now, which `logferry lanes --to` changes while the workers run.

* The change is one Kafka transaction, of a transactional id of its own. It moves the states of the sources or copies to
  their new lanes, and writes the number into this topic and into each partition of the state topic.
* Whoever opens a lane fences that id after the lane's own ids, and before the replay. So the transaction of a change
  can be committed only if no lane was opened since it fenced them all.
* The number that a lane's replay finds decides what the lane may write. What is read here finds the lane of a request;
  where it is older than that, the lane refuses, and the request is sent again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.kafka.aiokafka_internals import CoordinationType
from logferry.gateway.kafka.client import EARLIEST, KafkaClient, Send
from logferry.gateway.kafka.error_codes import RETRIABLE
from logferry.gateway.kafka.hanging_transactions import DescribeTransactionsRequest
from logferry.gateway.kafka.types import LaneIdentity

_FETCH_BYTES: Final = 1 << 16
_LOOK_S: Final = 2.0
# The name that Kafka gives to a transaction that is not decided.
_ONGOING: Final = "Ongoing"


class Laned(Protocol):
    """The configuration of a service whose number of lanes may change. ``lanes``: at the beginning."""

    @property
    def group(self) -> str: ...

    @property
    def state_topic(self) -> str: ...

    @property
    def lanes(self) -> int: ...


def change_identity(config: Laned, timeout_ms: int | None = None) -> LaneIdentity:
    """Of the transactions that change the number. ``timeout_ms``: Kafka ends one that takes longer."""
    place = f"{config.group}.lanes", 0

    def may_write(topic: str, partition: int) -> bool:
        return topic == config.state_topic or (topic, partition) == place

    return LaneIdentity(-1, f"{config.group}.lane-count", place, may_write, 0, timeout_ms)


class PresentLanes:
    """``count``: as read last, here or by the replay of a lane."""

    def __init__(self, kafka: KafkaClient, config: Laned) -> None:
        self._kafka, self._change = kafka, change_identity(config)
        self.topic, _ = self._change.state
        self.count = LaneCount(config.lanes, config.lanes, 0)
        self._position: int | None = None
        self._is_news = asyncio.Event()
        # The start and time-out of the change that was seen last, by the brokers; when it was seen first, here.
        self._seen: tuple[tuple[int, int], float] = ((0, 0), 0.0)

    def number(self) -> int:
        return self.count.lanes

    def take(self, count: LaneCount) -> None:
        """The newer number counts."""
        if count.epoch > self.count.epoch:
            self.count = count
            self._is_news.set()

    async def read(self) -> LaneCount:
        """The number as it is committed now. Raises KafkaError."""
        if self._position is None:
            # Where it may not be seen, either: without that right the command of this principal changes nothing.
            if self.topic not in (await self._kafka.describe([self.topic])).topics:
                return self.count
            self._position = await self._kafka.offset(self.topic, 0, EARLIEST)
        while True:
            try:
                fetched = await self._kafka.fetch(self.topic, 0, self._position, max_bytes=_FETCH_BYTES)
            except (errors.OffsetOutOfRangeError, errors.UnknownTopicOrPartitionError):
                self._position = None
                raise
            for record in fetched.records:
                if record.key == COUNT_KEY and record.value is not None:
                    try:
                        self.take(LaneCount.decode(record.value))
                    except ValueError as error:
                        raise errors.KafkaError(f"{self.topic}: {error}; upgrade this worker") from None
            self._position = fetched.next_offset
            if fetched.at_end:
                return self.count

    async def is_changing(self) -> bool:
        """Whether a change is under way, which the opening of a lane would undo. Never for longer than it may take.

        Raises KafkaError.
        """
        code, _, state, timeout_ms, start_ms, *_ = await self._transaction()
        if code or state != _ONGOING:  # with an error it was never used
            return False
        if self._seen[0] != (start_ms, timeout_ms):
            self._seen = (start_ms, timeout_ms), time.monotonic()
        return time.monotonic() < self._seen[1] + int(timeout_ms) / 1000

    async def last_fence(self) -> tuple[int, int]:
        """Another one after each fence of a change, which whoever opens a lane does. Raises KafkaError."""
        *_, producer_id, epoch, _, _ = await self._transaction()
        return producer_id, epoch

    async def _transaction(self) -> Any:
        """Of a change, the last one, as its coordinator has it."""
        name = self._change.transactional_id

        async def ask(send: Send) -> Any:
            [found] = (await send(DescribeTransactionsRequest([name]))).states
            if found[0] in RETRIABLE:
                raise errors.for_code(found[0])(name)
            return found

        return await self._kafka.with_coordinator(name, ask, CoordinationType.TRANSACTION)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Calls ``changed`` after each change, until it is cancelled."""
        known = self.count
        while True:
            with suppress(errors.KafkaError, OSError, TimeoutError):
                await self.read()
            if not self.count.is_as(known):
                log.event("lanes_changed", lanes=self.count.lanes, before=known.lanes, epoch=self.count.epoch)
                known = self.count
                changed()
            self._is_news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._is_news.wait()
