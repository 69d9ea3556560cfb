"""The answer to a write says what aiohttp's own answer with the same document says, on every kind of connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

import pytest
from aiohttp import web
from logferry.gateway.config import Config
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.http.server import Server
from logferry.gateway.http.short_answer import ShortAnswer
from logferry.ops.stack.processes import free_ports

DOCUMENT = {"source_id": "wéb1", "recorded_seqno": 7}
LARGE = {"filler": "x" * 65_536}
MANY = 300


class Worker:
    """The server of a worker with two routes that give the same document, and one that gives a large one."""

    def __init__(self) -> None:
        self.port, self.begun, self.answered = free_ports(1)[0], 0, 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        config = Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}})
        self.routes = Routes(Gate(config))

        async def short(_: Call) -> web.StreamResponse:
            return ShortAnswer(json.dumps(DOCUMENT))

        async def plain(_: Call) -> web.StreamResponse:
            return json_response(DOCUMENT)

        async def large(_: Call) -> web.StreamResponse:
            self.begun += 1
            await self.may_answer.wait()
            self.answered += 1
            return ShortAnswer(json.dumps(LARGE))

        for handler in (short, plain, large):
            self.routes.add("POST", f"/v1/{handler.__name__}", handler.__name__, handler, Right.OPEN)
        self.server = Server(self.routes, config.limits)

    def has_begun(self, number: int) -> bool:
        return self.begun == number

    async def ask(self, request: str) -> tuple[str, dict[str, str], bytes, bool]:
        """Status line, fields and body of the answer to a request, and whether the connection ended with it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request.encode())
        found = await read_answer(reader)
        # A connection that stays answers the next request, and the one after it ends it.
        rest = b""
        with suppress(ConnectionError):
            writer.write(b"POST /v1/plain HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            rest = await reader.read()
        await closed(writer)
        return *found, not rest


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in head[1:-2])
    return head[0], fields, await reader.readexactly(int(fields["Content-Length"]))


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    await worker.server.listen("127.0.0.1", worker.port, None)
    yield worker
    await worker.server.close()


@pytest.mark.parametrize("is_leaving", [False, True])
@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("connection", ["", "Connection: close\r\n", "Connection: keep-alive\r\n"])
async def test_it_says_the_same(worker: Worker, version: str, connection: str, is_leaving: bool) -> None:
    worker.routes.is_leaving = is_leaving
    short, plain = [
        await worker.ask(f"POST /v1/{name} {version}\r\nHost: x\r\n{connection}\r\n") for name in ("short", "plain")
    ]
    # The same kind of date; its second may be the next one.
    assert len(short[1].pop("Date")) == len(plain[1].pop("Date")) == len("Sat, 28 Nov 2026 06:45:59 GMT")
    # RFC 9112: a server states its own version, and in 1.1 says that it closes. aiohttp repeats the request's version.
    assert short[0] == "HTTP/1.1 200 OK"
    assert plain[0] == f"{version} 200 OK"
    if plain[3]:
        plain[1].setdefault("Connection", "close")
    assert short[1:] == plain[1:]


async def test_a_caller_that_does_not_read_gets_no_further_answers_until_it_does(worker: Worker) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port, limit=65_536)
    writer.write(b"POST /v1/large HTTP/1.1\r\nHost: x\r\n\r\n" * MANY)
    others = await asyncio.open_connection("127.0.0.1", worker.port)
    before = -1
    while worker.answered > before:
        before = worker.answered
        for _ in range(MANY):
            others[1].write(b"POST /v1/plain HTTP/1.1\r\nHost: x\r\n\r\n")
            await read_answer(others[0])
    assert worker.answered < MANY, "what waits for this caller is bounded"
    bodies = [(await read_answer(reader))[2] for _ in range(MANY)]
    assert bodies == [json.dumps(LARGE).encode()] * MANY
    await closed(writer)
    await closed(others[1])


async def test_a_caller_that_goes_before_its_answer_harms_nobody(
    worker: Worker, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    worker.may_answer.clear()
    for number in range(1, 6):
        _, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        writer.write(b"POST /v1/large HTTP/1.1\r\nHost: x\r\n\r\n" * 5)
        await until(partial(worker.has_begun, number))
        writer.transport.abort()
        await closed(writer)
    await until(lambda: worker.server._open == 0)
    worker.may_answer.set()
    await until(lambda: worker.answered == 5)
    status, _, body, _ = await worker.ask("POST /v1/short HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, json.loads(body)) == ("HTTP/1.1 200 OK", DOCUMENT)
    assert capsys.readouterr().err == ""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
