"""Committed positions that come along with the topics: forward only, and not under a group that reads here."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.stack import Stack

from tests.support.kafka import becomes, commit, committed
from tests.support.mirror import Mirror

_TOPIC = "dc1.carried"
_PARTITION = TopicPartition(_TOPIC, 0)


async def test_positions_come_along(stack: Stack, tmp_path: Path) -> None:
    there, here = stack.cluster("dc1"), stack.cluster("dc2")
    admin = AIOKafkaAdminClient(bootstrap_servers=there.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(_TOPIC, 1, 1)])
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=there.bootstrap, transactional_id="writer") as producer:
        for number in range(10):  # a control record after each: offset 2 n there
            async with producer.transaction():
                await producer.send(_TOPIC, b"%d" % number, partition=0)
    mirror = Mirror(stack, tmp_path, "carried")
    worker = mirror.start()
    try:
        await commit(there, "one", _TOPIC, 8)
        assert await becomes(here, "one", _TOPIC, await where(here, b"4"))
        await commit(there, "one", _TOPIC, 9)  # on a control record: the same next record
        end, taken_s = await where(here, b"9") + 1, list[float]()
        for group in ("two", "two again", "two once more"):
            began = time.monotonic()
            await commit(there, group, _TOPIC, 20)  # everything
            assert await becomes(here, group, _TOPIC, end)
            taken_s.append(time.monotonic() - began)
        # At least every 5 s, is the promise; the look at it takes its time, too.
        print(taken_s)
        # It continued here, so what it commits there does not set it back.
        await commit(here, "one", _TOPIC, await where(here, b"7"))
        await commit(there, "one", _TOPIC, 12)
        await commit(there, "three", _TOPIC, 4)  # when this has come, so has what was before it
        assert await becomes(here, "three", _TOPIC, await where(here, b"2"))
        assert await committed(here, "one", _TOPIC) == await where(here, b"7")
        # A group with a member here is left alone; groups are gone through by their names.
        async with AIOKafkaConsumer(
            _TOPIC, bootstrap_servers=here.bootstrap, group_id="three", enable_auto_commit=False
        ) as live:
            while not live.assignment():
                await live.getmany(timeout_ms=100)
            await commit(there, "three", _TOPIC, 6)
            await commit(there, "zzz", _TOPIC, 6)
            assert await becomes(here, "zzz", _TOPIC, await where(here, b"3"))
            assert await committed(here, "three", _TOPIC) == await where(here, b"2")
        assert await becomes(here, "three", _TOPIC, await where(here, b"3"))
    finally:
        worker.child.stop(15)


async def where(cluster: KafkaCluster, value: bytes) -> int:
    """The offset of the record there."""
    async with asyncio.timeout(60):
        options = {"isolation_level": "read_committed", "auto_offset_reset": "earliest"}
        async with AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap, **options) as reader:
            while True:
                try:
                    reader.assign([_PARTITION])
                    found = await reader.getmany(timeout_ms=1000)
                except (AssertionError, ValueError):
                    continue
                for record in found.get(_PARTITION, []):
                    if record.value == value:
                        return int(record.offset)
                await asyncio.sleep(0.1)
