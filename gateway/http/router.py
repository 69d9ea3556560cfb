"""From a request line to a handler, and from every error to a problem document.

On aiohttp's low-level server, with a table of its own: the raw path is split once, escapes are undone once, and
what is not UTF-8 is refused. The application router and the query parser took a third of the time of a small
request (see ops/decisions/hot-path.md).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.contract.chunk import Malformed
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import ANYBODY, Caller, Gate, Right
from logferry.gateway.http.request import percent_decoded
from logferry.gateway.metrics import REQUEST_SECONDS, REQUESTS

_JSON: Final = {"Content-Type": "application/json"}
_PROBLEM: Final = {"Content-Type": "application/problem+json"}
# The places of a path's parameters: /v1/topics/{3}/sources/{5}/chunks.
_FIRST, _SECOND = 3, 5


@dataclass(slots=True)
class Call:
    """A request that found its handler. ``segments``: of the raw path, still escaped; ``query``: undone.

    ``lists``: what may be given more than once in the query, apart from the rest.
    """

    request: web.BaseRequest
    segments: list[str]
    query: dict[str, str]
    caller: Caller = ANYBODY
    lists: dict[str, list[str]] = field(default_factory=dict)

    def first(self, what: str) -> str:
        """The first parameter of the path. Raises Malformed when it is not UTF-8."""
        return percent_decoded(self.segments[_FIRST], what)

    def second(self, what: str) -> str:
        return percent_decoded(self.segments[_SECOND], what)

    def knows_only(self, *names: str) -> None:
        """A misspelt name in the query must not be ignored. Raises Malformed."""
        for name in self.query:
            if name not in names:
                known = ", ".join(names) or "none"
                raise Malformed(f"query: {name[:60]!r} is not known here; known are {known}")


Handler = Callable[[Call], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    name: str
    handler: Handler
    right: Right
    lists: tuple[str, ...]


class Routes:
    """The table: the shape of a path → method → handler. The gate stands before every one of them.

    ``is_leaving``: the worker stops, and its callers do well to connect to another one.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._table: dict[tuple[Any, ...], dict[str, Route]] = {}
        self._counters: dict[tuple[str, int], Any] = {}
        self.declared: list[Route] = []
        self.is_leaving = False

    def add(
        self,
        method: str,
        path: str,
        name: str,
        handler: Handler,
        right: Right = Right.EVERYTHING,
        *,
        lists: tuple[str, ...] = (),
    ) -> None:
        """A route that does not say which right it needs is open to those alone who may do everything.

        ``lists``: the names that its query may give more than once.
        """
        route = Route(method, path, name, handler, right, lists)
        self._table.setdefault(_shape(path.split("/")), {})[method] = route
        self.declared.append(route)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers the request; whatever goes wrong is a problem document."""
        started = time.monotonic()
        path, _, query = request.raw_path.partition("?")
        segments = path.split("/")
        methods = self._table.get(_shape(segments))
        route = methods.get(request.method) if methods else None
        if route is None:
            return _no_route(request, path, methods)
        response = await self._answered(route, request, segments, query)
        if self.is_leaving:
            response.force_close()
        self._count(route.name, response.status, time.monotonic() - started)
        return response

    async def _answered(
        self, route: Route, request: web.BaseRequest, segments: list[str], query: str
    ) -> web.StreamResponse:
        try:
            caller = self._gate.admit(route.right, request.headers, segments)
            lists: dict[str, list[str]] = {name: [] for name in route.lists}
            return await route.handler(Call(request, segments, parse_query(query, lists), caller, lists))
        except Problem as problem:
            return problem_response(problem, request.raw_path)
        except Malformed as error:
            return problem_response(Problem("bad-request", str(error)), request.raw_path)
        except (KafkaError, TimeoutError) as error:
            return problem_response(Problem("kafka-unavailable", f"Kafka does not answer: {error!r}"), request.raw_path)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  the last line: the worker must live, the caller must know
            log.event("error", "request_failed", path=request.raw_path, error=repr(error))
            internal = Problem("internal", "an error inside the gateway; it is in its log")
            return problem_response(internal, request.raw_path)

    def _count(self, route: str, status: int, seconds: float) -> None:
        counters = self._counters.get((route, status))
        if counters is None:
            counters = (REQUESTS.labels(route, str(status)), REQUEST_SECONDS.labels(route))
            self._counters[route, status] = counters
        counters[0].inc()
        counters[1].observe(seconds)


def _shape(segments: list[str]) -> tuple[Any, ...]:
    if len(segments) == 7:
        return (7, segments[1], segments[2], segments[4], segments[6])
    return (len(segments), *segments[1:_FIRST], *segments[_FIRST + 1 : _SECOND], *segments[_SECOND + 1 :])


def parse_query(text: str, lists: dict[str, list[str]]) -> dict[str, str]:
    """The query, each name once; the names in ``lists`` go there, as often as they are given. Raises Malformed."""
    found: dict[str, str] = {}
    if not text:
        return found
    for item in text.split("&"):
        if not item:
            continue
        name, _, value = item.partition("=")
        if "%" in item or "+" in item:
            name = percent_decoded(name.replace("+", " "), "query")
            value = percent_decoded(value.replace("+", " "), f"query: {name}")
        if name in lists:
            lists[name].append(value)
            continue
        if name in found:
            raise Malformed(f"query: {name} is given more than once")
        found[name] = value
    return found


def _no_route(request: web.BaseRequest, path: str, methods: dict[str, Route] | None) -> web.Response:
    if not methods:
        return problem_response(Problem("not-found", f"{path} is not part of the interface"), request.raw_path)
    allowed = ", ".join(sorted(methods))
    response = problem_response(Problem("method-not-allowed", f"allowed here: {allowed}"), request.raw_path)
    response.headers["Allow"] = allowed
    return response


def json_response(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(document).encode(), status=status, headers=_JSON)


def problem_response(problem: Problem, path: str) -> web.Response:
    document = {**problem.document(), "instance": path}
    response = web.Response(body=json.dumps(document).encode(), status=problem.status, headers=_PROBLEM)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="logferry"'
    return response
