"""Transactions that stay open: readers of committed records get nothing behind the first record of one (KIP-98).

The lanes end their own within seconds. What is named here is a program that writes into the topics, too, and does not
end its transaction, or one that Kafka left open (see `kafka.hanging_transactions`).

The age counts from this worker's first look, since the time of a record is what its producer says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.hanging_transactions import Wanted, open_transactions
from logferry.gateway.metrics import OLDEST_OPEN
from pydantic import BaseModel

# Ten thousand partitions take 230 ms of a worker's time, in a thread.
LOOK_S: Final = 20.0
# Kafka ends a transaction after so long by itself, unless its program asks for longer (transaction.timeout.ms).
OVERDUE_S: Final = 60.0


class OverdueTransaction(BaseModel):
    """A transaction that is open for too long: readers get nothing of the partition from ``offset`` on."""

    topic: str
    partition: int
    offset: int
    producer_id: int
    since_ms: int


class OpenTransactions:
    """``is_ours``: whether this worker looks at a partition now, for any thread. ``overdue``: at the last look."""

    def __init__(self, kafka: KafkaClient, is_ours: Wanted, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._kafka, self._is_ours, self._clock_s = kafka, is_ours, clock_s
        # By partition, first offset and producer id: when it was seen first.
        self._seen: dict[tuple[TopicPartition, int, int], float] = {}
        self.overdue: dict[tuple[TopicPartition, int, int], OverdueTransaction] = {}

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Where no broker answers, what was seen before remains."""
        before, known = self._seen, self.overdue
        try:
            opened, missed = await open_transactions(self._kafka, self._is_ours)
        except (errors.KafkaError, OSError, TimeoutError):
            opened, missed = [], {tp: "" for tp, _, _ in before}
        now_s, now_ms = self._clock_s(), time.time() * 1000
        found = {(open_.tp, open_.first_offset, open_.producer_id) for open_ in opened}
        found |= {key for key in before if key[0] in missed and self._is_ours(*key[0])}
        self._seen = {key: before.get(key, now_s) for key in found}
        OLDEST_OPEN.set(now_s - min(self._seen.values(), default=now_s))
        late = ((key, now_s - since_s) for key, since_s in sorted(self._seen.items()) if now_s - since_s >= OVERDUE_S)
        self.overdue = {
            (tp, at, who): OverdueTransaction(
                topic=tp[0], partition=tp[1], offset=at, producer_id=who, since_ms=int(now_ms - 1000 * age_s)
            )
            for (tp, at, who), age_s in late
        }
        for key in self.overdue.keys() - known.keys():
            log.event("transaction_open", **self.overdue[key].model_dump())
