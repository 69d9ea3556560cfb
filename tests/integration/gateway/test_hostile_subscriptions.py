"""Subscriptions by a hostile user: odd names and places, giants, thousands, changes and removals while it delivers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.delivery import Deliver, PushReceiver, Received, deliver, receiver, send, subscribe
from tests.support.gateway import Gateway

URL = "http://127.0.0.1:9/"


@pytest.fixture(scope="module")
def pushing(kafka: KafkaCluster, workers: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deliver]:
    with deliver(kafka, tmp_path_factory.mktemp("hostile"), "shared") as running:
        yield running


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "", 405),
        ("POST", "", 405),
        ("PUT", "/", 400),
        ("GET", "/.", 400),
        ("GET", "/..", 400),
        ("PUT", "/a%2Fb", 400),
        ("PUT", "/%00", 400),
        ("PUT", "/%ff", 400),
        ("PUT", "/%zz", 400),
        ("PUT", "/%D1%91%D0%B6", 400),
        ("PUT", "/" + "a" * 101, 400),
        ("GET", "/" + "a" * 15_000, 400),
        ("GET", "/not-there", 404),
        ("DELETE", "/not-there", 404),
        ("POST", "/not-there/pause", 404),
        ("POST", "/not-there/resume", 404),
        ("POST", "/not-there/replay", 404),
        ("GET", "/not-there/pause", 405),
        ("PATCH", "/not-there", 405),
        ("POST", "/not-there/explode", 404),
        ("POST", "/not-there/pause/more", 404),
        ("GET", "?all=1", 400),
        ("GET", "/not-there?x=1", 400),
    ],
)
async def test_odd_names_and_methods(workers: Gateway, method: str, path: str, status: int) -> None:
    body = {"topics": ["dc1.a"], "url": URL} if method == "PUT" else {"offset": "earliest"}
    options: dict[str, Any] = {} if method == "GET" else {"json": body}
    answer = await workers.ask(method, "/v1/subscriptions" + path, expect=None, **options)
    assert answer.status == status, answer.body
    assert answer.problem is not None
    assert ("Allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"topics": ["dc1.a"], "url": "http://a", "topics": 1}',
        b"[" * 100_000,
        b'{"topics": ["' + b"x" * 900_000 + b'"], "url": "http://a"}',
        b'{"topics": ["a"], "url": "http://a"}',
        b'{"topics": ["dc7.a"], "url": "http://a"}',
        b'{"topics": ["dc1.\xc3\xa9"], "url": "http://a"}',
        b'{"topics": ["dc1.a"], "url": "http://\xd1\x91.example"}',
        b'{"topics": ["*"], "url": "http://a", "on_rejection": "split", "dead_letter_topic": "a"}',
        b'{"topics": ["dc1.a"], "url": "http://a", "max_bytes": 1e99}',
        b'{"topics": ["dc1.a"], "url": "http://a", "timeout_s": NaN}',
    ],
)
async def test_odd_definitions(workers: Gateway, topic_name: str, body: bytes) -> None:
    answer = await workers.ask("PUT", f"/v1/subscriptions/{topic_name[:90]}", data=body, expect=None)
    assert answer.status in (400, 413), answer.body
    await workers.ask("GET", f"/v1/subscriptions/{topic_name[:90]}", expect=404)


async def test_places_that_are_not_delivered_cannot_be_replayed(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    """An answer of success after which nothing happens would hide a misspelt name."""
    topic = await workers.make_topic(topic_name, 2)
    async with receiver() as got:
        await subscribe(workers, topic_name, topic, got.url)
        written = await send(workers, topic_name, "a", range(1, 4))
        await got.until(lambda: len(got.rows) == len(written), "all")
        path = f"/v1/subscriptions/{topic_name}/replay"
        for body, kind in (
            ({"topic": "dc1.other", "offset": "earliest"}, "bad-request"),
            ({"cursor": "dc1.other:0:0"}, "bad-request"),
            ({"cursor": "not a cursor"}, "bad-request"),
            ({"topic": topic, "partition": 2, "offset": 0}, "not-found"),
            ({"cursor": f"{topic}:99:0"}, "not-found"),
            ({"cursor": f"{topic}:0:{2**70}"}, "bad-request"),
            ({"topic": "", "offset": "earliest"}, "bad-request"),
            ({"topic": "dc1/ä", "offset": "earliest"}, "bad-request"),
            ({"offset": -1, "topic": topic, "partition": 0}, "bad-request"),
            ({"time_ms": 2**64}, "bad-request"),
        ):
            answer = await workers.ask("POST", path, json=body, expect=None)
            assert answer.problem == kind, (body, answer.body)
        before = {unit["partition"]: unit["epoch"] for unit in await _units(pushing, topic_name)}
        await workers.ask("POST", path, json={"time_ms": 2**62})
        # It skips all that is there when a worker follows it, which is later than the answer.
        await pushing.until(
            lambda units: all(
                unit["epoch"] > before[unit["partition"]] for unit in units if unit["subscription"] == topic_name
            ),
            "replay into the future",
        )
        await send(workers, topic_name, "a", range(4, 6))
        await got.until(lambda: len(got.rows) == 5, "what came after a replay into the future")


async def _units(pushing: Deliver, name: str) -> list[dict[str, Any]]:
    return [unit for unit in await pushing.units() if unit["subscription"] == name]


async def test_a_replay_beyond_the_end_stops_by_name_and_another_one_mends_it(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    topic = await workers.make_topic(topic_name)
    async with receiver() as got:
        await subscribe(workers, topic_name, topic, got.url)
        written = await send(workers, topic_name, "a", range(1, 4))
        await got.until(lambda: len(got.rows) == len(written), "all")
        path = f"/v1/subscriptions/{topic_name}"
        for body in ({"topic": topic, "partition": 0, "offset": 2**62}, {"cursor": f"{topic}:0:99999"}):
            await workers.ask("POST", path + "/replay", json=body)
            async with asyncio.timeout(60):
                while True:
                    [unit] = (await workers.ask("GET", path)).document["partitions"]
                    if unit["stop"] is not None:
                        break
                    await asyncio.sleep(0.1)
            assert unit["stop"]["kind"] == "out-of-range"
            taken = len(got.rows)
            await workers.ask("POST", path + "/replay", json={"offset": "earliest"})
            await got.until(lambda taken=taken: len(got.rows) == taken + 3, "all again")  # type: ignore[misc]


async def test_changed_and_removed_while_batches_are_under_way_harms_no_other(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    """Units that wait for their turn at a receiver that hangs are moved to another one, and others do not notice."""
    topic = await workers.make_topic(topic_name, 4)
    hangs = asyncio.Event()

    async def behave(got: Received) -> int | None:
        await hangs.wait()
        return None

    async with receiver(PushReceiver(behave)) as hung, receiver() as got, receiver() as other:
        await subscribe(workers, f"{topic_name}-other", topic, other.url)
        await subscribe(workers, topic_name, topic, hung.url, max_in_flight=1)
        written = [
            one
            for some in await asyncio.gather(*(send(workers, topic_name, f"s{n}", range(1, 4)) for n in range(8)))
            for one in some
        ]
        await hung.until(lambda: len(hung.seen) > 0, "one under way")
        await subscribe(workers, topic_name, topic, got.url, max_in_flight=1)
        await got.until(lambda: len(got.rows) >= len(written), "all at the new receiver")
        assert got.problems(written) == []
        await other.until(lambda: len(other.rows) >= len(written), "all of the other")
        await subscribe(workers, topic_name, topic, hung.url, max_in_flight=1)
        await workers.ask("POST", f"/v1/subscriptions/{topic_name}/replay", json={"offset": "earliest"})
        seen = len(hung.seen)
        await hung.until(lambda: len(hung.seen) > seen, "one under way again")
        await workers.ask("DELETE", f"/v1/subscriptions/{topic_name}")
        written += await send(workers, topic_name, "s0", range(4, 6))
        await other.until(lambda: len(other.rows) >= len(written), "all of the other")
        assert other.problems(written) == []
        hangs.set()
    assert "delivery_failed" not in pushing.log()


async def test_removed_and_made_again_under_its_name_is_another_one(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    """A receiver that follows the rule forgets the offset, and refuses no batch as that of a replaced worker."""
    topic = await workers.make_topic(topic_name)
    newest = (0, 0)

    async def behave(got: Received) -> int | None:
        nonlocal newest
        if (got.replay, got.epoch) < newest:
            return 409
        newest = got.replay, got.epoch
        return None

    async with receiver(PushReceiver(behave)) as got:
        written, path = await send(workers, topic_name, "a", range(1, 4)), f"/v1/subscriptions/{topic_name}"
        for count in range(1, 4):
            await subscribe(workers, topic_name, topic, got.url)
            for _ in range(count):
                await workers.ask("POST", path + "/replay", json={"offset": "earliest"})
            # A subscription and its replays are numbered from the time when it was made.
            last = (await workers.ask("GET", path)).document["created_ms"] + count
            await got.until(lambda last=last: last in {one.replay for one in got.seen}, "deliveries")  # type: ignore[misc]
            await workers.ask("DELETE", path)
        await subscribe(workers, topic_name, topic, got.url)
        last = (await workers.ask("GET", path)).document["created_ms"]

        def rows() -> int:
            return sum(len(one.rows) for (replay, _), one in got.taken.items() if replay == last)

        await got.until(lambda: rows() >= len(written), "all of the last one")
        answer = await workers.ask("GET", path)
        assert [row["stop"] for row in answer.document["partitions"]] == [None]


@pytest.mark.long
async def test_thousands_of_subscriptions(workers: Gateway, pushing: Deliver, topic_name: str) -> None:
    """Up to a limit that is named; another one's chunks are not late meanwhile, and all are gone afterwards."""
    topic = await workers.make_topic(topic_name)
    already = len((await workers.ask("GET", "/v1/subscriptions")).document["subscriptions"])
    names = [f"{topic_name[:60]}-{number}" for number in range(2000 - already)]
    async with receiver() as got:

        async def put(name: str) -> None:
            await subscribe(workers, name, "dc1.*-not-there-" + name, URL)

        await subscribe(workers, f"{topic_name}-other", topic, got.url)
        for at in range(0, len(names) - 1, 20):
            await asyncio.gather(*map(put, names[at : at + 20][: len(names) - 1 - at]))
        body = {"topics": ["dc1.a"], "url": URL}
        answer = await workers.ask("PUT", "/v1/subscriptions/one-too-many", json=body, expect=409)
        assert "2000 subscriptions" in answer.document["detail"]
        started = time.monotonic()
        written = await send(workers, topic_name, "a", range(1, 11))
        await got.until(lambda: len(got.rows) >= len(written), "all of the other")
        print(f"delivered after {time.monotonic() - started:.2f} s beside {len(names)} subscriptions")
        for at in range(0, len(names) - 1, 20):
            removed = [name for name in names[at : at + 20] if name != names[-1]]
            await asyncio.gather(*(workers.ask("DELETE", f"/v1/subscriptions/{name}") for name in removed))
