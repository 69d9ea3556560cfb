"""Read sessions and the positions of consumers, from outside: real workers, real Kafka, readers over HTTP."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.structs import TopicPartition
from logferry.gateway.auth import new_token
from logferry.gateway.contract import MSGPACK, NDJSON, Chunk, pack_chunk, record_headers
from logferry.gateway.readers import named
from logferry.ops.kafka import Cluster
from yarl import URL

from tests.serving import Gateway
from tests.streaming import PATIENCE_S, Stream

# A session whose connection is cut gives its partitions up within this time.
MOVED_S = 10


# One gateway serves all of these tests, so they share its event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(kafka: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Two workers; small limits for what a session holds."""
    folder = tmp_path_factory.mktemp("gateway")
    async with Gateway(folder, kafka.bootstrap, 2, "[limits]\nsession_bytes = 1048576\n") as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(kafka: Cluster) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await client.start()
    yield client
    await client.close()


async def make(gateway: Gateway, topic: str, partitions: int = 2) -> str:
    status, document, _ = await gateway.ask("PUT", f"/v1/topics/{topic}", json={"partitions": partitions})
    assert status in (200, 201), document
    return f"dc1.{topic}"


async def write(gateway: Gateway, topic: str, sources: int = 8, start: int = 0, chunks: int = 1, size: int = 20) -> int:
    """``chunks`` of random bytes to each source, from seqno ``start`` + 1 on; returns how many in all.

    Kafka shows a transaction to readers a moment after its commit is answered; that is waited for.
    """
    rng = random.Random(start)
    last: dict[int, int] = {}
    for source in range(sources):
        body = b"".join(
            pack_chunk(Chunk(start + n + 1, None, 1000 + n, {"host": f"web{source}"}, rng.randbytes(size)))
            for n in range(chunks)
        )
        path = f"/v1/topics/{topic}/sources/web{source}/chunks"
        status, document, _ = await gateway.ask("POST", path, data=body, headers={"Content-Type": MSGPACK})
        assert status == 200, document
        last[document["partition"]] = document["offsets"][1]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            _, document, _ = await gateway.ask("GET", f"/v1/topics/{topic}")
            if all(p["next"] > last.get(p["partition"], -1) + 1 for p in document["offsets"] if p["partition"] in last):
                return sources * chunks
            await asyncio.sleep(0.01)


def has(count: int) -> Callable[[Stream], bool]:
    return lambda stream: len(stream.chunks) >= count


def is_caught_up(stream: Stream) -> bool:
    """Every partition that is held was said to be caught up, after its last chunk."""
    kinds = stream.kinds()
    if not stream.held:
        return False
    waiting = set(stream.held)
    for frame in stream.frames[len(kinds) - kinds[::-1].index("assigned") :]:
        if frame["frame"] == "chunk":
            waiting.add((frame["topic"], frame["partition"]))
        elif frame["frame"] == "caught_up":
            waiting -= {(p["topic"], p["partition"]) for p in frame["partitions"]}
    return not waiting


def identities(*streams: Stream) -> list[tuple[str, str, int]]:
    return sorted((f["topic"], f["source_id"], f["seqno"]) for stream in streams for f in stream.chunks)


async def offsets(gateway: Gateway, consumer: str, query: str = "") -> Any:
    status, document, _ = await gateway.ask("GET", f"/v1/consumers/{consumer}/offsets{query}")
    assert status == 200, document
    return document


async def put(gateway: Gateway, consumer: str, body: Any) -> None:
    status, document, _ = await gateway.ask("PUT", f"/v1/consumers/{consumer}/offsets", json=body)
    assert status == 200, document


async def until_members(gateway: Gateway, consumer: str, members: int, seconds: float = PATIENCE_S) -> None:
    async with asyncio.timeout(seconds):
        while True:
            view = await offsets(gateway, consumer)
            if view["members"] == members and view["state"] in ("Stable", "Empty"):
                return
            await asyncio.sleep(0.1)


# ---- what comes --------------------------------------------------------------------------------------------


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


async def test_aborted_and_foreign_records_are_no_chunks(gateway: Gateway, kafka: Cluster, topic_name: str) -> None:
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
    gateway: Gateway, admin: AIOKafkaAdminClient, kafka: Cluster, topic_name: str
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


# ---- positions ---------------------------------------------------------------------------------------------


async def test_a_session_starts_at_what_was_committed_by_any_node(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name)
    count = await write(gateway, topic_name)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(lambda s: has(count)(s) and is_caught_up(s))
        # Through the other worker, which hands it on.
        status, document = await stream.commit(stream.held, url=gateway.urls[1])
        assert status == 200
        assert document["positions"] == [
            {"topic": topic, "partition": number, "offset": stream.held[topic, number]} for number in range(2)
        ]
        path = f"/v1/consumers/{topic_name}/sessions/{stream.id}/commit"
        status, _, headers = await gateway.ask("POST", path, worker=1, data="{}", headers={"X-Logferry-Redirect": "1"})
        assert (status, headers["Location"]) == (307, gateway.urls[0] + path)
    more = await write(gateway, topic_name, start=1)
    async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as stream:
        await stream.until(has(more))
        assert [frame["seqno"] for frame in stream.chunks] == [2] * more


async def test_what_was_not_committed_comes_again_and_consumers_are_independent(
    gateway: Gateway, topic_name: str
) -> None:
    topic = await make(gateway, topic_name)
    count = await write(gateway, topic_name)
    for _ in range(2):
        async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
            await stream.until(has(count))
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(lambda s: has(count)(s) and is_caught_up(s))
        assert (await stream.commit(stream.held))[0] == 200
    async with Stream(gateway.session, gateway.urls[0], topic_name + "-other", f"topic={topic}") as other:
        await other.until(has(count))
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as again:
        await again.until(is_caught_up)
        assert again.chunks == []


async def test_lag_and_setting_of_positions(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name, 1)
    path = f"/v1/consumers/{topic_name}/offsets"
    assert await offsets(gateway, topic_name) == {
        "consumer": topic_name, "state": "Dead", "members": 0, "positions": [],
    }  # fmt: skip
    await write(gateway, topic_name, sources=1)
    (before,) = (await offsets(gateway, topic_name, f"?topic={topic}"))["positions"]
    assert (before["offset"], before["first"], before["out_of_range"], before["lag_bytes"]) == (None, 0, False, None)
    assert before["lag_records"] >= 1
    between_ms = int(time.time() * 1000) + 1
    await asyncio.sleep(0.01)
    await write(gateway, topic_name, sources=1, start=1)
    second = 2  # after the first chunk and the marker of its transaction
    sets: list[tuple[Any, int]] = [
        ({"topic": topic, "to": "latest"}, 4),
        ({"topic": topic, "to": "earliest"}, 0),
        ({"topic": topic, "to": between_ms}, second),
        ({"positions": [{"topic": topic, "partition": 0, "offset": 1}]}, 1),
        ({"positions": [{"topic": topic, "partition": 0, "offset": "latest"}]}, 4),
        ({"positions": [{"topic": topic, "partition": 0, "time_ms": between_ms + 3_600_000}]}, 4),
        ({"positions": [{"topic": topic, "partition": 0, "time_ms": 0}]}, 0),
        ({"positions": [{"topic": topic, "partition": 0, "offset": "earliest"}]}, 0),
        ({"positions": [{"topic": topic, "partition": 0, "offset": 2}]}, second),
    ]
    for body, expected in sets:
        status, document, _ = await gateway.ask("PUT", path, worker=1, json=body)
        assert status == 200, document
        assert document["positions"] == [{"topic": topic, "partition": 0, "offset": expected}]
        (now,) = (await offsets(gateway, topic_name))["positions"]
        assert now["offset"] == expected
        assert (now["lag_records"] == 0) == (now["lag_seconds"] is None) == (expected == 4)
    # The marker of the first transaction is nothing to read: the oldest unread one is the second chunk.
    await put(gateway, topic_name, {"positions": [{"topic": topic, "partition": 0, "offset": 1}]})
    (now,) = (await offsets(gateway, topic_name))["positions"]
    assert now["lag_records"] == 2
    assert 0 <= now["lag_seconds"] < 600
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(has(1))
        assert stream.last("assigned")["partitions"][0]["offset"] == 1
        assert [frame["seqno"] for frame in stream.chunks] == [2]
        status, document, _ = await gateway.ask("PUT", path, json={"topic": topic, "to": "earliest"})
        assert (status, document["members"]) == (409, 1)
        assert document["type"].endswith("/conflict")
    assert (await offsets(gateway, topic_name))["positions"][0]["offset"] == 1


async def test_kafkas_own_tools_see_the_same_groups(
    gateway: Gateway, admin: AIOKafkaAdminClient, topic_name: str
) -> None:
    topic = await make(gateway, topic_name)
    await write(gateway, topic_name)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(is_caught_up)
        await stream.commit(stream.held)
        (response,) = await admin.describe_consumer_groups([topic_name])
        _, group, state, kind, _, members = response.groups[0][:6]
        assert (group, state, kind, len(members)) == (topic_name, "Stable", "consumer", 1)
        assert members[0][1] == f"logferry-{stream.id}"
    assert (topic_name, "consumer") in [tuple(group[:2]) for group in await admin.list_consumer_groups()]
    seen = await admin.list_consumer_group_offsets(topic_name)
    assert {(tp.topic, tp.partition): found.offset for tp, found in seen.items()} == stream.held


async def test_a_position_that_is_not_retained_is_said_and_never_reset(
    gateway: Gateway, admin: AIOKafkaAdminClient, topic_name: str
) -> None:
    topic = await make(gateway, topic_name, 1)
    await write(gateway, topic_name, sources=1, chunks=5)
    path = f"/v1/consumers/{topic_name}/offsets"
    await put(gateway, topic_name, {"positions": [{"topic": topic, "partition": 0, "offset": 1}]})
    await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=3)})
    for _ in range(2):
        async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
            await stream.until(lambda s: "error" in s.kinds())
            problem = stream.last("error")["problem"]
            assert stream.chunks == []
            with pytest.raises(StopAsyncIteration):
                await stream.next()
        assert problem["type"].endswith("/out-of-range")
        assert (problem["topic"], problem["partition"]) == (topic, 0)
        assert (problem["offset"], problem["first"], problem["next"]) == (1, 3, 6)
    assert (await offsets(gateway, topic_name))["positions"][0]["out_of_range"]
    await until_members(gateway, topic_name, 0)
    for wrong in (2, 7):
        body = {"positions": [{"topic": topic, "partition": 0, "offset": wrong}]}
        status, document, _ = await gateway.ask("PUT", path, json=body)
        assert (status, document["first"], document["next"]) == (416, 3, 6)
    await put(gateway, topic_name, {"topic": topic, "to": "earliest"})
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
        await stream.until(has(2))
        assert [frame["offset"] for frame in stream.chunks] == [3, 4]
        status, problem = await stream.commit({(topic, 0): 7})
        assert (status, problem["next"]) == (416, 6)


async def test_from_latest_begins_at_the_end_once_and_passes_nothing_over(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name)
    await write(gateway, topic_name)
    query = f"topic={topic}&from=latest"
    async with Stream(gateway.session, gateway.urls[0], topic_name, query) as stream:
        await stream.until(is_caught_up)
        assert stream.chunks == []
        other = await make(gateway, topic_name + "-new", 1)
        status, problem, _ = await gateway.ask(
            "GET", f"/v1/consumers/{topic_name}/stream?topic={other}&from=latest", worker=1
        )
        assert (status, problem["type"].rpartition("/")[2]) == (409, "conflict")
    count = await write(gateway, topic_name, start=1)
    async with Stream(gateway.session, gateway.urls[1], topic_name, query) as stream:
        await stream.until(has(count))
        assert {frame["seqno"] for frame in stream.chunks} == {2}


# ---- sharing -----------------------------------------------------------------------------------------------


async def test_partitions_are_shared_and_move(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name, 4)
    every = {(topic, number) for number in range(4)}
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as one:
        await one.until(lambda s: set(s.held) == every)
        async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
            await asyncio.gather(one.until(lambda s: len(s.held) == 2), two.until(lambda s: len(s.held) == 2))
            assert set(one.held) | set(two.held) == every
            count = await write(gateway, topic_name, sources=32)
            told = await offsets(gateway, topic_name, f"?topic={topic}")
            need = {p["partition"]: p["next"] for p in told["positions"]}

            def has_all(stream: Stream) -> bool:
                return all(position >= need[number] for (_, number), position in stream.held.items())

            await asyncio.gather(one.until(has_all), two.until(has_all))
            assert len(set(identities(one, two))) == len(identities(one, two)) == count
            old = dict(one.held), one.generation
            assert (await one.commit(one.held))[0] == 200
            assert (await two.commit(two.held))[0] == 200
            # Neither may commit what the other one holds, nor in a generation that is not its own.
            assert (await one.commit(two.held))[0] == 409
            status, problem = await one.commit(one.held, generation=one.generation - 1)
            assert (status, problem["type"].rpartition("/")[2]) == (409, "superseded")
        await one.until(lambda s: set(s.held) == every, MOVED_S)
        assert (await one.commit(*old))[0] == 409
        await one.until(is_caught_up)
    assert one.kinds().count("assigned") == 3
    assert len(set(identities(one, two))) == len(identities(one, two)), "what was committed came again"


async def test_a_commit_on_being_revoked_is_in_time(gateway: Gateway, topic_name: str) -> None:
    """A reader that answers ``revoked`` with a commit sees nothing twice, nor does the one that comes."""
    topic = await make(gateway, topic_name, 4)
    count = await write(gateway, topic_name, sources=32)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as one:
        await one.until(has(count))
        delivered = dict(one.held)
        async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
            await one.until(lambda s: "revoked" in s.kinds())
            assert (await one.commit(delivered))[0] == 200
            await asyncio.gather(one.until(lambda s: len(s.held) == 2), two.until(lambda s: len(s.held) == 2))
            await asyncio.gather(one.until(is_caught_up), two.until(is_caught_up))
    assert two.chunks == []
    assert len(one.chunks) == count


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_cut_connection_gives_its_partitions_up(gateway: Gateway, topic_name: str, how: str) -> None:
    topic = await make(gateway, topic_name, 4)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as one:
        await one.until(lambda s: len(s.held) == 4)
        async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
            await two.until(lambda s: len(s.held) == 2)
            assert two.response.connection is not None
            transport = two.response.connection.transport
            assert transport is not None
            if how == "reset":
                transport.abort()
            else:
                transport.close()
            await one.until(lambda s: s.kinds().count("assigned") >= 2 and len(s.held) == 4, MOVED_S)
            assert (await two.commit({(topic, 0): 0}))[0] == 409


async def test_a_worker_that_stops_ends_its_sessions_and_one_that_dies_loses_them(
    gateway: Gateway, topic_name: str
) -> None:
    topic = await make(gateway, topic_name, 4)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as one:
        for number in (signal.SIGTERM, signal.SIGKILL):
            async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
                await two.until(lambda s: len(s.held) == 2)
                gateway.workers[1].send(number)
                with pytest.raises((StopAsyncIteration, aiohttp.ClientPayloadError)):
                    await two.until(lambda s: False)
                seen = one.kinds().count("assigned")
                await one.until(lambda s, seen=seen: s.kinds().count("assigned") > seen and len(s.held) == 4, MOVED_S)
                async with asyncio.timeout(MOVED_S):
                    while True:
                        # 503 while it is not known whether the other worker is gone.
                        status, problem = await two.commit({(topic, 0): 0}, url=gateway.urls[0])
                        if status != 503:
                            break
                        await asyncio.sleep(0.2)
                assert (status, problem["type"].rpartition("/")[2]) == (409, "superseded")
            await asyncio.to_thread(gateway.workers[1].ends_by_itself)
            gateway.workers[1].start()
            await gateway._ready()


# ---- slow readers and limits -------------------------------------------------------------------------------


def rss_bytes(gateway: Gateway, worker: int) -> int:
    status = Path(f"/proc/{gateway.workers[worker].pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


async def test_a_reader_that_does_not_read_holds_little_and_blocks_nobody(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name, 4)
    count = 0
    for turn in range(12):
        count += await write(gateway, topic_name, sources=16, start=100 * turn, chunks=8, size=64 << 10)
    before = rss_bytes(gateway, 0)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as slow:
        await slow.until(has(1))
        # It reads no more; the other one gets its share all the same, and reads it.
        async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
            await two.until(lambda s: len(s.held) == 2)
            await two.until(is_caught_up)
            assert rss_bytes(gateway, 0) - before < 40 << 20
            assert (await two.commit(two.held))[0] == 200
            await slow.until(lambda s: s.kinds().count("assigned") == 2 and is_caught_up(s))
    assert set(identities(slow, two)) == {
        (topic, f"web{source}", 100 * turn + n + 1) for source in range(16) for turn in range(12) for n in range(8)
    }
    assert count == len(set(identities(slow, two)))


async def test_a_reader_that_takes_nothing_for_too_long_is_cut_off(
    kafka: Cluster, tmp_path: Path, topic_name: str
) -> None:
    async with Gateway(tmp_path, kafka.bootstrap, 1, "[limits]\nsession_stall_s = 0.5\nsessions = 1\n") as gateway:
        topic = await make(gateway, topic_name, 1)
        for turn in range(8):
            await write(gateway, topic_name, sources=8, start=100 * turn, chunks=8, size=64 << 10)
        async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as slow:
            await slow.until(has(1))
            status, problem, headers = await gateway.ask("GET", f"/v1/consumers/{topic_name}/stream?topic={topic}")
            assert (status, problem["limit_sessions"]) == (503, 1)
            assert int(headers["Retry-After"]) >= 1
            status, metrics, _ = await gateway.ask("GET", "/metrics")
            assert b"\nlogferry_read_sessions 1.0\n" in metrics
            await until_members(gateway, topic_name, 0)
            assert "it took nothing for 0.5 s" in gateway.said()
        async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
            await stream.until(has(1))


# ---- rights ------------------------------------------------------------------------------------------------


async def test_a_reader_learns_of_what_it_may_read_alone(kafka: Cluster, tmp_path: Path, topic_name: str) -> None:
    secret, sha256 = new_token()
    boss, boss_sha256 = new_token()
    tables = (
        f'[[tokens]]\nname = "reader"\nsha256 = "{sha256}"\nread = ["{topic_name}-mine"]\n'
        f'[[tokens]]\nname = "boss"\nsha256 = "{boss_sha256}"\nread = ["*"]\nwrite = ["*"]\nadmin = ["*"]\n'
    )
    async with Gateway(tmp_path, kafka.bootstrap, 1, tables) as gateway:
        for name in ("mine", "other"):
            await gateway.ask("PUT", f"/v1/topics/{topic_name}-{name}", boss, json={"partitions": 1})
            path = f"/v1/topics/{topic_name}-{name}/sources/s/chunks?seqno=1"
            assert (await gateway.ask("POST", path, boss, data=name.encode()))[0] == 200
        mine, other = f"dc1.{topic_name}-mine", f"dc1.{topic_name}-other"
        base = f"/v1/consumers/{topic_name}"
        # Every topic is set for the consumer, by somebody who may.
        for topic in (mine, other):
            assert (await gateway.ask("PUT", f"{base}/offsets", boss, json={"topic": topic, "to": "earliest"}))[
                0
            ] == 200
        there, not_there = f"topic={other}", "topic=dc1.not-there-at-all"
        refused = [
            await gateway.ask("GET", f"{base}/{what}?{topic}", secret)
            for what in ("stream", "offsets")
            for topic in (there, not_there)
        ] + [
            await gateway.ask("PUT", f"{base}/offsets", secret, json={"topic": topic, "to": "latest"})
            for topic in (other, "dc1.not-there-at-all")
        ]
        assert [status for status, _, _ in refused] == [403] * 6
        assert (await gateway.ask("GET", f"{base}/stream?topic={mine}"))[0] == 401
        _, seen, _ = await gateway.ask("GET", f"{base}/offsets", secret)
        assert [position["topic"] for position in seen["positions"]] == [mine]
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with Stream(session, gateway.urls[0], topic_name, "topic=*") as stream:
                await stream.until(is_caught_up)
                assert set(stream.held) == {(mine, 0)}
                assert [frame["data"] for frame in stream.chunks] == [b"mine"]
                assert (await stream.commit({(other, 0): 0}))[0] == 403
                assert (await stream.commit(stream.held))[0] == 200


# ---- wrong use ---------------------------------------------------------------------------------------------

GOOD = {"generation": 1, "positions": [{"topic": "dc1.t", "partition": 0, "offset": 0}]}
NO_SESSION = "aHR0cDovLzEyNy4wLjAuMTox.0011223344556677"


def position(**changes: Any) -> dict[str, Any]:
    return {"positions": [{**GOOD["positions"][0], **changes}]}  # type: ignore[index]


BAD: list[tuple[str, str, Any, int, str]] = [
    # method, path after /v1/consumers/, body, status, type
    ("GET", "c/stream", None, 400, "bad-request"),
    ("GET", "c/stream?topic=", None, 400, "bad-request"),
    ("GET", "c/stream?topic=nginx", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.%ff", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.a%20b", None, 400, "bad-request"),
    ("GET", "c/stream?topic=*.a%20b", None, 400, "bad-request"),
    ("GET", "c/stream?topic=" + "&topic=".join(["dc1.t"] * 101), None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.t&from=9", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.t&from=latest&from=latest", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.t&form=latest", None, 400, "bad-request"),
    ("GET", "c/stream?topic=dc1.not-there-at-all", None, 404, "unknown-topic"),
    ("GET", "c/stream?topic=dc9.t", None, 404, "unknown-topic"),
    ("GET", "c/stream?topic=__consumer_offsets", None, 400, "bad-request"),
    ("GET", "c/stream?topic={prefix}.gateway.dc1.state", None, 404, "unknown-topic"),
    ("GET", "a%20b/stream?topic=dc1.t", None, 400, "bad-request"),
    ("GET", "%ff/stream?topic=dc1.t", None, 400, "bad-request"),
    ("GET", "c" * 201 + "/stream?topic=dc1.t", None, 400, "bad-request"),
    ("GET", "{prefix}.gateway.dc1/stream?topic=dc1.t", None, 409, "conflict"),
    ("GET", "{prefix}.gateway.dc1/offsets", None, 409, "conflict"),
    ("PUT", "{prefix}.gateway.dc1/offsets", {"topic": "dc1.t", "to": "latest"}, 409, "conflict"),
    ("POST", "c/stream?topic=dc1.t", None, 405, "method-not-allowed"),
    ("POST", f"c/sessions/{NO_SESSION}/commit", GOOD, 409, "superseded"),
    ("POST", "c/sessions/%2E/commit", GOOD, 409, "superseded"),
    ("POST", "c/sessions/%ff/commit", GOOD, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", GOOD, 409, "superseded"),
    ("POST", "c/sessions/{own}.00/commit", b"", 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", b"\xff", 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", [], 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {"generation": 1}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {"generation": 1, "positions": []}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, "generation": -1}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, "generation": "1"}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, "more": 1}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, **position(offset=-1)}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, **position(offset=2**63)}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, **position(partition=2**31)}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {**GOOD, **position(topic="nginx")}, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit?x=1", GOOD, 400, "bad-request"),
    ("POST", "c/sessions/{own}.00/commit", {"generation": 1, "positions": GOOD["positions"] * 2}, 400, "bad-request"),
    ("GET", "c/offsets?topic=nginx", None, 400, "bad-request"),
    ("GET", "c/offsets?topic=*.nginx", None, 400, "bad-request"),
    ("GET", "c/offsets?topic=dc1.not-there-at-all", None, 404, "unknown-topic"),
    ("GET", "c/offsets?limit=1", None, 400, "bad-request"),
    ("PUT", "c/offsets", b"", 400, "bad-request"),
    ("PUT", "c/offsets", {}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.t"}, 400, "bad-request"),
    ("PUT", "c/offsets", {"to": "latest"}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.t", "to": "soon"}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.t", "to": -1}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.t", "to": "latest", **position()}, 400, "bad-request"),
    ("PUT", "c/offsets", {"topic": "dc1.not-there-at-all", "to": "latest"}, 404, "unknown-topic"),
    ("PUT", "c/offsets", {"topic": "__consumer_offsets", "to": "latest"}, 400, "bad-request"),
    ("PUT", "c/offsets", {"positions": []}, 400, "bad-request"),
    ("PUT", "c/offsets", position(time_ms=1), 400, "bad-request"),
    ("PUT", "c/offsets", {"positions": [{"topic": "dc1.t", "partition": 0}]}, 400, "bad-request"),
    ("PUT", "c/offsets", position(topic="dc1.not-there-at-all"), 404, "unknown-topic"),
    ("PUT", "c/offsets", position(partition=7, topic="{there}"), 404, "not-found"),
    ("PUT", "c/offsets", position(offset=7, topic="{there}"), 416, "out-of-range"),
    ("DELETE", "c/offsets", None, 405, "method-not-allowed"),
]


async def test_bad_input_is_a_problem_and_changes_nothing(gateway: Gateway, topic_name: str) -> None:
    there = await make(gateway, topic_name, 1)
    names = {"{prefix}": gateway.prefix, "{own}": named(gateway.urls[0]), "{there}": there}

    def filled(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    wrong = []
    for method, path, body, status, kind in BAD:
        request: dict[str, Any] = {}
        if isinstance(body, bytes):
            request["data"] = body
        elif body is not None:
            for found in body.get("positions", []) if isinstance(body, dict) else []:
                found["topic"] = filled(found["topic"])
            request["json"] = body
        url = URL(gateway.urls[0] + "/v1/consumers/" + filled(path), encoded=True)
        async with gateway.session.request(method, url, **request) as answer:
            document = await answer.json(content_type=None)
            seen = (answer.status, document["type"].rpartition("/")[2], answer.headers["Content-Type"])
        if seen != (status, kind, "application/problem+json"):
            wrong.append((method, path, body, status, kind, document))
    assert wrong == []
    for accept in ("text/plain", "image/png"):
        status, _, _ = await gateway.ask("GET", f"/v1/consumers/c/stream?topic={there}", headers={"Accept": accept})
        assert status == 400
    assert await offsets(gateway, "c") == {"consumer": "c", "state": "Dead", "members": 0, "positions": []}
    assert all(worker.running for worker in gateway.workers)
