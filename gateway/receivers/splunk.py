"""Splunk's HTTP Event Collector (HEC): events, raw lines, acknowledgements and health."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import full_topic
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.receiver_settings import topic_for
from logferry.gateway.receivers import hec
from logferry.gateway.receivers.append import CHUNK_BYTES, Appender, Part, idempotency_key
from logferry.gateway.receivers.hec import BadEvent, Code
from logferry.gateway.receivers.lines import cut_lines, joined, sender

_DEFAULT_INDEX: Final = "main"
_CHANNEL_CHARACTERS: Final = 128
_ACKS: Final = 10_000
_CODES: Final = {"unauthenticated": hec.TOKEN_REQUIRED, "forbidden": hec.INVALID_TOKEN, "internal": hec.INTERNAL}


def _said(code: Code, **more: Any) -> web.Response:
    return json_response({"text": code.text, "code": code.code, **more}, code.status)


def problem_answer(problem: Problem, _path: str) -> web.Response:
    """A problem as the collector says it. Agents repeat 429 and 5xx; of an unknown outcome, too."""
    code = _CODES.get(problem.kind)
    if code is None:
        if problem.status in (408, 429) or problem.status >= 500:
            code = hec.BUSY._replace(status=problem.status if problem.status == 429 else 503)
        else:
            code = hec.INVALID_DATA._replace(status=problem.status)
    response = _said(code, detail=problem.detail)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(problem.retry_after_s)))
    return response


def _longest(lines: list[bytes]) -> int:
    return max(map(len, lines))


@dataclass(frozen=True, slots=True)
class SplunkApi:
    appender: Appender
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(time.time_ns() // 1_000_000))

    def add_to(self, routes: Routes) -> None:
        path = "/services/collector"
        routes.add("POST", path, "hec", self.collect, Right.AGENT, problem=problem_answer)
        routes.add("POST", path + "/{kind}", "hec_kind", self.collect, Right.AGENT, problem=problem_answer)
        routes.add("POST", path + "/{kind}/1.0", "hec_version", self.collect, Right.AGENT, problem=problem_answer)
        routes.add("GET", path + "/{kind}", "hec_health", self.health, Right.OPEN, problem=problem_answer)

    async def health(self, call: Call) -> web.StreamResponse:
        if call.segments[3] != "health":
            raise Problem("not-found", f"{call.segments[3][:40]!r} is not part of the collector")
        return _said(hec.HEALTHY)

    async def collect(self, call: Call) -> web.StreamResponse:
        kind = call.segments[3] if len(call.segments) > 3 else "event"
        channel = call.request.headers.get("X-Splunk-Request-Channel") or call.query.get("channel")
        if channel is not None and not (len(channel) <= _CHANNEL_CHARACTERS and channel.isprintable()):
            return _said(hec.INVALID_CHANNEL)
        try:
            if kind == "ack":
                return await self._acks(call, channel)
            if kind not in ("event", "raw"):
                raise Problem("not-found", f"{kind[:40]!r} is not part of the collector")
            return await self._collect(call, kind, channel)
        except BadEvent as bad:
            return _said(bad.code, **({} if bad.number is None else {"invalid-event-number": bad.number}))

    async def _collect(self, call: Call, kind: str, channel: str | None) -> web.StreamResponse:
        """All of a request is checked before anything is recorded. A part that fails fails the request: who sends it
        again doubles the parts that were recorded, unless it has a key."""
        appender, headers = self.appender, call.request.headers
        key = idempotency_key(headers)
        with appender.admission.reserved(call.request):
            body = await appender.body(call)
            index = call.query.get("index", _DEFAULT_INDEX)
            if kind == "event":
                parts = await self._event_parts(call, body, index, key)
            else:
                parts = [await self._raw_part(call, body, index, key)]
            answers = await appender.append_all(call, "splunk", parts)
        problems = [answer for answer in answers if isinstance(answer, Problem)]
        if problems:
            # One that is worth another attempt is named first: the sender must not take the request for lost.
            raise max(problems, key=lambda problem: (problem.status >= 500, problem.status == 429))
        more = {} if channel is None else {"ackId": hec.ack_id(channel, next(self._numbers))}
        return _said(hec.SUCCESS, **more)

    async def _event_parts(self, call: Call, body: bytes, index: str, key: str | None) -> list[Part]:
        rules, parts = self.appender.config.receivers.splunk, list[Part]()
        grouped = await self.appender.parsed(body, hec.group_events, body, index, rules)
        for topic, (of_topic, host) in grouped.items():
            source, limit = await self._place(call, topic, host)
            longest = await computed(len(body), _longest, of_topic)
            if longest >= limit:
                raise Problem("too-large", f"an event has {longest} bytes; the limit is {limit - 1}", limit_bytes=limit)
            pieces = await computed(len(body), joined, of_topic, limit)
            parts.append(Part(source, [Chunk(0, None, None, {}, piece) for piece in pieces], key, len(of_topic)))
        return parts

    async def _raw_part(self, call: Call, body: bytes, index: str, key: str | None) -> Part:
        if not body.strip():
            raise BadEvent(hec.NO_DATA)
        source, limit = await self._place(call, self._topic(index), call.query.get("host"))
        pieces, lines = await computed(len(body), cut_lines, body, limit)
        return Part(source, [Chunk(0, None, None, {}, piece) for piece in pieces], key, lines)

    def _topic(self, index: str) -> str:
        topic = topic_for(self.appender.config.receivers.splunk, index)
        if topic is None:
            raise BadEvent(hec.INCORRECT_INDEX)
        return topic

    async def _place(self, call: Call, topic: str, host: str | None) -> tuple[SourceIdentity, int]:
        """The source of a topic's lines, and the limit of a chunk."""
        source = SourceIdentity(full_topic(self.appender.config.dc, topic), None, sender(call, "splunk", host))
        return source, min(CHUNK_BYTES, (await self.appender.bounds(call.caller, source)).data_bytes)

    async def _acks(self, call: Call, channel: str | None) -> web.StreamResponse:
        """An id is given after the commit, so each one that was given is recorded."""
        if channel is None:
            return _said(hec.CHANNEL_MISSING)
        body = await self.appender.admission.read(call.request, 1 << 18)
        try:
            asked = (await self.appender.parsed(body, json.loads, body))["acks"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return _said(hec.INVALID_DATA)
        if not isinstance(asked, list) or len(asked) > _ACKS or not all(type(ack) is int for ack in asked):
            return _said(hec.INVALID_DATA)
        return json_response({"acks": {str(ack): hec.is_acked(channel, ack) for ack in asked}})
