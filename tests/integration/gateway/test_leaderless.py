"""A partition whose only replica is away: a transaction that needs it commits nothing of itself, anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import partition_of
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.kafka import transactional_producer
from logferry.gateway.kafka.transactional_producer import NotCommitted
from logferry.gateway.lanes.group_commit import GroupCommit
from logferry.gateway.lanes.lane import replay
from logferry.gateway.lanes.transaction import Draft, WriteChunks
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.producer import Lane, lane

_PARTITIONS = 6


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster("three", tmp_path_factory.mktemp("three"), brokers=3) as cluster:
        yield cluster


def source_of(partition: int) -> str:
    return next(name for name in map(str, range(99)) if partition_of(name, _PARTITIONS) == partition)


def draft_of(world: Lane, number: int, *partitions: int) -> Draft:
    draft = world.draft(number, source=source_of(partitions[0]))
    for partition in partitions[1:]:
        source = SourceIdentity(world.facts.name, None, source_of(partition))
        draft.add(WriteChunks(world.facts, source, None, [Chunk(number, None, None, {}, b"%d " % number)], 10))
    return draft


async def test_commits_nothing_without_it_and_continues_when_it_is_back(
    three: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional_producer, "_TRANSACTION_DEADLINE_S", 5)
    async with lane(three, topic_name, _PARTITIONS) as world:
        producer: GroupCommit = await world.producer()
        await producer.transact(draft_of(world, 1, 0))
        leaders = [await world.kafka.present_leader(world.facts.name, number) for number in range(_PARTITIONS)]
        needed = {leaders[0], await world.kafka.present_leader(world.config.state_topic, 0)}
        away = next(number for number, leader in enumerate(leaders) if leader not in needed)
        three.kill(leaders[away])
        try:
            with pytest.raises(NotCommitted):
                await producer.transact(draft_of(world, 2, 0, away))
            # The other partition was not drawn into it: its next transaction follows, and is the next that is read.
            await (await world.producer()).transact(draft_of(world, 3, 0))
            assert await world.committed(2) == [1, 3]
        finally:
            three.restart(leaders[away])
        await (await world.producer()).transact(draft_of(world, 4, 0, away))
        assert await world.committed(3) == [1, 3, 4]
        # Behind the next fence: Kafka answers a commit before its markers are written.
        fenced = await world.producer()
        table = await replay(world.kafka, world.config.state_topic, 0, up_to=fenced.state_end)
        recorded = {
            partition: table.get(SourceIdentity(world.facts.name, None, source_of(partition)), world.facts.id)
            for partition in (0, away)
        }
        assert {partition: state and state.recorded for partition, state in recorded.items()} == {0: 4, away: 4}
