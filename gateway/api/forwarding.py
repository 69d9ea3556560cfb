"""Routes a request of a source to its lane's owner: answered here, redirected, or forwarded once.

Any worker accepts any request. A caller that sends ``X-Logferry-Redirect: 1`` gets a 307 to the owner; every other
request is forwarded, because stock HTTP clients drop the token or the body on a redirect. A forwarded request is never
forwarded again, so there are no loops. Only complete requests are forwarded: a body that is too large, too slow or
incomplete is rejected where it arrived, by the same limits.

A hand-over of a lane is a pause, not an error: the worker that received the request holds it and retries where the lane
is then. The caller would do the same, and it is safe for the same reason: the lane's next owner knows what is recorded
already. While the owners change no request is redirected.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from typing import Any, Final, cast

import aiohttp
from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway.access.certificates import CALLER_HEADER, Identity, hand_on, signed
from logferry.gateway.config import LOOPBACK, Config
from logferry.gateway.contract.names import Malformed, lane_of
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.errors import LaneMoved, Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.router import FORWARDED, IDENTITY, problem_response
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.metrics import FORWARDS
from logferry.gateway.tls import peer_context
from multidict import CIMultiDict
from yarl import URL

REDIRECT: Final = "X-Logferry-Redirect"
# The answer to a forwarded request whose lane has another owner: the same request may be retried there.
_MOVED: Final = "X-Logferry-Moved"
_HAND_OVER_S: Final = 3.0
_HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "content-length", "expect", "date", "server"),
    }
)


_WORKER: Final = re.compile(r"(https?)://([\w.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}\Z", re.ASCII)


def is_worker(config: Config, url: str) -> bool:
    """Whether a URL of the workers' group in Kafka can be that of a worker, so that it may receive callers' tokens.

    Never over plain HTTP where this worker has a certificate, nor on a host that the configuration rules out.
    """
    found = _WORKER.match(url)
    if found is None or found[1] != ("http" if config.tls is None else "https"):
        return False
    if config.worker_hosts is not None:
        return any(fnmatchcase(found[2], pattern) for pattern in config.worker_hosts)
    return found[2] in LOOPBACK or not config.is_loopback or config.advertised_host is not None


class Forwarding:
    """Finds the owner of a request and its answer."""

    def __init__(self, config: Config, ownership: Ownership[Lane], admission: Admission) -> None:
        self._config = config
        self._ownership = ownership
        self._admission = admission
        self._session: aiohttp.ClientSession | None = None
        self._key = config.worker_key

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
        self,
        request: web.BaseRequest,
        source: SourceIdentity,
        here: Callable[[Lane], Awaitable[web.StreamResponse]],
        *,
        is_repeatable: bool = True,
    ) -> web.StreamResponse:
        """The answer of the lane's owner: of ``here``, if this worker owns it; else a redirect, or the other worker's
        answer. ``here`` must be safe to call again after it raised LaneMoved; without ``is_repeatable`` only after one
        that says that nothing was recorded.

        Raises Problem ``not-owner-yet`` or ``outcome-unknown`` when the lane moves for too long.
        """
        deadline = 0.0
        unknown: LaneMoved | None = None
        while True:
            number = lane_of(source.key, self._ownership.number_of_lanes())
            try:
                response = await self._answer_once(request, number, here)
                if unknown is None or response.status not in (429, 503):
                    return response
            except LaneMoved as moved:
                obstacle = moved
                if moved.kind == "outcome-unknown":
                    if not is_repeatable:
                        raise
                    unknown = moved
            except (Problem, KafkaError, TimeoutError):
                if unknown is None:
                    raise
            # A request that may be recorded is never answered as surely not recorded.
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
            raise LaneMoved("not-owner-yet", f"lane {number} is moving; its owner is not known yet")
        return await self._hand_on(request, owner, number)

    async def _hand_on(self, request: web.BaseRequest, owner: str, number: int) -> web.StreamResponse:
        self.check_worker(owner)
        if request.headers.get(REDIRECT) == "1" and not self._ownership.is_changing:
            FORWARDS.labels("redirect").inc()
            return web.Response(status=307, headers={"Location": owner + request.raw_path})
        FORWARDS.labels("forward").inc()
        answer = asyncio.ensure_future(self.forward(request, owner, f"the owner of lane {number}"))
        taken = asyncio.ensure_future(self._ownership.is_taken_from(owner, number))
        try:
            # A frozen owner never answers, but the next one does once it is known.
            await asyncio.wait((answer, taken), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            for task in (answer, taken):
                task.cancel()
            await asyncio.gather(answer, taken, return_exceptions=True)
        raise LaneMoved("outcome-unknown", f"lane {number} moved to another worker before its owner answered")

    def check_worker(self, url: str) -> None:
        """Raises Problem ``not-owner-yet``: whoever may join the group in Kafka could collect tokens."""
        if not is_worker(self._config, url):
            detail = f"{url[:200]!r} is in the workers' group, but no URL of a worker here; check worker_hosts"
            raise Problem("not-owner-yet", detail)

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
        """The answer of another worker, named ``who`` in errors. Raises Problem without an answer."""
        self.check_worker(owner)
        reserved = self._admission.reserve(request)
        try:
            return await self._forward(request, await self._admission.body(request), owner, who)
        finally:
            self._admission.release(reserved)

    async def _forward(self, request: web.BaseRequest, data: bytes, owner: str, who: str) -> web.Response:
        headers, url = _handed_on(request), owner + request.raw_path
        return await self._send(request.method, url, headers, data, who, request.get(IDENTITY))

    async def get(self, request: web.BaseRequest, url: str, path: str, who: str) -> web.Response:
        """The answer of a worker, ``who``, to GET with the headers of the request. Raises Problem without one."""
        self.check_worker(url)
        return await self._send("GET", url + path, _handed_on(request), b"", who, request.get(IDENTITY))

    async def post(
        self, owner: str, path: str, headers: CIMultiDict[str], data: bytes, who: str, identity: Identity | None
    ) -> web.Response:
        """The answer of another worker, ``who``, to a request that this one makes. Raises Problem without an answer."""
        self.check_worker(owner)
        FORWARDS.labels("forward").inc()
        headers[FORWARDED] = "1"
        return await self._send("POST", owner + path, headers, data, who, identity)

    async def _send(
        self, method: str, url: str, headers: CIMultiDict[str], data: bytes, who: str, identity: Identity | None
    ) -> web.Response:
        """``identity``: of the caller's certificate, which the other worker does not see."""
        if self._session is None:
            raise Problem("not-owner-yet", "the worker is starting")
        target = URL(url, encoded=True)
        if self._key is not None:
            path, now_s = target.raw_path_qs, time.time()
            headers[FORWARDED] = hand_on(self._key, method, path, now_s)
            if identity is not None:
                headers[CALLER_HEADER] = signed(self._key, method, path, identity, now_s)
        try:
            async with self._session.request(
                method, target, headers=headers, data=data, allow_redirects=False
            ) as response:
                body = await response.read()
                if _MOVED in response.headers:
                    kind = "not-owner-yet" if response.status == 503 else "outcome-unknown"
                    raise LaneMoved(kind, f"{who} no longer owns it")
                kept = CIMultiDict((k, v) for k, v in response.headers.items() if k.lower() not in _HOP_BY_HOP)
                return web.Response(status=response.status, headers=kept, body=body)
        except aiohttp.ClientSSLError:
            raise Problem("not-owner-yet", f"the certificate of {who} cannot be verified; check tls.ca") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise LaneMoved("not-owner-yet", f"{who} does not answer; it is being replaced") from None
        except TimeoutError:
            raise Problem("outcome-unknown", f"{who} does not answer; send the same request again") from None
        except (aiohttp.ClientError, OSError):
            raise LaneMoved("outcome-unknown", f"{who} closed the connection; send the same request again") from None


def _handed_on(request: web.BaseRequest) -> CIMultiDict[str]:
    """The headers for the next worker, complete and unchanged. Raises Malformed."""
    headers = CIMultiDict[str]()
    for name, value in request.headers.items():
        if not value.isascii() and "\udc80" <= max(value) <= "\udcff":
            raise Malformed(f"header {name}: not UTF-8")
        # In lower case: the client takes names that differ in case alone for one, and sends the last of them.
        if (lower := name.lower()) not in _HOP_BY_HOP:
            headers.add(lower, value)
    headers[FORWARDED] = "1"
    headers.popall(CALLER_HEADER, None)  # the caller's own word
    return headers
