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
from logferry.gateway.kafka.hanging_transactions import OpenTransaction, Wanted, open_transactions
from logferry.gateway.metrics import OLDEST_OPEN

# Ten thousand partitions take 230 ms of a worker's time, in a thread.
LOOK_S: Final = 20.0
# Kafka ends a transaction after so long by itself, unless its program asks for longer (transaction.timeout.ms).
OVERDUE_S: Final = 60.0


class OpenTransactions:
    """``is_ours``: whether this worker looks at a partition now; asked in a thread, too."""

    def __init__(self, kafka: KafkaClient, is_ours: Wanted, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._kafka, self._is_ours, self._clock_s = kafka, is_ours, clock_s
        # By partition and first offset: the transaction, and when it was seen first.
        self._seen: dict[tuple[TopicPartition, int], tuple[OpenTransaction, float]] = {}
        self._looked_s = clock_s()

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Where no broker answers, what was seen before remains."""
        before = self._seen
        try:
            opened, missed = await open_transactions(self._kafka, self._is_ours)
        except (errors.KafkaError, OSError, TimeoutError):
            opened, missed = [], {tp: "" for tp, _ in before}
        looked_s, self._looked_s = self._looked_s, self._clock_s()
        self._seen = {key: seen for key, seen in before.items() if key[0] in missed and self._is_ours(*key[0])}
        for open_ in opened:
            key = open_.tp, open_.first_offset
            self._seen[key] = open_, before.get(key, (open_, self._looked_s))[1]
        OLDEST_OPEN.set(max((self._looked_s - since for _, since in self._seen.values()), default=0.0))
        for open_, age_s in self.overdue():
            if age_s - (self._looked_s - looked_s) < OVERDUE_S:
                facts = {"topic": open_.tp[0], "partition": open_.tp[1], "offset": open_.first_offset}
                log.event("transaction_open", **facts, producer_id=open_.producer_id)

    def overdue(self) -> list[tuple[OpenTransaction, float]]:
        """The transactions that are open for `OVERDUE_S`, and for how many seconds, by partition."""
        ages = ((open_, self._looked_s - since) for open_, since in self._seen.values())
        return sorted((one for one in ages if one[1] >= OVERDUE_S), key=lambda one: one[0].tp)
