"""The read stream as Server-Sent Events: rows, ids that are cursors, filters, and problems that a browser can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition
from logferry.gateway.contract.chunk import NDJSON
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.event_source import Event, EventSource
from tests.support.gateway import Gateway, gateway, source_path

_PATIENCE_S = 60


def chunks(topic: str, partition: int = 0) -> str:
    return f"/v1/topics/{topic}/partitions/{partition}/chunks"


def source(workers: Gateway, topic: str, worker: int = 0, **query: Any) -> EventSource:
    return EventSource(workers.urls[worker] + chunks(topic), **query)


async def write(workers: Gateway, topic: str, seqno: int, data: bytes, source_id: str = "a", **attributes: str) -> None:
    headers = {f"X-Attr-{name}": value for name, value in attributes.items()}
    path = source_path(topic.removeprefix("dc1."), source_id, f"/chunks?seqno={seqno}")
    async with asyncio.timeout(_PATIENCE_S):
        # As a client that keeps the rules: a worker may know an older topic of the name for a moment.
        while True:
            answer = await workers.ask("POST", path, data=data, headers=headers, expect=None)
            if answer.status not in (500, 503):
                break
            await asyncio.sleep(0.1)
    assert answer.status == 200, answer.body


async def problem_of(events: EventSource, headers: dict[str, str] | None = None) -> tuple[str, dict[str, Any]]:
    """The kind and the document of the only event of a connection, which ends."""
    async with asyncio.timeout(_PATIENCE_S):
        [event] = [event async for event in events.connection(headers)]
    assert event.kind == "problem"
    return event.row["type"].rpartition("/")[2], event.row


async def test_events_are_the_rows_of_json_and_ids_are_cursors(workers: Gateway, topic_name: str) -> None:
    """Also lines that a stream of lines could take for its own, and bytes that are not text."""
    topic = await workers.make_topic(topic_name)
    awkward = [b"plain\n", b"data: x\n\nid: 7\r\n\r", 'ёж \u2028 "\n'.encode(), b"\xff\x00\n", b""]
    for seqno, data in enumerate(awkward):
        await write(workers, topic, seqno, data, host="ä")
    events = source(workers, topic)
    async with asyncio.timeout(_PATIENCE_S):
        found = await events.take(len(awkward))
    answer = await workers.ask("GET", chunks(topic) + "?wait_ms=5000", headers={"Accept": NDJSON})
    assert [event.row for event in found] == [json.loads(line) for line in answer.body.split(b"\n")[:-1]]
    assert [event.last_id for event in found] == [f"{topic}:0:{event.row['offset'] + 1}" for event in found]
    assert 0 < events.retry_ms < 3000


async def test_any_id_continues_at_any_worker_and_goes_before_the_query(workers: Gateway, topic_name: str) -> None:
    topic = await workers.make_topic(topic_name)
    for seqno in range(4):
        await write(workers, topic, seqno, b"x")
    async with asyncio.timeout(_PATIENCE_S):
        found = await source(workers, topic).take(4)
        for number, event in enumerate(found[:-1]):
            again = source(workers, topic, number % 2, offset="latest")
            again.last_id = event.last_id
            assert [one.row["seqno"] for one in await again.take(3 - number)] == list(range(number + 1, 4))


async def test_a_start_at_the_end_has_an_id_before_the_first_chunk(workers: Gateway, topic_name: str) -> None:
    """So nothing is skipped if the connection is cut before one came."""
    topic = await workers.make_topic(topic_name)
    await write(workers, topic, 1, b"old")
    events = source(workers, topic, offset="latest")
    stream = events.connection()
    first = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(_PATIENCE_S):
        while not events.last_id:  # noqa: ASYNC110  set by the stream
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await write(workers, topic, 2, b"new")
        assert [event.row["seqno"] for event in await events.take(1)] == [2]


async def test_filters_and_what_they_exclude_moves_the_id(workers: Gateway, topic_name: str) -> None:
    topic = await workers.make_topic(topic_name)
    for seqno in range(3):
        await write(workers, topic, seqno, b"x", "web/1", level="warn")
        await write(workers, topic, seqno, b"x", "web/2")
        await write(workers, topic, seqno, b"x", "db/1", level="warn")
    events = source(workers, topic, 0, source_prefix="web/", **{"attr.level": "warn"})
    stream = events.connection()
    async with asyncio.timeout(_PATIENCE_S):
        found = [await anext(stream) for _ in range(3)]
        assert [(event.row["source_id"], event.row["seqno"]) for event in found] == [("web/1", n) for n in range(3)]
        last, waiting = found[-1].last_id, asyncio.ensure_future(anext(stream))
        while events.last_id == last:  # noqa: ASYNC110  set by the stream
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("query", "last_id", "kind"),
    [
        ({"wait_ms": "1"}, "", "bad-request"),
        ({"offset": "x"}, "", "bad-request"),
        ({"cursor": "dc1.other:0:1"}, "", "bad-request"),
        ({}, "dc1.other:0:1", "bad-request"),
        ({}, "{topic}:1:1", "bad-request"),
        ({}, "\u00ff", "bad-request"),
        ({}, "{topic}:0:99999", "out-of-range"),
        ({"offset": "99999"}, "", "out-of-range"),
    ],
)
async def test_a_problem_is_an_event_and_the_end(
    workers: Gateway, topic_name: str, query: dict[str, str], last_id: str, kind: str
) -> None:
    """A browser that gets an answer of another status than 200 gives up and shows nothing of it."""
    topic = await workers.make_topic(topic_name)
    events = source(workers, topic, 0, **query)
    events.last_id = last_id.format(topic=topic)
    found, document = await problem_of(events)
    assert found == kind, document
    assert events.retry_ms == 60_000, "it lasts until somebody acts"


async def test_a_topic_that_is_not_there(workers: Gateway) -> None:
    assert (await problem_of(source(workers, "dc1.not-there")))[0] == "unknown-topic"


async def test_a_stream_is_not_a_session(workers: Gateway, topic_name: str) -> None:
    """Its positions are those that its consumer committed, so an id would be a second truth."""
    topic = await workers.make_topic(topic_name)
    path = f"/v1/consumers/browser/stream?topic={topic}"
    answer = await workers.ask("GET", path, headers={"Accept": "text/event-stream"}, expect=400)
    assert answer.problem == "bad-request"


async def test_retention_that_passes_the_reader_is_a_problem_with_the_way_on(
    kafka: KafkaCluster, workers: Gateway, topic_name: str
) -> None:
    topic = await workers.make_topic(topic_name)
    for seqno in range(4):
        await write(workers, topic, seqno, b"x")
    events = source(workers, topic)
    async with asyncio.timeout(_PATIENCE_S):
        [first] = await events.take(1)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=4)})
    finally:
        await admin.close()
    kind, document = await problem_of(events)
    assert (kind, document["first"]) == ("out-of-range", 4)
    assert events.last_id == first.last_id, "the id is kept: the reader decides"
    again = source(workers, topic, offset=str(document["first"]))
    async with asyncio.timeout(_PATIENCE_S):
        assert [event.row["seqno"] for event in await again.take(2)] == [2, 3]


@pytest.fixture
def hasty(kafka: KafkaCluster, tmp_path: Path) -> Iterator[Gateway]:
    """Workers that ask Kafka often: a deleted topic is not missed while it is waited for its records."""
    with gateway(kafka, tmp_path, "hasty-events", limits={"read_wait_ms": 1000}) as at:
        yield at


async def test_a_topic_recreated_under_an_open_stream_is_another_topic(
    kafka: KafkaCluster, hasty: Gateway, topic_name: str
) -> None:
    """The new one has the position of the stream, which would continue in it."""
    topic = await hasty.make_topic(topic_name)
    await write(hasty, topic, 1, b"x")
    events = source(hasty, topic)
    stream = events.connection()
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    async with asyncio.timeout(2 * _PATIENCE_S):
        await anext(stream)
        await admin.delete_topics([topic])
        await admin.close()
        problem: Event | None = None
        while problem is None:
            await asyncio.sleep(0.1)
            answer = await hasty.ask("PUT", f"/v1/topics/{topic_name}", json={"partitions": 1}, expect=None)
            if answer.status == 201:
                for seqno in range(5, 9):
                    await write(hasty, topic, seqno, b"y", "other")
                problem = await anext(stream)
    assert problem.kind == "problem"
    assert problem.row["type"].endswith("unknown-topic")


async def test_streams_are_limited_with_the_sessions_and_end_with_the_worker(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    with gateway(kafka, tmp_path, "events", workers=1, limits={"sessions": 1, "read_wait_ms": 0}) as at:
        topic = await at.make_topic(topic_name)
        await write(at, topic, 1, b"x")
        first, second = source(at, topic), source(at, topic)
        stream = first.connection()
        async with asyncio.timeout(2 * _PATIENCE_S):
            await anext(stream)
            assert (await problem_of(second))[0] == "overloaded"
            assert second.retry_ms < 3000, "it passes by itself"
            at.workers[0].child.send(15)
            assert [event async for event in stream] == [], "an end, and no cut"
