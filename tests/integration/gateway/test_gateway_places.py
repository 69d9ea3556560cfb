"""Who answers for a source, where its chunks go, and the topics, over HTTP against two workers and a real Kafka."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from logferry.gateway.contract.names import partition_of
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.checker import read_back
from tests.support.gateway import Gateway, gateway, log_of, open_session, source_path, write


@pytest.fixture
async def topic(workers: Gateway, topic_name: str) -> str:
    """A new topic of four partitions, by the name that writers use."""
    await workers.make_topic(topic_name, 4)
    return topic_name


# ---- who answers -------------------------------------------------------------------------------------------


async def test_a_redirect_for_those_who_asked_for_it(workers: Gateway, topic: str) -> None:
    owner = await workers.owner("web1/ä.log")
    path = source_path(topic, "web1/ä.log", "/chunks?seqno=1")
    other = await workers.ask("POST", path, 1 - owner, data=b"x", headers={"X-Logferry-Redirect": "1"}, expect=307)
    assert other.headers["Location"] == workers.urls[owner] + path
    assert await log_of(workers, topic) == []
    at_owner = await workers.ask("POST", path, owner, data=b"x", headers={"X-Logferry-Redirect": "1"})
    assert at_owner.document["written"] == 1
    forwarded = await workers.ask("POST", path, 1 - owner, data=b"x")
    assert forwarded.document["duplicates"] == 1


async def test_workers_are_reached_under_the_name_that_they_advertise(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    with gateway(kafka, tmp_path, f"named-{topic_name[-6:]}", advertised_host="localhost") as workers:
        await workers.make_topic(topic_name)
        advertised = [url.replace("127.0.0.1", "localhost") for url in workers.urls]
        owner = await workers.owner("a")
        path = source_path(topic_name, "a", "/chunks?seqno=1")
        redirect = {"X-Logferry-Redirect": "1"}
        other = await workers.ask("POST", path, 1 - owner, data=b"x", headers=redirect, expect=307)
        assert other.headers["Location"] == advertised[owner] + path
        assert (await workers.ask("POST", path, 1 - owner, data=b"x")).document["written"] == 1
        assert (await open_session(workers, topic_name, "a", worker=1 - owner))["url"] == advertised[owner]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_look_ups_and_sessions_go_to_the_owner_too(workers: Gateway, topic: str, method: str) -> None:
    owner = await workers.owner("a")
    path = source_path(topic, "a", "" if method == "GET" else "/session")
    redirected = await workers.ask(method, path, 1 - owner, headers={"X-Logferry-Redirect": "1"}, expect=307)
    assert redirected.headers["Location"] == workers.urls[owner] + path
    answers = [await workers.ask(method, path, worker) for worker in (0, 1)]
    assert {answer.document["url"] for answer in answers} == {workers.urls[owner]}


async def test_what_was_handed_on_once_is_not_handed_on_again(workers: Gateway, topic: str) -> None:
    other = 1 - await workers.owner("a")
    path = source_path(topic, "a", "/chunks?seqno=1")
    refused = await workers.ask("POST", path, other, data=b"x", headers={"X-Logferry-Forwarded": "1"}, expect=503)
    assert refused.problem == "not-owner-yet"
    assert int(refused.headers["Retry-After"]) >= 1
    assert await log_of(workers, topic) == []


async def test_an_unknown_source_is_looked_up_as_nulls(workers: Gateway, topic: str) -> None:
    for worker in (0, 1):
        document = (await workers.ask("GET", source_path(topic, "nobody"), worker)).document
        assert (document["session"], document["recorded_seqno"]) == (None, None)
        assert document["partition"] is None, "looking does not pin"
    assert (await open_session(workers, topic, "nobody"))["recorded_seqno"] is None


# ---- keys --------------------------------------------------------------------------------------------------


async def test_the_key_is_part_of_the_identity(workers: Gateway, topic: str) -> None:
    for query in ("", "&partition_key=k1", "&partition_key=k2%2F%C3%A9"):
        assert (await write(workers, topic, "a", f"seqno=5{query}")).document["written"] == 1
        assert (await write(workers, topic, "a", f"seqno=5{query}", worker=1)).document["written"] == 0
    assert (await write(workers, topic, "a", "seqno=9&partition_key=k1")).document["recorded_seqno"] == 9
    for query, recorded in [
        ("", 5),
        ("?partition_key=k1", 9),
        ("?partition_key=k2%2F%C3%A9", 5),
        ("?partition_key=z", None),
    ]:
        document = (await workers.ask("GET", source_path(topic, "a", query))).document
        assert document["recorded_seqno"] == recorded
        session = await open_session(workers, topic, "a", query)
        assert session["recorded_seqno"] == recorded
    assert sorted(row[1] for row in await log_of(workers, topic)) == [5, 5, 5, 9]


async def test_sources_of_one_key_share_a_partition_before_and_after_growth(workers: Gateway, topic: str) -> None:
    """Also with the unkeyed source whose id is the key; unknown keys use the new partitions."""
    keys = [f"k{n}" for n in range(40) if partition_of(f"k{n}", 4) != partition_of(f"k{n}", 7)][:6]
    for key in keys:
        await write(workers, topic, "x", f"seqno=1&partition_key={key}")
    await workers.ask("PUT", f"/v1/topics/{topic}", json={"partitions": 7})
    for key in keys:
        for source, query in (
            (key, "seqno=1"),
            ("x", f"seqno=2&partition_key={key}"),
            ("y", f"seqno=1&partition_key={key}"),
        ):
            answer = await write(workers, topic, source, query, worker=1)
            assert answer.document["partition"] == partition_of(key, 4), (key, source)
    await growth_is_known(workers, topic)
    fresh = [f"n{n}" for n in range(20)]
    answers = [await write(workers, topic, source, "seqno=1") for source in fresh]
    assert [answer.document["partition"] for answer in answers] == [partition_of(source, 7) for source in fresh]
    assert max(answer.document["partition"] for answer in answers) > 3


async def growth_is_known(workers: Gateway, topic: str) -> None:
    """A worker may take some seconds to hear of partitions that another one added."""
    moved = (f"p{n}" for n in itertools.count() if partition_of(f"p{n}", 4) != partition_of(f"p{n}", 7))
    unaware = {0, 1}
    async with asyncio.timeout(60):
        while unaware:
            source = next(moved)
            answer = await write(workers, topic, source, "seqno=1")
            if answer.document["partition"] == partition_of(source, 7):
                unaware.discard(await workers.owner(source))
            else:
                await asyncio.sleep(0.2)


# ---- topics ------------------------------------------------------------------------------------------------


async def test_topics_are_created_described_and_grown(workers: Gateway, topic_name: str) -> None:
    path = f"/v1/topics/{topic_name}"
    missing = await workers.ask("GET", path, expect=404)
    assert missing.problem == "unknown-topic"
    wanted = {"partitions": 2, "retention_ms": 86_400_000}
    created = await workers.ask("PUT", path, json=wanted, expect=201)
    assert len(created.document["id"]) == 22
    assert created.document == {
        "id": created.document["id"],
        "topic": f"dc1.{topic_name}",
        "dc": "dc1",
        "name": topic_name,
        "partitions": 2,
        "retention_ms": 86_400_000,
        "offsets": [{"partition": 0, "first": 0, "next": 0}, {"partition": 1, "first": 0, "next": 0}],
    }
    assert (await workers.ask("PUT", path, worker=1, json=wanted)).document == created.document
    grown = await workers.ask("PUT", path, json={"partitions": 5})
    assert (grown.document["partitions"], grown.document["retention_ms"]) == (5, 86_400_000)
    refused = await workers.ask("PUT", path, json={"partitions": 4}, expect=409)
    assert (refused.problem, refused.document["partitions"]) == ("conflict", 5)
    for name in (topic_name, f"dc1.{topic_name}"):
        assert (await workers.ask("GET", f"/v1/topics/{name}", worker=1)).document == grown.document
    listed = (await workers.ask("GET", "/v1/topics")).document["topics"]
    assert grown.document in listed
    assert [one["topic"] for one in listed] == sorted(one["topic"] for one in listed)
    assert all(one["dc"] in ("dc1", "dc2") for one in listed), "nothing of Kafka's own, nor of ours"


async def test_offsets_of_a_topic_follow_what_is_written(workers: Gateway, topic_name: str) -> None:
    await workers.make_topic(topic_name)
    await write(workers, topic_name, "a", "seqno=1")
    await read_back(workers.kafka.bootstrap, f"dc1.{topic_name}")
    [offsets] = (await workers.ask("GET", f"/v1/topics/{topic_name}")).document["offsets"]
    assert offsets["first"] == 0
    assert offsets["next"] >= 1


# ---- the worker itself ---------------------------------------------------------------------------------------


async def test_health_readiness_and_metrics(workers: Gateway, topic: str) -> None:
    await write(workers, topic, "a", "seqno=1")
    owned: list[str] = []
    for worker in (0, 1):
        assert (await workers.ask("GET", "/healthz", worker)).document == {"status": "alive"}
        ready = (await workers.ask("GET", "/readyz", worker)).document
        assert ready["status"] == "ready"
        assert set(ready["lanes"].values()) == {"serving"}
        owned += ready["lanes"]
        text = (await workers.ask("GET", "/metrics", worker)).body.decode()
        assert 'logferry_requests_total{route="healthz",status="200"}' in text
    assert sorted(owned) == ["0", "1", "2", "3"]
