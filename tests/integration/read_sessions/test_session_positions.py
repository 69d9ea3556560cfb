"""The positions of consumers: where sessions start, what was committed, lag, setting them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition

from tests.support.read_sessions import Stream, has, is_caught_up, make, offsets, put, until_members, write
from tests.support.served_gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
    assert (before["offset"], before["first"], before["out_of_range"], before["lag_bytes"]) == (None, 0, False, 20)
    assert before["lag_records"] >= 1
    between_ms = int(time.time() * 1000) + 1
    await asyncio.sleep(0.01)  # what follows is written at a later millisecond
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
        assert now["lag_bytes"] == {0: 40, 1: 20, 2: 20, 4: 0}[expected]
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


async def test_the_lag_in_bytes_is_computed_from_the_oldest_chunks(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name, 1)
    for turn in range(3):
        await write(gateway, topic_name, sources=1, start=100 * turn, chunks=40, size=8192)
    (now,) = (await offsets(gateway, topic_name, f"?topic={topic}"))["positions"]
    # The markers of the transactions count as records do.
    assert 3 * 40 * 8192 <= now["lag_bytes"] <= 3 * 41 * 8192


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


async def test_a_position_that_is_not_retained_is_reported_and_never_reset(
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
