"""Topics that change under the gateway: grown under load, deleted and recreated, with a limit of their own.

What was recorded in a topic that is gone says nothing of the new one of the same name: a chunk must never be called
a duplicate because the older topic held it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgpack
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAlreadyExistsError
from logferry.gateway.contract.chunk import MSGPACK
from logferry.gateway.contract.names import lane_of

from tests.support.checker import read_back, violations
from tests.support.clients import Load
from tests.support.gateway import LANES, Answer, Gateway, source_path
from tests.support.kafka import alter_topic, delete_topic, until_replaced

_RETRIABLE = (429, 500, 503)


@pytest.fixture
async def admin(workers: Gateway) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=workers.kafka.bootstrap)
    await client.start()
    yield client
    await client.close()


async def create(admin: AIOKafkaAdminClient, topic: str, **configs: str) -> None:
    """Also while Kafka is still deleting an older one of the name."""
    async with asyncio.timeout(60):
        while True:
            response = await admin.create_topics([NewTopic(topic, 1, 1, topic_configs=configs)])
            code = response.topic_errors[0][1]
            if code != TopicAlreadyExistsError.errno:
                assert code == 0, response
                break
            await asyncio.sleep(0.05)
        # A broker may show it a moment after the controller has made it.
        while (await admin.describe_topics([topic]))[0]["error_code"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def recreate(workers: Gateway, admin: AIOKafkaAdminClient, topic: str) -> None:
    """Without the gateway; its leaders know it then."""
    gone = await delete_topic(workers.kafka.bootstrap, topic)
    await create(admin, topic)
    await until_replaced(workers.kafka.bootstrap, topic, gone)


async def write(workers: Gateway, topic: str, source: str, query: str, data: bytes = b"x", worker: int = 0) -> Answer:
    """As a client that keeps the rules: the same again on "retry" and "unknown", until it is taken or refused."""
    return await insist(workers, source_path(topic.removeprefix("dc1."), source, f"/chunks?{query}"), data, worker)


async def insist(workers: Gateway, path: str, data: bytes = b"", worker: int = 0) -> Answer:
    async with asyncio.timeout(60):
        while True:
            answer = await workers.ask("POST", path, worker, data=data, expect=None)
            if answer.status not in _RETRIABLE:
                return answer
            await asyncio.sleep(0.1)


async def seqnos(workers: Gateway, topic: str) -> list[tuple[str, int]]:
    return [(record.source, record.seqno) for record in await read_back(workers.kafka.bootstrap, topic)]


# ---- recreated ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [0, 1])
async def test_nothing_is_a_duplicate_of_what_an_older_topic_held(
    workers: Gateway, admin: AIOKafkaAdminClient, topic_name: str, worker: int
) -> None:
    topic = f"dc1.{topic_name}"
    await create(admin, topic)
    for source in ("a", "b", "c"):
        for seqno in (1, 2, 3):
            await write(workers, topic, source, f"seqno={seqno}&prev={seqno - 1}")
    await recreate(workers, admin, topic)
    for source in ("a", "b", "c"):
        answer = await write(workers, topic, source, "seqno=3&prev=2", worker=worker)
        assert (answer.status, answer.document["written"], answer.document["duplicates"]) == (200, 1, 0)
    assert sorted(await seqnos(workers, topic)) == [("a", 3), ("b", 3), ("c", 3)]
    answer = await write(workers, topic, "a", "seqno=3&prev=2", worker=worker)
    assert (answer.document["written"], answer.document["duplicates"]) == (0, 1), "of the new topic, it is one"
    assert (await write(workers, topic, "a", "seqno=2&prev=1", worker=worker)).problem == "gap"


async def test_a_session_of_the_older_topic_is_not_one_of_the_new(
    workers: Gateway, admin: AIOKafkaAdminClient, topic_name: str
) -> None:
    topic = f"dc1.{topic_name}"
    await create(admin, topic)
    path = source_path(topic_name, "a", "/session")
    older = (await workers.ask("POST", path)).document
    assert (await write(workers, topic, "a", f"seqno=1&session={older['session']}")).status == 200
    await recreate(workers, admin, topic)
    refused = await write(workers, topic, "a", f"seqno=2&session={older['session']}")
    assert refused.problem == "superseded" or refused.document["written"] == 0
    answer = await insist(workers, path)
    assert answer.document["recorded_seqno"] is None
    assert (await write(workers, topic, "a", f"seqno=1&session={answer.document['session']}")).document["written"] == 1


async def test_writers_continue_in_the_new_topic(workers: Gateway, admin: AIOKafkaAdminClient, topic_name: str) -> None:
    """Deleted and recreated while sixteen sources write: what is acknowledged afterwards is in the new topic."""
    topic = f"dc1.{topic_name}"
    await create(admin, topic)
    acknowledged: dict[str, list[int]] = {f"s{n}": [] for n in range(16)}
    stop = asyncio.Event()

    async def keep_writing(source: str, worker: int) -> None:
        seqno = 0
        while not stop.is_set():
            seqno += 1
            answer = await write(workers, topic, source, f"seqno={seqno}", worker=worker)
            if answer.status != 404:
                assert answer.status == 200, answer.body
                acknowledged[source].append(seqno)

    async def until_all_have(more: int) -> None:
        wanted = {source: len(done) + more for source, done in acknowledged.items()}
        async with asyncio.timeout(60):
            while any(len(acknowledged[source]) < count for source, count in wanted.items()):
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(keep_writing(f"s{n}", n % 2)) for n in range(16)]
    await until_all_have(5)
    await recreate(workers, admin, topic)
    await until_all_have(1)  # the one that was on its way may have been answered before
    settled = {source: len(done) for source, done in acknowledged.items()}
    await until_all_have(5)
    stop.set()
    await asyncio.gather(*tasks)
    stored = await seqnos(workers, topic)
    assert len(stored) == len(set(stored)), "doubled"
    for source, done in acknowledged.items():
        in_log = [seqno for owner, seqno in stored if owner == source]
        assert in_log == sorted(in_log)
        missing = set(done[settled[source] :]) - set(in_log)
        assert not missing, f"{source}: acknowledged after the new topic was there, and not in it: {missing}"


async def test_a_deleted_topic_fails_alone(workers: Gateway, admin: AIOKafkaAdminClient, topic_name: str) -> None:
    """Others of the same lane continue, also while its writers try again and again."""
    gone, kept = f"dc1.{topic_name}-gone", f"dc1.{topic_name}-kept"
    for topic in (gone, kept):
        await create(admin, topic)
        await write(workers, topic, "a", "seqno=1")
    await delete_topic(workers.kafka.bootstrap, gone)
    path = source_path(f"{topic_name}-gone", "a", "/chunks?seqno=2")
    tries = [asyncio.create_task(workers.ask("POST", path, n % 2, data=b"x", expect=None)) for n in range(6)]
    for seqno in range(2, 8):
        assert (await write(workers, kept, "a", f"seqno={seqno}", worker=seqno % 2)).document["written"] == 1
    answers = await asyncio.gather(*tries)
    assert {answer.status for answer in answers} <= {404, 503}, "a topic that is gone takes nothing"
    assert (await write(workers, gone, "a", "seqno=2")).problem == "unknown-topic"
    assert await seqnos(workers, kept) == [("a", seqno) for seqno in range(1, 8)]


# ---- limits of its own -------------------------------------------------------------------------------------------


def of_one_lane(count: int) -> list[str]:
    return [name for name in (f"s{n}" for n in range(100)) if lane_of(name, LANES) == 1][:count]


async def test_a_topic_with_a_small_limit(workers: Gateway, admin: AIOKafkaAdminClient, topic_name: str) -> None:
    """What is over it is refused before Kafka is asked, by data and attributes together; what is not is taken."""
    topic = f"dc1.{topic_name}"
    await create(admin, topic, **{"max.message.bytes": "20000"})
    noise = random.Random(7)
    refused = await write(workers, topic, "a", "seqno=1", noise.randbytes(20_001))
    assert (refused.status, refused.problem) == (413, "too-large")
    limit = refused.document["limit_bytes"]
    assert 10_000 < limit < 20_000
    path = source_path(topic_name, "a", "/chunks?seqno=1")
    headers = {f"X-Attr-a{n}": noise.randbytes(1500).hex() for n in range(5)}
    refused = await workers.ask("POST", path, data=noise.randbytes(5000), headers=headers, expect=413)
    assert (refused.problem, refused.document["limit_bytes"]) == ("too-large", limit)
    written = await workers.ask("POST", path, data=noise.randbytes(limit - 15_100), headers=headers)
    assert written.document["written"] == 1
    # Many small ones with large headers go into batches that Kafka takes.
    path = source_path(topic_name, "b", "/chunks")
    chunks = [msgpack.packb([n, None, None, {"a": noise.randbytes(1000).hex()}, b"x"]) for n in range(50)]
    written = await workers.ask("POST", path, data=b"".join(chunks), headers={"Content-Type": MSGPACK})
    assert written.document["written"] == 50
    assert (await write(workers, topic, "a", "seqno=2", noise.randbytes(limit))).document["written"] == 1
    assert len(await seqnos(workers, topic)) == 52


async def test_a_limit_that_is_lowered_hits_those_alone_who_are_over_it(
    workers: Gateway, admin: AIOKafkaAdminClient, topic_name: str
) -> None:
    """The gateway hears of it when Kafka refuses the record, in a transaction that holds the chunks of others."""
    topic, other = f"dc1.{topic_name}", f"dc1.{topic_name}-other"
    for name in (topic, other):
        await create(admin, name)
    noise = random.Random(8)
    large, *fine = of_one_lane(6)
    assert (await write(workers, topic, large, "seqno=1", noise.randbytes(50_000))).status == 200
    await alter_topic(workers.kafka.bootstrap, topic, max_message_bytes="20000")

    async def keep_writing(target: str, source: str) -> None:
        for seqno in range(1, 20):
            answer = await write(workers, target, source, f"seqno={seqno}&prev={seqno - 1}", noise.randbytes(1000))
            assert answer.status == 200, answer.body

    asking = asyncio.create_task(write(workers, topic, large, "seqno=2&prev=1", noise.randbytes(50_000)))
    await asyncio.gather(*(keep_writing(target, source) for source in fine for target in (topic, other)))
    refused = await asking
    assert (refused.status, refused.problem) == (413, "too-large")
    assert (await write(workers, topic, large, "seqno=2&prev=1", noise.randbytes(5000))).document["written"] == 1
    expected = sorted([(large, 1), (large, 2), *((source, seqno) for source in fine for seqno in range(1, 20))])
    assert sorted(await seqnos(workers, topic)) == expected


async def test_a_limit_below_every_chunk(workers: Gateway, admin: AIOKafkaAdminClient, topic_name: str) -> None:
    await create(admin, f"dc1.{topic_name}", **{"max.message.bytes": "100"})
    refused = await write(workers, f"dc1.{topic_name}", "a", "seqno=1")
    assert (refused.status, refused.document["limit_bytes"]) == (413, 0)


# ---- grown and created under load --------------------------------------------------------------------------------


async def test_growth_under_load_moves_no_source(workers: Gateway, topic_name: str) -> None:
    topic = await workers.make_topic(topic_name, 2)
    async with Load(topic_name, workers.urls, seed=11) as load:
        for partitions in (3, 7):
            await load.acknowledged(200)
            await workers.ask("PUT", f"/v1/topics/{topic_name}", json={"partitions": partitions})
            await asyncio.gather(*(workers.make_topic(f"{topic_name}-{partitions}-{n}", 2) for n in range(3)))
        await load.acknowledged(400)
    assert violations(load.history, await read_back(workers.kafka.bootstrap, topic)) == []
