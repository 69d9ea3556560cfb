"""What bounds a mirror: the rate of a link over all its workers, the topics that it takes, and its offset history."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewPartitions, NewTopic, RecordsToDelete
from aiokafka.structs import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.ops.audit.command import main as audit
from logferry.ops.stack.stack import Stack

from tests.support.kafka import becomes, commit
from tests.support.mirror import differences_in_the_end, read_log, remote, true_pairs
from tests.support.mirrored_topic import World, mirroring, settings_of

_PARTITIONS = 8


async def fetched_bytes(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/status") as answer:
        [link] = (await answer.json())["links"]
    return int(link["fetched_bytes"])


async def test_the_limit_of_a_link_holds_over_all_workers(world: World) -> None:
    """Two workers may take 200 kB/s together, and 1.6 MB wait. Each had the whole limit before."""
    limit, sent_bytes = 200_000, 1_600_000
    world.configure(
        workers=2,
        limits={"fetch_bytes": 65_536, "partition_bytes": 65_536},
        remote=[remote(world.stack, "dc1", topics=[world.name], bytes_per_s=limit)],  # type: ignore[arg-type]
    )
    await world.create(_PARTITIONS)
    with ExitStack() as stack:
        workers = [world.mirror.start(number=number) for number in range(2)]
        for worker in workers:
            stack.callback(worker.child.stop, 15)
        # Both have lanes, and what was brought before counts below.
        await shared(world, [worker.url for worker in workers])
        for number in range(_PARTITIONS):
            await world.write(*[bytes(10_000)] * (sent_bytes // 10_000 // _PARTITIONS), partition=number)
        before, began = sum([await fetched_bytes(worker.url) for worker in workers]), time.monotonic()
        assert await world.differences() == []
        seconds = time.monotonic() - began
        brought = sum([await fetched_bytes(worker.url) for worker in workers]) - before
        print(f"{brought / seconds / 1000:.0f} kB/s of {limit / 1000:.0f}")
        # A second's worth was saved up, and each worker may have a fetch too many at the end.
        assert brought <= 1.1 * limit * (seconds + 1) + 2 * 65_536
        assert brought > sent_bytes / 2
        assert all([await fetched_bytes(worker.url) > sent_bytes / 8 for worker in workers])


async def shared(world: World, urls: list[str]) -> None:
    """Returns when both workers follow half of the partitions."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        while True:
            found = []
            for url in urls:
                try:
                    async with session.get(f"{url}/v1/status") as answer:
                        [link] = (await answer.json())["links"]
                        found.append(link["partitions"])
                except aiohttp.ClientError:
                    break
            if found == [_PARTITIONS // 2] * 2:
                return
            await asyncio.sleep(0.1)


async def test_excluded_topics_stay_away(world: World) -> None:
    world.configure(
        remote=[remote(world.stack, "dc1", topics=[f"{world.name}*"], exclude=["*-debug"])],  # type: ignore[arg-type]
        replicas=1,
    )
    debug = f"{world.topic}-debug"
    await world.create(1)
    await world.admin(world.there, "create_topics", [NewTopic(debug, 1, 1)])
    await world.write(b"one")
    with mirroring(world.mirror):
        assert await world.differences() == []
        async with connected(world.here) as here:
            topics = (await here.describe()).topics
    assert debug not in topics
    assert [len(partition.replicas) for partition in topics[world.topic].partitions] == [1]


@asynccontextmanager
async def connected(bootstrap: str) -> AsyncIterator[KafkaClient]:
    kafka = KafkaClient({"bootstrap_servers": bootstrap}, "tests")
    await kafka.start()
    try:
        yield kafka
    finally:
        await kafka.close()


async def test_history_of_records_that_are_gone_is_removed_and_the_rest_is_exact(world: World) -> None:
    world.configure(lanes=1, history_retention_ms=1000)
    await world.create(2)
    tp, other = (world.topic, 0), (world.topic, 1)
    async with connected(world.here) as here, AIOKafkaProducer(bootstrap_servers=world.there) as producer:
        with mirroring(world.mirror) as url:
            for number in range(40):  # each in a transaction of its own
                await producer.send_and_wait(world.topic, b"%d" % number, partition=0)
                found = await world.state(url, "caught-up")
                assert found["lag_records"] == 0
                if number == 20:  # nothing of this one is removed, so its block stays, and all behind it
                    await producer.send_and_wait(world.topic, b"other", partition=1)
            assert await world.differences() == []
            original, copy = await read_log(world.there, world.topic), await read_log(world.here, world.topic)
            pairs = true_pairs(original, copy)
            kept = sorted(copy[0])[30][0]  # the ten records from here on are to stay, and those of the other partition
            # What retention would do.
            gone = {TopicPartition(*tp): RecordsToDelete(before_offset=kept)}
            await world.admin(world.here, "delete_records", gone)
            async with asyncio.timeout(60):
                while not (first := await here.offset(world.mirror.pairs, 0, EARLIEST)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert first < await here.offset(world.mirror.pairs, 0, LATEST)
            # By a reader that has seen none of it before.
            translation = OffsetTranslation(here, world.name, "dc2")
            for at, local in pairs[0].items():
                if local >= kept:
                    assert await translation.to_here(tp, at) == local
                    assert await translation.to_original(tp, local) == at
            for at, local in pairs[1].items():
                assert await translation.to_here(other, at) == local
            with pytest.raises(Problem, match="does not reach back so far"):
                await translation.to_here(tp, 0)
            await producer.send_and_wait(world.topic, b"more", partition=0)
        with mirroring(world.mirror) as url:  # a worker that takes over continues
            await producer.send_and_wait(world.topic, b"and more", partition=0)
            async with asyncio.timeout(60):
                while (await read_log(world.here, world.topic))[0][-1][1].value != b"and more":  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await world.state(url, "caught-up")
    there, here_log = await read_log(world.there, world.topic), await read_log(world.here, world.topic)
    assert [copied for _, copied in there[0]][30:] == [copied for _, copied in here_log[0]]


async def test_a_topic_without_a_data_centre_is_copied_under_the_name_that_it_gets(
    world: World, stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all that goes by names: settings, partitions that are added, positions of consumers, stops, the audit."""
    plain, world.topic = f"orders-{world.name}", f"dc1.{world.name}-orders"
    world.configure(remote=[remote(stack, "dc1", topics=["none"], renamed={plain: world.topic})])
    settings = {"retention.ms": "123456789"}
    await world.admin(world.there, "create_topics", [NewTopic(plain, 1, 1, topic_configs=settings)])
    async with AIOKafkaProducer(bootstrap_servers=world.there) as producer:
        for number in range(3):
            await producer.send_and_wait(plain, b"%d" % number, key=b"key", headers=[("h", b"v")])
        with mirroring(world.mirror) as url:
            assert await differences_in_the_end((world.there, plain), (world.here, world.topic)) == []
            assert (await settings_of(world.here, world.topic))["retention.ms"] == "123456789"
            await world.admin(world.there, "create_partitions", {plain: NewPartitions(2)})
            async with AIOKafkaProducer(bootstrap_servers=world.there) as other:  # it knows the new partition
                await other.send_and_wait(plain, b"more", partition=1)
            assert await differences_in_the_end((world.there, plain), (world.here, world.topic)) == []
            await commit(stack.cluster("dc1"), "shop", plain, 2)
            pairs = true_pairs(await read_log(world.there, plain), await read_log(world.here, world.topic))
            assert await becomes(stack.cluster("dc2"), "shop", world.topic, pairs[0][2])
            # What retention removed there while the mirror was away is a stop, which an operator ends.
            await world.state(url, "caught-up")
        for number in range(3):
            await producer.send_and_wait(plain, b"lost-%d" % number, partition=0)
        end = await producer.send_and_wait(plain, b"kept", partition=0)
        gone = {TopicPartition(plain, 0): RecordsToDelete(before_offset=end.offset)}
        await world.admin(world.there, "delete_records", gone)
        with mirroring(world.mirror) as url:
            await world.state(url, "records-removed")
            assert (await world.resume(url, "earliest"))[1] == {
                "topic": world.topic,
                "partition": 0,
                "from": end.offset,
            }
            await world.state(url, "caught-up")
            copy = [copied.value for _, copied in (await read_log(world.here, world.topic))[0]]
            assert copy == [b"0", b"1", b"2", b"kept"]
    command = ["--mirror", "dc1:dc2", "--config", str(world.mirror.file), "--topic", f"{world.name}-orders"]
    assert await asyncio.to_thread(audit, command) == 0, capsys.readouterr().out
    assert "exact" in capsys.readouterr().out
