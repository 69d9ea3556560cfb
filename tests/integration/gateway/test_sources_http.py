"""What the gateway knows of sources, over HTTP: heartbeats, the list, forgetting, expiry, limits; and that it outlives
every worker."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from logferry.gateway.contract.names import lane_of, partition_of
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import LANES, Answer, Gateway, gateway, log_of, open_session, source_path, write

_PATIENCE_S = 60


@pytest.fixture(scope="module")
def workers(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two workers of these tests alone: they are killed."""
    with gateway(kafka, tmp_path_factory.mktemp("sources"), "sources", max_seqno_jump=1000) as running:
        yield running


@pytest.fixture
async def topic(workers: Gateway, topic_name: str) -> str:
    await workers.make_topic(topic_name, 4)
    return topic_name


async def killed_and_back(workers: Gateway) -> None:
    """All of them at once: whatever is known afterwards, they have from Kafka."""
    for worker in workers.workers:
        worker.child.send(signal.SIGKILL)
    for worker in workers.workers:
        worker.child.start()
    await asyncio.to_thread(workers.wait_ready)


async def listed(workers: Gateway, topic: str, query: str = "", worker: int = 0) -> list[dict[str, Any]]:
    answer = await workers.ask("GET", f"/v1/topics/{topic}/sources{query}", worker)
    assert answer.document["next"] is None
    rows: list[dict[str, Any]] = answer.document["sources"]
    return rows


async def beat(workers: Gateway, topic: str, source: str, worker: int = 0, expect: int = 200, **said: Any) -> Answer:
    return await workers.ask("POST", source_path(topic, source, "/heartbeat"), worker, json=said, expect=expect)


# ---- known, by whichever worker, and after a restart ---------------------------------------------------------


async def test_heartbeats_are_recorded_and_outlive_the_workers(workers: Gateway, topic: str) -> None:
    names = [f"web{number}" for number in range(2 * LANES)]
    assert {lane_of(name, LANES) for name in names} == set(range(LANES))
    for number, name in enumerate(names):
        await write(workers, topic, name, "seqno=10")
        await beat(workers, topic, name, number % 2, watermark_ms=5, position=10, size=30)
        answer = await beat(workers, topic, name, 1 - number % 2, position=20)
        assert answer.document["recorded_seqno"] == 10
    await beat(workers, topic, names[0], finished=True)
    before = await listed(workers, topic)
    assert [row["source_id"] for row in before] == sorted(names)
    for row in before:
        assert (row["recorded_seqno"], row["watermark_ms"], row["position"], row["size"]) == (10, 5, 20, 30)
        assert row["finished"] == (row["source_id"] == names[0])
        assert row["heartbeat_ms"] >= row["written_ms"]
    await killed_and_back(workers)
    for worker in (0, 1):
        assert await listed(workers, topic, worker=worker) == before


async def test_the_list_by_prefix_by_silence_and_in_pages(workers: Gateway, topic: str) -> None:
    names = [f"web{number:04}" for number in range(1050)]
    gate = asyncio.Semaphore(50)

    async def first(name: str) -> None:
        async with gate:
            await write(workers, topic, name, "seqno=1", worker=len(name) % 2)

    await asyncio.gather(*(first(name) for name in [*names, "other"]))
    assert [row["source_id"] for row in await listed(workers, topic, "?prefix=oth", 1)] == ["other"]
    page = (await workers.ask("GET", f"/v1/topics/{topic}/sources?prefix=web")).document
    assert [row["source_id"] for row in page["sources"]] == names[:1000]
    rest = await listed(workers, topic, f"?prefix=web&after={page['next']}", 1)
    assert [row["source_id"] for row in rest] == names[1000:]
    assert await listed(workers, topic, "?idle_for_ms=3600000") == []
    async with asyncio.timeout(_PATIENCE_S):
        silent: list[dict[str, Any]] = []
        while not silent:
            silent = await listed(workers, topic, "?prefix=other&idle_for_ms=100")
    assert silent[0]["written_ms"] + 100 <= time.time() * 1000


async def test_sessions_and_pins_outlive_the_workers_and_the_growth_of_the_topic(workers: Gateway, topic: str) -> None:
    names = [name for name in (f"s{n}" for n in range(99)) if partition_of(name, 4) != partition_of(name, 7)][:8]
    older = {name: (await open_session(workers, topic, name))["session"] for name in names}
    newer = {name: (await open_session(workers, topic, name, worker=1))["session"] for name in names}
    await workers.ask("PUT", f"/v1/topics/{topic}", json={"partitions": 7})
    await killed_and_back(workers)
    for number, name in enumerate(names):
        worker = number % 2
        refused = await write(workers, topic, name, f"seqno=1&session={older[name]}", worker=worker, expect=409)
        assert refused.problem == "superseded"
        written = await write(workers, topic, name, f"seqno=1&session={newer[name]}", worker=worker)
        assert written.document["partition"] == partition_of(name, 4), "it stays where it was"
    fresh = [await write(workers, topic, f"n{number}", "seqno=1") for number in range(20)]
    assert [answer.document["partition"] for answer in fresh] == [partition_of(f"n{n}", 7) for n in range(20)]


# ---- forgotten -----------------------------------------------------------------------------------------------


async def test_a_forgotten_source_starts_again(workers: Gateway, topic: str) -> None:
    await write(workers, topic, "a", "seqno=900")
    await write(workers, topic, "b", "seqno=900")
    for worker, forgotten in ((1, True), (0, False)):
        answer = await workers.ask("DELETE", source_path(topic, "a"), worker)
        assert (answer.document["forgotten"], answer.document["recorded_seqno"]) == (
            forgotten,
            900 if forgotten else None,
        )
    assert (await workers.ask("GET", source_path(topic, "a"))).document["recorded_seqno"] is None
    await killed_and_back(workers)
    assert [row["source_id"] for row in await listed(workers, topic)] == ["b"]
    assert (await write(workers, topic, "a", "seqno=5")).document["written"] == 1
    assert (await write(workers, topic, "b", "seqno=5")).document["written"] == 0
    assert [row[:2] for row in await log_of(workers, topic) if row[0] == "a"] == [("a", 900), ("a", 5)]


async def test_silent_sources_expire_by_tombstones_and_those_that_are_heard_of_stay(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    with gateway(kafka, tmp_path, f"expire-{topic_name[-6:]}", source_retention_ms=6000) as workers:
        await workers.make_topic(topic_name, 4)
        for name in ("silent", "writes", "beats"):
            await write(workers, topic_name, name, "seqno=1")
        seqno = 1
        async with asyncio.timeout(_PATIENCE_S):
            while (await workers.ask("GET", source_path(topic_name, "silent"))).document["recorded_seqno"] is not None:
                seqno += 1
                await write(workers, topic_name, "writes", f"seqno={seqno}")
                await beat(workers, topic_name, "beats")
        await beat(workers, topic_name, "beats")
        for name, recorded in (("writes", seqno), ("beats", 1)):
            assert (await workers.ask("GET", source_path(topic_name, name))).document["recorded_seqno"] == recorded
        assert await last_state(workers, topic_name, "silent") is None
        await beat(workers, topic_name, "beats")
        assert await last_state(workers, topic_name, "beats") is not None
        assert (await write(workers, topic_name, "silent", "seqno=1")).document["written"] == 1


async def last_state(workers: Gateway, topic: str, source: str) -> bytes | None:
    """The last record of the source in the state topic; a tombstone is None."""
    key, found = SourceIdentity(f"dc1.{topic}", None, source).state_key(), []
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    async with AIOKafkaConsumer(workers.state_topic, bootstrap_servers=workers.kafka.bootstrap, **options) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += [record.value for record in records if record.key == key]
    value: bytes | None = found[-1]
    return value


# ---- limits --------------------------------------------------------------------------------------------------


async def test_a_seqno_far_above_what_is_recorded_is_refused(workers: Gateway, topic: str) -> None:
    await write(workers, topic, "a", "seqno=5000", expect=400)
    await write(workers, topic, "a", "seqno=5000&prev=4900")  # the first may begin anywhere, if it says so
    for worker in (0, 1):
        refused = await write(workers, topic, "a", "seqno=6001", worker=worker, expect=400)
        assert refused.problem == "bad-request"
        assert "1000" in refused.document["detail"]
    assert (await write(workers, topic, "a", "seqno=6000")).document["recorded_seqno"] == 6000


async def test_a_lane_takes_so_many_sources_and_serves_those_it_knows(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    name = f"few-{topic_name[-6:]}"
    with gateway(kafka, tmp_path, name, workers=1, lanes=1, limits={"lane_sources": 3}) as workers:
        await workers.make_topic(topic_name)
        for source in "abc":
            await write(workers, topic_name, source, "seqno=1")
        for _ in range(2):
            refused = [
                await write(workers, topic_name, "d", "seqno=1", expect=503),
                await workers.ask("POST", source_path(topic_name, "d", "/session"), expect=503),
                await beat(workers, topic_name, "d", expect=503),
            ]
            for answer in refused:
                assert answer.problem == "overloaded"
                assert int(answer.headers["Retry-After"]) >= 1
            for source in "abc":
                assert (await write(workers, topic_name, source, "seqno=2")).status == 200
            assert b'logferry_lane_sources{lane="0"} 3.0\n' in (await workers.ask("GET", "/metrics")).body
            await killed_and_back(workers)
        await workers.ask("DELETE", source_path(topic_name, "a"))
        assert (await write(workers, topic_name, "d", "seqno=1")).document["written"] == 1
