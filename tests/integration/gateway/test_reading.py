"""The stateless read: positions, formats, filters, long poll; the same on every worker and every time."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import msgpack
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from logferry.gateway.contract.chunk import MSGPACK, NDJSON
from logferry.gateway.http.request import decoded_body

from tests.support.gateway import Answer, Gateway, source_path

KEYS = (
    *("dc", "topic", "partition", "offset", "source_id"),
    *("seqno", "prev", "created_ms", "recorded_ms", "attributes", "data"),
)
Row = dict[str, Any]


@pytest.fixture
async def topic(workers: Gateway, topic_name: str) -> str:
    """A new topic of one partition, by its full name."""
    return await workers.make_topic(topic_name)


async def write(workers: Gateway, topic: str, seqno: int, data: bytes, source: str = "a", **headers: str) -> int:
    """One transaction; the offset of the chunk. Returns when it can be read: some milliseconds after the answer."""
    offset = await post(workers, topic, seqno, data, source, **headers)
    assert (await rows(workers, topic, f"offset={offset}&wait_ms=10000"))[0]
    return offset


async def post(workers: Gateway, topic: str, seqno: int, data: bytes, source: str = "a", **headers: str) -> int:
    path = source_path(topic.removeprefix("dc1."), source, f"/chunks?seqno={seqno}&created_ms={seqno}")
    attributes = {f"X-Attr-{name}": value for name, value in headers.items()}
    offset: int = (await workers.ask("POST", path, data=data, headers=attributes)).document["offsets"][0]
    return offset


async def ask(
    workers: Gateway, topic: str, query: str = "", accept: str | None = None, worker: int = 0, expect: int = 200
) -> Answer:
    headers = {} if accept is None else {"Accept": accept}
    path = f"/v1/topics/{topic}/partitions/0/chunks{query and '?' + query}"
    return await workers.ask("GET", path, worker, headers=headers, skip_auto_headers=["Accept"], expect=expect)


async def rows(workers: Gateway, topic: str, query: str = "", worker: int = 0) -> tuple[list[Row], int]:
    """The rows, and the next offset."""
    answer = await ask(workers, topic, query, worker=worker)
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(answer.body)
    found = [dict(zip(KEYS, row, strict=True)) for row in unpacker]
    return found, int(answer.headers["X-Next-Offset"])


def seqnos(found: tuple[list[Row], int]) -> list[int]:
    return [row["seqno"] for row in found[0]]


# ---- formats -----------------------------------------------------------------------------------------------


async def test_a_row_has_everything_in_its_order(workers: Gateway, topic: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    await write(workers, topic, 7, b"line\n\xff", "web/ä", level="warn")
    [row], next_offset = await rows(workers, topic)
    recorded_ms = row.pop("recorded_ms")
    assert before_ms - 1000 <= recorded_ms <= time.time_ns() // 1_000_000 + 1000
    assert list(row.values()) == ["dc1", topic, 0, 0, "web/ä", 7, None, 7, {"level": "warn"}, b"line\n\xff"]
    assert next_offset == 2, "past the control record of the commit"


@pytest.mark.parametrize("accept", [None, "*/*", "application/*", MSGPACK, f"text/html, {MSGPACK};q=0.9"])
async def test_messagepack_is_the_default(workers: Gateway, topic: str, accept: str | None) -> None:
    await write(workers, topic, 7, b"line\n")
    answer = await ask(workers, topic, accept=accept)
    assert answer.headers["Content-Type"] == MSGPACK
    assert msgpack.unpackb(answer.body)[5] == 7


async def test_ndjson_has_text_where_it_is_text(workers: Gateway, topic: str) -> None:
    for seqno, data in enumerate([b"plain\n", 'ёж \u2028 "\n'.encode(), b"\xff\n", b""]):
        await write(workers, topic, seqno, data, host="ä")
    answer = await ask(workers, topic, accept=NDJSON)
    assert answer.headers["Content-Type"] == NDJSON
    lines = answer.body.split(b"\n")
    assert lines.pop() == b""
    objects = [json.loads(line) for line in lines]
    assert [one.get("data") for one in objects] == ["plain\n", 'ёж \u2028 "\n', None, ""]
    assert base64.b64decode(objects[2]["data_base64"]) == b"\xff\n"
    assert "data_base64" not in objects[0]
    packed, _ = await rows(workers, topic)
    for one, row in zip(objects, packed, strict=True):
        assert {name: one[name] for name in KEYS[:-1]} == {name: row[name] for name in KEYS[:-1]}


async def test_plain_text_is_the_data_alone(workers: Gateway, topic: str) -> None:
    for seqno, data in enumerate([b"one\n", b"\xfftwo", b"\r\nthree\n"]):
        await write(workers, topic, seqno, data)
    answer = await ask(workers, topic, accept="text/plain")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert answer.body == b"one\n\xfftwo\r\nthree\n"


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        ("deflate, GZIP;q=0.5, br", "gzip"),
        ("gzip, zstd", "zstd"),
        ("zstd;q=0, gzip", "gzip"),
        ("zstd; q=0.0, br", None),
        ("identity", None),
    ],
)
async def test_the_answer_is_compressed_for_those_who_accept_it(
    workers: Gateway, topic: str, accepted: str, coding: str | None
) -> None:
    data = b"GET /index.html 200\n" * 100
    await write(workers, topic, 1, data)
    path = f"/v1/topics/{topic}/partitions/0/chunks"
    answer = await workers.ask("GET", path, headers={"Accept-Encoding": accepted, "Accept": "text/plain"})
    assert answer.headers.get("Content-Encoding") == coding
    assert answer.headers["Vary"] == "Accept-Encoding"
    assert (len(answer.body) < len(data) / 5) == (coding is not None)
    assert decoded_body(answer.body, coding or "identity", 1 << 20) == data


# ---- positions -----------------------------------------------------------------------------------------------


async def test_offsets_by_number_and_by_name(workers: Gateway, topic: str) -> None:
    offsets = [await write(workers, topic, seqno, b"x") for seqno in range(4)]
    assert seqnos(await rows(workers, topic)) == [0, 1, 2, 3]
    assert seqnos(await rows(workers, topic, "offset=earliest")) == [0, 1, 2, 3]
    assert seqnos(await rows(workers, topic, f"offset={offsets[2]}")) == [2, 3]
    assert seqnos(await rows(workers, topic, f"offset={offsets[2] + 1}")) == [3], "the offset of a control record"
    latest, next_offset = await rows(workers, topic, "offset=latest")
    assert (latest, next_offset) == ([], offsets[-1] + 2)


async def test_times(workers: Gateway, topic: str) -> None:
    recorded = []
    for seqno in range(3):
        await write(workers, topic, seqno, b"x")
        recorded.append((await rows(workers, topic))[0][-1]["recorded_ms"])
        await asyncio.sleep(0.005)  # the next one is recorded at another millisecond
    assert seqnos(await rows(workers, topic, "time_ms=0")) == [0, 1, 2]
    assert seqnos(await rows(workers, topic, f"time_ms={recorded[1]}")) == [1, 2]
    assert seqnos(await rows(workers, topic, f"time_ms={recorded[1] + 1}")) == [2]
    found, next_offset = await rows(workers, topic, f"time_ms={recorded[2] + 60_000}")
    assert (found, next_offset) == ([], (await rows(workers, topic, "offset=latest"))[1])


async def test_a_cursor_continues_where_the_answer_ended(workers: Gateway, topic: str) -> None:
    for seqno in range(3):
        await write(workers, topic, seqno, b"x")
    first = await ask(workers, topic, "max_bytes=1")
    cursor = first.headers["X-Next-Cursor"]
    assert cursor == f"{topic}:0:{first.headers['X-Next-Offset']}"
    assert seqnos(await rows(workers, topic, f"cursor={cursor}", worker=1)) == [1, 2]


@pytest.mark.parametrize("max_bytes", [0, 1, 25, 1000])
async def test_any_steps_read_everything_once(workers: Gateway, topic: str, max_bytes: int) -> None:
    """Also chunks of one transaction, and on whichever worker each step is asked."""
    body = b"".join(msgpack.packb([n, None, None, None, b"x" * 10]) for n in range(7))
    path = source_path(topic.removeprefix("dc1."), "a", "/chunks")
    await workers.ask("POST", path, data=body, headers={"Content-Type": MSGPACK})
    for seqno in range(7, 10):
        await write(workers, topic, seqno, b"x" * 10)
    found: list[int] = []
    offset, step = 0, 0
    while len(found) < 10:
        page, next_offset = await rows(workers, topic, f"offset={offset}&max_bytes={max_bytes}", worker=step % 2)
        assert page
        assert page == (await rows(workers, topic, f"offset={offset}&max_bytes={max_bytes}"))[0], "repeatable"
        found += [row["seqno"] for row in page]
        offset, step = next_offset, step + 1
    assert found == list(range(10))
    assert step == {0: 10, 1: 10, 25: step, 1000: 1}[max_bytes]


async def test_what_no_gateway_wrote_and_what_was_aborted_is_passed(workers: Gateway, topic: str) -> None:
    await write(workers, topic, 1, b"x")
    bootstrap = workers.kafka.bootstrap
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as plain:
        await plain.send_and_wait(topic, b"no chunk", key=b"a", partition=0)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"other-{topic}")
    async with producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"undone", partition=0)
        await producer.abort_transaction()
        # The coordinator answers before the marker is written.
        async with asyncio.timeout(30):
            while (await rows(workers, topic, "offset=latest"))[1] < 5:  # noqa: ASYNC110 - Kafka's state
                await asyncio.sleep(0.02)
        await write(workers, topic, 2, b"y")
        [row], _ = await rows(workers, topic, "offset=2")
        assert (row["seqno"], row["offset"]) == (2, 5), "after a record that is no chunk, an aborted one and its marker"
        # What an open transaction holds back is not there yet.
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open", partition=0)
        offset = await post(workers, topic, 3, b"z")
        assert seqnos(await rows(workers, topic, "offset=5")) == [2]
        await producer.commit_transaction()
    assert seqnos(await rows(workers, topic, f"offset={offset}&wait_ms=10000")) == [3]
    assert seqnos(await rows(workers, topic)) == [1, 2, 3]


async def test_out_of_range_says_where_the_range_is(workers: Gateway, topic: str) -> None:
    offsets = [await write(workers, topic, seqno, b"x") for seqno in range(4)]
    end = offsets[-1] + 2
    for worker in (0, 1):
        refused = await ask(workers, topic, f"offset={end + 1}", expect=416, worker=worker)
        assert (refused.problem, refused.document["first"], refused.document["next"]) == ("out-of-range", 0, end)
    admin = AIOKafkaAdminClient(bootstrap_servers=workers.kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=offsets[2])})
    finally:
        await admin.close()
    refused = await ask(workers, topic, "offset=0", expect=416)
    assert (refused.problem, refused.document["first"], refused.document["next"]) == ("out-of-range", offsets[2], end)
    assert seqnos(await rows(workers, topic, "offset=earliest")) == [2, 3]
    refused = await ask(workers, topic, f"cursor={topic}:0:0", expect=416)
    assert refused.problem == "out-of-range"
    assert (await rows(workers, topic, f"offset={end}"))[0] == []


# ---- waiting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [0, 1])
async def test_a_waiting_read_gets_the_chunk_when_it_is_written(workers: Gateway, topic: str, worker: int) -> None:
    await write(workers, topic, 1, b"x")
    _, end = await rows(workers, topic, "offset=latest")
    waiting = asyncio.create_task(rows(workers, topic, f"offset={end}&wait_ms=30000", worker))
    # This read is asked for later and answered: the worker has the waiting one.
    assert await rows(workers, topic, f"offset={end}", worker) == ([], end)
    assert not waiting.done()
    await write(workers, topic, 2, b"y")
    assert seqnos(await waiting) == [2]


async def test_a_waiting_read_is_not_woken_by_what_it_does_not_want(workers: Gateway, topic: str) -> None:
    waiting = asyncio.create_task(rows(workers, topic, "wait_ms=30000&source_prefix=b"))
    for seqno in range(3):
        await write(workers, topic, seqno, b"x")
    assert not waiting.done()
    await write(workers, topic, 1, b"y", source="b1")
    found, next_offset = await waiting
    assert [(row["source_id"], row["seqno"]) for row in found] == [("b1", 1)]
    assert next_offset > found[0]["offset"]


async def test_a_wait_without_a_chunk_ends(workers: Gateway, topic: str) -> None:
    await write(workers, topic, 1, b"x")
    _, end = await rows(workers, topic, "offset=latest")
    started = time.monotonic()
    assert await rows(workers, topic, f"offset={end}&wait_ms=700") == ([], end)
    assert time.monotonic() - started >= 0.7


async def wait_connections(workers: Gateway, wanted: int) -> None:
    """Returns when the first worker has so many connections of callers."""
    async with asyncio.timeout(30):
        while True:
            lines = (await workers.ask("GET", "/metrics")).body.decode().splitlines()
            (count,) = (float(line.split()[1]) for line in lines if line.startswith("logferry_connections "))
            if count >= wanted:
                return
            await asyncio.sleep(0.02)


async def test_many_waiting_reads_do_not_stand_in_the_way(workers: Gateway, topic: str) -> None:
    """Also more of them than there are connections for waiting: everybody is served."""
    waiting = [asyncio.create_task(rows(workers, topic, "wait_ms=30000")) for _ in range(300)]
    await wait_connections(workers, len(waiting))
    async with asyncio.timeout(25):
        assert await rows(workers, topic, "offset=latest") == ([], 0)
        await write(workers, topic, 1, b"x")
    async with asyncio.timeout(60):
        assert [seqnos(found) for found in await asyncio.gather(*waiting)] == [[1]] * 300


# ---- filters -------------------------------------------------------------------------------------------------


async def test_filters(workers: Gateway, topic: str) -> None:
    await write(workers, topic, 1, b"1", "web1/a", level="warn", host="w")
    await write(workers, topic, 2, b"2", "web1/b", level="info")
    await write(workers, topic, 3, b"3", "web2/ä", level="warn")
    await write(workers, topic, 4, b"4", "web2/c")
    for query, expected in [
        ("source_prefix=web1%2F", [1, 2]),
        ("source_prefix=", [1, 2, 3, 4]),
        ("source_prefix=web2%2F%C3%A4", [3]),
        ("source_prefix=WEB", []),
        ("attr.level=warn", [1, 3]),
        ("attr.level=", []),
        ("attr.level=warn&attr.host=w", [1]),
        ("attr.level=warn&source_prefix=web2", [3]),
        ("attr.nothing=x", []),
    ]:
        found = await rows(workers, topic, query)
        assert (seqnos(found), found[1]) == (expected, 8), query


async def test_a_filter_finds_what_lies_far_behind(workers: Gateway, topic: str) -> None:
    """At least one chunk if there is one, although it is beyond what one fetch brings."""
    for seqno in range(1, 9):
        await write(workers, topic, seqno, b"x" * 1000)
    await write(workers, topic, 1, b"here", "z")
    found, next_offset = await rows(workers, topic, "source_prefix=z&max_bytes=1000")
    assert [row["data"] for row in found] == [b"here"]
    assert next_offset > found[0]["offset"]


# ---- topics --------------------------------------------------------------------------------------------------


async def test_a_topic_of_another_data_centre_is_read_under_its_full_name(workers: Gateway, topic_name: str) -> None:
    topic = f"dc2.{topic_name}"
    bootstrap = workers.kafka.bootstrap
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
    finally:
        await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        headers = [("seqno", (7).to_bytes(8, "big")), ("created", (5).to_bytes(8, "big"))]
        await producer.send_and_wait(topic, b"mirrored", key=b"a", partition=0, headers=headers)
    found, next_offset = await rows(workers, topic)
    assert [(row["dc"], row["topic"], row["seqno"], row["data"]) for row in found] == [("dc2", topic, 7, b"mirrored")]
    assert next_offset == 1
    answer = await ask(workers, topic)
    assert "X-Next-Cursor" not in answer.headers, "offsets here are not those of the original partition"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("dc1.no-such-topic/partitions/0/chunks", "unknown-topic"),
        ("dc9.no-such-topic/partitions/0/chunks", "unknown-topic"),
        ("{topic}/partitions/1/chunks", "not-found"),
        ("{topic}/partitions/2147483647/chunks", "not-found"),
    ],
)
async def test_what_is_not_there_is_not_found(workers: Gateway, topic: str, path: str, problem: str) -> None:
    for query in ("", "?offset=latest", "?time_ms=0", "?offset=5&wait_ms=100"):
        answer = await workers.ask("GET", f"/v1/topics/{path.format(topic=topic)}{query}", expect=404)
        assert answer.problem == problem
