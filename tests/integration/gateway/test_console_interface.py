"""What the console asks for, as HTTP: offsets at a time, sizes, the list of consumers, a preview, all workers."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support import served_gateway
from tests.support.gateway import Gateway, write


async def test_offsets_at_a_time_and_sizes(workers: Gateway, topic_name: str) -> None:
    await workers.make_topic(topic_name, 2)
    first = await write(workers, topic_name, "a", "seqno=5&prev=0", b"x" * 1000)
    partition = first.document["partition"]
    recorded_ms = await _last_recorded_ms(workers, topic_name, partition)
    after_ms = recorded_ms
    while after_ms == recorded_ms:
        last = await write(workers, topic_name, "a", f"seqno={time.time_ns()}", b"y")
        after_ms = await _last_recorded_ms(workers, topic_name, partition)
    await write(workers, topic_name, "a", f"seqno={time.time_ns()}", b"z")
    query = f"?at_ms={recorded_ms + 1}&sizes=true"
    for path in (f"/v1/topics/{topic_name}{query}", f"/v1/topics{query}"):
        document = (await workers.ask("GET", path, 1)).document
        (topic,) = (one for one in document.get("topics", [document]) if one["topic"] == f"dc1.{topic_name}")
        written, empty = sorted(topic["offsets"], key=lambda one: one["partition"] != partition)
        assert first.document["offsets"][1] < written["at"] <= last.document["offsets"][0]
        assert written["size_bytes"] > 100
        assert (empty["at"], empty["size_bytes"]) == (None, 0)
    plain = (await workers.ask("GET", f"/v1/topics/{topic_name}")).document
    assert set(plain["offsets"][0]) == {"partition", "first", "next"}
    await workers.ask("GET", "/v1/topics?sizes=yes", expect=400)


async def _last_recorded_ms(workers: Gateway, topic: str, partition: int) -> int:
    path, ndjson = f"/v1/topics/dc1.{topic}/partitions/{partition}/chunks", {"Accept": "application/x-ndjson"}
    async with asyncio.timeout(60):
        # Kafka shows a transaction a moment after its answer.
        while not (rows := (await workers.ask("GET", path + "?wait_ms=5000", headers=ndjson)).body.splitlines()):
            pass
    return int(json.loads(rows[-1])["recorded_ms"])


async def test_a_preview_sets_nothing(workers: Gateway, topic_name: str) -> None:
    topic = await workers.make_topic(topic_name)
    await write(workers, topic_name, "a", "seqno=5&prev=0")
    await _last_recorded_ms(workers, topic_name, 0)  # it is shown, and its end is known
    path = f"/v1/consumers/{topic_name}/offsets"
    await workers.ask("PUT", path, json={"topic": topic, "to": "latest"})
    before = (await workers.ask("GET", path)).document["positions"]
    answer = await workers.ask("PUT", path + "?dry_run=true", json={"topic": topic, "to": "earliest"})
    assert answer.document["positions"] == [{"topic": topic, "partition": 0, "offset": 0}]
    assert (await workers.ask("GET", path)).document["positions"] == before
    await workers.ask("PUT", path + "?dry_run=false", json={"topic": topic, "to": "earliest"})
    (exact,) = (await workers.ask("GET", path)).document["positions"]
    (quick,) = (await workers.ask("GET", path + "?records_only=true")).document["positions"]
    assert (exact["offset"], exact["lag_bytes"] > 0) == (0, True)
    assert quick == {**exact, "lag_records": exact["next"], "lag_bytes": None, "lag_seconds": None}


async def test_consumers_are_listed_with_their_lag(workers: Gateway, topic_name: str) -> None:
    topic = await workers.make_topic(topic_name, 2)
    await workers.ask("PUT", f"/v1/consumers/{topic_name}/offsets", json={"topic": topic, "to": "latest"})
    written = (await write(workers, topic_name, "a", "seqno=5&prev=0")).document["offsets"]
    document = (await workers.ask("GET", "/v1/consumers", 1)).document
    assert document["complete"] is True
    (found,) = (one for one in document["consumers"] if one["consumer"] == topic_name)
    assert found["lag_records"] > written[0] - 1
    assert (found["topics"], found["partitions"], found["state"], found["out_of_range"]) == ([topic], 2, "Empty", 0)
    assert not any(one["consumer"].startswith(("shared.", "logferry.")) for one in document["consumers"])


async def test_a_token_sees_the_consumers_of_its_own_topics_alone(kafka: KafkaCluster, tmp_path: Path) -> None:
    made = {name: new_token() for name in ("admin", "one", "none", "named")}
    rights = {
        "admin": 'admin = ["*"]\nread = ["*"]',
        "one": 'read = ["console-one"]',
        "none": 'write = ["console-one"]',
        "named": 'read = ["*"]\nconsumers = ["console-mine*"]',
    }
    tables = "".join(f'[[tokens]]\nname = "{n}"\nsha256 = "{made[n][1]}"\n{rights[n]}\n' for n in made)
    async with served_gateway.Gateway(tmp_path, kafka.bootstrap, 1, tables) as gateway:
        secret = {name: token for name, (token, _) in made.items()}
        for topic in ("console-one", "console-two"):
            assert (await gateway.ask("PUT", f"/v1/topics/{topic}", secret["admin"], json={"partitions": 1}))[0] < 300
        for consumer, topics in (("console-a", ["one"]), ("console-b", ["two"]), ("console-mine", ["one", "two"])):
            for topic in topics:
                path, body = f"/v1/consumers/{consumer}/offsets", {"topic": f"dc1.console-{topic}", "to": "earliest"}
                assert (await gateway.ask("PUT", path, secret["admin"], json=body))[0] == 200
        seen = {}
        for name in ("admin", "one", "named"):
            _, document, _ = await gateway.ask("GET", "/v1/consumers", secret[name])
            listed = [one for one in document["consumers"] if one["consumer"].startswith("console-")]
            seen[name] = {one["consumer"]: [topic[12:] for topic in one["topics"]] for one in listed}
        assert seen["admin"] == {"console-a": ["one"], "console-b": ["two"], "console-mine": ["one", "two"]}
        assert seen["one"] == {"console-a": ["one"], "console-mine": ["one"]}
        assert seen["named"] == {"console-mine": ["one", "two"]}
        assert (await gateway.ask("GET", "/v1/consumers", secret["none"]))[0] == 403
        _, caller, _ = await gateway.ask("GET", "/v1/caller", secret["none"])
        assert {name: caller[name] for name in ("name", "write", "read", "admin", "everything")} == {
            "name": "none",
            "write": True,
            "read": False,
            "admin": False,
            "everything": False,
        }
        assert (await gateway.ask("GET", "/v1/caller"))[0] == 401


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_all_workers_and_one_that_does_not_answer(
    kafka: KafkaCluster, tmp_path: Path, number: signal.Signals
) -> None:
    settings = {"session_timeout_ms": 60_000}
    async with served_gateway.Gateway(tmp_path, kafka.bootstrap, 2, settings=settings) as gateway:
        async with asyncio.timeout(60):
            while True:
                _, document, _ = await gateway.ask("GET", "/v1/workers")
                workers = document["workers"]
                if set(workers) == set(gateway.urls) and all("error" not in worker for worker in workers.values()):
                    break
        _, mirror, _ = await gateway.ask("GET", "/v1/mirror")
        assert mirror == {"group": f"{gateway.prefix}.mirror.dc1", "workers": {}}
        gateway.workers[1].send(number)
        _, document, _ = await gateway.ask("GET", "/v1/workers")
        silent = document["workers"][gateway.urls[1]]
        assert set(silent) == {"error"}
        assert document["well"] is False
        assert any(gateway.urls[1] in finding["what"] for finding in document["findings"] if finding["wrong"])
        if number == signal.SIGSTOP:
            gateway.workers[1].send(signal.SIGCONT)
