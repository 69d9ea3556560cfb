"""Readers are counted: sessions and bytes of answers, in shares of the tokens; one that takes nothing is cut off."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp.test_utils import make_mocked_request
from logferry.gateway.api import read
from logferry.gateway.api.consumers import ConsumersApi
from logferry.gateway.api.read import ReadApi
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.router import Call
from logferry.gateway.limits import FairShare
from logferry.gateway.reading.formats import Row
from logferry.gateway.reading.page import PartitionPage
from logferry.gateway.reading.registry import SessionRegistry

TOKENS = [
    {"name": "reader", "sha256": "0" * 64, "read": ["*"]},
    {"name": "writer", "sha256": "1" * 64, "write": ["*"]},
]
CONFIG = Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "x:1"}, "tokens": TOKENS})
READ = "/v1/topics/dc1.nginx/partitions/0/chunks"


def call(path: str, token: str = "reader", **query: str) -> Call:
    (caller,) = (caller for caller in Gate(CONFIG)._tokens.values() if caller.name == token)
    return Call(make_mocked_request("GET", path), path.split("/"), query, caller, {"topic": ["*"], "cursor": []})


def reading(monkeypatch: pytest.MonkeyPatch, size: int, room: int) -> ReadApi:
    """A read API whose pages hold one chunk of that size."""
    row: Row = ("dc1", "dc1.nginx", 0, 0, "web1", 1, None, 0, 0, {}, bytes(size))
    monkeypatch.setattr("logferry.gateway.reading.page.read_page", AsyncMock(return_value=PartitionPage([row], 1, 0)))
    kafka: Any = Mock()
    return ReadApi(CONFIG, kafka, Mock(), FairShare(room), Mock(), Mock())


async def test_bytes_of_reads_count_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    api = reading(monkeypatch, 100_000, 1 << 20)
    seen: list[int] = []
    monkeypatch.setattr(read, "written", AsyncMock(side_effect=lambda *_: seen.append(api.room.used)))
    await api.read(call(READ))
    assert seen[0] > 100_000
    assert api.room.used == 0


async def test_a_read_over_the_room_is_to_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    api = reading(monkeypatch, 100_000, 1 << 20)
    api.room.take("reader", 1_000_000)
    with pytest.raises(Problem, match="overloaded"):
        await api.read(call(READ))
    assert api.room.used == 1_000_000


async def test_a_reader_that_takes_nothing_of_its_answer_is_cut_off() -> None:
    request = make_mocked_request("GET", READ)
    never: Any = AsyncMock(side_effect=TimeoutError)
    writer: Any = request._payload_writer
    writer.write, writer.write_eof = never, never
    with pytest.raises(ConnectionError, match="took nothing for 300 s"):
        await read.written(request, bytes(1 << 20), {}, 300)
    transport: Any = request.transport
    transport.abort.assert_called_once_with()


def test_one_token_does_not_hold_all_sessions() -> None:
    registry = SessionRegistry(CONFIG, Mock(), "http://w")
    for _ in range(800):
        registry.check_room("reader")
        registry._room.take("reader", 1)
    with pytest.raises(Problem, match="800 of them with the token reader"):
        registry.check_room("reader")
    registry.check_room("other")


async def test_a_token_that_reads_nothing_holds_no_session() -> None:
    api = ConsumersApi(CONFIG, Mock(), Mock(), Mock(), Mock(), "http://w", Gate(CONFIG), Mock())
    with pytest.raises(Problem, match="does not have the right to read anything"):
        await api.stream(call("/v1/consumers/c/stream", "writer"))
