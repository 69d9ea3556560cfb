"""Transactions that Kafka ended without a marker in one of their partitions.

Kafka does that when the partition has no leader at that moment, which can't be timed. So here records get into a
partition behind the coordinator's back, by an older request and on a broker that does not check it: what the
coordinator does not know of, it writes no marker to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import errors
from aiokafka.protocol.produce import ProduceRequest
from logferry.gateway.config import KafkaSettings
from logferry.gateway.contract.names import partition_of
from logferry.gateway.kafka import hanging_transactions, transactional_producer
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.record_batch import CODECS, Stamp, batches
from logferry.gateway.kafka.transactional_producer import NotCommitted
from logferry.gateway.lanes.group_commit import GroupCommit
from logferry.gateway.tls import kafka_options
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.kafka_rights import ALTER_CLUSTER, documented, grant
from tests.support.producer import LIMIT, Lane, lane
from tests.support.secured_kafka import SecuredKafka

_IN_0 = next(name for name in map(str, range(9)) if partition_of(name, 2) == 0)
_IN_1 = next(name for name in map(str, range(9)) if partition_of(name, 2) == 1)
_LEADER_S = 30


@pytest.fixture(scope="module")
def careless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    settings = {"transaction.partition.verification.enable": "false"}
    with KafkaCluster("careless", tmp_path_factory.mktemp("careless"), settings=settings) as cluster:
        yield cluster


async def leave_open(world: Lane, producer: GroupCommit, number: int) -> None:
    """A record in partition 0, in the transaction of the producer, of which the coordinator does not know."""
    draft = world.draft(number, source=_IN_0)
    [batch] = batches(draft.records((world.facts.name, 0)), LIMIT, draft.now_ms, CODECS["none"])
    present = producer.producers[producer.lane.transactional_id]
    raw = b"".join(batch.pieces(Stamp(present.producer_id, present.epoch, 0)))
    wanted = [(world.facts.name, [(0, raw)])]
    request = ProduceRequest(producer.lane.transactional_id, -1, 10_000, wanted)
    code = -1
    async with asyncio.timeout(_LEADER_S):
        while code != 0:  # a new partition's leader may not know yet that it is
            answer = await world.kafka.send(await world.kafka.present_leader(world.facts.name, 0), request)
            code = answer.topics[0][1][0][1]
            assert code in (0, errors.NotLeaderForPartitionError.errno), code


async def abort_without_a_marker(world: Lane) -> GroupCommit:
    """1 is left open in partition 0; the transaction is aborted by the fence of the producer that is returned."""
    older = await world.producer()
    await leave_open(world, older, 1)
    draft = world.draft(5, source=_IN_1)
    await older.write(older._parts(draft))
    return await world.producer()


async def test_what_was_aborted_is_not_committed_by_the_next_transaction(
    careless: KafkaCluster, topic_name: str
) -> None:
    async with lane(careless, topic_name, partitions=2) as world:
        newer = await abort_without_a_marker(world)
        await newer.transact(world.draft(2, source=_IN_0))
        assert await world.committed(1) == [2]


async def test_without_that_it_would_be(
    careless: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look_away(*_: object, **__: object) -> dict[tuple[str, int], str]:
        return {}

    monkeypatch.setattr(transactional_producer, "complete_hanging", look_away)
    async with lane(careless, topic_name, partitions=2) as world:
        newer = await abort_without_a_marker(world)
        await newer.transact(world.draft(2, source=_IN_0))
        assert await world.committed(2) == [1, 2]


async def test_what_was_committed_is_not_lost_with_the_next_transaction(
    careless: KafkaCluster, topic_name: str
) -> None:
    async with lane(careless, topic_name, partitions=2) as world:
        older = await world.producer()
        await leave_open(world, older, 1)
        await older.transact(world.draft(5, source=_IN_1))
        newer = await world.producer()
        assert await world.committed(1) == [1]
        draft = world.draft(2, source=_IN_0)
        await newer.write(newer._parts(draft))
        await (await world.producer()).transact(world.draft(3, source=_IN_0))
        assert await world.committed(2) == [1, 3]


async def test_what_nothing_is_known_of_is_not_guessed(careless: KafkaCluster, topic_name: str) -> None:
    async with lane(careless, topic_name, partitions=2) as world:
        await leave_open(world, await world.producer(), 1)
        with pytest.raises(errors.KafkaError, match=f"dc1.{topic_name}-0 holds an open transaction"):
            await world.producer()


async def test_without_the_right_to_end_it_the_other_partitions_are_written(tmp_path: Path, topic_name: str) -> None:
    """By a user with the documented rights alone, which are enough for all but this."""
    settings = {"transaction.partition.verification.enable": "false"}
    secured = SecuredKafka(tmp_path / "kafka", ["unused"], settings=settings)
    with secured:
        async with lane(secured, topic_name, partitions=2) as world:
            prefix = world.config.prefix
            rights = [
                (kind, name.replace("logferry.", f"{prefix}."), pattern, operation)
                for kind, name, pattern, operation in documented("Gateway of `dc1`")
            ]
            await grant(secured.bootstrap, "ingest", rights)
            options = kafka_options(KafkaSettings.model_validate(secured.plain_settings("ingest", "certificate")))
            ingest = KafkaClient(options, "ingest")
            await ingest.start()
            try:
                older = await world.producer()
                await leave_open(world, older, 1)
                await older.transact(world.draft(5, source=_IN_1))
                newer = await world.producer(ingest)
                await newer.transact(world.draft(6, source=_IN_1))
                with pytest.raises(NotCommitted, match="only a user with the right Alter on the cluster") as found:
                    await newer.write(newer._parts(world.draft(2, source=_IN_0)))
                assert found.value.refused == (world.facts.name, 0)
                await grant(secured.bootstrap, "ingest", [ALTER_CLUSTER])
                last = await world.producer(ingest)
                await last.transact(world.draft(3, source=_IN_0))
                # What was committed before is there, and in its place.
                assert await world.committed(2) == [1, 3]
            finally:
                await ingest.close()


async def test_a_broker_that_was_away_is_looked_at_in_all_that_was_written_to(
    careless: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same producer continues: what it writes to next holds a transaction that Kafka did not end there."""
    async with lane(careless, topic_name, partitions=2) as world:
        producer = await world.producer()
        await leave_open(world, producer, 1)
        producer._written.add((world.facts.name, 0))
        await producer.transact(world.draft(5, source=_IN_1))
        ask, broken = producer._channels.ask, iter([True])

        async def break_once(node: int, question: Any, line: str = "") -> Any:
            if next(broken, False):
                raise errors.KafkaConnectionError("cut")
            return await ask(node, question, line)

        monkeypatch.setattr(producer._channels, "ask", break_once)
        parts = producer._parts(world.draft(6, source=_IN_1))
        await producer.write(parts)
        assert await world.committed(1) == [1]
        # What is written there now and never committed takes nothing along.
        draft = world.draft(2, source=_IN_0)
        await producer.write([part for part in producer._parts(draft) if part.topic == world.facts.name])
        await (await world.producer()).transact(world.draft(3, source=_IN_0))
        assert await world.committed(2) == [1, 3]


@pytest.mark.parametrize("history", ["committed before", "committed earlier", "aborted"])
async def test_a_batch_that_the_leader_took_after_it_was_asked_for_open_transactions(
    careless: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch, history: str
) -> None:
    """The answer to the batch is lost, and the leader holds the hanging transaction and the running one as one."""

    async def look_away(*_: object, **__: object) -> dict[tuple[str, int], str]:
        return {}

    async with lane(careless, topic_name, partitions=2) as world:
        if history == "aborted":
            with monkeypatch.context() as patched:
                patched.setattr(transactional_producer, "complete_hanging", look_away)
                producer = await abort_without_a_marker(world)
        else:
            producer = await world.producer()
            await leave_open(world, producer, 1)
            for number in (5,) if history == "committed before" else (5, 6, 7):
                await producer.transact(world.draft(number, source=_IN_1))
        seen = await hanging_transactions.open_transactions(world.kafka, lambda *tp: tp == (world.facts.name, 0))
        assert len(seen[0]) == 1
        ask, lost = producer._channels.ask, iter([True])

        async def lose_the_answer(node: int, question: Any, line: str = "") -> Any:
            answer = await ask(node, question, line)
            if next(lost, False):
                raise errors.KafkaConnectionError("cut")
            return answer

        async def look_before(*_: object) -> Any:
            return seen

        parts = [p for p in producer._parts(world.draft(2, source=_IN_0)) if p.topic == world.facts.name]
        with monkeypatch.context() as patched:
            patched.setattr(producer._channels, "ask", lose_the_answer)
            patched.setattr(hanging_transactions, "open_transactions", look_before)
            if history == "aborted":
                with pytest.raises(NotCommitted, match="InvalidProducerEpoch"):
                    await producer.write(parts)
            else:
                await producer.write(parts)
                await producer.commit()
        await (await world.producer()).transact(world.draft(3, source=_IN_0))
        stored = [3] if history == "aborted" else [1, 2, 3]
        assert await world.committed(len(stored)) == stored
