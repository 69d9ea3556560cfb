"""A partition with a record that cannot be read stops alone; the disk's bytes are changed under a real broker."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import msgpack
import pytest
from logferry.client import Reader
from logferry.client.errors import Rejected
from logferry.gateway.kafka.record_batch import BATCH_HEAD, BEFORE_LENGTH
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.read_sessions import Stream, has, identities, make, write
from tests.support.served_gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


@contextmanager
def damaged_batch(kafka: KafkaCluster, topic: str, number: int, partition: int = 0) -> Iterator[int]:
    """While it lasts, a byte of the partition's batch with that number is another; gives the batch's offset."""
    [log] = (kafka.data / "kafka-1" / "log" / f"{topic}-{partition}").glob("*.log")
    raw, at = log.read_bytes(), 0
    for _ in range(number):
        at += BEFORE_LENGTH + struct.unpack_from(">i", raw, at + 8)[0]
    offset, length, *_ = BATCH_HEAD.unpack_from(raw, at)
    last = at + BEFORE_LENGTH + length - 1
    _write_byte(log, last, raw[last] ^ 0xFF)
    try:
        yield offset
    finally:
        _write_byte(log, last, raw[last])


def _write_byte(file: Path, at: int, byte: int) -> None:
    with file.open("r+b") as out:
        out.seek(at)
        out.write(bytes((byte,)))


async def test_a_damaged_partition_stops_alone_and_goes_on_when_mended(
    gateway: Gateway, kafka: KafkaCluster, topic_name: str
) -> None:
    topic = await make(gateway, topic_name)
    for start in range(12):
        await write(gateway, topic_name, start=start)
    async with Stream(gateway.session, gateway.urls[0], "whole-" + topic_name, f"topic={topic}") as stream:
        await stream.until(has(96))
        whole = identities(stream)
        before = {p: [f["offset"] for f in stream.chunks if f["partition"] == p] for p in (0, 1)}
    async with AsyncExitStack() as readers:
        with damaged_batch(kafka, topic, 8) as offset:
            later = Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}")
            stream = await readers.enter_async_context(later)
            await stream.until(lambda s: "damaged" in s.kinds())
            frame = stream.last("damaged")
            assert (frame["topic"], frame["partition"]) == (topic, 0)
            assert frame["problem"]["type"].endswith("kafka-unavailable")
            assert "wrong checksum" in frame["problem"]["detail"]
            readable = sum(at < offset for at in before[0]) + len(before[1])
            await stream.until(has(readable))
            await write(gateway, topic_name, start=12)
            new = sum(f["seqno"] == 13 for f in stream.chunks)
            while new < len(before[1]) // 12:
                await stream.next()
                new = sum(f["seqno"] == 13 for f in stream.chunks)
            assert all(f["partition"] == 1 or f["offset"] < offset for f in stream.chunks)
            assert "error" not in stream.kinds()
            assert stream.kinds().count("damaged") == 1
        await stream.until(has(104))
        assert identities(stream) == sorted(whole + [(topic, f"web{n}", 13) for n in range(8)])
        assert [f["offset"] for f in stream.chunks if f["partition"] == 0][: len(before[0])] == before[0]


async def test_a_damaged_control_batch_stops_nothing(gateway: Gateway, kafka: KafkaCluster, topic_name: str) -> None:
    topic = await make(gateway, topic_name, 1)
    for start in range(6):
        await write(gateway, topic_name, sources=1, start=start)
    with damaged_batch(kafka, topic, 5):
        async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
            await stream.until(has(6))
            assert [frame["seqno"] for frame in stream.chunks] == [1, 2, 3, 4, 5, 6]
            assert "damaged" not in stream.kinds()


async def test_what_lies_before_it_is_read_page_by_page(gateway: Gateway, kafka: KafkaCluster, topic_name: str) -> None:
    topic = await make(gateway, topic_name, 1)
    for start in range(5):
        await write(gateway, topic_name, sources=1, start=start)
    path = f"/v1/topics/{topic}/partitions/0/chunks"
    with damaged_batch(kafka, topic, 6) as offset:
        _, body, _ = await gateway.ask("GET", f"{path}?offset=0")
        unpacker = msgpack.Unpacker()
        unpacker.feed(body)
        assert [row[5] for row in unpacker] == [1, 2, 3]
        status, problem, _ = await gateway.ask("GET", f"{path}?offset={offset}")
        assert status == 503
        assert f"the batch at offset {offset} has a wrong checksum" in problem["detail"]


async def test_a_reader_to_the_end_says_which_partition(gateway: Gateway, kafka: KafkaCluster, topic_name: str) -> None:
    topic = await make(gateway, topic_name)
    for start in range(4):
        await write(gateway, topic_name, start=start)

    def read() -> tuple[int, str]:
        found = 0
        with Reader(gateway.urls[0], topic, consumer=topic_name, follow=False) as reader:
            try:
                for _ in reader:
                    found += 1
            except Rejected as error:
                return found, str(error)
        return found, ""

    with damaged_batch(kafka, topic, 4):
        found, said = await asyncio.to_thread(read)
    assert found >= 12
    assert f"{topic}-0" in said
    assert "wrong checksum" in said
