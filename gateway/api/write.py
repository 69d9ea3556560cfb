"""The routes that write: chunks of a source, and its sessions. The owner of the source's lane answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from aiohttp import web
from logferry.gateway.api.forwarding import Forwarding
from logferry.gateway.api.sources import charge_state, described, refused, source_bytes, source_of
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import MSGPACK, Chunk
from logferry.gateway.contract.names import Malformed
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Right
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.request import (
    ChunkLimits,
    checked,
    decoded_body,
    header_attributes,
    iter_chunks,
    number,
    optional_number,
    unpack_chunks,
)
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import Refusal
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.transaction import OpenSession, SessionOutcome, WriteChunks, WriteOutcome
from logferry.gateway.metrics import count_chunks
from logferry.gateway.topics.catalog import RECORD_OVERHEAD_BYTES, TopicCatalog
from logferry.gateway.turns import Turns

# Counted for each chunk beside its data, so that many tiny ones stay within the limits of bytes, too.
_CHUNK_OVERHEAD_BYTES: Final = 100
# A packed body of so many bytes unpacks at once, up to so many; so does a plain one of chunks.
_PACKED_INLINE_BYTES: Final = 2048
_UNPACKED_INLINE_BYTES: Final = 1 << 17
_INLINE_BYTES: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class WriteApi:
    config: Config
    topics: TopicCatalog
    forwarding: Forwarding
    admission: Admission
    quotas: Quotas
    url: str

    def add_to(self, routes: Routes) -> None:
        source = "/v1/topics/{topic}/sources/{source}"
        routes.add("POST", source + "/chunks", "write", self.write, Right.WRITE)
        routes.add("POST", source + "/session", "session", self.open_session, Right.WRITE)

    async def write(self, call: Call) -> web.StreamResponse:
        source = source_of(call, self.config.dc)
        return await self.forwarding.answer(call.request, source, partial(self._write, call, source))

    async def _write(self, call: Call, source: SourceIdentity, lane: Lane) -> web.StreamResponse:
        reserved = self.admission.reserve(call.request)
        try:
            facts = self.topics.fresh(source.topic) or await self.topics.facts(source.topic)
            _check_durable(facts)
            if self.quotas.is_active:
                self.quotas.take(call.caller.name, source.topic)
            session, chunks, size = await self._chunks(call, facts)
            size += source_bytes(source)
            if self.quotas.is_active:
                self.quotas.take(call.caller.name, source.topic, sum(len(c.data) for c in chunks), len(chunks))
            request = WriteChunks(facts, source, session, chunks, size, call.caller.name)
            answered = await lane.submit(request)
        finally:
            self.admission.release(reserved)
        outcome = answered.outcome
        if isinstance(outcome, Refusal):
            count_chunks(source.topic, outcome.kind, chunks)
            raise refused(outcome)
        outcome = cast(WriteOutcome, outcome)
        if outcome.duplicates:
            # They are the first ones: the chunks above the recorded seqno are written.
            count_chunks(source.topic, "duplicate", chunks[: outcome.duplicates])
        return json_response(
            {
                "source_id": source.source_id,
                "topic": source.topic,
                "partition": outcome.state.partition,
                "recorded_seqno": outcome.state.recorded,
                "written": outcome.written,
                "duplicates": outcome.duplicates,
                "offsets": answered.offsets,
            }
        )

    async def _chunks(self, call: Call, facts: TopicFacts) -> tuple[int | None, list[Chunk], int]:
        limits, query, headers = self.config.limits, call.query, call.request.headers
        room = max(0, facts.max_message_bytes - RECORD_OVERHEAD_BYTES)
        bounds = ChunkLimits(min(limits.chunk_bytes, room), room, limits.request_chunks)
        session = optional_number(query, "session")
        encoding = headers.get("Content-Encoding", "")
        if headers.get("Content-Type", "").partition(";")[0].strip().lower() == MSGPACK:
            call.knows_only("session", "partition_key")
            body = await _decoded(await self.admission.body(call.request), encoding, limits.request_bytes)
            chunks = await _unpacked(body, bounds)
            return session, chunks, len(body) + _CHUNK_OVERHEAD_BYTES * len(chunks)
        call.knows_only("seqno", "prev", "session", "created_ms", "partition_key")
        if "seqno" not in query:
            raise Malformed("seqno: is missing from the query")
        seqno, prev = number(query["seqno"], "seqno"), optional_number(query, "prev")
        created_ms = optional_number(query, "created_ms")
        attributes = header_attributes(headers.items())
        body = await _decoded(await self.admission.body(call.request), encoding, limits.request_bytes)
        chunk = checked(Chunk(seqno, prev, created_ms, attributes, body), "chunk", bounds)
        return session, [chunk], len(body) + _CHUNK_OVERHEAD_BYTES

    async def open_session(self, call: Call) -> web.StreamResponse:
        source = source_of(call, self.config.dc)
        return await self.forwarding.answer(call.request, source, partial(self._open_session, call, source))

    async def _open_session(self, call: Call, source: SourceIdentity, lane: Lane) -> web.StreamResponse:
        call.knows_only("partition_key")
        reserved = self.admission.reserve(call.request)
        try:
            if await self.admission.body(call.request):
                raise Malformed("body: must be empty to open a session")
            facts = await self.topics.facts(source.topic)
            _check_durable(facts)
            size = charge_state(self.quotas, call, source)
            is_admin = call.caller.admin.match(source.topic)
            answered = await lane.submit(OpenSession(facts, source, size, call.caller.name, is_admin))
        finally:
            self.admission.release(reserved)
        if isinstance(answered.outcome, Refusal):
            raise refused(answered.outcome)
        return json_response(described(source, cast(SessionOutcome, answered.outcome).state, self.url))


def _check_durable(facts: TopicFacts) -> None:
    if facts.weakness is not None:
        raise Problem("topic-not-durable", facts.weakness, topic=facts.name)


async def _decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """In a thread, except for a body that unpacks to little: nothing holds the event loop."""
    if not encoding:
        return body
    if len(body) <= _PACKED_INLINE_BYTES:
        try:
            return decoded_body(body, encoding, min(limit, _UNPACKED_INLINE_BYTES))
        except Problem as problem:
            # A few bytes of zstd may hold all that the limit allows.
            if problem.kind != "too-large" or limit <= _UNPACKED_INLINE_BYTES:
                raise
    return await asyncio.to_thread(decoded_body, body, encoding, limit)


async def _unpacked(body: bytes, bounds: ChunkLimits) -> list[Chunk]:
    """Other requests run in between: a body may hold thousands of chunks."""
    if len(body) <= _INLINE_BYTES:
        return unpack_chunks(body, bounds)
    chunks, turns = list[Chunk](), Turns()
    for chunk in iter_chunks(body, bounds):
        chunks.append(chunk)
        if turns.over:
            await turns.give()
    return chunks
