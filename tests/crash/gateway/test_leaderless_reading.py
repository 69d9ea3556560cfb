"""Read sessions while a partition has no leader: the others are read and committed, and it follows when it has one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from logferry.client import AsyncReader
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.read_sessions import Stream, has, is_caught_up, offsets
from tests.support.served_gateway import Gateway

_AWAY = 3
_PATIENCE_S = 90


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster("reading", tmp_path_factory.mktemp("reading"), brokers=3) as cluster:
        yield cluster


@pytest.fixture
async def gateway(three: KafkaCluster, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, three.bootstrap, 1) as running:
        yield running


async def make(three: KafkaCluster, topic: str) -> str:
    """A topic of three partitions, each with the broker of its number plus one alone; a chunk in each."""
    admin = AIOKafkaAdminClient(bootstrap_servers=three.bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(f"dc1.{topic}", -1, -1, {0: [1], 1: [2], 2: [_AWAY]})])
    finally:
        await admin.close()
    await write(three, topic, 1, 0, 1, 2)
    return f"dc1.{topic}"


async def write(three: KafkaCluster, topic: str, seqno: int, *partitions: int) -> None:
    async with AIOKafkaProducer(bootstrap_servers=three.bootstrap) as producer:
        for number in partitions:
            chunk = Chunk(seqno, seqno - 1 or None, 1000, {}, b"%d\n" % seqno)
            sent = {"key": b"web%d" % number, "partition": number, "headers": record_headers(chunk)}
            await producer.send_and_wait(f"dc1.{topic}", chunk.data, **sent)


@asynccontextmanager
async def without_broker(three: KafkaCluster) -> AsyncIterator[None]:
    await asyncio.to_thread(three.kill, _AWAY)
    try:
        yield
    finally:
        await asyncio.to_thread(three.restart, _AWAY)


def seen(stream: Stream) -> list[tuple[int, int]]:
    return sorted((frame["partition"], frame["seqno"]) for frame in stream.chunks)


async def commit(stream: Stream) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while (answer := await stream.commit(stream.held))[0] != 200:
            assert answer[0] == 503, answer
            await asyncio.sleep(0.2)


async def test_a_session_begins_without_it(three: KafkaCluster, gateway: Gateway, topic_name: str) -> None:
    topic = await make(three, topic_name)
    async with without_broker(three):
        async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
            await stream.until(has(2), _PATIENCE_S)
            assert stream.last("assigned")["waiting"] == [{"topic": topic, "partition": 2}]
            await write(three, topic_name, 2, 0, 1)
            await stream.until(lambda s: has(4)(s) and is_caught_up(s))
            assert seen(stream) == [(0, 1), (0, 2), (1, 1), (1, 2)]
            await commit(stream)
            assert "error" not in stream.kinds()
            await asyncio.to_thread(three.restart, _AWAY)
            await stream.until(has(5), _PATIENCE_S)
            assert seen(stream) == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]
            await commit(stream)
            assert "waiting" not in stream.last("assigned")


async def test_a_session_goes_on_when_it_loses_it(three: KafkaCluster, gateway: Gateway, topic_name: str) -> None:
    topic = await make(three, topic_name)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(lambda s: has(3)(s) and is_caught_up(s))
        async with without_broker(three):
            await commit(stream)
            await write(three, topic_name, 2, 0, 1)
            await stream.until(lambda s: has(5)(s), _PATIENCE_S)
            await commit(stream)
        await write(three, topic_name, 2, 2)
        await stream.until(has(6), _PATIENCE_S)
        assert seen(stream) == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]
        assert "error" not in stream.kinds()
        await commit(stream)
    view = await offsets(gateway, topic_name)
    assert [p["lag_records"] for p in view["positions"]] == [0, 0, 0]


async def test_a_reader_to_the_end_waits_for_it(three: KafkaCluster, gateway: Gateway, topic_name: str) -> None:
    topic = await make(three, topic_name)
    found: list[int] = []
    two = asyncio.Event()

    async def read() -> None:
        async with AsyncReader(gateway.urls[0], topic, consumer=topic_name, follow=False) as reader:
            async for chunk in reader:
                found.append(chunk.partition)
                if len(found) == 2:
                    two.set()

    async with without_broker(three):
        reading = asyncio.create_task(read())
        async with asyncio.timeout(_PATIENCE_S):
            await two.wait()
        assert not (await asyncio.wait([reading], timeout=3))[0], "it took a partition without a leader for read"
    async with asyncio.timeout(_PATIENCE_S):
        await reading
    assert sorted(found) == [0, 1, 2]
