"""A function that is asked for the token before each request, since tokens are rotated."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from logferry.client import AsyncReader, AsyncWriter, Reader, Unknown, Writer
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import NoResponse

from tests.support.fake_gateway import FakeGateway, Served


@pytest.fixture(params=[Writer, AsyncWriter], ids=["plain", "asyncio"])
def face(request: pytest.FixtureRequest) -> Any:
    return request.param


async def call(function: Any, *args: Any) -> Any:
    """Of either face."""
    if asyncio.iscoroutinefunction(function):
        return await function(*args)
    return await asyncio.to_thread(function, *args)


async def test_each_request_has_the_present_token(face: Any) -> None:
    gateway, numbers = FakeGateway(), itertools.count(1)
    gateway.prev_always = False
    with Served(gateway) as served:
        writer = face(served.url, "t", "s", token=lambda: f"token-{next(numbers)}")
        await call(writer.open)
        for data in (b"one", b"two"):
            await call(writer.write, data)
            await call(writer.flush)
        await call(writer.close)
    found = [headers["authorization"] for _, headers in gateway.requests]
    assert found == ["Bearer token-1", "Bearer token-2", "Bearer token-3"]


async def test_a_function_that_fails_is_asked_again(face: Any) -> None:
    gateway, numbers = FakeGateway(), itertools.count(1)
    gateway.prev_always, gateway.token = False, "good"

    def token() -> str:
        if next(numbers) < 3:
            raise RuntimeError("the vault is sealed")
        return "good"

    with Served(gateway) as served:
        writer = face(served.url, "t", "s", token=token)
        await call(writer.write, b"data")
        await call(writer.close)
    assert gateway.sources["s"].content() == b"data"


@pytest.mark.parametrize("reader_face", [Reader, AsyncReader])
async def test_the_error_says_what_the_function_raised(face: Any, reader_face: Any) -> None:
    def token() -> str:
        raise RuntimeError("the vault is sealed")

    for one in (face("http://127.0.0.1:9", "t", "s", token=token), reader_face("http://127.0.0.1:9", "t", token=token)):
        with pytest.raises(Unknown, match="the vault is sealed"):
            await call(one.open, 0.2)
        await call(one.close)


def test_what_is_no_token_is_not_sent() -> None:
    cluster = GatewayCluster(["http://127.0.0.1:9"], lambda: "two\r\nlines")
    with pytest.raises(NoResponse, match="token"):
        cluster.authorization("http://127.0.0.1:9/v1")
