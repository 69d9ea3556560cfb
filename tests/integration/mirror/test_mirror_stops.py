"""The mirror between two real clusters: every reason to stop, and the way on."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic, RecordsToDelete
from logferry.gateway.contract.mirror_state import checkpoint_key, mirror_lane_of
from logferry.ops.cli.main import main as command

from tests.support.kafka import alter_topic
from tests.support.mirror import pairs_by_history, read_log
from tests.support.mirrored_topic import World, mirroring


async def test_records_removed_before_they_were_mirrored(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    async def shown(url: str, *options: str) -> tuple[int, str]:
        """What `logferry status` makes of it."""
        exit_status = await asyncio.to_thread(command, ["status", "--mirror", url, *options])
        return exit_status, capsys.readouterr().out

    await world.create()
    await world.write(*(b"%d" % number for number in range(10)), linger_ms=50)
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
    await world.write(*(b"%d" % number for number in range(10, 30)), linger_ms=50)
    await world.admin(world.there, "delete_records", {TopicPartition(world.topic, 0): RecordsToDelete(15)})
    with mirroring(world.mirror) as url:
        stopped = await world.state(url, "records-removed")
        assert "5 offsets from 10 on" in stopped["stop"]["detail"]
        exit_status, said = await shown(url)
        assert exit_status == 1
        assert f"{world.topic}-0 of dc1 stopped: records-removed" in said
        assert f"logferry mirror resume {world.topic} 0 --url {url} --from" in said
        assert (await world.resume(url, 3))[0] == 409
        assert await world.resume(url, "earliest") == (200, {"topic": world.topic, "partition": 0, "from": 15})
        await world.state(url, "caught-up")
        exit_status, said = await shown(url)
        assert (exit_status, "the mirror of dc2: no problem found" in said) == (0, True)
        assert "0 records" in said
        [link] = json.loads((await shown(url, "--json"))[1])["workers"][url]["links"]
        assert (link["lag_records"], link["lag_bytes"], link["stopped"]) == (0, 0, 0)
        values = [record.value for _, record in (await read_log(world.here, world.topic))[0]]
        assert values == [b"%d" % number for number in (*range(10), *range(15, 30))]
        assert (await world.resume(url, "earliest"))[0] == 409
        history = await pairs_by_history(world.here, world.mirror.pairs)
        assert sorted(history[world.topic, 0]) == [*range(10), *range(15, 30)]


async def test_a_topic_that_is_recreated_there(world: World) -> None:
    await world.create()
    await world.write(b"old 0", b"old 1")
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        await world.admin(world.there, "delete_topics", [world.topic])
        await world.state(url, "source-deleted")
        await world.create()
        await world.write(b"new 0", b"new 1", b"new 2")
        await world.state(url, "source-recreated")
        assert (await world.resume(url, "earliest"))[0] == 200
        await world.state(url, "caught-up")
        values = [record.value for _, record in (await read_log(world.here, world.topic))[0]]
        assert values == [b"old 0", b"old 1", b"new 0", b"new 1", b"new 2"]


async def test_a_topic_that_is_deleted_here(world: World) -> None:
    await world.create()
    await world.write(b"0", b"1")
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        await world.admin(world.here, "delete_topics", [world.topic])
        await world.write(b"2")
        await world.state(url, "target-recreated")
        # A transaction for the topic that is gone may still fail the lane meanwhile.
        assert (await world.resume(url, "earliest"))[0] == 200
        assert await world.differences() == []


async def test_a_checkpoint_that_cannot_be_decoded_is_forgotten(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.create(partitions=2)
    for partition in range(2):
        await world.write(b"0", b"1", partition=partition)
    with mirroring(world.mirror) as url:
        for partition in range(2):
            await world.state(url, "caught-up", partition)
    lane = mirror_lane_of(world.topic, 0, 4)
    state = f"{world.name}.mirror.dc2.state"
    async with AIOKafkaProducer(bootstrap_servers=world.here) as producer:
        poison = await producer.send_and_wait(
            state, b"\x09 of a newer version", key=checkpoint_key(world.topic, 0), partition=lane
        )
    worker = world.mirror.start()
    try:
        # The other lane serves, and the groups of consumers are carried: the worker does not end for it.
        await world.write(b"2", partition=1)
        await world.write(b"2")
        while not worker.child.log.exists() or "lane_stopped" not in worker.child.log_tail():
            assert worker.child.running, worker.child.log_tail()
            await asyncio.sleep(0.05)
        await world.state(worker.url, "caught-up", 1)
        assert await asyncio.to_thread(command, ["status", "--mirror", worker.url]) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert f"lane {lane} is stopped" in said
        options = ["--mirror", "--config", str(world.mirror.file), "--yes", "--forget"]
        first = ["lanes", *options, f"{lane}:{poison.offset - 2}"]
        assert await asyncio.to_thread(command, first) == 1
        assert await asyncio.to_thread(command, ["lanes", *options, f"{lane}:{poison.offset}"]) == 0
        await world.state(worker.url, "target-not-empty")
        assert (await world.resume(worker.url, 2))[0] == 200
        assert await world.differences() == []
        assert worker.child.running
    finally:
        worker.child.stop(15)


async def test_what_kafka_here_refuses_stops_that_partition_alone(world: World) -> None:
    world.configure(carry_settings=False)
    await world.create(partitions=2, **{"max.message.bytes": "3000000"})
    await world.write(b"small")
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        await alter_topic(world.here, world.topic, max_message_bytes="1000")
        await world.write(bytes(100_000), max_request_size=1 << 22)
        stopped = await world.state(url, "write-rejected")
        assert "larger" in stopped["stop"]["detail"] or "TooLarge" in stopped["stop"]["detail"]
        await world.write(b"small", partition=1)
        await world.state(url, "caught-up", partition=1)
        await alter_topic(world.here, world.topic, max_message_bytes="4000000")
        assert (await world.resume(url, 1))[0] == 200
        assert await world.differences() == []


async def test_the_command_resumes_a_partition(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    await world.create()
    await world.write(b"0", b"1", b"2")
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")

        async def resumed(start: str) -> int:
            return await asyncio.to_thread(
                command, ["mirror", "resume", world.topic, "0", "--from", start, "--url", url]
            )

        assert await resumed("earliest") == 1
        assert "has not stopped" in capsys.readouterr().err
        await world.admin(world.there, "delete_topics", [world.topic])
        await world.state(url, "source-deleted")
        await world.create()
        await world.state(url, "source-recreated")
        assert await resumed("earliest") == 0
        assert f"{world.topic}-0 resumes at 0" in capsys.readouterr().out
    resume = ["mirror", "resume", world.topic, "0", "--from", "1", "--url", url]
    assert await asyncio.to_thread(command, resume) == 3


async def test_records_here_of_which_nothing_is_known(world: World) -> None:
    """As when the mirror's state was lost: written once more, everything would be there twice."""
    await world.create()
    await world.write(b"0", b"1")
    await world.admin(world.here, "create_topics", [NewTopic(world.topic, 1, 1)])
    async with AIOKafkaProducer(bootstrap_servers=world.here, transactional_id=world.name) as producer:
        await producer.begin_transaction()
        await producer.send(world.topic, b"aborted", partition=0)
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send(world.topic, b"stranger", partition=0)
    with mirroring(world.mirror) as url:
        await world.state(url, "target-not-empty")
        assert (await world.resume(url, 1))[0] == 200
        await world.state(url, "caught-up")
        values = [record.value for _, record in (await read_log(world.here, world.topic))[0]]
        assert values == [b"stranger", b"1"]


async def test_a_kafka_that_is_too_weak_is_refused_by_name(world: World) -> None:
    """Of the two topics that the mirror creates, too."""
    world.configure(accept_weak_kafka=[])
    worker = world.mirror.start()
    try:
        async with asyncio.timeout(60):
            while worker.child.running:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.05)
        assert worker.child.exit_status == 2, worker.child.log_tail()
        assert 'accept_weak_kafka = [\\"replication' in worker.child.log_tail()
    finally:
        worker.child.stop(15)
