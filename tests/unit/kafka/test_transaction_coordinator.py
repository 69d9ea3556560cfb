"""Which of a lane's transactional ids is written with, by what Kafka says of their transactions."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors
from aiokafka.protocol.transaction import InitProducerIdRequest
from logferry.gateway.kafka import error_codes, transaction_coordinator
from logferry.gateway.kafka.hanging_transactions import DescribeTransactionsRequest, FencedProducer
from logferry.gateway.kafka.transaction_coordinator import TransactionCoordinator
from logferry.gateway.kafka.types import LaneIdentity

LANE = LaneIdentity(3, "lane-3", ("state", 3), lambda *_: True)
FIRST, SECOND, THIRD = LANE.transactional_ids
NO_BEFORE: dict[str, FencedProducer] = {}


class Coordinators:
    """Each id with what Kafka answers: an epoch when it is fenced, or the state of a transaction that does not end."""

    def __init__(self, **states: Any) -> None:
        self.answers = {FIRST: 5, SECOND: 5, THIRD: 5, **states}
        self.fenced: list[str] = []

    async def coordinator_lookup(self, kind: Any, name: str) -> int:
        return 1

    async def send(self, node: int, request: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(request, InitProducerIdRequest):
            name = request._transactional_id
            answer = self.answers[name]
            if isinstance(answer, deque):
                answer = answer.popleft() if len(answer) > 1 else answer[0]
            if isinstance(answer, int):
                self.fenced.append(name)
                return SimpleNamespace(error_code=0, producer_id=2000, producer_epoch=answer)
            code = answer if isinstance(answer, Exception) else None
            if code is not None:
                return SimpleNamespace(error_code=code.errno)  # type: ignore[attr-defined]
            return SimpleNamespace(error_code=error_codes.CONCURRENT_TRANSACTIONS)
        assert isinstance(request, DescribeTransactionsRequest)
        [name] = request._fields[0]
        answer = self.answers[name]
        described = answer[0] if isinstance(answer, deque) else answer
        state, producer_id, epoch = ("CompleteAbort", 2000, 8) if isinstance(described, int) else described
        return SimpleNamespace(states=[(0, name, state, 15_000, 0, producer_id, epoch, [], {})])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDING_S", "_BACKOFF_S", "_LONGEST_BACKOFF_S"):
        monkeypatch.setattr(transaction_coordinator, name, 0.001)


def coordinator(kafka: Coordinators, before: dict[str, FencedProducer] = NO_BEFORE) -> TransactionCoordinator:
    client: Any = kafka
    return TransactionCoordinator(client, LANE, before)


async def test_all_ids_are_fenced_and_the_first_is_used() -> None:
    kafka = Coordinators()
    found = coordinator(kafka)
    await found.fence()
    assert sorted(kafka.fenced) == [FIRST, SECOND, THIRD]
    assert (found.present.transactional_id, found.ending) == (FIRST, {})


async def test_an_id_that_kafka_is_aborting_is_passed_over() -> None:
    found = coordinator(Coordinators(**{FIRST: ("PrepareAbort", 1500, 8), SECOND: ("PrepareAbort", 1600, 8)}))
    await found.fence()
    assert found.present.transactional_id == THIRD
    assert {*found.ending.values()} == {1500, 1600}


@pytest.mark.parametrize("state", ["PrepareCommit", "Ongoing", "PrepareEpochFence"])
async def test_an_id_whose_producer_may_be_alive_is_waited_for(state: str) -> None:
    """Another worker may hold the next epoch, and commit with it as soon as Kafka has ended this transaction."""
    found = coordinator(Coordinators(**{FIRST: (state, 2000, 8)}))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await found.fence()


@pytest.mark.parametrize(("epoch", "is_own"), [(8, True), (9, True), (7, False), (10, False)])
async def test_the_commit_of_this_process_itself_needs_no_fence(epoch: int, is_own: bool) -> None:
    kafka = Coordinators(**{FIRST: ("PrepareCommit", 2000, epoch)})
    found = coordinator(kafka, {FIRST: FencedProducer(FIRST, 2000, 8)})
    if is_own:
        await found.fence()
        assert found.present.transactional_id == SECOND
        return
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await found.fence()


async def test_when_all_are_aborting_the_first_that_ends_is_used() -> None:
    aborting = ("PrepareAbort", 1500, 8)
    found = coordinator(Coordinators(**{FIRST: aborting, SECOND: deque([aborting, aborting, 7]), THIRD: aborting}))
    async with asyncio.timeout(60):
        await found.fence()
    assert found.present == FencedProducer(SECOND, 2000, 7)


async def test_an_error_of_one_id_ends_the_others() -> None:
    """Its client is closed then: they must not ask on."""
    refused = errors.TransactionalIdAuthorizationFailed()
    found = coordinator(Coordinators(**{FIRST: ("Ongoing", 2000, 8), SECOND: refused}))
    with pytest.raises(errors.TransactionalIdAuthorizationFailed):
        await found.fence()
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if "_fence" in repr(task.get_coro())] == []
