"""From a source to its lane, from the lane to the worker that answers: here, by a redirect, or forwarded once.

Any worker takes any request. A caller that sends ``X-Logferry-Redirect: 1`` gets a 307 to the owner; everybody
else's request is handed on, because stock HTTP clients drop the token or the body on a redirect. A request that
was handed on once is never handed on again, so nothing loops. Only a whole request is handed on: a body that is too
large, too slow or cut off is refused where it came in, by the same limits.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, cast

import aiohttp
from aiohttp import web
from logferry.gateway.admission import Admission
from logferry.gateway.config import Config
from logferry.gateway.contract import Malformed, lane_of
from logferry.gateway.errors import Problem
from logferry.gateway.lane import Lane
from logferry.gateway.metrics import FORWARDS
from logferry.gateway.ownership import Ownership
from logferry.gateway.sources import Source
from logferry.gateway.tls import peer_context
from multidict import CIMultiDict
from yarl import URL

FORWARDED: Final = "X-Logferry-Forwarded"
REDIRECT: Final = "X-Logferry-Redirect"
_HAND_OVER_S: Final = 3.0
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "expect",
        "date",
        "server",
    }
)


class Routing:
    """Knows where a request belongs."""

    def __init__(self, config: Config, ownership: Ownership, admission: Admission) -> None:
        self._config = config
        self._ownership = ownership
        self._admission = admission
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        verify = True if self._config.tls is None else peer_context(self._config.tls)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ssl=verify),
            timeout=aiohttp.ClientTimeout(total=self._config.limits.request_timeout_s + 10, connect=2),
            auto_decompress=False,
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def find(self, request: web.BaseRequest, source: Source) -> Lane | web.StreamResponse:
        """The source's lane, if this worker holds it; else the answer: its owner's, or a redirect to it.

        While a lane moves, the request waits for it here, before its body is read: a hand-over is a pause, not an
        error. Raises Problem ``not-owner-yet`` when it takes too long.
        """
        number = lane_of(source.key, self._config.lanes)
        lane = self._ownership.lanes.get(number)
        if lane is not None and lane.is_open:
            return lane
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _HAND_OVER_S
        while True:
            owner = self._ownership.owner(number)
            if owner is not None and FORWARDED not in request.headers:
                return await self._hand_on(request, owner, number)
            if loop.time() > deadline:
                raise Problem("not-owner-yet", f"lane {number} is moving; its owner is not known here yet")
            await self._ownership.wait_for_news()
            lane = self._ownership.lanes.get(number)
            if lane is not None and lane.is_open:
                return lane

    async def _hand_on(self, request: web.BaseRequest, owner: str, number: int) -> web.StreamResponse:
        if request.headers.get(REDIRECT) == "1":
            FORWARDS.labels("redirect").inc()
            return web.Response(status=307, headers={"Location": owner + request.raw_path})
        FORWARDS.labels("forward").inc()
        return await self.forward(request, owner, f"the owner of lane {number}")

    async def ask_others(self, request: web.BaseRequest) -> list[dict[str, Any]]:
        """The same request to every other worker; the answers. Raises Problem when one does not answer."""
        return await asyncio.gather(*(self._ask(request, url) for url in self._ownership.other_workers()))

    async def _ask(self, request: web.BaseRequest, url: str) -> dict[str, Any]:
        answer = await self.forward(request, url, f"the worker {url}")
        if answer.status != 200:
            raise Problem("not-owner-yet", f"the worker {url} answered {answer.status}")
        body = answer.body
        return cast(dict[str, Any], json.loads(body if isinstance(body, bytes | bytearray) else b"{}"))

    async def forward(self, request: web.BaseRequest, owner: str, who: str) -> web.Response:
        """What another worker answers; ``who`` it is to the caller. Raises Problem when no answer comes."""
        reserved = self._admission.reserve(request)
        try:
            return await self._forward(request, await self._admission.body(request), owner, who)
        finally:
            self._admission.release(reserved)

    async def _forward(self, request: web.BaseRequest, data: bytes, owner: str, who: str) -> web.Response:
        if self._session is None:
            raise Problem("not-owner-yet", "the worker is starting")
        try:
            async with self._session.request(
                request.method,
                URL(owner + request.raw_path, encoded=True),
                headers=_handed_on(request),
                data=data,
                allow_redirects=False,
            ) as response:
                body = await response.read()
                kept = CIMultiDict((k, v) for k, v in response.headers.items() if k.lower() not in _HOP_BY_HOP)
                return web.Response(status=response.status, headers=kept, body=body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            self._ownership.look_again()
            raise Problem("not-owner-yet", f"{who} does not answer; it is being replaced") from None
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._ownership.look_again()
            raise Problem("outcome-unknown", f"{who} broke off; send the same again") from None


def _handed_on(request: web.BaseRequest) -> CIMultiDict[str]:
    """The headers for the next worker, none lost and none changed on the way. Raises Malformed."""
    headers = CIMultiDict[str]()
    for name, value in request.headers.items():
        if not value.isascii() and "\udc80" <= max(value) <= "\udcff":
            raise Malformed(f"header {name}: not UTF-8")
        # In lower case: the client takes names that differ in case alone for one, and sends the last of them.
        if (lower := name.lower()) not in _HOP_BY_HOP:
            headers.add(lower, value)
    headers[FORWARDED] = "1"
    return headers
