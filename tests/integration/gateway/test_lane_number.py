"""`logferry lanes --to` on real Kafka without load: what it refuses, and what it leaves to the workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from logferry.gateway.config import Config
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.contract.names import lane_of
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.lanes.replay import replay_states
from logferry.gateway.service import preflight
from logferry.gateway.service.lane_change import ChangeRefused, LaneChange
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import LANES, gateway
from tests.support.kafka import delete_topic


class BeforeArchive(Config):
    """Of a command that looked before a worker created the staging topic."""

    @property
    def staging_topic(self) -> str:
        return f"{self.group}.not-there"


@asynccontextmanager
async def client(kafka: KafkaCluster) -> AsyncIterator[KafkaClient]:
    found = KafkaClient({"bootstrap_servers": kafka.bootstrap}, "tests")
    await found.start()
    try:
        yield found
    finally:
        await found.close()


def configured(kafka: KafkaCluster, prefix: str, kind: type[Config] = Config) -> Config:
    weak, access = ["replication", "min-isr"], {"bootstrap_servers": kafka.bootstrap}
    return kind.model_validate(
        {"dc": "dc1", "prefix": prefix, "lanes": LANES, "accept_weak_kafka": weak, "kafka": access}
    )


async def numbers(kafka: KafkaClient, config: Config) -> set[LaneCount]:
    """The newest in each partition of the state topic."""
    found: dict[int, LaneCount] = {}
    for partition in range(LANES):

        def apply(key: bytes, value: bytes | None, partition: int = partition) -> None:
            if key == COUNT_KEY and value is not None:
                found[partition] = LaneCount.decode(value)

        await replay_states(kafka, config.state_topic, partition, apply)
    return set(found.values())


async def until_all_have(wanted: LaneCount, kafka: KafkaClient, config: Config) -> None:
    """Kafka answers a commit before its markers are in each partition."""
    deadline = time.monotonic() + 60
    while (found := await numbers(kafka, config)) != {wanted}:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)


async def test_a_number_that_was_deleted_is_not_guessed(kafka: KafkaCluster, topic_name: str) -> None:
    """The number that is configured would be written into lanes that are of another one."""
    config = configured(kafka, topic_name[-60:])
    async with client(kafka) as connected:
        await preflight.check(connected, config, ())
        await LaneChange(connected, config, 3, print).run()
        await until_all_have(LaneCount(3, LANES, 2), connected, config)
        await delete_topic(kafka.bootstrap, f"{config.group}.lanes")
        with pytest.raises(ChangeRefused, match="deleted, or may not be read"):
            await LaneChange(connected, config, 2, print).run()
        await until_all_have(LaneCount(3, LANES, 2), connected, config)


async def test_a_staging_topic_that_was_created_meanwhile_gets_the_lanes_that_it_lacks(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    prefix, lanes = topic_name[-60:], 2 * LANES
    rules = [{"name": "*", "topic": "archived"}]
    with gateway(kafka, tmp_path, prefix, workers=1, receivers={"archive": {"topics": rules}}) as worker:
        await worker.make_topic("archived")
        async with client(kafka) as connected:
            await LaneChange(connected, configured(kafka, prefix, BeforeArchive), lanes, print).run()
            assert len((await connected.describe_topic(f"{prefix}.gateway.dc1.archive")).partitions) == LANES
        deadline = time.monotonic() + 120
        by_lane = {lane_of(f"archive/-/t{number}", lanes): number for number in range(20 * lanes)}
        assert len(by_lane) == lanes
        for number in by_lane.values():
            path = f"/v1/archive/t{number}/store?piece=1&host=web&file=%2Ff&log_type=access-log"
            while (answer := await worker.ask("POST", path, data=b"x\n", expect=None)).status != 200:
                assert time.monotonic() < deadline, answer.document
                await asyncio.sleep(0.1)
