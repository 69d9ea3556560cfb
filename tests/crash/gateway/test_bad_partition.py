"""Partitions that take nothing: their sources are refused by name, and the others of the same lane are not.

One lane holds all sources here. Its transactions are committed by another transactional id while Kafka cannot end the
one that the bad partition is part of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from logferry.gateway.contract.names import partition_of
from logferry.gateway.kafka.client import KafkaClient
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import Gateway, gateway, log_of, write
from tests.support.kafka import make_topic

_PATIENCE_S = 90
_PARTITIONS = 6
# So many writes in a row of a healthy source, none refused.
_WRITES = 200
_ATTEMPTS = 4


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster("bad", tmp_path_factory.mktemp("bad"), brokers=3) as cluster:
        yield cluster


@dataclass
class Writing:
    """One source, one chunk after another, each repeated until it is recorded."""

    running: Gateway
    topic: str
    source: str
    recorded: int = 0
    refused_at: int = 0
    refused: list[str] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        while True:
            seqno = self.recorded + 1
            query = f"seqno={seqno}&prev={self.recorded}" if self.recorded else f"seqno={seqno}"
            answer = await write(self.running, self.topic, self.source, query, b"%d\n" % seqno, expect=None)
            async with self.changed:
                if answer.status == 200:
                    assert answer.document["recorded_seqno"] == seqno
                    self.recorded = seqno
                elif answer.status in (500, 503):
                    self.refused.append(answer.document["detail"])
                    self.refused_at = self.recorded
                elif self.recorded or answer.status != 404:  # a broker may show a new topic a moment later
                    raise AssertionError(answer.document)
                self.changed.notify_all()
            if answer.status != 200:
                await asyncio.sleep(0.1)

    async def until(self, wanted: Any) -> None:
        async with asyncio.timeout(_PATIENCE_S), self.changed:
            await self.changed.wait_for(wanted)

    async def advance(self, count: int) -> None:
        before = self.recorded
        await self.until(lambda: self.recorded >= before + count)


async def first_refused(running: Gateway) -> dict[str, Any]:
    [shown] = (await running.ask("GET", "/v1/status")).document["refused"]
    return dict(shown)


@asynccontextmanager
async def writing(*sources: Writing) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(source.run()) for source in sources]
    try:
        yield
    finally:
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def make_plain_topic(cluster: KafkaCluster, name: str, replicas: list[int], in_sync: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    await admin.start()
    try:
        settings = {"min.insync.replicas": str(in_sync)}
        await admin.create_topics([NewTopic(name, -1, -1, {0: replicas}, settings)])
    finally:
        await admin.close()


@asynccontextmanager
async def kafka_of(cluster: KafkaCluster) -> AsyncIterator[KafkaClient]:
    kafka = KafkaClient({"bootstrap_servers": cluster.bootstrap}, "tests")
    await kafka.start()
    try:
        yield kafka
    finally:
        await kafka.close()


async def leaders(kafka: KafkaClient, *topics: str) -> dict[tuple[str, int], int]:
    view = await kafka.describe(list(topics))
    return {(topic.name, p.partition): p.leader for topic in view.topics.values() for p in topic.partitions}


def source_in(partition: int) -> str:
    return next(name for name in map(str, range(99)) if partition_of(name, _PARTITIONS) == partition)


@pytest.mark.parametrize(
    ("replicas", "in_sync", "why"),
    [pytest.param(1, 1, "it has no leader", marks=pytest.mark.long), (3, 3, "min.insync.replicas is 3")],
)
@pytest.mark.timeout(900)
async def test_the_other_sources_of_the_lane_are_written(
    three: KafkaCluster, topic_name: str, tmp_path: Path, replicas: int, in_sync: int, why: str
) -> None:
    name = topic_name[-40:].strip("-_.")
    accepted: Any = ["replication", "min-isr", "unclean-election"]
    with gateway(three, tmp_path, name, workers=1, lanes=1, accept_weak_kafka=accepted) as running:
        await running.make_topic(f"{name}.good", _PARTITIONS)
        state = running.state_topic
        async with kafka_of(three) as kafka:
            led = await leaders(kafka, f"dc1.{name}.good", state)
            away = next(broker for broker in (1, 2, 3) if broker != led[state, 0])
            healthy = next(n for n in range(_PARTITIONS) if led[f"dc1.{name}.good", n] != away)
            on = [away] if replicas == 1 else [away, *(broker for broker in (1, 2, 3) if broker != away)]
            await make_plain_topic(three, f"dc1.{name}.bad", on, in_sync)
            good = Writing(running, f"{name}.good", source_in(healthy))
            bad = Writing(running, f"{name}.bad", "host")
            async with writing(good, bad):
                # Metadata may show it before a transaction meets it: then there is nothing that Kafka could not end.
                for _ in range(_ATTEMPTS):
                    await bad.advance(20)
                    bad.refused.clear()
                    three.kill(away)
                    try:
                        await bad.until(lambda: any("takes nothing now" in text for text in bad.refused))
                        recorded, refused = bad.recorded, len(bad.refused)
                        good.refused_at = good.recorded
                        await good.until(lambda: good.recorded - good.refused_at >= _WRITES)
                        assert (bad.recorded, len(bad.refused) > refused) == (recorded, True)
                        # Kafka knows of the broker's end some seconds later.
                        await bad.until(lambda: why in bad.refused[-1])
                        async with asyncio.timeout(_PATIENCE_S):
                            while True:
                                shown = await first_refused(running)
                                if why in shown["why"]:
                                    break
                                await asyncio.sleep(0.1)
                        assert (shown["topic"], shown["partition"]) == (f"dc1.{name}.bad", 0)
                    finally:
                        three.restart(away)
                    await bad.advance(20)
                    assert (await running.ask("GET", "/v1/status")).document["refused"] == []
                    log = running.workers[0].child.log.read_text()
                    if replicas == 1 or '"transaction_not_ended"' in log:
                        break
        assert running.workers[0].child.running
        assert '"partition_refused"' in log
        assert '"partition_accepted"' in log
        if replicas == 3:
            assert '"transaction_not_ended"' in log, "Kafka ended the transaction: nothing was tested"
        for source in (good, bad):
            stored = [seqno for _, seqno, _ in await log_of(running, source.topic)]
            assert stored[: source.recorded] == list(range(1, source.recorded + 1))
            assert len(stored) <= source.recorded + 1


async def test_a_topic_that_is_not_durable_is_refused_alone(
    three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    name = topic_name[-40:].strip("-_.")
    strict: Any = []
    with gateway(three, tmp_path, name, workers=1, accept_weak_kafka=strict) as running:
        await running.make_topic(f"{name}.good")
        await make_plain_topic(three, f"dc1.{name}.weak", [1], 1)
        answer = await write(running, f"{name}.weak", "host", "seqno=1", expect=503)
        assert answer.problem == "topic-not-durable"
        assert "its partitions have 1 replicas, needed are 3" in answer.document["detail"]
        assert (await running.ask("POST", f"/v1/topics/{name}.weak/sources/host/session", expect=503)).problem
        await write(running, f"{name}.good", "host", "seqno=1")
        [shown] = (await running.ask("GET", "/v1/status")).document["refused"]
        assert (shown["topic"], shown["partition"]) == (f"dc1.{name}.weak", None)
    # A worker that starts later serves all the same.
    with gateway(three, tmp_path, name, workers=1, accept_weak_kafka=strict) as running:
        await write(running, f"{name}.good", "host", "seqno=2&prev=1")
        assert (await write(running, f"{name}.weak", "host", "seqno=1", expect=503)).problem == "topic-not-durable"


async def test_a_topic_is_not_created_weaker_while_a_broker_is_away(
    three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    name = topic_name[-40:].strip("-_.")
    strict: Any = []
    with gateway(three, tmp_path, name, workers=1, accept_weak_kafka=strict) as running:
        three.kill(3)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while len((await running.ask("GET", "/v1/status")).document["kafka"]["brokers"]) == 3:
                    with suppress(TimeoutError):
                        await asyncio.sleep(0.2)
            # Kafka places replicas on brokers that it knows, also while they are down.
            await running.ask("PUT", f"/v1/topics/{name}", json={"partitions": 1}, expect=None)
        finally:
            three.restart(3)
        async with asyncio.timeout(_PATIENCE_S):
            await make_topic(running.urls[0], name, 1)
        async with kafka_of(three) as kafka:
            assert {len(p.replicas) for p in (await kafka.describe_topic(f"dc1.{name}")).partitions} == {3}
