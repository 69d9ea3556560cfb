"""aiohttp's server with limits on connections, on idle time, and on the memory of unfinished request heads.

* A connection over the limit gets a 503 and is closed; the open ones are not affected.
* A connection that sends nothing, or its head byte by byte, is closed after the idle time-out; one that does not
  finish its TLS handshake even sooner.
* Unfinished heads are limited as a whole, since they arrive before authentication. Over the limit the connection with
  the largest one is closed.
* Bytes that are not HTTP are answered by a problem document, too. They appear in neither answer nor log: a header
  that is too long may be the one with the token.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Final, cast
from weakref import WeakSet

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler
from logferry.gateway import log
from logferry.gateway.config import Limits
from logferry.gateway.errors import CannotListen, Problem
from logferry.gateway.http.request import trace_of
from logferry.gateway.http.router import Routes, problem_response
from logferry.gateway.http.shares import SharedCount
from logferry.gateway.metrics import CONNECTIONS, CONNECTIONS_REFUSED, REQUESTS, REQUESTS_REFUSED

_BACKLOG: Final = 4096
_TLS_HANDSHAKE_S: Final = 10.0
_DRAIN_S: Final = 5.0
_HEAD_LINES: Final = 128
# The files that a worker opens beside its callers' connections: to Kafka, to other workers, and others.
_OWN_FILES: Final = 512


class CallerConnection(RequestHandler):
    """One connection of a caller. ``head_bytes``: the size of its unfinished request head.

    ``counted``: for which token; ``on_lost``: is called when it is closed.
    """

    __slots__ = ("_limits", "_server", "counted", "head_bytes", "on_lost")

    def __init__(self, server: Server, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            keepalive_timeout=limits.idle_timeout_s,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=_HEAD_LINES,
        )
        self._server, self._limits, self.head_bytes = server, limits, 0
        self.counted: SharedCount | None = None
        self.on_lost: Callable[[], None] | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waiter = self._waiter
        if self._request_count == 0 or (waiter is not None and not waiter.done()):
            # There was no request yet, or nobody was woken for one: what came is a part of a head.
            self.head_bytes += len(data)
            self._server.grew(len(data))
        elif self.head_bytes:
            self.forget_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.forget_head()
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    def end(self) -> None:
        """Closes it, after the request that is under way. aiohttp's `close` alone leaves an idle one open."""
        if self._waiter is not None and not self._waiter.done():
            self.force_close()
        else:
            self.close()

    def abort(self) -> None:
        """Closes it at once, without waiting for what the caller has to say."""
        if self.transport is not None:
            self.transport.abort()
        self.force_close()

    def forget_head(self) -> None:
        self._server.grew(-self.head_bytes)
        self.head_bytes = 0

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what never reached a handler, or came back from it as an error; the connection ends."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: nothing can be added to it")
        if isinstance(exc, LineTooLong):
            limit = self._limits.header_bytes
            problem = Problem("too-large", f"request: a line of its head is over {limit} bytes", limit_bytes=limit)
        elif 400 <= status < 500:
            what = "" if exc is None or type(exc) is BadHttpMessage else f" ({type(exc).__name__})"
            problem = Problem("bad-request", f"request: not valid HTTP/1.1{what}")
        elif isinstance(exc, ConnectionError):
            problem = Problem("bad-request", "the connection broke off")
        else:
            trace = trace_of(request.headers)
            log.event("request_failed", path=request.raw_path, error=repr(exc), traceparent=trace)
            problem = Problem("internal", "this worker failed; its log has the error")
        REQUESTS.labels("none", str(problem.status)).inc()
        REQUESTS_REFUSED.labels(problem.kind).inc()
        response = problem_response(problem, request.raw_path)
        response.force_close()
        return response


class Server(web.Server):
    """Makes the connections and counts them."""

    def __init__(self, routes: Routes, limits: Limits) -> None:
        super().__init__(routes)
        self._limits, self._most = limits, _room_for(limits.connections)
        self._open = self._head_bytes = 0
        self._listening: list[asyncio.Server] = []
        # With others a connection was begun before the authorities or the need for certificates changed.
        self._contexts: WeakSet[ssl.SSLContext] = WeakSet()
        CONNECTIONS.set_function(lambda: self._open)

    async def listen(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        """Raises CannotListen."""
        handshake_s = None if context is None else _TLS_HANDSHAKE_S
        try:
            server = await asyncio.get_running_loop().create_server(
                self, host, port, ssl=context, backlog=_BACKLOG, ssl_handshake_timeout=handshake_s
            )
        except OSError as error:
            raise CannotListen(f"{host}:{port}", error) from error
        self._listening = [server]
        if context is not None:
            self._contexts.add(context)

    async def renew(self, context: ssl.SSLContext, *, drops: bool, requires: bool = False) -> None:
        """New connections get this context. ``drops``: those whose client certificate was verified before end;
        ``requires``: those without a certificate end. Idle ones end at once, each other one after the request that is
        under way, at the latest after `request_timeout_s`; those whose handshake is under way end after it."""
        loop, before = asyncio.get_running_loop(), self._listening
        sockets = [socket.socket(fileno=os.dup(one.fileno())) for server in before for one in server.sockets]
        self._listening = [
            await loop.create_server(
                self, sock=one, ssl=context, backlog=_BACKLOG, ssl_handshake_timeout=_TLS_HANDSHAKE_S
            )
            for one in sockets
        ]
        for server in before:
            server.close()
        if drops or requires:
            self._contexts.clear()
        self._contexts.add(context)
        for connection in cast("list[CallerConnection]", self.connections):
            if connection.transport is None:
                continue
            if drops if connection.transport.get_extra_info("peercert") else requires:
                connection.end()
                if requires:
                    # A stream has no end of its own.
                    loop.call_later(self._limits.request_timeout_s, connection.abort)

    async def close(self) -> None:
        """No connection is accepted any more; requests that are being answered get some seconds."""
        for server in self._listening:
            server.close()
        # What arrived before begins to be answered.
        await asyncio.sleep(0)
        self.pre_shutdown()
        await self.shutdown(_DRAIN_S)

    def __call__(self) -> RequestHandler:
        return CallerConnection(self, self._limits, self._loop)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._open += 1
        context = transport.get_extra_info("sslcontext")
        if context is not None and context not in self._contexts:
            cast(CallerConnection, handler).abort()
        elif self._open > self._most:
            CONNECTIONS_REFUSED.labels("limit").inc()
            transport.write(_full())
            handler.force_close()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._open -= 1

    def grew(self, size_bytes: int) -> None:
        """Counts bytes of unfinished heads."""
        self._head_bytes += size_bytes
        if self._head_bytes > self._limits.heads_bytes:
            connections = cast("list[CallerConnection]", self.connections)
            largest = max(connections, key=lambda connection: connection.head_bytes)
            CONNECTIONS_REFUSED.labels("head").inc()
            largest.forget_head()
            largest.force_close()


def _full() -> bytes:
    problem = Problem("overloaded", "this worker is at its limit of connections; try again, or at another worker")
    response = problem_response(problem, "")
    body = bytes(cast(bytes, response.body))
    fields = {**response.headers, "Content-Length": str(len(body)), "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {problem.status} Service Unavailable\r\n{head}\r\n".encode() + body


def _room_for(connections: int) -> int:
    """The connections that the limit of open files allows; the soft limit is raised as far as possible."""
    wanted = connections + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    room = max(1, allowed - _OWN_FILES)
    if room < connections:
        log.event("open_file_limit_low", limit=hard, connections=room, configured=connections)
    return min(room, connections)
