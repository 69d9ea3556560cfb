"""What comes in a read session: real workers, real Kafka, readers over HTTP."""

from __future__ import annotations

import time

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from logferry.gateway.contract.chunk import MSGPACK, NDJSON, Chunk, record_headers
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.kafka import delete_topic, recreate_topic
from tests.support.read_sessions import Stream, has, identities, is_caught_up, make, offsets, write
from tests.support.served_gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("accept", [MSGPACK, NDJSON])
async def test_chunks_come_with_all_of_their_keys(gateway: Gateway, topic_name: str, accept: str) -> None:
    topic = await make(gateway, topic_name, 1)
    source = f"/v1/topics/{topic_name}/sources/web1%2F%C3%A4.log/chunks"
    headers = {"X-Attr-Host": "w%C3%A9b"}
    await gateway.ask("POST", f"{source}?seqno=7&created_ms=5", data="grüß\n".encode(), headers=headers)
    await gateway.ask("POST", f"{source}?seqno=9&prev=7&created_ms=6", data=b"\xff\xfe")
    async with Stream(gateway.session, gateway.urls[1], "c-" + topic_name, f"topic={topic}", accept) as stream:
        await stream.until(lambda s: has(2)(s) and is_caught_up(s))
        first, second = stream.chunks
        assert stream.response.headers["Content-Type"] == accept
    assert list(first) == [
        "frame", "dc", "topic", "partition", "offset", "source_id", "seqno", "prev", "created_ms", "recorded_ms",
        "attributes", "data",
    ]  # fmt: skip
    recorded = first.pop("recorded_ms")
    assert abs(recorded / 1000 - time.time()) < 600
    assert first == {
        "frame": "chunk",
        "dc": "dc1",
        "topic": topic,
        "partition": 0,
        "offset": 0,
        "source_id": "web1/ä.log",
        "seqno": 7,
        "prev": None,
        "created_ms": 5,
        "attributes": {"host": "wéb"},
        "data": "grüß\n" if accept == NDJSON else "grüß\n".encode(),
    }
    assert (second["seqno"], second["prev"], second["attributes"]) == (9, 7, {})
    assert second.get("data_base64", second.get("data")) == ("//4=" if accept == NDJSON else b"\xff\xfe")
    assert stream.kinds()[:3] == ["session", "assigned", "chunk"]
    assert stream.frames[0] == {"frame": "session", "session": stream.id, "consumer": "c-" + topic_name}
    assert stream.frames[1]["partitions"] == [{"topic": topic, "partition": 0, "offset": 0}]


async def test_what_is_written_later_comes_too_and_silence_is_kept_alive(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(is_caught_up)
        assert stream.chunks == []
        count = await write(gateway, topic_name)
        await stream.until(lambda s: has(count)(s) and is_caught_up(s))
        await stream.until(lambda s: "keep_alive" in s.kinds())
    assert len(set(identities(stream))) == count


async def test_filters(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name)
    await write(gateway, topic_name, sources=12)
    query = f"topic={topic}&source_prefix=web1&attr.host=web11"
    async with Stream(gateway.session, gateway.urls[0], topic_name, query) as stream:
        await stream.until(is_caught_up)
        assert [frame["source_id"] for frame in stream.chunks] == ["web11"]
        # What was left out is passed by the position, too.
        assert (await stream.commit(stream.held))[0] == 200
    assert {p["lag_records"] for p in (await offsets(gateway, topic_name))["positions"]} == {0}


async def test_aborted_and_foreign_records_are_no_chunks(
    gateway: Gateway, kafka: KafkaCluster, topic_name: str
) -> None:
    topic = await make(gateway, topic_name, 1)
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic_name)
    async with producer:
        for fate in ("abort", "commit", "abort"):
            await producer.begin_transaction()
            chunk = Chunk(1 if fate == "commit" else 2, None, 0, {}, fate.encode())
            headers = record_headers(chunk)
            await producer.send_and_wait(topic, chunk.data, key=b"s", partition=0, headers=headers)
            await producer.send_and_wait(topic, b"no chunk", partition=0)
            await (producer.abort_transaction() if fate == "abort" else producer.commit_transaction())
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(is_caught_up)
        assert [frame["data"] for frame in stream.chunks] == [b"commit"]
        assert (await stream.commit(stream.held))[0] == 200
    assert (await offsets(gateway, topic_name))["positions"][0]["lag_records"] == 0


async def test_patterns_follow_topics_that_come_and_partitions_that_are_added(
    gateway: Gateway, admin: AIOKafkaAdminClient, kafka: KafkaCluster, topic_name: str
) -> None:
    one = await make(gateway, topic_name + "-one", 1)
    await write(gateway, topic_name + "-one")
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic=*.{topic_name}-*") as stream:
        await stream.until(has(8))
        await stream.commit(stream.held)
        other = f"dc2.{topic_name}-two"
        await admin.create_topics([NewTopic(other, 1, 1), NewTopic(f"dc9.{topic_name}-two", 1, 1)])
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
            headers = record_headers(Chunk(1, None, 0, {}, b"mirrored"))
            for topic in (other, f"dc9.{topic_name}-two"):
                await producer.send_and_wait(topic, b"mirrored", key=b"s", partition=0, headers=headers)
        await stream.until(lambda s: (other, 0) in s.held and has(9)(s))
        await stream.commit(stream.held)
        await make(gateway, topic_name + "-one", 2)
        await write(gateway, topic_name + "-one", sources=32, start=1)
        # Some of these come before the new partition is seen; they are not committed, so they come again.
        await stream.until(lambda s: (one, 1) in s.held and len(set(identities(s))) == 9 + 32)
    committed = [(one, f"web{number}", 1) for number in range(8)] + [(other, "s", 1)]
    more = [(one, f"web{number}", 2) for number in range(32)]
    came = identities(stream)
    assert set(came) == {*committed, *more}
    assert [came.count(chunk) for chunk in committed] == [1] * 9


async def test_several_topics_by_name(gateway: Gateway, topic_name: str) -> None:
    topics = [await make(gateway, f"{topic_name}-{name}", 1) for name in "abc"]
    for name in "abc":
        await write(gateway, f"{topic_name}-{name}", sources=1)
    query = f"topic={topics[0]}&topic={topics[1]}"
    async with Stream(gateway.session, gateway.urls[0], topic_name, query) as stream:
        await stream.until(has(2))
        assert set(stream.held) == {(topics[0], 0), (topics[1], 0)}
    assert {frame["topic"] for frame in stream.chunks} == set(topics[:2])


async def test_a_topic_that_is_deleted_ends_the_session(
    gateway: Gateway, admin: AIOKafkaAdminClient, topic_name: str
) -> None:
    topic = await make(gateway, topic_name)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(is_caught_up)
        await admin.delete_topics([topic])
        await stream.until(lambda s: "error" in s.kinds())
        assert stream.last("error")["problem"]["type"].endswith("/unknown-topic")
        with pytest.raises(StopAsyncIteration):
            await stream.next()


async def test_a_recreated_topic_ends_the_session_and_the_next_one_begins_at_its_start(
    gateway: Gateway, kafka: KafkaCluster, topic_name: str
) -> None:
    """Also when the new one is there and full before anybody looks again: what was committed says nothing of it."""
    topic = await make(gateway, topic_name, 1)
    await write(gateway, topic_name, chunks=5)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(is_caught_up)
        assert (await stream.commit(stream.held))[0] == 200
        gone = await delete_topic(kafka.bootstrap, topic)
        await recreate_topic(kafka.bootstrap, topic, gateway.urls, 1, gone)
        status, problem = await stream.commit(stream.held)
        assert (status, problem["type"].rpartition("/")[2]) in ((404, "unknown-topic"), (409, "superseded"))
        count = await write(gateway, topic_name, start=100, chunks=9)
        await stream.until(lambda s: "error" in s.kinds())
        assert stream.last("error")["problem"]["type"].endswith("/unknown-topic")
        with pytest.raises(StopAsyncIteration):
            await stream.next()
    async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as again:
        await again.until(is_caught_up)
        assert again.frames[1]["partitions"] == [{"topic": topic, "partition": 0, "offset": 0}]
        assert again.last("chunk")["seqno"] > 100
        assert len(set(identities(again))) == len(again.chunks) == count
