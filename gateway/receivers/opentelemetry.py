"""OpenTelemetry's logs over HTTP: ``POST /otlp/v1/logs``, in protobuf or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import Malformed, full_topic
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, problem_of
from logferry.gateway.receiver_settings import topic_for
from logferry.gateway.receivers.append import CHUNK_BYTES, Appender, Part, idempotency_key
from logferry.gateway.receivers.lines import joined, sender
from logferry.gateway.receivers.otlp import ResourceLines, decode_json
from logferry.gateway.receivers.otlp_protobuf import decode_protobuf
from logferry.gateway.turns import Turns

_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
# The statuses that keep their meaning; of the others each agent repeats 503 and nothing else.
_KEPT: Final = (401, 403, 404, 413, 415, 429)
# Of one request; the resources of others count as of the sender's address.
_SOURCES: Final = 100
_UNAVAILABLE, _INVALID_ARGUMENT = 14, 3


def _problem_answer(problem: Problem, is_json: bool) -> web.Response:
    can_repeat = problem.status == 408 or problem.status >= 500
    http_status = 503 if can_repeat else problem.status if problem.status in _KEPT else 400
    code = _UNAVAILABLE if can_repeat or http_status == 429 else _INVALID_ARGUMENT
    body = status(code, f"{problem.kind}: {problem.detail}", is_json=is_json)
    answer = web.Response(body=body, status=http_status, headers={"Content-Type": _JSON if is_json else _PROTOBUF})
    if http_status in (429, 503):
        answer.headers["Retry-After"] = str(max(1, round(problem.retry_after_s or 1)))
    return answer


@dataclass(frozen=True, slots=True)
class OtlpApi:
    appender: Appender

    def add_to(self, routes: Routes) -> None:
        routes.add(
            "POST",
            "/otlp/v1/{signal}",
            "otlp",
            self.export,
            Right.AGENT,
            problem=lambda problem, _: _problem_answer(problem, is_json=True),
        )

    async def export(self, call: Call) -> web.StreamResponse:
        kind = call.request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        try:
            if call.segments[3] != "logs":
                raise Problem("not-found", f"{call.segments[3][:40]!r} is not taken here; only logs are")
            if kind not in (_PROTOBUF, _JSON):
                raise Problem("unsupported-media-type", f"Content-Type: {kind[:60]!r} is not {_PROTOBUF} or {_JSON}")
            rejected, why = await self._export(call, kind == _JSON)
        except (Problem, Malformed, KafkaError, TimeoutError) as error:
            return _problem_answer(problem_of(error), kind != _PROTOBUF)
        body = response(rejected, why, is_json=kind == _JSON)
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _export(self, call: Call, is_json: bool) -> tuple[int, str]:
        """The number of records that are refused for good, and why. Raises Problem where an attempt may help, or where
        everything is refused."""
        appender, headers = self.appender, call.request.headers
        key = idempotency_key(headers)
        with appender.admission.reserved(call.request):
            body = await appender.body(call)
            decode = decode_json if is_json else decode_protobuf
            resources = await appender.parsed(body, decode, body)
            parts, refused = await self._parts(call, [one for one in resources if one.lines], key)
            answers = await appender.append_all(call, "otlp", parts)
        refused += [(part.lines, a) for part, a in zip(parts, answers, strict=True) if isinstance(a, Problem)]
        if not refused:
            return 0, ""
        worst = max((problem for _, problem in refused), key=lambda p: (p.status >= 500, p.status == 429))
        if worst.status >= 500 or worst.status == 429 or not any(isinstance(answer, dict) for answer in answers):
            raise worst
        return sum(lines for lines, _ in refused), "; ".join(dict.fromkeys(problem.detail for _, problem in refused))

    async def _parts(
        self, call: Call, resources: list[ResourceLines], key: str | None
    ) -> tuple[list[Part], list[tuple[int, Problem]]]:
        """One part a source, one chunk or more a resource; and what is refused: (records, why)."""
        appender, refused = self.appender, list[tuple[int, Problem]]()
        parts: dict[SourceIdentity, Part] = {}
        turns = Turns()
        for resource in resources:
            if turns.over:
                await turns.give()
            service = resource.name("service.name") or ""
            topic = topic_for(appender.config.receivers.otlp, service)
            if topic is None:
                detail = f"no rule of receivers.otlp gives the service {service[:200]!r} a topic"
                refused.append((len(resource.lines), Problem("unknown-topic", detail)))
                continue
            full = full_topic(appender.config.dc, topic)
            name = resource.name("host.name", "service.instance.id", "service.name")
            source = SourceIdentity(full, None, sender(call, "otlp", name))
            if source not in parts and len(parts) >= _SOURCES:
                source = SourceIdentity(full, None, sender(call, "otlp"))
            try:
                limit = min(CHUNK_BYTES, (await appender.bounds(call.caller, source)).data_bytes)
            except (Problem, KafkaError, TimeoutError) as error:
                refused.append((len(resource.lines), problem_of(error)))
                continue
            limit -= sum(len(name) + len(value.encode()) + 16 for name, value in resource.attributes.items())
            fitting = [line for line in resource.lines if len(line) < limit]
            if len(fitting) < len(resource.lines):
                detail = f"a record has {max(map(len, resource.lines))} bytes as a line; the limit is {limit - 1}"
                refused.append((len(resource.lines) - len(fitting), Problem("too-large", detail)))
            if not fitting:
                continue
            pieces = await computed(sum(map(len, fitting)), joined, fitting, limit)
            part = parts.setdefault(source, Part(source, [], key, 0))
            part.chunks.extend(Chunk(0, None, None, resource.attributes, piece) for piece in pieces)
            parts[source] = part._replace(lines=part.lines + len(fitting))
        call.refused.extend(problem for _, problem in refused)
        return list(parts.values()), refused


# ---- answers ---------------------------------------------------------------------------------------------------------


def response(rejected: int, why: str, *, is_json: bool) -> bytes:
    """An ExportLogsServiceResponse; without rejected records it is empty."""
    if is_json:
        partial = {"partialSuccess": {"rejectedLogRecords": str(rejected), "errorMessage": why}} if rejected else {}
        return json.dumps(partial).encode()
    if not rejected:
        return b""
    inner = b"\x08" + _encoded(rejected) + b"\x12" + _sized(why)
    return b"\x0a" + _encoded(len(inner)) + inner


def status(code: int, message: str, *, is_json: bool) -> bytes:
    """A google.rpc.Status."""
    if is_json:
        return json.dumps({"code": code, "message": message}).encode()
    return b"\x08" + _encoded(code) + b"\x12" + _sized(message)


def _encoded(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _sized(text: str) -> bytes:
    raw = text.encode()
    return _encoded(len(raw)) + raw
