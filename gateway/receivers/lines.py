"""Whole lines over HTTP without seqnos: ``POST /v1/topics/{topic}/lines``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from logferry.gateway.api.sources import topic_of
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import Malformed, check_source_id
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.auth import Right
from logferry.gateway.http.request import checked, header_attributes, percent_decoded
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.receivers.append import CHUNK_BYTES, Appender, Part, idempotency_key

_NAME_CHARACTERS: Final = 100
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
SOURCE_HEADER: Final = "X-Logferry-Source"


def cut_lines(body: bytes, limit: int) -> tuple[list[bytes], int]:
    """The body in pieces of whole lines, each of at most so many bytes, and the number of lines.

    The last line gets its newline if it has none. Raises Problem ``too-large`` where a line alone is larger.
    """
    if body and not body.endswith(b"\n"):
        body += b"\n"
    found, at = list[bytes](), 0
    while at < len(body):
        end = len(body) if len(body) - at <= limit else body.rfind(b"\n", at, at + limit) + 1
        if end <= at:
            size = body.index(b"\n", at) + 1 - at
            raise Problem("too-large", f"a line has {size} bytes; the limit is {limit}", limit_bytes=limit)
        found.append(body[at:end])
        at = end
    return found, body.count(b"\n")


def joined(lines: list[bytes], limit: int) -> list[bytes]:
    """The lines, without their newlines so far, in pieces of at most so many bytes; none of them is longer."""
    found, at, size = list[bytes](), 0, 0
    for number, line in enumerate(lines):
        if number > at and size + len(line) + 1 > limit:
            found.append(b"\n".join(lines[at:number]) + b"\n")
            at, size = number, 0
        size += len(line) + 1
    found.append(b"\n".join(lines[at:]) + b"\n")
    return found


def sender(call: Call, receiver: str, name: str | None = None) -> str:
    """The source id of a sender: the receiver, its token, and a name.

    The name is what the sender calls itself, else ``name``, of its protocol, else its address. Raises Malformed.
    """
    given = call.request.headers.get(SOURCE_HEADER)
    if given is not None:
        name = percent_decoded(given, SOURCE_HEADER)
    elif name is not None:
        name = _CONTROL.sub("_", name)[:_NAME_CHARACTERS]
    return check_source_id(f"{receiver}/{call.caller.name or '-'}/{name or call.request.remote or '-'}")


@dataclass(frozen=True, slots=True)
class LinesApi:
    appender: Appender

    def add_to(self, routes: Routes) -> None:
        routes.add("POST", "/v1/topics/{topic}/lines", "lines", self.lines, Right.WRITE)

    async def lines(self, call: Call) -> web.StreamResponse:
        call.knows_only("source")
        appender, headers = self.appender, call.request.headers
        topic = topic_of(appender.config.dc, call.segments[3])
        source = SourceIdentity(topic, None, sender(call, "lines", call.query.get("source")))
        key = idempotency_key(headers)
        with appender.admission.reserved(call.request):
            bounds = await appender.bounds(call.caller, source)
            body = await appender.body(call)
            if not body:
                raise Malformed("body: holds no line")
            attributes = header_attributes(headers.items())
            room = bounds.record_bytes - sum(len(name) + len(value.encode()) for name, value in attributes.items())
            limit = min(CHUNK_BYTES, bounds.data_bytes, max(1, room))
            pieces, lines = await computed(len(body), cut_lines, body, limit)
            chunks = [
                checked(Chunk(0, None, None, attributes, piece), f"chunk {n}", bounds) for n, piece in enumerate(pieces)
            ]
            (answer,) = await appender.append_all(call, "lines", [Part(source, chunks, key, lines)])
        if isinstance(answer, Problem):
            raise answer
        return json_response({**answer, "lines": lines})
