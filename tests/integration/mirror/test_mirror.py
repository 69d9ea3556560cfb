"""The mirror between two real clusters: what it copies, what it makes here, and every reason to stand still."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.fetch_request import FetchSession, Wanted
from logferry.mirror.__main__ import main as mirror_main
from logferry.mirror.copy.batch_rewrite import committed_batches
from logferry.ops.audit import main as audit
from logferry.ops.cli.main import main as command
from logferry.ops.stack.stack import Stack

from tests.mirrored import differences_in_the_end, pairs_by_history, read_log, true_pairs
from tests.mirroring import Mirror

CODECS = (None, "gzip", "snappy", "lz4", "zstd")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2")) as stack:
        yield stack


@contextmanager
def mirroring(mirror: Mirror) -> Iterator[str]:
    """The URL of a worker that serves its lanes."""
    worker, deadline = mirror.start(), time.monotonic() + 60
    try:
        while not worker.is_ready():
            assert worker.child.running, worker.child.said()
            assert time.monotonic() < deadline, worker.child.said()
            time.sleep(0.05)
        yield worker.url
    finally:
        worker.child.stop(15)


class World:
    """A topic of dc1 in dc1's Kafka, written to without the gateway, and a mirror of it alone."""

    def __init__(self, stack: Stack, name: str, folder: Path) -> None:
        self.there, self.here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
        self.name, self.topic = name, f"dc1.{name}"
        self.mirror = Mirror(stack, folder, name)

    async def create(self, partitions: int = 1, **configs: str) -> None:
        await self.admin(self.there, "create_topics", [NewTopic(self.topic, partitions, 1, topic_configs=configs)])

    async def admin(self, bootstrap: str, call: str, *arguments: Any) -> None:
        client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await client.start()
        try:
            await getattr(client, call)(*arguments)
        finally:
            await client.close()

    async def write(self, *values: bytes, partition: int = 0, **options: Any) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.there, acks="all", **options) as producer:
            sent = [await producer.send(self.topic, value, partition=partition) for value in values]
            await asyncio.gather(*sent)

    async def differences(self) -> list[str]:
        return await differences_in_the_end((self.there, self.topic), (self.here, self.topic))

    async def state(self, url: str, wanted: str, partition: int = 0) -> dict[str, Any]:
        """What the worker says of the partition once its state, or why it stopped, is the one that is wanted."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                async with session.get(f"{url}/v1/status") as answer:
                    for found in (await answer.json())["partitions"]:
                        is_it = (found["topic"], found["partition"]) == (self.topic, partition)
                        if is_it and wanted in (found["state"], found.get("stop", {}).get("kind")):
                            return dict(found)
                await asyncio.sleep(0.05)

    async def resume(self, url: str, start: str | int, partition: int = 0) -> tuple[int, dict[str, Any]]:
        body = {"topic": self.topic, "partition": partition, "from": start}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/resume", json=body) as answer:
                return answer.status, await answer.json(content_type=None)


@pytest.fixture
def world(stack: Stack, request: pytest.FixtureRequest, tmp_path: Path) -> World:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:60].strip("-")
    return World(stack, name, tmp_path)


async def test_batches_of_every_codec_and_size_and_transactions(world: World) -> None:
    await world.create(partitions=3)
    for number, codec in enumerate(CODECS):
        many = [b"%d of many, " % index * 3 for index in range(10_000)]
        await world.write(*many, partition=number % 3, compression_type=codec, linger_ms=50, max_batch_size=1 << 20)
        for size in (0, 1, 200_000):
            await world.write(bytes(size), partition=number % 3, compression_type=codec)
        transactional = {"transactional_id": f"{world.name}-{codec}", "compression_type": codec}
        async with AIOKafkaProducer(bootstrap_servers=world.there, **transactional) as producer:
            for turn in range(6):
                await producer.begin_transaction()
                for partition in range(3):
                    headers = [("turn", b"%d" % turn), ("empty", b"")]
                    for index in range(20):
                        await producer.send(world.topic, b"%d" % index, key=None, partition=partition, headers=headers)
                await (producer.abort_transaction() if turn % 2 else producer.commit_transaction())
    with mirroring(world.mirror) as url:
        assert await world.differences() == []
        found = await world.state(url, "caught-up")
        assert (found["lag_records"], found["lag_s"]) == (0, 0.0)
        original, copy = await read_log(world.there, world.topic), await read_log(world.here, world.topic)
        history = await pairs_by_history(world.here, world.mirror.pairs)
        assert {number: history[world.topic, number] for number in original} == true_pairs(original, copy)


async def test_a_topic_grows_with_its_original_and_keeps_its_settings(world: World) -> None:
    await world.create(partitions=1, **{"retention.ms": "123456789", "max.message.bytes": "2000000"})
    with mirroring(world.mirror) as url:
        await world.write(b"first")
        await world.state(url, "caught-up")
        await world.admin(world.there, "create_partitions", {world.topic: NewPartitions(3)})
        await world.write(b"second", partition=2)
        assert await world.differences() == []
    client = AIOKafkaAdminClient(bootstrap_servers=world.here)
    await client.start()
    try:
        [answer] = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, world.topic)])
    finally:
        await client.close()
    settings = {entry[0]: entry[1] for entry in answer.resources[0][4]}
    assert settings["retention.ms"] == "123456789"
    assert int(settings["max.message.bytes"]) >= 2_000_000
    assert settings["compression.type"] == "producer"


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
        assert f"{world.topic}-0 of dc1 stands still: records-removed" in said
        assert f"logferry mirror resume {world.topic} 0 --url {url} --from" in said
        assert (await world.resume(url, 3))[0] == 409
        assert await world.resume(url, "earliest") == (200, {"topic": world.topic, "partition": 0, "from": 15})
        await world.state(url, "caught-up")
        exit_status, said = await shown(url)
        assert (exit_status, "the mirror of dc2: all is well" in said) == (0, True)
        assert "0 records" in said
        [link] = json.loads((await shown(url, "--json"))[1])["workers"][url]["links"]
        assert (link["lag_records"], link["lag_bytes"], link["stopped"]) == (0, 0, 0)
        values = [record.value for _, record in (await read_log(world.here, world.topic))[0]]
        assert values == [b"%d" % number for number in (*range(10), *range(15, 30))]
        assert (await world.resume(url, "earliest"))[0] == 409
        history = await pairs_by_history(world.here, world.mirror.pairs)
        assert sorted(history[world.topic, 0]) == [*range(10), *range(15, 30)]


async def test_a_topic_that_is_created_anew_there(world: World) -> None:
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
        assert (await world.resume(url, "earliest"))[0] == 200
        assert await world.differences() == []


async def test_what_kafka_here_refuses_stops_that_partition_alone(world: World) -> None:
    await world.create(partitions=2, **{"max.message.bytes": "3000000"})
    await world.write(b"small")
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        small = ConfigResource(ConfigResourceType.TOPIC, world.topic, {"max.message.bytes": "1000"})
        await world.admin(world.here, "alter_configs", [small])
        await world.write(bytes(100_000), max_request_size=1 << 22)
        stopped = await world.state(url, "refused")
        assert "larger" in stopped["stop"]["detail"] or "TooLarge" in stopped["stop"]["detail"]
        await world.write(b"small", partition=1)
        await world.state(url, "caught-up", partition=1)
        large = ConfigResource(ConfigResourceType.TOPIC, world.topic, {"max.message.bytes": "4000000"})
        await world.admin(world.here, "alter_configs", [large])
        assert (await world.resume(url, 1))[0] == 200
        assert await world.differences() == []


async def records_of_batches(world: World) -> list[int]:
    """How many records each batch of the copy has."""
    kafka = Kafka({"bootstrap_servers": world.here}, world.name)
    await kafka.start()
    try:
        session = FetchSession()
        session.want(((await kafka.describe_topic(world.topic)).id, 0), Wanted(0, -1, 1 << 24))
        leader = await kafka.leader(world.topic, 0)
        fetched = await kafka.channels.ask(leader, session.request(0, 1 << 24))
        return [batch.size for batch in committed_batches(fetched.found[0].records, [], 0).batches]
    finally:
        await kafka.close()


async def test_small_batches_are_written_as_one(world: World) -> None:
    await world.create()
    await world.write(*(b"%d" % number * 20_000 for number in range(20)))
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        assert await world.differences() == []
        sizes = await records_of_batches(world)
        assert sum(sizes) == 20
        assert len(sizes) < 5


async def test_where_they_are_refused_so_they_go_as_they_are(world: World) -> None:
    await world.create()
    small = NewTopic(world.topic, 1, 1, topic_configs={"max.message.bytes": "50000"})
    await world.admin(world.here, "create_topics", [small])
    await world.write(*(b"%d" % number * 20_000 for number in range(20)))
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        assert await world.differences() == []
        assert await records_of_batches(world) == [1] * 20


async def test_the_audit_compares_both_sides_and_goes_on_from_what_is_proven(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.create(partitions=2)
    await world.write(*(b"%d" % number for number in range(50)), linger_ms=50)
    options = ["--mirror", "dc1:dc2", "--config", str(world.mirror.file), "--keep", str(tmp_path / "proven.json")]

    async def audited() -> tuple[int, str]:
        status = await asyncio.to_thread(audit, options)
        return status, capsys.readouterr().out.splitlines()[-1]

    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        where = "dc1 to dc2: 2 partitions"
        alike = "the same records in the same order, nothing twice"
        assert await audited() == (0, f"exact: {where}, 50 records compared: {alike}")
        await world.write(b"50", b"51", partition=1)
        assert await world.differences() == []
        assert await audited() == (0, f"exact: {where}, 2 records compared: {alike}")
    await world.write(b"not yet")
    assert await audited() == (0, f"exact: {where}, 0 records compared, 1 not mirrored yet: {alike}")
    async with AIOKafkaProducer(bootstrap_servers=world.here) as producer:
        await producer.send_and_wait(world.topic, b"planted", partition=1)
    status, verdict = await audited()
    assert (status, verdict.split(":")[0]) == (1, "REFUTED")


async def test_the_command_lets_a_partition_go_on(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    await world.create()
    await world.write(b"0", b"1", b"2")
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")

        async def resumed(start: str) -> int:
            return await asyncio.to_thread(mirror_main, ["resume", world.topic, "0", "--from", start, "--url", url])

        assert await resumed("earliest") == 1
        assert "has not stopped" in capsys.readouterr().err
        await world.admin(world.there, "delete_topics", [world.topic])
        await world.state(url, "source-deleted")
        await world.create()
        await world.state(url, "source-recreated")
        assert await resumed("earliest") == 0
        assert f"{world.topic}-0 goes on at 0" in capsys.readouterr().out
    assert await asyncio.to_thread(mirror_main, ["resume", world.topic, "0", "--from", "1", "--url", url]) == 3


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


async def test_a_compacted_topic_is_copied_as_it_is_retained(world: World, stack: Stack) -> None:
    """Batches with holes, and whole batches gone; before it was mirrored, and more of it afterwards."""
    quick = ConfigResource(ConfigResourceType.BROKER, "1", {"log.cleaner.backoff.ms": "100"})
    await world.admin(world.there, "alter_configs", [quick])
    compaction = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.ms": "200"}
    await world.create(**compaction)

    async def write(turn: int) -> None:
        """Batches of ten keys each, most of which are written again; the last one closes their segment."""
        async with AIOKafkaProducer(bootstrap_servers=world.there, acks="all", linger_ms=20) as producer:
            for start in range(0, 40, 10):
                sent = [
                    await producer.send(
                        world.topic, b"%d in %d" % (number, turn) if number % 7 else None, key=b"%d" % (number * 5 % 17)
                    )
                    for number in range(start, start + 10)
                ]
                await asyncio.gather(*sent)
            await asyncio.sleep(0.3)  # older than segment.ms: the next record rolls the segment
            await producer.send_and_wait(world.topic, b"closes", key=b"last-%d" % turn)

    async def compacted() -> int:
        """Waits until no key is there twice; how many records are retained then."""
        async with asyncio.timeout(60):
            while True:
                kept = [record.key for _, record in (await read_log(world.there, world.topic))[0]]
                if len(set(kept)) == len(kept):
                    return len(kept)
                await asyncio.sleep(0.2)

    await write(0)
    await write(1)
    kept = await compacted()
    with mirroring(world.mirror) as url:
        assert await world.differences() == []
        await world.state(url, "caught-up")
        assert len((await read_log(world.here, world.topic))[0]) == kept
        original, copy = await read_log(world.there, world.topic), await read_log(world.here, world.topic)
        history = await pairs_by_history(world.here, world.mirror.pairs)
        assert history[world.topic, 0] == true_pairs(original, copy)[0]
    # What it read last is compacted away while it is not running; that is no log that was cut back.
    for turn in (2, 3):
        await write(turn)
    await compacted()
    before = copy[0]
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        after = (await read_log(world.there, world.topic))[0]
        copied = (await read_log(world.here, world.topic))[0]
        seen = original[0][-1][0]
        assert [record for _, record in copied] == [
            *(record for _, record in before),
            *(record for offset, record in after if offset > seen),
        ]
