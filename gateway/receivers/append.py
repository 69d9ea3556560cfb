"""Appends for receivers: a request in parts, one a source, each of them recorded by the owner of its lane.

* A part is recorded as a whole or not at all. Parts of one request are independent: each has its own answer.
* A part with a key is sent again when its lane moves, whatever is known of it: the receipt makes it a duplicate. A part
  without a key is sent again only where it is certain that nothing was recorded; otherwise its outcome is unknown, the
  sender repeats it, and it may be recorded twice.
* The caller's rights and quotas count where the lane is, as for chunks with seqnos.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast
from urllib.parse import quote

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway.access.rights import Caller
from logferry.gateway.api.forwarding import Forwarding
from logferry.gateway.api.sources import CHUNK_OVERHEAD_BYTES, check_durable, decoded, refused, source_of, unpacked
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import MSGPACK, TRACEPARENT, Chunk, pack_chunk
from logferry.gateway.contract.names import Malformed, lane_of, split_topic
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.errors import PROBLEMS, LaneMoved, Problem
from logferry.gateway.http.admission import Admission, computed
from logferry.gateway.http.auth import Right, presented_token
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.request import ChunkLimits, checked, header_attributes, trace_of, traced
from logferry.gateway.http.router import Call, Routes, json_response, problem_of
from logferry.gateway.lanes.dedup import Refusal
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.lanes.transaction import AppendChunks, WriteOutcome
from logferry.gateway.metrics import RECEIVED, count_chunks
from logferry.gateway.topics.catalog import RECORD_OVERHEAD_BYTES, TopicCatalog
from multidict import CIMultiDict

# Of the data of a chunk that a receiver puts together from lines.
CHUNK_BYTES: Final = 1 << 20
_KEY_CHARACTERS: Final = 255
_HAND_OVER_S: Final = 3.0
_NO_DIGEST: Final = bytes(16)
# What is parsed on the event loop: it takes less than a few ms, whatever it is.
_INLINE_BYTES: Final = 1 << 13
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Part(NamedTuple):
    """What is appended to one source. ``lines``: of its chunks, for metrics."""

    source: SourceIdentity
    chunks: list[Chunk]
    key: str | None
    lines: int


def idempotency_key(headers: Any) -> str | None:
    """The request's ``Idempotency-Key``; None: it has none. Raises Malformed."""
    found = headers.get("Idempotency-Key")
    if found is None:
        return None
    key = str(found).strip()
    if not 1 <= len(key) <= _KEY_CHARACTERS or not (key.isascii() and key.isprintable()):
        raise Malformed(f"Idempotency-Key: must be 1 to {_KEY_CHARACTERS} printable ASCII characters")
    return key


def digest_of(chunks: Iterable[Chunk]) -> bytes:
    """Of the content of a request: 16 bytes. A sender that sends it again may do so in another trace."""
    digest = blake2b(digest_size=16)
    for chunk in chunks:
        attributes = sorted(item for item in chunk.attributes.items() if item[0] != TRACEPARENT)
        digest.update(json.dumps([len(chunk.data), attributes]).encode())
        digest.update(chunk.data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Appender:
    """Appends parts, wherever their lanes are. Also the route by which workers hand parts on."""

    config: Config
    topics: TopicCatalog
    ownership: Ownership[Lane]
    forwarding: Forwarding
    admission: Admission
    quotas: Quotas
    _parser: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add_to(self, routes: Routes) -> None:
        routes.add("POST", "/v1/topics/{topic}/sources/{source}/append", "append", self.answer, Right.WRITE)

    async def bounds(self, caller: Caller, source: SourceIdentity) -> ChunkLimits:
        """The limits of chunks of the source. Raises Problem ``forbidden``, ``unknown-topic``, or KafkaError.

        Rights come first: who may not write the topic does not learn whether it exists.
        """
        if not caller.may_write_as(source.topic, source.source_id):
            detail = f"the token {caller.name} does not have the right to write {source.topic} as {source.source_id}"
            raise Problem("forbidden", detail)
        facts = self.topics.fresh(source.topic) or await self.topics.facts(source.topic)
        room = max(0, facts.max_message_bytes - RECORD_OVERHEAD_BYTES)
        return ChunkLimits(min(self.config.limits.chunk_bytes, room), room, self.config.limits.request_chunks)

    async def body(self, call: Call) -> bytes:
        """The body as it was before it was packed. Raises Problem."""
        body = await self.admission.body(call.request)
        return await decoded(body, call.request.headers.get("Content-Encoding", ""), self.config.limits.request_bytes)

    async def parsed(
        self, body: bytes, parse: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Result:
        """The result of parsing a body: large ones in a thread and one at a time, since it may take many times the
        memory of the body."""
        if len(body) <= _INLINE_BYTES:
            return parse(*args, **kwargs)
        async with self._parser:
            return await asyncio.to_thread(parse, *args, **kwargs)

    # ---- parts of a receiver's request ------------------------------------------------------------------------------

    async def append_all(self, call: Call, receiver: str, parts: list[Part]) -> list[dict[str, Any] | Problem]:
        """The answer to each part, in order; a part that fails fails alone."""
        return await asyncio.gather(*(self._append_or_problem(call, receiver, part) for part in parts))

    async def _append_or_problem(self, call: Call, receiver: str, part: Part) -> dict[str, Any] | Problem:
        headers = call.request.headers
        if (trace := trace_of(headers)) is not None:
            part = part._replace(chunks=[traced(chunk, trace) for chunk in part.chunks])
        try:
            done = await self.append(call.caller, headers.get("Authorization"), part)
        except (Problem, Malformed, KafkaError, TimeoutError) as error:
            problem = problem_of(error)
            RECEIVED.labels(receiver, problem.kind).inc(part.lines)
            return problem
        RECEIVED.labels(receiver, "recorded" if done["written"] else "duplicate").inc(part.lines)
        return done

    async def append(self, caller: Caller, authorization: str | None, part: Part) -> dict[str, Any]:
        """The answer of the lane's owner once the part is recorded. `bounds` has checked the caller's right.

        Raises Problem, Malformed or KafkaError: not recorded, except for ``outcome-unknown`` and ``internal``.
        """
        source = part.source
        loop = asyncio.get_running_loop()
        deadline, unknown = loop.time() + _HAND_OVER_S, False
        while True:
            number = lane_of(source.key, self.ownership.number_of_lanes())
            try:
                return await self._append_once(caller, authorization, part, number)
            except LaneMoved as moved:
                obstacle: Problem = moved
            except Problem as problem:
                if problem.status not in (429, 503) or not unknown:
                    raise
                obstacle = problem
            if obstacle.kind == "outcome-unknown":
                unknown = True
                if part.key is None:
                    raise obstacle
            if loop.time() > deadline:
                if unknown and obstacle.kind != "outcome-unknown":
                    raise Problem("outcome-unknown", f"lane {number} moved before its owner answered")
                raise obstacle
            await self.ownership.wait_for_news()

    async def _append_once(self, caller: Caller, authorization: str | None, part: Part, number: int) -> dict[str, Any]:
        lane = self.ownership.lanes.get(number)
        if lane is not None and lane.is_open:
            return await self._record(caller, part.source, part.chunks, part.key, lane)
        owner = self.ownership.owner(number)
        if owner is None:
            raise LaneMoved("not-owner-yet", f"lane {number} is moving; its owner is not known yet")
        headers = CIMultiDict({"Content-Type": MSGPACK})
        if authorization is not None and caller.name is not None:
            headers["Authorization"] = f"Bearer {presented_token(authorization)}"
        if part.key is not None:
            headers["Idempotency-Key"] = part.key
        _, topic = split_topic(part.source.topic)
        path = f"/v1/topics/{quote(topic, safe='')}/sources/{quote(part.source.source_id, safe='')}/append"
        size = sum(len(chunk.data) for chunk in part.chunks)
        body = await computed(size, b"".join, map(pack_chunk, part.chunks))
        answer = await self.forwarding.post(owner, path, headers, body, f"the owner of lane {number}", caller.identity)
        document = json.loads(answer.body if isinstance(answer.body, bytes | bytearray) else b"{}")
        if answer.status == 200:
            return cast(dict[str, Any], document)
        kind = str(document.get("type", "")).rpartition("/")[2]
        wait = answer.headers.get("Retry-After", "")
        detail = str(document.get("detail", f"the owner of lane {number} answered {answer.status}"))
        raise Problem(
            kind if kind in PROBLEMS else "outcome-unknown",
            detail,
            retry_after_s=float(wait) if wait.isdecimal() else None,
        )

    # ---- the owner's side -------------------------------------------------------------------------------------------

    async def answer(self, call: Call) -> web.StreamResponse:
        """The route: chunks of one source, from anybody who may write it."""
        source = source_of(call, self.config.dc)
        key = idempotency_key(call.request.headers)
        here = partial(self._answer_here, call, source, key)
        return await self.forwarding.answer(call.request, source, here, is_repeatable=key is not None)

    async def _answer_here(self, call: Call, source: SourceIdentity, key: str | None, lane: Lane) -> web.StreamResponse:
        with self.admission.reserved(call.request):
            chunks = await self._chunks(call, await self.bounds(call.caller, source))
            return json_response(await self._record(call.caller, source, chunks, key, lane))

    async def _chunks(self, call: Call, bounds: ChunkLimits) -> list[Chunk]:
        headers = call.request.headers
        call.knows_only("partition_key")
        body = await self.body(call)
        if headers.get("Content-Type", "").partition(";")[0].strip().lower() != MSGPACK:
            chunk = checked(Chunk(0, None, None, header_attributes(headers.items()), body), "chunk", bounds)
            return [traced(chunk, trace_of(headers))]
        chunks = await unpacked(body, bounds, trace_of(headers))
        for number, chunk in enumerate(chunks):
            if chunk.seqno or chunk.prev is not None:
                raise Malformed(f"chunk {number}: its seqno must be 0 and its prev nil, since the gateway gives them")
        return chunks

    async def _record(
        self, caller: Caller, source: SourceIdentity, chunks: list[Chunk], key: str | None, lane: Lane
    ) -> dict[str, Any]:
        facts = self.topics.fresh(source.topic) or await self.topics.facts(source.topic)
        check_durable(facts)
        data = sum(len(chunk.data) for chunk in chunks)
        if self.quotas.is_active:
            self.quotas.take(caller.name, source.topic, data, len(chunks))
        size = data + CHUNK_OVERHEAD_BYTES * len(chunks) + len(source.state_key())
        digest = _NO_DIGEST if key is None else await computed(data, digest_of, chunks)
        answered = await lane.submit(AppendChunks(facts, source, chunks, size, digest, key, caller.name))
        outcome = answered.outcome
        if isinstance(outcome, Refusal):
            count_chunks(source.topic, outcome.kind, chunks)
            raise refused(outcome)
        receipt = cast(WriteOutcome, outcome).receipt
        if receipt is None:
            raise Problem("internal", "an append without a receipt")
        written = cast(WriteOutcome, outcome).written
        if not written:
            count_chunks(source.topic, "duplicate", chunks)
        return {
            "source_id": source.source_id,
            "topic": source.topic,
            "partition": receipt.partition,
            "first_seqno": receipt.first_seqno,
            "last_seqno": receipt.last_seqno,
            "written": written,
            "duplicates": len(chunks) - written,
            "offsets": answered.offsets,
        }
