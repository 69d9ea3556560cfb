"""From a source to its lane, from the lane to the worker that answers: here, by a redirect, or forwarded once.

Any worker takes any request. A caller that sends ``X-Logferry-Redirect: 1`` gets a 307 to the owner; everybody
else's request is handed on, because stock HTTP clients drop the token or the body on a redirect. A request that
was handed on once is never handed on again, so nothing loops. Only a whole request is handed on: a body that is too
large, too slow or cut off is refused where it came in, by the same limits.

A hand-over is a pause, not an error: the worker that a request came to first keeps it, and tries it again where the
lane is now. That is what its caller would be told to do, and safe for the same reason: what is recorded already is
known to the lane's next owner. While the owners change nobody is redirected.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import aiohttp
from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import Malformed, lane_of
from logferry.gateway.errors import Moved, Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.router import problem_response
from logferry.gateway.lanes.dedup import Source
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.metrics import FORWARDS
from logferry.gateway.tls import peer_context
from multidict import CIMultiDict
from yarl import URL

FORWARDED: Final = "X-Logferry-Forwarded"
REDIRECT: Final = "X-Logferry-Redirect"
# Said by a worker of what was handed on to it when the lane is another one's: the same request may be tried there.
_MOVED: Final = "X-Logferry-Moved"
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

    def __init__(self, config: Config, ownership: Ownership[Lane], admission: Admission) -> None:
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

    async def answer(
        self, request: web.BaseRequest, source: Source, here: Callable[[Lane], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """What the owner of the source's lane answers: ``here``, if this worker holds it; else a redirect, or what the
        other worker said. ``here`` must be safe to call again after it raised Moved.

        Raises Problem ``not-owner-yet`` or ``outcome-unknown`` when the lane moves for too long.
        """
        number = lane_of(source.key, self._config.lanes)
        deadline = 0.0
        unknown: Moved | None = None
        while True:
            try:
                response = await self._answer_once(request, number, here)
                if unknown is None or response.status not in (429, 503):
                    return response
            except Moved as moved:
                obstacle = moved
                if moved.kind == "outcome-unknown":
                    unknown = moved
            except (Problem, KafkaError, TimeoutError):
                if unknown is None:
                    raise
            # What may have been recorded once is never said to be surely not.
            obstacle = unknown or obstacle
            owner_known = self._ownership.owner(number) is not None and not self._ownership.is_changing
            if FORWARDED in request.headers and owner_known:
                response = problem_response(obstacle, request.raw_path)
                response.headers[_MOVED] = "1"
                return response
            now = asyncio.get_running_loop().time()
            deadline = deadline or now + _HAND_OVER_S
            if now > deadline:
                raise obstacle
            try:
                reserved = self._admission.reserve_read(request)
            except Problem:
                raise obstacle from None
            try:
                await self._ownership.wait_for_news()
            finally:
                self._admission.release(reserved)

    async def _answer_once(
        self, request: web.BaseRequest, number: int, here: Callable[[Lane], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        lane = self._ownership.lanes.get(number)
        if lane is not None and lane.is_open:
            return await here(lane)
        owner = self._ownership.owner(number)
        if owner is None or FORWARDED in request.headers:
            raise Moved("not-owner-yet", f"lane {number} is moving; its owner is not known here yet")
        return await self._hand_on(request, owner, number)

    async def _hand_on(self, request: web.BaseRequest, owner: str, number: int) -> web.StreamResponse:
        if request.headers.get(REDIRECT) == "1" and not self._ownership.is_changing:
            FORWARDS.labels("redirect").inc()
            return web.Response(status=307, headers={"Location": owner + request.raw_path})
        FORWARDS.labels("forward").inc()
        answer = asyncio.ensure_future(self.forward(request, owner, f"the owner of lane {number}"))
        taken = asyncio.ensure_future(self._ownership.is_taken_from(owner, number))
        try:
            # An owner that was frozen never answers, but another one can, once it is known.
            await asyncio.wait((answer, taken), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            for task in (answer, taken):
                task.cancel()
            await asyncio.gather(answer, taken, return_exceptions=True)
        raise Moved("outcome-unknown", f"lane {number} moved to another worker before its owner answered")

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
                if _MOVED in response.headers:
                    kind = "not-owner-yet" if response.status == 503 else "outcome-unknown"
                    raise Moved(kind, f"{who} does not hold it any more")
                kept = CIMultiDict((k, v) for k, v in response.headers.items() if k.lower() not in _HOP_BY_HOP)
                return web.Response(status=response.status, headers=kept, body=body)
        except aiohttp.ClientSSLError:
            raise Problem("not-owner-yet", f"{who} cannot be verified") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise Moved("not-owner-yet", f"{who} does not answer; it is being replaced") from None
        except TimeoutError:
            raise Problem("outcome-unknown", f"{who} does not answer; send the same again") from None
        except (aiohttp.ClientError, OSError):
            raise Moved("outcome-unknown", f"{who} broke off; send the same again") from None


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
