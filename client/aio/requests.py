"""Requests and waits of the asyncio faces, over aiohttp. `SourceRequest` decides on redirects and tokens."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from logferry.client.transport.cluster import ANSWER_TIMEOUT_S
from logferry.client.transport.connections import NoResponse, Reply, TlsFiles
from logferry.client.transport.source_request import Outcome, SourceRequest
from yarl import URL

CONNECT_TIMEOUT_S = 5.0
FAULTS = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)


class Change:
    """Tasks wait for the next `notify`, as on a condition."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait(self, timeout_s: float | None) -> None:
        """Returns at the next `notify`, or after the timeout."""
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._future], timeout=timeout_s)

    def notify(self) -> None:
        future, self._future = self._future, None
        if future is not None and not future.done():
            future.set_result(None)


def session(files: TlsFiles) -> aiohttp.ClientSession:
    """Connections of one writer or reader, made in the running loop. Proxies are those of the environment."""
    verify: Any = files.context() if any(files) else True
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=verify),
        timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        trust_env=True,
        skip_auto_headers=("Accept-Encoding",),
    )


class _Body(aiohttp.BytesPayload):
    """Calls ``sent`` when it is written."""

    def __init__(self, body: bytes, sent: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # large bodies are no surprise
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
    """One request and its whole response; calls ``sent`` when the body has left. Raises `NoResponse`."""
    data = None if body is None else _Body(body, sent)
    try:
        async with http.request(
            method, URL(url, encoded=True), headers=headers, data=data, allow_redirects=False
        ) as response:
            return await reply_of(response)
    except FAULTS as error:
        raise NoResponse(f"{url.partition('/v1/')[0]}: {error!s}" if str(error) else repr(error)) from error


async def reply_of(response: aiohttp.ClientResponse) -> Reply:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Reply(response.status, headers, await response.read(), time.time())


async def follow(http: aiohttp.ClientSession, request: SourceRequest, sent: Callable[[], None]) -> Outcome:
    """As `SourceRequest.follow`."""
    outcome = None
    body = request.body if isinstance(request.body, bytes) else b"".join(request.body)
    while outcome is None:
        try:
            outcome = request.answered(await exchange(http, "POST", request.url, request.headers(), body, sent))
        except NoResponse as error:
            outcome = request.unanswered(error)
    return outcome
