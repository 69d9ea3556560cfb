"""The coordinator's side of a lane's transactions: fences its transactional ids, and commits.

A lane has several transactional ids. Kafka cannot end a transaction while one of its partitions takes no marker (no
leader, too few replicas in sync), and its id can begin no other transaction meanwhile: the lane continues with the
next id.

Invariants:

* Every id is fenced before the lane writes with any of them. No fence is needed, nor possible, while Kafka is aborting
  the id's transaction: no producer holds a valid epoch of it then. While Kafka is *committing* one, the producer that
  committed it holds the next epoch: the lane waits, unless that producer was this process's own and is discarded.
* The transaction of an id that is still ending is decided. Nothing is written to a partition in which it is open.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any, Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.kafka import error_codes
from logferry.gateway.kafka.aiokafka_internals import AIOKafkaClient, CoordinationType, InitProducerIdRequest
from logferry.gateway.kafka.client import PASSING
from logferry.gateway.kafka.hanging_transactions import DescribeTransactionsRequest, FencedProducer
from logferry.gateway.kafka.requests import CommitRequest
from logferry.gateway.kafka.types import LaneIdentity

TRANSACTION_TIMEOUT_MS: Final = 15_000
# Kafka usually ends a fenced transaction within milliseconds.
ENDING_S: Final = 1.0
_BACKOFF_S: Final = 0.02
_LONGEST_BACKOFF_S: Final = 0.5
# Kafka's names of a transaction whose outcome is decided, and whose markers are not written yet.
_ABORTING, _COMMITTING = "PrepareAbort", "PrepareCommit"


class TransactionCoordinator:
    """Those of one lane's transactional ids.

    ``before``: `producers` of the lane's discarded producer in this process. ``is_troubled``: a coordinator was away.
    ``fenced``: the lane's producers since its fence. ``ending``: the producer ids whose decided transaction Kafka has
    not ended. Both by transactional id.
    """

    def __init__(self, client: AIOKafkaClient, lane: LaneIdentity, before: Mapping[str, FencedProducer]) -> None:
        self._client, self._lane, self._before = client, lane, before
        self._nodes: dict[str, int] = {}
        self.fenced: dict[str, FencedProducer] = {}
        self.ending: dict[str, int] = {}
        self.present = FencedProducer(lane.transactional_id, -1, -1)
        self.is_troubled = False
        # The pauses that the answers to commits asked for, and the end of the last one.
        self.throttled_s = self.rests_until_s = 0.0

    @property
    def producers(self) -> dict[str, FencedProducer]:
        """The lane's producers of this process, by transactional id."""
        return {**self._before, **self.fenced}

    async def fence(self) -> None:
        """Fences the lane's ids, and chooses the one to write with. Waits while it is none. Raises KafkaError."""
        ids = self._lane.transactional_ids
        while True:
            tasks = [asyncio.create_task(self._fence(name)) for name in ids]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            if self.fenced:
                break
            await asyncio.sleep(_LONGEST_BACKOFF_S)
        self.present = next(self.fenced[name] for name in ids if name in self.fenced)
        self.is_troubled = False
        if self.ending:
            log.event(
                "transaction_not_ended",
                lane=self._lane.number,
                transactional_ids=sorted(self.ending),
                continues_with=self.present.transactional_id,
            )

    async def exclude(self) -> None:
        """Returns when no producer of the lane's usual id can commit what it has begun. Raises KafkaError.

        Kafka has ended its transaction then, or has decided to abort it. One that is being committed is waited for.
        """
        await self._fence(self._lane.transactional_id)

    async def commit(self) -> int:
        """Commits, and returns the error code; Kafka answers a repeated commit like the first."""
        name, producer_id, epoch = self.present
        answer = await self._ask(name, CommitRequest(name, producer_id, epoch))
        if answer.throttle_time_ms > 0:
            self.throttled_s += answer.throttle_time_ms / 1000
            self.rests_until_s = time.monotonic() + answer.throttle_time_ms / 1000
        if not answer.error_code:
            self.present = self.fenced[name] = FencedProducer(name, answer.producer_id, answer.producer_epoch)
        return int(answer.error_code)

    async def _fence(self, name: str) -> None:
        """Returns when the id is fenced, or when its transaction is decided and Kafka may take long to end it."""
        timeout_ms = self._lane.timeout_ms or TRANSACTION_TIMEOUT_MS
        while True:
            answer = await self._ask(name, InitProducerIdRequest(name, timeout_ms), ENDING_S)
            if answer.error_code == error_codes.CONCURRENT_TRANSACTIONS:
                found = await self._ask(name, DescribeTransactionsRequest([name]))
                [(code, _, state, _, _, producer_id, epoch, *_)] = found.states
                # With an error the coordinator does not know the id, or does not answer for it now.
                if not code and (state == _ABORTING or self._is_own_commit(name, state, producer_id, epoch)):
                    self.ending[name] = producer_id
                    return
                continue
            if answer.error_code:
                raise errors.for_code(answer.error_code)(f"fencing {name}")
            self.ending.pop(name, None)
            self.fenced[name] = FencedProducer(name, answer.producer_id, answer.producer_epoch)
            return

    def _is_own_commit(self, name: str, state: str, producer_id: int, epoch: int) -> bool:
        """Whether Kafka is committing a transaction of this process, whose producer is discarded."""
        before = self._before.get(name)
        if state != _COMMITTING or before is None or before.producer_id != producer_id:
            return False
        # The commit raises the epoch; its answer may be missing.
        return epoch in (before.epoch, before.epoch + 1)

    async def _ask(self, name: str, request: Any, ending_s: float = math.inf) -> Any:
        """The coordinator's answer; retries while it moves, and so long while a transaction of the id is ending."""
        pause, ends = _BACKOFF_S, time.monotonic() + ending_s
        while True:
            try:
                if name not in self._nodes:
                    self._nodes[name] = await self._client.coordinator_lookup(CoordinationType.TRANSACTION, name)
                answer = await self._client.send(self._nodes[name], request)
                code = answer.states[0][0] if hasattr(answer, "states") else answer.error_code
                is_ending = code == error_codes.CONCURRENT_TRANSACTIONS
                if code not in error_codes.RETRIABLE or (is_ending and time.monotonic() > ends):
                    return answer
            except PASSING:
                is_ending = False
            if not is_ending:
                self._nodes.pop(name, None)
                self.is_troubled = True
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_BACKOFF_S)
