"""The log of acts: a topic with one partition, which only the acting keeper can write to.

Invariants:

* An act is carried out only after its record is committed, and within `ACT_WITHIN_S` of the beginning of that commit.
* A keeper that takes over fences its predecessor by the transactional id before it reads the log. From then on no
  record of the predecessor is committed, so it begins no act; what it had begun was sent within `ACT_WITHIN_S`, and the
  new keeper waits for longer than that before its first act.

Crash windows: between record and act nothing has happened, and the next keeper sees that in Kafka: a move is planned
again, a deletion too. Between act and the record of its end, it sees the end. A keeper that is frozen between the last
look at the clock and the request sends it late; no request of `cluster_admin.py` does harm then.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaProducer, errors
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.gateway.topics.health import replication

ACT_WITHIN_S: Final = 2.0
TAKE_OVER_S: Final = 3.0
_OPENS_S: Final = 20.0
_COMMITS_S: Final = 15.0
_TRANSACTION_MS: Final = 15_000
_FETCH_BYTES: Final = 4 << 20
_PAUSE_S: Final = 0.1
_TROUBLE: Final = (errors.KafkaError, OSError, TimeoutError)
_T = TypeVar("_T")


class NotActing(Exception):
    """Another keeper has taken over, or it is not known whether a record was committed: nothing was carried out."""


def boot_s() -> float:
    """Runs while the machine is suspended, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Journal:
    """``may_act``: whether the group still says that this keeper acts, as far as this process knows."""

    def __init__(
        self, kafka: KafkaClient, topic: str, may_act: Callable[[], bool], clock_s: Callable[[], float] = boot_s
    ) -> None:
        self._kafka, self.topic, self._may_act, self._clock_s = kafka, topic, may_act, clock_s
        self.transactional_id = f"{topic}.act"
        self._producer: AIOKafkaProducer | None = None

    @property
    def is_open(self) -> bool:
        return self._producer is not None

    async def create(self, accepted: Sequence[str], retention_days: int) -> None:
        """Creates the topic unless it is there, and waits for its leader. Raises KafkaError."""
        if self.topic not in (await self._kafka.describe([self.topic])).topics:
            replicas, in_sync = replication(accepted, len((await self._kafka.describe([])).brokers))
            settings = {
                "cleanup.policy": "delete",
                "retention.ms": str(retention_days * 86_400_000),
                "min.insync.replicas": str(in_sync),
                "unclean.leader.election.enable": "false",
            }
            with suppress(errors.TopicAlreadyExistsError):
                await self._kafka.create_topic(self.topic, 1, replicas, settings)
        async with asyncio.timeout(_OPENS_S):
            while True:
                found = (await self._kafka.describe([self.topic])).topics.get(self.topic)
                if found is not None and found.partitions[0].leader >= 0:
                    return
                await asyncio.sleep(_PAUSE_S)

    async def open(self) -> list[dict[str, Any]]:
        """Fences every other keeper, and returns all records. Raises KafkaError or TimeoutError."""
        await self.close()
        producer = AIOKafkaProducer(
            transactional_id=self.transactional_id, transaction_timeout_ms=_TRANSACTION_MS, **self._kafka.options
        )
        try:
            async with asyncio.timeout(_OPENS_S):
                await producer.start()
                records = await self._read()
        except BaseException:
            await _stop(producer)
            raise
        self._producer = producer
        return records

    async def _read(self) -> list[dict[str, Any]]:
        position = await self._kafka.offset(self.topic, 0, EARLIEST)
        found: list[dict[str, Any]] = []
        while True:
            fetched = await self._kafka.fetch(self.topic, 0, position, max_bytes=_FETCH_BYTES)
            found += [json.loads(record.value) for record in fetched.records if record.value]
            position = fetched.next_offset
            if fetched.at_end:
                return found

    async def append(self, record: Mapping[str, Any]) -> None:
        """Returns when the record is committed. Raises NotActing; the journal is closed then."""
        producer, value = self._producer, json.dumps(record, default=str).encode()
        if producer is None:
            raise NotActing("the log of acts is not open")
        try:
            async with asyncio.timeout(_COMMITS_S), producer.transaction():
                await producer.send_and_wait(self.topic, value, key=str(record["kind"]).encode(), partition=0)
        except _TROUBLE as error:
            await self.close()
            raise NotActing(f"its record is not committed: {error!r}") from None

    async def carry_out(self, record: Mapping[str, Any], act: Callable[[], Awaitable[_T]]) -> _T:
        """Commits the record, then acts. Raises NotActing before the act, and what the act raises."""
        began_s = self._clock_s()
        if not self._may_act():
            raise NotActing("the group has given the acts to another keeper")
        await self.append(record)
        if self._clock_s() - began_s > ACT_WITHIN_S or not self._may_act():
            raise NotActing("its record was committed too late for the act")
        return await act()

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await _stop(producer)


async def _stop(producer: AIOKafkaProducer) -> None:
    """Its resources are freed even where Kafka does not answer."""
    with suppress(*_TROUBLE):
        async with asyncio.timeout(5):
            await producer.stop()
