"""The mirror between two real clusters: what it copies, and what it makes here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.record_requests import FetchPosition, FetchSession
from logferry.gateway.kafka.types import TopicIdPartition
from logferry.mirror.copy.batch_rewrite import committed_batches
from logferry.ops.audit.command import main as audit
from logferry.ops.stack.stack import Stack

from tests.support.kafka import alter_topic
from tests.support.mirror import pairs_by_history, read_log, true_pairs
from tests.support.mirrored_topic import World, mirroring, settings_of

CODECS = (None, "gzip", "snappy", "lz4", "zstd")


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
    settings = await settings_of(world.here, world.topic)
    assert settings["retention.ms"] == "123456789"
    assert int(settings["max.message.bytes"]) >= 2_000_000
    assert settings["compression.type"] == "producer"


async def test_settings_that_change_later_are_copied(world: World) -> None:
    """Among them a copy that an operator made too small: what it refused is written when it is as it must be."""
    await world.create(partitions=1, **{"retention.ms": "123456789"})
    await world.write(b"small")
    wrong = {"max_message_bytes": "1000", "message_timestamp_after_max_ms": "3600000"}
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        await alter_topic(world.here, world.topic, **wrong)
        await alter_topic(world.there, world.topic, retention_ms="987654321", max_message_bytes="3000000")
        # It is refused here, so the settings are compared at once.
        await world.write(bytes(2_000_000), max_request_size=1 << 22)
        assert await world.differences() == []
        found = await settings_of(world.here, world.topic)
    assert found["retention.ms"] == "987654321"
    assert int(found["max.message.bytes"]) == 3_004_096
    assert found["message.timestamp.after.max.ms"] == str(2**63 - 1)
    assert found["min.insync.replicas"] == (await settings_of(world.there, world.topic))["min.insync.replicas"]


async def records_of_batches(world: World) -> list[int]:
    """How many records each batch of the copy has."""
    kafka = KafkaClient({"bootstrap_servers": world.here}, world.name)
    await kafka.start()
    try:
        session = FetchSession()
        session.want(TopicIdPartition((await kafka.describe_topic(world.topic)).id, 0), FetchPosition(0, -1, 1 << 24))
        leader = await kafka.present_leader(world.topic, 0)
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
    world.configure(carry_settings=False)
    await world.create()
    small = NewTopic(world.topic, 1, 1, topic_configs={"max.message.bytes": "50000"})
    await world.admin(world.here, "create_topics", [small])
    await world.write(*(b"%d" % number * 20_000 for number in range(20)))
    with mirroring(world.mirror) as url:
        await world.state(url, "caught-up")
        assert await world.differences() == []
        assert await records_of_batches(world) == [1] * 20


async def test_the_audit_compares_both_sides_and_continues_from_the_proof(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.create(partitions=2)
    await world.write(*(b"%d" % number for number in range(50)), linger_ms=50)
    options = ["--mirror", "dc1:dc2", "--config", str(world.mirror.file), "--state-file", str(tmp_path / "proven.json")]

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


async def test_a_compacted_topic_is_copied_as_it_is_retained(world: World, stack: Stack) -> None:
    """Batches with holes, and whole batches gone; before it was mirrored, and more of it afterwards."""
    world.configure(carry_settings=False)  # the copy is not compacted, too
    quick = ConfigResource(ConfigResourceType.BROKER, "1", {"log.cleaner.backoff.ms": "100"})
    await world.admin(world.there, "alter_configs", [quick])
    compaction = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.ms": "200"}
    await world.create(1, **compaction)

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
