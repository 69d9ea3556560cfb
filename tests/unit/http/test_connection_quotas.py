"""Quotas of connections and requests at the server of a worker, over real connections and without Kafka."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web
from logferry.gateway.access.certificates import hand_on, handed_on
from logferry.gateway.config import Config
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.router import FORWARDED, Call, Routes, json_response
from logferry.gateway.http.server import CallerConnection, Server
from logferry.gateway.metrics import REGISTRY
from logferry.ops.stack.processes import free_ports

from tests.support.raw_connection import Line

KEY = b"k" * 32
PATH = "/v1/topics"
LIMIT = 20


class Worker:
    """The server of a worker with one route, which answers at once, or when `may_answer` is set."""

    def __init__(self, folder: Path) -> None:
        (folder / "key").write_bytes(KEY)
        self.port = free_ports(1)[0]
        tokens = [
            {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "read": ["*"], **quota}
            for name, quota in (("few", {"connections": LIMIT}), ("slow", {"requests_per_s": 5}), ("free", {}))
        ]
        self.config = Config.model_validate(
            {
                "dc": "dc1",
                "kafka": {"bootstrap_servers": "x:1"},
                "listen": f"127.0.0.1:{self.port}",
                "worker_key_file": folder / "key",
                "tokens": tokens,
                "limits": {"connections": 5000},
            }
        )
        # Its time stands: no bucket fills while a test runs.
        self.quotas = Quotas(self.config, lambda: 1000.0)
        self.routes = Routes(Gate(self.config))
        self.routes.charge = lambda name, request: self.quotas.take_request(
            name, cast(CallerConnection, request.protocol)
        )
        self.lines: list[Line] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

        async def handler(call: Call) -> web.StreamResponse:
            await self.may_answer.wait()
            return json_response({"name": call.caller.name})

        self.routes.add("GET", PATH, "topics", handler, Right.KNOWN)
        self.routes.add("POST", PATH, "forbidden", handler)
        self.routes.add("PUT", PATH + "/{topic}", "malformed", handler, Right.ADMIN)
        self.server = Server(self.routes, self.config.limits)

    def count(self, name: str) -> int:
        found = self.quotas.shared._counts.get(name)
        return 0 if found is None else found.open


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path)
    await worker.server.listen("127.0.0.1", worker.port, None)
    yield worker
    worker.may_answer.set()
    await asyncio.gather(*(line.close() for line in worker.lines))
    await worker.server.close()


async def until_open(worker: Worker, name: str, number: int) -> None:
    async with asyncio.timeout(60):
        while worker.count(name) != number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def lines(worker: Worker, token: str, number: int) -> list[Line]:
    made = await asyncio.gather(*(Line(worker.port, token).open() for _ in range(number)))
    worker.lines += made
    return made


async def test_a_connection_too_many_is_refused_and_closed(worker: Worker) -> None:
    mine = await lines(worker, "few", LIMIT + 5)
    assert [(await line.ask(PATH))[0] for line in mine[:LIMIT]] == [200] * LIMIT
    for line in mine[LIMIT:]:
        assert await line.ask(PATH) == (429, f"the token few is over its quota of {LIMIT} connections")
        assert await line.reader.read() == b"", "it is closed after the answer"
    # The open ones continue, and so does everybody else.
    assert [(await line.ask(PATH))[0] for line in mine[:LIMIT]] == [200] * LIMIT
    free = await lines(worker, "free", 2 * LIMIT)
    assert {(await line.ask(PATH))[0] for line in free} == {200}
    mine[0].writer.close()
    await until_open(worker, "few", LIMIT - 1)
    [again] = await lines(worker, "few", 1)
    assert (await again.ask(PATH))[0] == 200


async def test_thousands_that_are_closed_at_once_while_their_requests_run(worker: Worker) -> None:
    worker.may_answer.clear()
    free = await lines(worker, "free", 1500)
    few = await lines(worker, "few", LIMIT)
    asked = [asyncio.create_task(line.ask(PATH)) for line in (*free, *few)]
    await until_open(worker, "free", 1500)
    await until_open(worker, "few", LIMIT)
    for line in (*free, *few):
        line.writer.transport.abort()
    await until_open(worker, "few", 0)
    await until_open(worker, "free", 0)
    worker.may_answer.set()
    assert {status for status, _ in await asyncio.gather(*asked)} == {0}
    assert "free" not in worker.quotas.shared._counts
    more = await lines(worker, "few", LIMIT)
    assert {(await line.ask(PATH))[0] for line in more} == {200}


async def test_only_what_a_worker_signed_is_not_charged_again(worker: Worker) -> None:
    now_s = time.time()
    [line] = await lines(worker, "slow", 1)
    # The connections between workers carry the requests of many: they count for nobody.
    for _ in range(20):
        assert await line.ask(PATH, f"{FORWARDED}: {hand_on(KEY, 'GET', PATH, now_s)}") == (200, "slow")
    assert worker.count("slow") == 0
    forged = [
        *("1", "", ";", "0" * 64 + f";{int(now_s)}", "é", hand_on(b"x" * 32, "GET", PATH, now_s)),
        *(hand_on(KEY, "POST", PATH, now_s), hand_on(KEY, "GET", PATH + "/", now_s)),
        *(hand_on(KEY, "GET", PATH, now_s - 300), hand_on(KEY, "GET", PATH, now_s + 300)),
    ]
    answers = [(await line.ask(PATH, f"{FORWARDED}: {value}"))[0] for value in forged]
    assert answers[:5] == [200] * 5
    assert set(answers[5:]) == {429}
    assert worker.count("slow") == 1
    assert await line.ask(PATH) == (429, "the token slow is over its quota of 5 requests a second")
    assert (await line.ask(PATH, token="free"))[0] == 200, "the connection serves others"
    assert not handed_on(None, "GET", PATH, hand_on(KEY, "GET", PATH, now_s), now_s)


async def test_what_is_refused_for_another_reason_counts_too(worker: Worker) -> None:
    """Otherwise a caller could ask for what it may not do without an end, on any number of connections."""
    worker.lines += (mine := [await Line(worker.port, "slow").open() for _ in range(6)])
    statuses = []
    for line, (method, path) in zip(mine, [("POST", PATH), ("PUT", PATH + "/%zz")] * 3, strict=True):
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer slow\r\n\r\n"
        line.writer.write(head.encode())
        statuses.append(int((await line.reader.readuntil(b"\r\n\r\n")).split()[1]))
    assert statuses == [403, 400, 403, 400, 403, 429]
    assert worker.count("slow") == 6


def refusals(kind: str) -> float:
    return REGISTRY.get_sample_value("logferry_requests_refused_total", {"kind": kind}) or 0.0


async def test_refused_requests_are_counted_by_kind(worker: Worker) -> None:
    """Whether they reached a route or not, and what is no HTTP at all."""
    before = {kind: refusals(kind) for kind in ("bad-request", "not-found", "unauthenticated", "method-not-allowed")}

    async def send(text: str) -> None:
        [line] = await lines(worker, "free", 1)
        line.writer.write(text.encode())
        assert (await line.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.")

    authorised = "Host: x\r\nAuthorization: Bearer free\r\n\r\n"
    await send(f"GET {PATH}?a=%zz HTTP/1.1\r\n{authorised}")
    await send("nonsense\r\n\r\n")
    await send(f"GET /nowhere HTTP/1.1\r\n{authorised}")
    await send(f"PUT {PATH} HTTP/1.1\r\n{authorised}")
    await send(f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n")
    await send(f"GET {PATH} HTTP/1.1\r\n{authorised}")
    more = {kind: refusals(kind) - number for kind, number in before.items()}
    assert more == {"bad-request": 2, "not-found": 1, "unauthenticated": 1, "method-not-allowed": 1}
