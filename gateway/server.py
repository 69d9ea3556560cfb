"""aiohttp's server, whose own answers are problem documents too: to what is not HTTP, and to heads over its limits."""

from __future__ import annotations

from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from logferry.gateway import log
from logferry.gateway.errors import Problem
from logferry.gateway.routes import problem_response


class _Connection(RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what never reached a handler, or came back from it as an error; the connection ends."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: nothing can be added to it")
        if 400 <= status < 500:
            # What was sent stays out of the answer: it may be anything, and it is the sender's own.
            text = (message or str(exc) or "not HTTP").partition("\n")[0].rstrip(": ")
            problem = Problem("bad-request", f"request: {text}")
        elif isinstance(exc, ConnectionError):
            problem = Problem("bad-request", "the connection broke off")
        else:
            log.event("error", "request_failed", path=request.raw_path, error=repr(exc))
            problem = Problem("internal", "an error inside the gateway; it is in its log")
        response = problem_response(problem, request.raw_path)
        response.force_close()
        return response


class Server(web.Server):
    """`web.Server` with connections of our own."""

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)
