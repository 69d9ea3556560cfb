"""Maps a request line to its handler, and every error to a problem document.

On aiohttp's low-level server, with a table of its own: the raw path is split once, escapes are undone once, and
what is not UTF-8 is refused. The application router and the query parser took a third of the time of a small
request (see ops/docs/decisions/0001-hot-path-of-a-write.md).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, Final

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.access.certificates import Identity, PeerRequest
from logferry.gateway.access.issuer import KeysMissing
from logferry.gateway.access.rights import ANYBODY, Caller
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.contract.names import Malformed
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import TOKEN
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.request import percent_decoded, trace_of
from logferry.gateway.http.short_answer import ShortAnswer
from logferry.gateway.metrics import REQUEST_SECONDS, REQUESTS, REQUESTS_REFUSED

# The header of a request that another worker hands on.
FORWARDED: Final = "X-Logferry-Forwarded"
# What the certificate of the request's caller says; absent without one, or with a token.
IDENTITY: Final = web.RequestKey("logferry.identity", Identity)
_JSON: Final = {"Content-Type": "application/json"}
_PROBLEM: Final = {"Content-Type": "application/problem+json"}
# The places of a path's parameters: /v1/topics/{3}/sources/{5}/chunks.
_FIRST, _SECOND = 3, 5
# The cursors of as many partitions, which take some ms.
_MOST_PARAMETERS: Final = 5000


@dataclass(slots=True)
class Call:
    """A request that found its handler. ``segments``: of the raw path, still escaped; ``query``: undone.

    ``lists``: what may be given more than once in the query, apart from the rest. ``facts``: what the handler says of
    an act, for the log of acts. ``refused``: of parts of the request.
    """

    request: web.BaseRequest
    segments: list[str]
    query: dict[str, str]
    caller: Caller = ANYBODY
    lists: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    refused: list[Problem] = field(default_factory=list)

    def first(self, what: str) -> str:
        """The first parameter of the path. Raises Malformed when it is not UTF-8."""
        return percent_decoded(self.segments[_FIRST], what)

    def second(self, what: str) -> str:
        return percent_decoded(self.segments[_SECOND], what)

    def segment(self, place: int, what: str) -> str:
        """A part of the path in another place. Raises Malformed when it is not UTF-8."""
        return percent_decoded(self.segments[place], what)

    def knows_only(self, *names: str) -> None:
        """A misspelt name in the query must not be ignored. Raises Malformed."""
        for name in self.query:
            if name not in names:
                known = ", ".join(names) or "none"
                raise Malformed(f"query: {name[:60]!r} is not a parameter of this route; it takes {known}")


@dataclass(frozen=True, slots=True)
class Observation:
    """A request and its answer. ``call`` None: it was refused before its handler. ``problem`` None: it was done."""

    route: str
    request: web.BaseRequest
    status: int
    problem: Problem | None
    call: Call | None


Handler = Callable[[Call], Awaitable[web.StreamResponse]]
# How a route says what is wrong, by the problem and the path.
ProblemForm = Callable[[Problem, str], web.Response]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    name: str
    handler: Handler
    right: Right
    lists: tuple[str, ...]
    problem: ProblemForm


class Routes:
    """The table: shape of a path → method → handler. Every handler is behind the gate.

    ``is_leaving``: the worker is stopping; connections are closed so that callers reconnect to another one.
    ``clock``: dates the answers, as it does the states in them; a loader compares the two. ``observe``: gets what was
    refused, and every request to one of the routes ``observed``; it returns at once. ``charge``: gets each request as
    its caller sent it here, by the caller's name; raises Problem ``quota``.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._table: dict[tuple[Any, ...], dict[str, Route]] = {}
        self._counters: dict[tuple[str, int], Any] = {}
        self.declared: list[Route] = []
        self.is_leaving = False
        self.clock = BrokerClock()
        self._date = (0, "")
        self.observe: Callable[[Observation], None] | None = None
        self.observed: frozenset[str] = frozenset()
        self.charge: Callable[[str, web.BaseRequest], None] | None = None

    def add(
        self,
        method: str,
        path: str,
        name: str,
        handler: Handler,
        right: Right = Right.EVERYTHING,
        *,
        lists: tuple[str, ...] = (),
        problem: ProblemForm | None = None,
    ) -> None:
        """A route without a declared right requires the right to administer everything.

        ``lists``: the names that its query may give more than once. ``problem``: of a protocol with errors of its own.
        """
        route = Route(method, path, name, handler, right, lists, problem or problem_response)
        self._table.setdefault(_shape(path.split("/")), {})[method] = route
        self.declared.append(route)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        started = time.monotonic()
        path, _, query = request.raw_path.partition("?")
        segments = path.split("/")
        methods = self._table.get(_shape(segments))
        route = methods.get(request.method) if methods else None
        if route is None:
            return _no_route(request, path, methods)
        response = await self._answered(route, request, segments, query)
        if isinstance(response, ShortAnswer):
            response.date = self._present_date()
        elif not response.prepared:
            response.headers["Date"] = self._present_date()
        if self.is_leaving:
            response.force_close()
        counters = self._counters.get((route.name, response.status))
        if counters is None:
            counters = (REQUESTS.labels(route.name, str(response.status)), REQUEST_SECONDS.labels(route.name))
            self._counters[route.name, response.status] = counters
        counters[0].inc()
        counters[1].observe(time.monotonic() - started)
        return response

    def _present_date(self) -> str:
        second = self.clock.now_ms() // 1000
        if second != self._date[0]:
            self._date = second, formatdate(second, usegmt=True)
        return self._date[1]

    def _is_handed_on(self, request: web.BaseRequest) -> bool:
        header = request.headers.get(FORWARDED)
        return header is not None and self._gate.is_handed_on(header, request.method, request.raw_path)

    async def _answered(
        self, route: Route, request: web.BaseRequest, segments: list[str], query: str
    ) -> web.StreamResponse:
        call: Call | None = None
        problem: Problem | None = None
        try:
            peer = _peer_of(request) if self._gate.takes_certificates else None
            try:
                caller = self._gate.identify(route.right, request.headers, peer)
            except KeysMissing as missing:
                await missing.issuer.refresh()
                caller = self._gate.identify(route.right, request.headers, peer)
            if caller.name is not None:
                request[TOKEN] = caller.name
                # Before its rights: what is forbidden counts, too. What another worker hands on was charged there.
                if self.charge is not None and not self._is_handed_on(request):
                    self.charge(caller.name, request)
            self._gate.check(caller, route.right, segments)
            if caller.identity is not None:
                request[IDENTITY] = caller.identity
            lists: dict[str, list[str]] = {name: [] for name in route.lists}
            call = Call(request, segments, {}, caller, lists)
            call.query = parse_query(query, lists)
            response = await route.handler(call)
        except (Problem, Malformed, KafkaError, TimeoutError) as error:
            problem = problem_of(error)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  the last line: the worker must live, the caller must know
            trace = trace_of(request.headers)
            log.event("request_failed", path=request.raw_path, error=repr(error), traceparent=trace)
            problem = Problem("internal", "this worker failed; its log has the error")
        if problem is not None:
            REQUESTS_REFUSED.labels(problem.kind).inc()
            response = route.problem(problem, request.raw_path)
            if problem.ends_connection:
                response.force_close()
        if self.observe is not None and (
            problem is not None or route.name in self.observed or (call is not None and call.refused)
        ):
            try:
                self.observe(Observation(route.name, request, response.status, problem, call))
            except Exception as error:  # noqa: BLE001  what watches a request does not fail it
                log.event("request_failed", path=request.raw_path, error=repr(error), traceparent=None)
        return response


def _peer_of(request: web.BaseRequest) -> PeerRequest:
    """A forwarded request comes with the certificate of a worker, which is not that of its caller."""
    transport = None if FORWARDED in request.headers else request.transport
    certificate = None if transport is None else transport.get_extra_info("peercert")
    return PeerRequest(request.method, request.raw_path, certificate)


def problem_of(error: Problem | Malformed | KafkaError | TimeoutError) -> Problem:
    """The answer to what a handler raised."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, Malformed):
        return Problem("bad-request", str(error))
    return Problem("kafka-unavailable", f"Kafka does not answer: {error!r}")


def _shape(segments: list[str]) -> tuple[Any, ...]:
    if len(segments) == 7:
        return (7, segments[1], segments[2], segments[4], segments[6])
    if len(segments) == 4 and segments[1] == "elasticsearch":
        return (4, segments[1], segments[3])  # its parameter is in the second place
    if len(segments) == 3 and segments[1] in ("console", "transactions"):
        return (3, segments[1])
    return (len(segments), *segments[1:_FIRST], *segments[_FIRST + 1 : _SECOND], *segments[_SECOND + 1 :])


def parse_query(text: str, lists: dict[str, list[str]]) -> dict[str, str]:
    """The query, each name once; the names in ``lists`` go there, as often as they are given. Raises Malformed."""
    found: dict[str, str] = {}
    if not text:
        return found
    if text.count("&") > _MOST_PARAMETERS:
        raise Malformed(f"query: more than {_MOST_PARAMETERS} parameters")
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
    REQUESTS_REFUSED.labels("method-not-allowed" if methods else "not-found").inc()
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
