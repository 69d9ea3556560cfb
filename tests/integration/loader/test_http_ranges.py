"""Ranges over HTTP: exactly the requested records, whatever happens to connections, or an error with the reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from logferry.client import Reader, Writer
from logferry.client.reading.decode import ReceivedChunk
from logferry.gateway.token_command import new_token
from logferry.loaders.errors import GatewayUnavailable, LoaderConfigError, TopicChanged
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.query.http_ranges import EARLIEST, LATEST, HttpTopics, ranges_between
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.checker import committed_records
from tests.support.gateway import Gateway
from tests.support.loader import Topic, chunks_of
from tests.support.relay import Relay
from tests.support.served_gateway import Gateway as Guarded

CHUNKS = 40


@pytest.fixture
def topic(workers: Gateway, topic_name: str) -> str:
    """Two partitions with chunks of 32 KiB, some of them behind aborted transactions."""
    full = asyncio.run(workers.make_topic(topic_name, 2))
    for source in ("a", "b", "c"):
        with Writer(workers.urls, topic_name, source) as writer:
            for number in range(CHUNKS // 4):
                writer.write(b"%d " % number + b"x" * 32_768)
    asyncio.run(Topic(workers.kafka.bootstrap, full).write(chunks_of("d", b"aborted"), partitions=2, commit=False))
    with Writer(workers.urls, topic_name, "e") as writer:
        writer.write(b"last\n")
    asyncio.run(committed_records(workers.kafka.bootstrap, full))  # Kafka shows it a moment later
    return full


@pytest.fixture
def door(workers: Gateway, topic: str) -> Iterator[HttpTopics]:
    with closing(HttpTopics(workers.urls, [topic], page_bytes=1 << 16, retry_s=20)) as door:
        yield door


def read(door: HttpTopics, *wanted: Range) -> list[ReceivedChunk]:
    return [chunk for part in wanted for page in door.chunks(part) for chunk in page]


def all_of(workers: Gateway, topic: str) -> list[ReceivedChunk]:
    """As the library's reader has them."""
    with Reader(workers.urls, topic, follow=False) as reader:
        return sorted(reader, key=lambda chunk: (chunk.partition, chunk.offset))


def test_ranges_are_what_the_gateway_reads(door: HttpTopics, workers: Gateway, topic: str):
    offsets, chunks = door.offsets(), all_of(workers, topic)
    whole = ranges_between(door.resolve_cursors(EARLIEST, offsets), door.resolve_cursors(LATEST, offsets))
    assert read(door, *whole) == chunks
    assert len(chunks) == CHUNKS // 4 * 3 + 1
    for place, at in offsets.items():
        of_it = [chunk for chunk in chunks if chunk.partition == place.partition]
        for start in range(at.earliest, at.stable, 3):
            part = Range(*place, "", start, min(start + 5, at.stable))
            want = [chunk for chunk in of_it if part.start <= chunk.offset < part.end]
            assert read(door, part) == want == read(door, part)


def test_connections_that_are_cut_in_mid_range(workers: Gateway, topic: str):
    over, cuts = threading.Event(), []
    with Relay(workers.urls[0]) as relay, closing(HttpTopics([relay.url], [topic], page_bytes=1, retry_s=60)) as door:
        offsets = door.offsets()
        relay.bytes_per_s = 1 << 20

        def cut() -> None:
            while not over.wait(0.1):
                cuts.append(relay.cut(wait=False))

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            found = read(door, *ranges_between({}, {place: at.stable for place, at in offsets.items()}))
        finally:
            over.set()
            cutter.join()
    assert found == all_of(workers, topic)
    assert sum(bool(cut) for cut in cuts) >= 3


def test_an_absent_gateway_is_reported_after_a_while(workers: Gateway, topic: str):
    with closing(HttpTopics(["http://127.0.0.1:9"], [topic], retry_s=1)) as door:
        with pytest.raises(GatewayUnavailable, match=r"no gateway answers at http://127\.0\.0\.1:9"):
            door.offsets()
    with closing(HttpTopics(["http://127.0.0.1:9", workers.urls[0]], [topic], retry_s=20)) as door:
        assert len(door.offsets()) == 2


def test_positions(door: HttpTopics, topic: str):
    offsets = door.offsets()
    zero, one = (TopicPartition(topic, number) for number in (0, 1))
    assert door.resolve_cursors(f"{topic}:0:3", offsets) == {zero: 3, one: 0}
    assert door.resolve_cursors(f"cursors:{topic}:0:3,{topic}:1:2", offsets) == {zero: 3, one: 2}
    with pytest.raises(LoaderConfigError, match="neither earliest, latest, nor a position"):
        door.resolve_cursors("yesterday", offsets)
    with pytest.raises(LoaderConfigError, match=r"dc1\.other:0, which is not a partition of these topics"):
        door.resolve_cursors("dc1.other:0:3", offsets)


async def test_what_is_not_retained_is_an_error(workers: Gateway, topic_name: str):
    full = await workers.make_topic(topic_name)
    kafka = Topic(workers.kafka.bootstrap, full)
    await kafka.write(chunks_of("s", b"1\n", b"2\n", b"3\n"))
    await kafka.remove_before(0, 2)

    def ask(part: Range) -> list[ReceivedChunk]:
        with closing(HttpTopics(workers.urls, [full], retry_s=1)) as door:
            return read(door, part)

    with pytest.raises(TopicChanged, match="offsets 0 to 2: out-of-range"):
        await asyncio.to_thread(ask, Range(full, 0, "", 0, 3))
    with pytest.raises(TopicChanged, match="its log was truncated"):
        await asyncio.to_thread(ask, Range(full, 0, "", 2, 9))
    assert [chunk.data for chunk in await asyncio.to_thread(ask, Range(full, 0, "", 2, 3))] == [b"3\n"]


def test_a_topic_that_is_not_there(workers: Gateway):
    with (
        closing(HttpTopics(workers.urls, ["dc1.nothing"])) as door,
        pytest.raises(LoaderConfigError, match="unknown-topic"),
    ):
        door.offsets()


async def test_a_token_that_is_wrong_or_may_not(kafka: KafkaCluster, tmp_path: Path):
    (reader, reader_hash), (stranger, stranger_hash) = new_token(), new_token()
    tokens = (
        f'[[tokens]]\nname = "reader"\nsha256 = "{reader_hash}"\nread = ["*"]\nadmin = ["*"]\n'
        f'[[tokens]]\nname = "stranger"\nsha256 = "{stranger_hash}"\nread = ["squid"]\n'
    )

    def ask(token: str | None) -> int:
        with closing(HttpTopics([urls[0]], ["dc1.guarded"], token=token, retry_s=20)) as door:
            return len(door.offsets())

    async with Guarded(tmp_path, kafka.bootstrap, 1, tokens) as gateway:
        await gateway.ask("PUT", "/v1/topics/guarded", reader, data='{"partitions": 2}')
        urls = gateway.urls
        assert await asyncio.to_thread(ask, reader) == 2
        for token, said in ((None, "unauthenticated"), ("wrong", "unauthenticated"), (stranger, "forbidden")):
            with pytest.raises(LoaderConfigError, match=rf"{said}.*\(the option token\)"):
                await asyncio.to_thread(ask, token)
