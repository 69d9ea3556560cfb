"""The lane's producer against a real Kafka: fence, commit, answers that never come, topics that are not the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiokafka import errors
from logferry.gateway.contract.source_state import FENCE_KEY
from logferry.gateway.kafka import hanging_transactions, transactional_producer
from logferry.gateway.kafka.record_requests import ProduceRequest
from logferry.gateway.kafka.requests import CommitRequest
from logferry.gateway.kafka.transactional_producer import Fenced, NotCommitted
from logferry.gateway.lanes import replay
from logferry.gateway.lanes.group_commit import GroupCommit
from logferry.gateway.lanes.replay import replay_states
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.producer import LIMIT, lane

_EPOCHS = 1 << 15


def lose_answers(
    producer: GroupCommit, monkeypatch: pytest.MonkeyPatch, of: type, sent: bool, times: int = 1
) -> list[Any]:
    """The next answers to requests of the type get lost on their way, or the requests do (``sent`` false)."""
    lost: list[Any] = []

    def losing(send: Callable[[int, Any], Awaitable[Any]]) -> Callable[[int, Any], Awaitable[Any]]:
        async def lose(node: int, request: Any) -> Any:
            if not isinstance(request, of) or len(lost) >= times:
                return await send(node, request)
            lost.append(await send(node, request) if sent else None)
            raise errors.KafkaConnectionError("the connection was cut")

        return lose

    monkeypatch.setattr(producer._client, "send", losing(producer._client.send))
    monkeypatch.setattr(producer._channels, "ask", losing(producer._channels.ask))
    return lost


async def test_what_is_committed_can_be_read_and_offsets_are_those_of_the_log(
    kafka: KafkaCluster, topic_name: str
) -> None:
    async with lane(kafka, topic_name) as world:
        producer = await world.producer()
        first = await producer.transact(world.draft(1, 2, 3))
        second = await producer.transact(world.draft(4))
        assert first[world.facts.name, 0] == [(0, 0)]
        assert second[world.facts.name, 0] == [(0, 4)], "three records and a commit marker before it"
        assert await world.committed(4) == [1, 2, 3, 4]


async def test_more_than_a_batch_goes_in_several_and_each_has_its_offset(kafka: KafkaCluster, topic_name: str) -> None:
    async with lane(kafka, topic_name) as world:
        producer = await world.producer()
        offsets = await producer.transact(world.draft(1, 2, 3, 4, 5, size=200_000))
        assert offsets[world.facts.name, 0] == [(0, 0), (2, 2), (4, 4)]
        assert await world.committed(5) == [1, 2, 3, 4, 5]


async def test_a_fence_shuts_the_older_producer_out(kafka: KafkaCluster, topic_name: str) -> None:
    async with lane(kafka, topic_name) as world:
        older = await world.producer()
        await older.transact(world.draft(1))
        newer = await world.producer()
        with pytest.raises(Fenced):
            await older.transact(world.draft(2))
        await newer.transact(world.draft(3))
        assert await world.committed(2) == [1, 3]


async def test_a_fence_ends_with_a_record_that_no_replay_may_miss(
    kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lane(kafka, topic_name) as world:
        older = await world.producer()
        await older.transact(world.draft(1))
        newer = await world.producer()
        topic, number = newer.lane.state
        fetched = await newer._kafka.fetch(topic, number, newer.state_end - 1, max_bytes=1 << 16, wait_ms=5000)
        assert [(record.key, record.value) for record in fetched.records] == [(FENCE_KEY, None)]
        applied: list[bytes] = []
        await replay_states(newer._kafka, topic, number, lambda key, _: applied.append(key), up_to=newer.state_end)
        assert applied.count(FENCE_KEY) == 2
        monkeypatch.setattr(replay, "_DEADLINE_S", 1.0)
        with pytest.raises(errors.LeaderNotAvailableError, match="does not have the offset"):
            await replay_states(newer._kafka, topic, number, lambda *_: None, up_to=newer.state_end + 9)


async def test_a_connection_that_broke_between_two_transactions_is_noticed_in_the_next(
    kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its broker may have been away, and a marker missing. Idle connections break as well: the lane stays open."""
    looks: list[Any] = []
    complete = hanging_transactions.complete_hanging

    async def noted(*given: Any, **options: Any) -> dict[tuple[str, int], str]:
        looks.append(given[3])
        return await complete(*given, **options)

    async with lane(kafka, topic_name) as world:
        producer = await world.producer()
        await producer.transact(world.draft(1))
        monkeypatch.setattr(transactional_producer, "complete_hanging", noted)
        for connection in producer._channels._open.values():
            connection._transport.abort()
        async with asyncio.timeout(30):
            while True:
                if producer._channels.losses:
                    break
                await asyncio.sleep(0.01)
        await producer.transact(world.draft(2))
        assert looks == [{(world.facts.name, 0), producer.lane.state}]
        assert not producer.is_troubled
        await producer.transact(world.draft(3))
        assert len(looks) == 1
        assert await world.committed(3) == [1, 2, 3]


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("of", [ProduceRequest, CommitRequest])
async def test_a_request_whose_answer_is_lost_is_sent_again_and_counts_once(
    kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch, of: type, sent: bool
) -> None:
    async with lane(kafka, topic_name) as world:
        producer = await world.producer()
        await producer.transact(world.draft(1))
        lost = lose_answers(producer, monkeypatch, of, sent, times=2)
        await producer.transact(world.draft(2, 3))
        assert len(lost) == 2
        await producer.transact(world.draft(4))
        assert await world.committed(4) == [1, 2, 3, 4]


async def test_a_commit_after_a_fence_is_refused_though_everything_was_produced(
    kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lane(kafka, topic_name) as world:
        older = await world.producer()
        commit = older._coordinator.commit

        async def commit_late() -> int:
            await world.producer()
            return await commit()

        monkeypatch.setattr(older._coordinator, "commit", commit_late)
        with pytest.raises(Fenced):
            await older.transact(world.draft(1))
        await (await world.producer()).transact(world.draft(2))
        assert await world.committed(1) == [2]


async def test_a_recreated_topic_of_the_name_is_not_written_to(kafka: KafkaCluster, topic_name: str) -> None:
    async with lane(kafka, topic_name) as world:
        producer = await world.producer()
        other = world.facts._replace(id=bytes(range(16)))
        with pytest.raises(NotCommitted) as raised:
            await producer.transact(world.draft(1, facts=other))
        assert raised.value.topic == world.facts.name
        assert "was deleted meanwhile" in str(raised.value)
        await (await world.producer()).transact(world.draft(2))
        assert await world.committed(1) == [2]


async def test_a_batch_that_the_topic_does_not_take_names_the_topic(kafka: KafkaCluster, topic_name: str) -> None:
    async with lane(kafka, topic_name) as world:
        producer = await world.producer()
        draft = world.draft(1)
        [chunks] = draft.chunks.values()
        key, chunk = chunks[0]
        chunks[0] = key, chunk._replace(data=random.Random(1).randbytes(2 * LIMIT))
        with pytest.raises(NotCommitted) as raised:
            await producer.transact(draft)
        assert raised.value.topic == world.facts.name
        assert isinstance(raised.value.cause, errors.MessageSizeTooLargeError)


def producer_id(producer: GroupCommit) -> int:
    return producer.producers[producer.lane.transactional_id].producer_id


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_the_epochs_of_a_producer_id_end_and_the_next_id_continues(kafka: KafkaCluster, topic_name: str) -> None:
    """Each transaction takes an epoch; there are 32,768 of them, a quarter of an hour's worth under load."""
    async with lane(kafka, topic_name) as world:
        producer = await world.producer()
        first_id, written = producer_id(producer), 0
        while producer_id(producer) == first_id:
            written += 1
            assert written <= _EPOCHS, "the epochs went past their end"
            await producer.settled()
            await producer.transact(world.draft(written))
        for _ in range(3):
            written += 1
            await producer.transact(world.draft(written))
        assert await world.committed(written) == [*range(1, written + 1)]
