"""Requests of the asyncio faces, over aiohttp: redirects and tokens as in the others, by `Trip`."""

from __future__ import annotations

import asyncio
import ssl
import warnings
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from logferry.client.gateways import ANSWER_TIMEOUT_S
from logferry.client.transport.connections import NoAnswer, Reply
from logferry.client.transport.redirects import Outcome, Trip
from yarl import URL

CONNECT_TIMEOUT_S = 5.0
TROUBLE = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)


def session(ca_file: str | None) -> aiohttp.ClientSession:
    """Connections of one writer or reader, made in the loop that is running. Proxies are those of the environment."""
    verify: Any = True if ca_file is None else ssl.create_default_context(cafile=ca_file)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=verify),
        timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        trust_env=True,
        skip_auto_headers=("Accept-Encoding",),
    )


class _Body(aiohttp.BytesPayload):
    """Tells when it is written."""

    def __init__(self, body: bytes, sent: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # large ones are no surprise
            super().__init__(body)
        self._sent = sent

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await super().write_with_length(writer, content_length)
        self._sent()


async def exchange(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: dict[str, str],
    body: bytes | None,
    sent: Callable[[], None] = lambda: None,
) -> Reply:
    """One request and its whole answer; calls ``sent`` when the body is on its way. Raises `NoAnswer`."""
    data = None if body is None else _Body(body, sent)
    try:
        async with http.request(
            method, URL(url, encoded=True), headers=headers, data=data, allow_redirects=False
        ) as answer:
            content = await answer.read()
            return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, content)
    except TROUBLE as error:
        raise NoAnswer(f"{url.partition('/v1/')[0]}: {error!s}" if str(error) else repr(error)) from error


async def travel(
    http: aiohttp.ClientSession, trip: Trip, headers: dict[str, str], body: bytes, sent: Callable[[], None]
) -> Outcome:
    """POSTs along the trip to its outcome. Never raises for what the network or the gateway does."""
    while True:
        try:
            reply = await exchange(http, "POST", trip.url, {**headers, **trip.authorization()}, body, sent)
        except NoAnswer as error:
            return trip.unanswered(str(error))
        outcome = trip.answered(reply)
        if outcome is not None:
            return outcome
