"""Denials, rights on consumers, tokens that end, and what a caller leaves behind: over HTTP, on real Kafka."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Setting

from tests.support.served_gateway import Gateway

NAMES = ("admin", "most", "watcher", "worker", "ends", "maker")
TOKENS = {name: new_token() for name in NAMES}
SECRET = {name: made[0] for name, made in TOKENS.items()}
GRANTS = {
    "admin": 'write = ["*"]\nread = ["*"]\nadmin = ["*"]',
    "most": 'write = ["*"]\nread = ["*"]\nadmin = ["*"]\n'
    'deny = { write = ["payments"], read = ["payments"], admin = ["payments"], consumers = ["billing"] }',
    "watcher": 'read = ["*"]\nconsumers = { read = ["*"] }',
    "worker": 'read = ["*"]\nconsumers = { commit = ["load-*"] }',
    "ends": 'read = ["*"]',
    "maker": 'read = ["*"]\nadmin = ["nginx"]',
}
PATIENT = aiohttp.ClientTimeout(60)


def entries(*names: str, ends: datetime | None = None, **changed: str) -> str:
    made = []
    for name in names:
        date = f", not_after = {ends:%Y-%m-%dT%H:%M:%SZ}" if name == "ends" and ends is not None else ""
        secret = f'secrets = [{{ sha256 = "{TOKENS[name][1]}"{date} }}]'
        made.append(f'[[tokens]]\nname = "{name}"\n{secret}\n{changed.get(name, GRANTS[name])}\n')
    return "".join(made)


@pytest.fixture
async def gateway(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[Gateway]:
    # Of a data centre of its own: other tests have topics of the same names.
    settings: dict[str, Setting] = {"dc": "rights", "data_centres": ["rights"]}
    async with Gateway(tmp_path, kafka.bootstrap, 2, entries(*NAMES), settings=settings) as gateway:
        for topic in ("nginx", "payments"):
            status, document, _ = await gateway.ask(
                "PUT", f"/v1/topics/{topic}", SECRET["admin"], data='{"partitions": 2}', timeout=PATIENT
            )
            assert status in (200, 201), document
        yield gateway


async def test_denials_and_rights_on_consumers(gateway: Gateway) -> None:
    run = time.time_ns()
    load, other = f"load-{run}", f"other-{run}"
    chunks, reads = "/v1/topics/{}/sources/web1/chunks?seqno=1", "/v1/topics/rights.{}/partitions/0/chunks"
    positions = '{"topic": "rights.nginx", "to": "earliest"}'
    definition = {"url": "https://receiver.invalid/", "format": "ndjson"}
    # What, of whom, and the answer.
    table: list[tuple[str, str, str, Any, int]] = [
        ("most", "POST", chunks.format("nginx"), b"x", 200),
        ("most", "POST", chunks.format("payments"), b"x", 403),
        ("most", "POST", chunks.format("p%61yments"), b"x", 403),
        ("most", "GET", reads.format("nginx"), None, 200),
        ("most", "GET", reads.format("payments"), None, 403),
        ("most", "PUT", "/v1/topics/payments", '{"partitions": 4}', 403),
        ("most", "DELETE", "/v1/topics/payments/sources/web1", None, 403),
        ("most", "GET", "/v1/topics/payments", None, 403),
        ("most", "GET", "/v1/topics/rights.payments", None, 403),
        ("most", "GET", "/v1/topics/payments/sources", None, 403),
        # It does not administer everything any more.
        ("most", "GET", "/v1/status", None, 403),
        ("most", "GET", "/metrics", None, 403),
        ("most", "GET", "/v1/consumers/billing/stream?topic=rights.nginx", None, 403),
        ("most", "GET", f"/v1/consumers/{other}/stream?topic=rights.payments", None, 403),
        ("most", "PUT", f"/v1/subscriptions/s{run}", json.dumps({"topics": ["*.nginx"], **definition}), 403),
        ("most", "PUT", f"/v1/subscriptions/s{run}", json.dumps({"topics": ["rights.payments"], **definition}), 403),
        ("watcher", "GET", f"/v1/consumers/{load}/offsets", None, 200),
        ("watcher", "PUT", f"/v1/consumers/{load}/offsets", positions, 403),
        ("watcher", "GET", f"/v1/consumers/{load}/stream?topic=rights.nginx", None, 403),
        ("watcher", "POST", f"/v1/consumers/{load}/sessions/x/commit", "{}", 403),
        ("worker", "GET", f"/v1/consumers/{other}/offsets", None, 403),
        ("worker", "PUT", f"/v1/consumers/{load}/offsets", positions, 403),
        ("worker", "GET", f"/v1/consumers/{load}/stream?topic=rights.nginx&cursor=rights.nginx:0:0", None, 403),
        ("admin", "PUT", f"/v1/consumers/{load}/offsets", positions, 200),
    ]
    for name, method, path, data, expected in table:
        for worker in range(2):
            status, document, _ = await gateway.ask(method, path, SECRET[name], worker, data=data, timeout=PATIENT)
            assert status == expected, (name, method, path, document)
    _, document, _ = await gateway.ask("GET", "/v1/topics", SECRET["most"])
    assert [topic["topic"] for topic in document["topics"]] == ["rights.nginx"]
    # A pattern reads what is not denied.
    headers = {"Authorization": f"Bearer {SECRET['most']}", "Accept": "application/x-ndjson"}
    url = f"{gateway.urls[0]}/v1/consumers/{other}/stream?topic=*"
    async with gateway.session.get(url, headers=headers) as stream:
        frames = [json.loads(await stream.content.readline()) for _ in range(2)]
    assert {one["topic"] for one in frames[1]["partitions"]} == {"rights.nginx"}


async def test_a_token_ends_also_for_the_stream_that_it_reads(gateway: Gateway) -> None:
    ends = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=10)
    await gateway.reload(entries(*NAMES, ends=ends))
    _, document, _ = await gateway.ask("GET", "/v1/status", SECRET["admin"])
    assert [text for text in document["warnings"] if "ends has no valid token" in text]
    _, metrics, _ = await gateway.ask("GET", "/metrics", SECRET["admin"])
    line = f'logferry_token_expires_timestamp_seconds{{token="ends"}} {ends.timestamp()}'
    [found] = [line for line in metrics.decode().splitlines() if line.startswith("logferry_token_expires")]
    assert float(found.rpartition(" ")[2]) == ends.timestamp(), line
    headers = {"Authorization": f"Bearer {SECRET['ends']}", "Accept": "application/x-ndjson"}
    url = f"{gateway.urls[0]}/v1/consumers/ends-{time.time_ns()}/stream?topic=rights.nginx"
    async with gateway.session.get(url, headers=headers) as stream:
        frames = [json.loads(line) async for line in stream.content]
    assert datetime.now(UTC) >= ends
    assert frames[0]["frame"] == "session"
    assert frames[-1]["frame"] == "error"
    assert frames[-1]["problem"]["type"].endswith("/forbidden")
    status, document, _ = await gateway.ask("GET", "/v1/topics", SECRET["ends"])
    assert (status, document["detail"]) == (401, "the token has ended")
    said = [json.loads(line) for line in gateway.said().splitlines() if "token_expires" in line]
    assert [(one["token"], one["level"]) for one in said] == [("ends", "warning")] * 2
    assert SECRET["ends"] not in gateway.said()


@pytest.mark.parametrize("lost", ["removed", "denied", "less"])
async def test_a_subscription_pauses_when_who_ordered_it_has_lost_the_right(gateway: Gateway, lost: str) -> None:
    path = f"/v1/subscriptions/orphan-{time.time_ns()}"
    data = json.dumps({"topics": ["rights.nginx"], "url": "https://receiver.invalid/", "format": "ndjson"})
    status, document, _ = await gateway.ask("PUT", path, SECRET["maker"], data=data, timeout=PATIENT)
    assert (status, document["owner"], document["is_paused"]) == (201, "maker", False)
    less = {
        "removed": entries(*(name for name in NAMES if name != "maker")),
        "denied": entries(*NAMES, maker=GRANTS["maker"] + '\ndeny = { read = ["nginx"] }'),
        "less": entries(*NAMES, maker='read = ["*"]\nadmin = ["squid"]'),
    }
    await gateway.reload(less[lost])
    async with asyncio.timeout(60):
        while not document["is_paused"]:
            await asyncio.sleep(0.2)
            _, document, _ = await gateway.ask("GET", path, SECRET["admin"])
    [said] = [json.loads(line) for line in gateway.said().splitlines() if "subscription_orphaned" in line]
    assert (said["level"], said["owner"]) == ("error", "maker")
    # Whoever resumes it orders it from then on.
    status, document, _ = await gateway.ask("POST", path + "/resume", SECRET["admin"])
    assert (status, document["owner"], document["is_paused"]) == (200, "admin", False)
