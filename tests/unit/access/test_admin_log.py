"""What the log of acts and refusals notes of requests, with the real router and gate; nothing is written to Kafka."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from logferry.gateway.admin_log import writer
from logferry.gateway.admin_log.records import _KINDS_OF_REFUSALS, ACTS, Refusals
from logferry.gateway.admin_log.writer import AdminLog
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.metrics import ADMIN_LOG

TOKEN, OTHER = "lf_of-the-operator", "lf_of-nobody"


def made() -> tuple[Routes, AdminLog]:
    """An act, and a request that is none, at a gateway with one token."""
    entry = {"name": "ops", "sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "admin": ["nginx"], "read": ["x"]}
    raw = {"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}, "tokens": [entry]}
    routes = Routes(Gate(Config.model_validate(raw)))

    async def put_topic(call: Call) -> web.StreamResponse:
        if "fail" in call.query:
            raise Problem("conflict", "there is one already")
        call.facts["partitions"] = 4
        return json_response({})

    async def bulk(call: Call) -> web.StreamResponse:
        call.refused += [Problem("forbidden", "not this topic"), Problem("too-large", "too much")]
        return json_response({})

    routes.add("PUT", "/v1/topics/{topic}", "put_topic", put_topic, Right.ADMIN)
    routes.add("POST", "/v1/bulk", "bulk", bulk, Right.KNOWN)
    log = AdminLog(
        KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "tests"), "logferry.gateway.dc1", "http://me", 1, ()
    )
    routes.observe, routes.observed = log.observe, ACTS
    return routes, log


async def ask(routes: Routes, method: str, path: str, token: str | None = TOKEN, **headers: str) -> int:
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return (await routes(make_mocked_request(method, path, headers=headers))).status


def kept(log: AdminLog, kind: str, *keys: str) -> list[tuple[Any, ...]]:
    log._end_window()
    records = [*log._waiting[kind]]
    assert not [word for word in (TOKEN, OTHER) if word in json.dumps(records)]
    return [tuple(record[key] for key in keys) for record in records]


async def test_an_act_is_noted_with_how_it_ended() -> None:
    routes, log = made()
    assert await ask(routes, "PUT", "/v1/topics/nginx") == 200
    assert await ask(routes, "PUT", f"/v1/topics/nginx?fail={TOKEN}") == 409
    assert await ask(routes, "PUT", "/v1/topics/nginx", **{"X-Logferry-Forwarded": "1"}) == 200
    keys = ("act", "caller", "path", "status", "result", "reason", "facts", "is_forwarded")
    assert kept(log, "acts", *keys) == [
        ("put_topic", "ops", "/v1/topics/nginx", 200, "done", None, {"partitions": 4}, False),
        ("put_topic", "ops", "/v1/topics/nginx", 409, "failed", "conflict: there is one already", {}, False),
        ("put_topic", "ops", "/v1/topics/nginx", 200, "done", None, {"partitions": 4}, True),
    ]
    assert kept(log, "refusals", "act") == []


async def test_refusals_are_counted_by_who_and_what() -> None:
    routes, log = made()
    for number in range(1000):
        assert await ask(routes, "PUT", f"/v1/topics/guess-{number}", OTHER) == 401
    assert await ask(routes, "PUT", "/v1/topics/squid") == 403
    assert await ask(routes, "PUT", "/v1/topics/squid", None) == 401
    assert await ask(routes, "POST", "/v1/bulk") == 200
    assert kept(log, "acts", "act") == []
    keys = ("act", "caller", "path", "status", "result", "reason", "count")
    unknown = "unauthenticated: the token is not configured here"
    right = "forbidden: the token ops does not have the right to do this"
    assert kept(log, "refusals", *keys) == [
        ("put_topic", None, "/v1/topics/guess-0", 401, "refused", unknown, 1001),
        ("put_topic", "ops", "/v1/topics/squid", 403, "refused", right, 1),
        ("bulk", "ops", "/v1/bulk", 403, "refused", "forbidden: not this topic", 1),
    ]


def refusal(address: str, at_ms: int) -> dict[str, Any]:
    named = {"caller": None, "address": address, "act": "write", "method": "POST", "path": "/", "reason": "x"}
    return {**named, "count": 1, "at_ms": at_ms, "first_ms": at_ms}


def test_many_addresses_share_one_record() -> None:
    refusals = Refusals()
    for number in range(10_000):
        refusals.add(refusal(f"10.0.{number // 256}.{number % 256}", number), "unauthenticated")
    found = refusals.take()
    assert len(found) == _KINDS_OF_REFUSALS + 1
    rest = found[-1]
    assert (rest["address"], rest["path"], rest["count"]) == (None, None, 10_000 - _KINDS_OF_REFUSALS)
    assert (rest["first_ms"], rest["at_ms"]) == (_KINDS_OF_REFUSALS, 9999)
    assert refusals.take() == []


async def test_what_cannot_be_written_is_bounded_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kafka is away: nobody listens at the address."""
    routes, log = made()

    def lost() -> float:
        return float(ADMIN_LOG.labels("acts", "lost")._value.get())

    before = lost()
    for _ in range(writer._WAITING + 5):
        assert await ask(routes, "PUT", "/v1/topics/nginx") == 200
    assert lost() - before == 5
    monkeypatch.setattr(writer, "_WRITE_S", 0.2)
    for _ in range(2):
        async with asyncio.timeout(30):
            await log._write()
    failed = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert failed == ["admin_log_failed"]
    await log.stop()
    assert lost() - before == writer._WAITING + 5


async def test_a_path_of_any_bytes_is_a_record() -> None:
    routes, log = made()
    assert await ask(routes, "PUT", "/v1/topics/\udcff" + "x" * 5000, OTHER) == 401
    [(path,)] = kept(log, "refusals", "path")
    assert len(path) < 400
    json.dumps(path).encode()
    path.encode()
