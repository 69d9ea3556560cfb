"""Push delivery: every chunk once and in order at a receiver that follows the rule, whatever it and others do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from logferry.gateway.contract.chunk import MSGPACK, Chunk, pack_chunk
from logferry.ops.cli import main
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.delivery import Deliver, PushReceiver, Received, deliver, is_signed, receiver, send, subscribe
from tests.support.gateway import Gateway, source_path, write


@pytest.fixture(scope="module")
def pushing(kafka: KafkaCluster, workers: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deliver]:
    folder = tmp_path_factory.mktemp("deliver")
    secrets = folder / "secrets"
    secrets.mkdir()
    (secrets / "key").write_text("first\n")
    (secrets / "old").write_text("older\n")
    (secrets / "token").write_text("let-me-in\n")
    with deliver(kafka, folder, "shared", secrets_dir=str(secrets)) as running:
        yield running


@pytest.mark.parametrize("order", ["partition", "source"])
async def test_every_chunk_comes_once_and_in_order(
    workers: Gateway, pushing: Deliver, topic_name: str, order: str
) -> None:
    topic = await workers.make_topic(topic_name, 2)
    async with receiver() as got:
        await subscribe(workers, topic_name, topic, got.url, order=order, max_bytes=1024)
        sources = [f"web{n}" for n in range(6)]
        written = [
            one
            for some in await asyncio.gather(*(send(workers, topic_name, source, range(1, 31)) for source in sources))
            for one in some
        ]
        await got.until(lambda: len(got.rows) >= len(written), "all chunks")
        assert got.problems(written, order=order) == []
        assert len(got.seen) > 4
        answer = await workers.ask("GET", f"/v1/subscriptions/{topic_name}")
        assert {row["topic"] for row in answer.document["partitions"]} == {topic}


async def test_signatures_tokens_and_two_keys(workers: Gateway, pushing: Deliver, topic_name: str) -> None:
    topic = await workers.make_topic(topic_name)
    async with receiver() as got:
        await subscribe(
            workers, topic_name, topic, got.url, secret_file="key", old_secret_file="old", token_file="token"
        )
        await send(workers, topic_name, "a", range(1, 3))
        await got.until(lambda: len(got.rows) == 2, "both")
        first = got.seen[0]
        assert is_signed(first, b"first")
        assert is_signed(first, b"older")
        assert not is_signed(first, b"third")
        assert first.headers["Authorization"] == "Bearer let-me-in"


async def test_the_trace_of_a_write_reaches_readers_and_receivers_and_makes_no_chunk_another_one(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    """The chunk is sent again in other traces, through both workers; what is not valid is as if it were not there."""
    topic = await workers.make_topic(topic_name)
    traces = [f"00-{number:032x}-00f067aa0ba902b7-01" for number in (1, 2)]
    x, y = (letter * 1024 + b"\n" for letter in (b"x", b"y"))  # each a batch of its own
    answers = [
        await write(workers, topic_name, "a", "seqno=5&prev=0", x, headers={"Traceparent": trace}, worker=worker)
        for trace in (*traces, "00-nonsense")
        for worker in range(2)
    ]
    assert [answer.document["written"] for answer in answers] == [1, 0, 0, 0, 0, 0]
    assert [answer.document["duplicates"] for answer in answers] == [0, 1, 1, 1, 1, 1]
    packed = b"".join(pack_chunk(Chunk(seqno, None, None, {}, y)) for seqno in (6, 7))
    sent = {"Content-Type": MSGPACK, "traceparent": "ff" + traces[1][2:]}
    await workers.ask("POST", source_path(topic_name, "a", "/chunks"), data=packed, headers=sent)
    async with receiver() as got:
        await subscribe(workers, topic_name, topic, got.url, max_bytes=1024)
        await got.until(lambda: len(got.rows) == 3, "all chunks")
    found = {row["data"][0]: row["attributes"] for row in got.rows}
    assert found == {"x": {"traceparent": traces[0]}, "y": {}}
    headers = {one.rows[0]["data"][0]: one.headers.get("traceparent") for one in got.seen}
    assert headers == {"x": traces[0], "y": None}


async def test_a_receiver_that_fails_and_lies(workers: Gateway, pushing: Deliver, topic_name: str) -> None:
    """A lie: 500 after the batch was taken. What was taken comes again, with the same token and bytes."""
    topic = await workers.make_topic(topic_name)
    count = 0

    async def behave(got: Received) -> int | None:
        nonlocal count
        count += 1
        return {1: 500, 3: 429, 5: 408, 6: 425}.get(count)

    async def after(got: Received) -> int | None:
        return 503 if count in (2, 8) else None

    async with receiver(PushReceiver(behave, after)) as got:
        await subscribe(workers, topic_name, topic, got.url, max_bytes=1024)
        written = await send(workers, topic_name, "a", range(1, 41), size=100)
        await got.until(lambda: len(got.rows) >= len(written), "all chunks")
        assert got.problems(written) == []
        assert len(got.seen) > len(got.taken)


async def test_a_rejected_batch_stops_its_partition_until_it_is_resumed(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    topic = await workers.make_topic(topic_name)
    is_good = False

    async def behave(got: Received) -> int | None:
        return None if is_good else 422

    async with receiver(PushReceiver(behave)) as got:
        await subscribe(workers, topic_name, topic, got.url)
        written = await send(workers, topic_name, "a", range(1, 4))
        await got.until(lambda: len(got.seen) > 0, "a delivery")

        async def stop() -> dict[str, str] | None:
            answer = await workers.ask("GET", f"/v1/subscriptions/{topic_name}")
            return next((row["stop"] for row in answer.document["partitions"] if row["stop"]), None)

        async with asyncio.timeout(60):
            while (why := await stop()) is None:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)
        assert why["kind"] == "rejected"
        assert "422" in why["detail"]
        is_good = True
        await workers.ask("POST", f"/v1/subscriptions/{topic_name}/resume")
        await got.until(lambda: len(got.rows) >= len(written), "all chunks")
        assert got.problems(written) == []
        # The batch may be there before the resumption is committed.
        async with asyncio.timeout(60):
            while await stop() is not None:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)


async def test_a_bad_chunk_is_found_by_halving_and_set_aside(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    topic = await workers.make_topic(topic_name)
    dead = await workers.make_topic(topic_name + "-dead")

    async def behave(got: Received) -> int | None:
        return 400 if b"bad 1 " in got.body else None

    async with receiver(PushReceiver(behave)) as got:
        written = []
        for number in range(10):
            written += await send(workers, topic_name, f"s{number}", range(1, 3))
        await send(workers, topic_name, "bad", range(1, 2))
        written += await send(workers, topic_name, "z", range(1, 3))
        await subscribe(
            workers, topic_name, topic, got.url, on_rejection="split", dead_letter_topic=topic_name + "-dead"
        )
        await got.until(lambda: len(got.rows) >= len(written), "all but one")
        assert got.problems(written) == []
        path, ndjson = f"/v1/topics/{dead}/partitions/0/chunks?wait_ms=5000", {"Accept": "application/x-ndjson"}
        async with asyncio.timeout(60):  # what comes after it may be delivered before it is committed
            while not (lines := (await workers.ask("GET", path, headers=ndjson)).body.splitlines()):
                pass
        [line] = lines
        assert b'"source_id": "bad"' in line
        assert b"dead.reason" in line


async def test_pause_replay_and_removal(workers: Gateway, pushing: Deliver, topic_name: str) -> None:
    topic = await workers.make_topic(topic_name)
    async with receiver() as got:
        await subscribe(workers, topic_name, topic, got.url)
        written = await send(workers, topic_name, "a", range(1, 4))
        await got.until(lambda: len(got.rows) == 3, "three")
        await workers.ask("POST", f"/v1/subscriptions/{topic_name}/replay", json={"offset": "earliest"})
        await got.until(lambda: len(got.rows) == 6, "all again")
        made, again = sorted({one.replay for one in got.seen})
        assert again == made + 1
        await workers.ask("POST", f"/v1/subscriptions/{topic_name}/pause")
        await workers.ask("DELETE", f"/v1/subscriptions/{topic_name}")
        await workers.ask("GET", f"/v1/subscriptions/{topic_name}", expect=404)
        assert len(written) == 3


async def test_a_private_address_is_not_connected_to(
    kafka: KafkaCluster, workers: Gateway, topic_name: str, tmp_path: Path
) -> None:
    """Whatever form it has. The subscriptions stand in the configuration, where each is harmed alone."""
    topic = await workers.make_topic(topic_name)
    hosts = ("localhost", "127.0.0.1", "127.1", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1")
    async with receiver() as got:
        port = got.url.rpartition(":")[2]
        tables: dict[str, Any] = {
            f"subscriptions.s{number}": {"topics": [topic], "url": f"http://{host}:{port}", "start": "earliest"}
            for number, host in enumerate(hosts)
        }
        with deliver(kafka, tmp_path, topic_name, allowed_networks=[], **tables) as running:
            await send(workers, topic_name, "a", range(1, 2))
            async with asyncio.timeout(60):
                while len(units := await running.units()) < len(hosts) or not all(unit["error"] for unit in units):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        assert all("allowed_networks" in unit["error"]["detail"] for unit in units), units
        assert got.seen == []


async def test_metrics_name_a_subscription_that_does_not_advance(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    """Not while nothing is to do, and not while it is paused, which an operator wants."""
    topic, name = await workers.make_topic(topic_name), f'{{subscription="{topic_name}"}}'
    may_take = asyncio.Event()
    may_take.set()

    async def behave(got: Received) -> None:
        await may_take.wait()

    async def measured() -> dict[str, float]:
        async with aiohttp.ClientSession() as session, session.get(f"{pushing.workers[0].url}/metrics") as answer:
            samples = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[0] != "#")
        found = {key: samples.get(f"logferry_delivery_{key}{name}", "-1") for key in ("stalled_seconds", "lag_records")}
        found["held_bytes"] = samples["logferry_delivery_held_bytes"]
        return {key: float(value) for key, value in found.items()}

    async def until(holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        async with asyncio.timeout(60):
            while not holds(found := await measured()):  # noqa: ASYNC110  each look is a scrape
                await asyncio.sleep(0.1)
        return found

    async with receiver(PushReceiver(behave)) as got:
        await subscribe(workers, topic_name, topic, got.url)
        await send(workers, topic_name, "a", range(1, 2))
        await got.until(lambda: len(got.rows) == 1, "the first one")
        await until(lambda found: (found["stalled_seconds"], found["lag_records"]) == (0, 0))
        may_take.clear()
        await send(workers, topic_name, "a", range(2, 4), size=1000)
        stuck = await until(lambda found: found["stalled_seconds"] > 1)
        assert stuck["lag_records"] > 0
        await workers.ask("POST", f"/v1/subscriptions/{topic_name}/pause")
        await until(lambda found: found["stalled_seconds"] == 0 and found["lag_records"] > 0)
        await workers.ask("POST", f"/v1/subscriptions/{topic_name}/resume")
        await until(lambda found: found["stalled_seconds"] > 0)
        await until(lambda found: found["held_bytes"] > 2000)  # both, also where each is a batch
        may_take.set()
        await got.until(lambda: len(got.rows) == 3, "the others")
        await until(lambda found: (found["stalled_seconds"], found["lag_records"], found["held_bytes"]) == (0, 0, 0))


async def test_the_status_of_all_subscriptions_with_the_way_on(
    kafka: KafkaCluster, workers: Gateway, topic_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = await workers.make_topic(topic_name, 2)
    written = await send(workers, topic_name, "a", range(1, 4))
    async with receiver() as good, receiver(PushReceiver(behave=lambda got: _answer(422))) as bad:
        tables: dict[str, Any] = {
            f"subscriptions.{name}": {"topics": [topic], "url": url, "start": "earliest"}
            for name, url in (("good", good.url), ("bad", bad.url), ("away", "http://127.0.0.1:9"))
        }
        tables["subscriptions.nothing"] = {"topics": ["dc1.not-there"], "url": good.url}
        with deliver(kafka, tmp_path, "status-of-all", workers=2, **tables) as running:
            await good.until(lambda: len(good.rows) == len(written), "all")

            async def status(*options: str) -> tuple[int, str]:
                url = ["--deliver", running.workers[1].url]
                found = await asyncio.to_thread(main.main, ["status", *url, *options])
                return found, capsys.readouterr().out

            async def until_said(holds: Callable[[str], bool], *options: str) -> int:
                """The exit status, once it holds: a worker that starts takes partitions from the other one."""
                result, said = await status(*options)
                deadline = time.monotonic() + 60
                while not holds(said):
                    assert time.monotonic() < deadline, said
                    await asyncio.sleep(0.2)
                    result, said = await status(*options)
                return result

            wanted = (
                f"bad: {topic}-", "stopped", "away: the receiver", "correct the receiver, then resume",
                "POST /v1/subscriptions/bad/resume", "nothing is delivered to nothing",
            )  # fmt: skip
            assert await until_said(lambda said: all(text in said for text in wanted)) == 1

            def is_whole(said: str) -> bool:
                workers = json.loads(said)["workers"]
                units = [unit for worker in workers.values() for unit in worker["units"]]
                lags = {unit["subscription"]: unit["lag_records"] for unit in units if unit["position"]}
                return (len(workers), lags.get("good")) == (2, 0)

            await until_said(is_whole, "--json")


async def _answer(status: int) -> int:
    return status
