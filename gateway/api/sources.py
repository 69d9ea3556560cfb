"""The routes about topics and their sources: chunks, sessions, heartbeats, state, forgetting, and the lists.

The owner of a source's lane answers what is about one source.

The sources of a topic are spread over the lanes, so a list is assembled from every worker; it is complete or rejected,
never silently partial.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from typing import Any, Final, cast
from urllib.parse import quote

from aiohttp import web
from logferry.gateway.api.forwarding import Forwarding
from logferry.gateway.api.schemas import HeartbeatBody, TopicBody
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import MSGPACK, Chunk
from logferry.gateway.contract.names import Malformed, check_source_id, check_topic, full_topic
from logferry.gateway.contract.source_state import Heartbeat, SourceIdentity, SourceState
from logferry.gateway.errors import LaneMoved, Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Right
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.request import (
    ChunkLimits,
    checked,
    decoded_body,
    flag,
    header_attributes,
    iter_chunks,
    number,
    optional_number,
    percent_decoded,
    trace_of,
    traced,
)
from logferry.gateway.http.router import FORWARDED, Call, Handler, Routes, json_response
from logferry.gateway.http.short_answer import ShortAnswer
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import Refusal
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.lanes.source_index import sort_key
from logferry.gateway.lanes.transaction import (
    ForgetOutcome,
    ForgetSource,
    HeartbeatOutcome,
    OpenSession,
    RecordHeartbeat,
    SessionOutcome,
    WriteChunks,
    WriteOutcome,
)
from logferry.gateway.metrics import count_chunks
from logferry.gateway.topics.catalog import RECORD_OVERHEAD_BYTES, TopicCatalog
from logferry.gateway.topics.remote_sources import RemoteSources
from logferry.gateway.turns import Turns

_PAGE: Final = 1000
_MORE: Final = ("at_ms", "sizes")
_STATE_BYTES: Final = 256
# Counted for each chunk beside its data, so that many tiny ones stay within the limits of bytes, too.
CHUNK_OVERHEAD_BYTES: Final = 100
# A packed body of so many bytes unpacks at once, up to so many.
_PACKED_INLINE_BYTES: Final = 2048
_UNPACKED_INLINE_BYTES: Final = 1 << 17


@lru_cache(maxsize=4096)
def topic_of(dc: str, escaped: str) -> str:
    """The full name of the topic that a segment of the path names for writing. Raises Malformed."""
    return full_topic(dc, check_topic(percent_decoded(escaped, "topic")))


def source_of(call: Call, dc: str) -> SourceIdentity:
    """The source that path and query name. Raises Malformed."""
    source_id = check_source_id(call.second("sourceId"))
    key = call.query.get("partition_key")
    return SourceIdentity(
        topic_of(dc, call.segments[3]), key if key is None else check_source_id(key, "partition_key"), source_id
    )


def charge_state(quotas: Quotas, call: Call, source: SourceIdentity) -> int:
    """The bytes of a state alone: a session or heartbeat counts as one chunk of so many. Raises Problem ``quota``."""
    # The key stands in Kafka and in memory as long as the state.
    size = _STATE_BYTES + len(source.state_key())
    if quotas.is_active:
        quotas.take(call.caller.name, source.topic, size, 1)
    return size


def described(source: SourceIdentity, state: SourceState | None, url: str) -> dict[str, Any]:
    """The answer about a source. ``url``: the worker that answers."""
    return {
        "source_id": source.source_id,
        "topic": source.topic,
        "session": state.session or None if state else None,
        "partition": state.partition if state else None,
        "recorded_seqno": state.recorded if state else None,
        "url": url,
    }


def written(source: SourceIdentity, outcome: WriteOutcome, offsets: tuple[int, int] | None) -> str:
    """The answer to chunks, in JSON: the library takes three times as long, a twentieth of a small request."""
    state, topic = outcome.state, encode_basestring_ascii(source.topic)
    return (
        f'{{"source_id": {encode_basestring_ascii(source.source_id)}, "topic": {topic}, '
        f'"partition": {state.partition}, "recorded_seqno": {"null" if state.recorded is None else state.recorded}, '
        f'"written": {outcome.written}, "duplicates": {outcome.duplicates}, '
        f'"offsets": {"null" if offsets is None else [*offsets]}}}'
    )


def refused(refusal: Refusal) -> Problem:
    return Problem(refusal.kind, refusal.detail, retry_after_s=refusal.retry_after_s, recorded_seqno=refusal.recorded)


async def first_rows(
    lanes: Iterable[Lane],
    topic: str,
    prefix: str,
    after: str,
    size: int,
    wanted: Callable[[str], bool],
    counts: Callable[[SourceState], bool],
) -> list[dict[str, Any]]:
    """The first rows of ids with the prefix, after a sort key. Of each lane no more is read than that."""
    start = quote(prefix, safe="")
    first: list[tuple[str, SourceIdentity, SourceState]] = []
    for lane in lanes:
        async for source, state in lane.sources(topic, max(after, start)):
            key = sort_key(source.source_id, source.partition_key)
            if not key.startswith(start) or (len(first) == size and key > first[-1][0]):
                break
            if key > after and wanted(source.source_id) and counts(state):
                insort(first, (key, source, state), key=itemgetter(0))
                del first[size:]
    return [_row(source, state) for _, source, state in first]


@dataclass(frozen=True, slots=True)
class SourcesApi:
    config: Config
    topics: TopicCatalog
    ownership: Ownership[Lane]
    forwarding: Forwarding
    admission: Admission
    moved: RemoteSources
    quotas: Quotas

    def add_to(self, routes: Routes) -> None:
        topic, sources = "/v1/topics/{topic}", "/v1/topics/{topic}/sources"
        source = sources + "/{source}"
        routes.add("GET", "/v1/topics", "topics", self.list_topics, Right.KNOWN)
        routes.add("GET", topic, "topic", self.get_topic, Right.TOPIC)
        routes.add("PUT", topic, "put_topic", self.put_topic, Right.ADMIN)
        routes.add("GET", sources, "sources", self.list, Right.SOURCE)
        routes.add("GET", source, "source", self.get, Right.SOURCE)
        routes.add("DELETE", source, "forget", self._by_owner(self._forget), Right.ADMIN)
        routes.add("POST", source + "/chunks", "write", self._by_owner(self._write), Right.WRITE)
        routes.add("POST", source + "/session", "session", self._by_owner(self._open_session), Right.WRITE)
        routes.add("POST", source + "/heartbeat", "heartbeat", self._by_owner(self._heartbeat), Right.WRITE)

    def _by_owner(self, handle: Callable[[Call, SourceIdentity, Lane], Awaitable[web.StreamResponse]]) -> Handler:
        """The handler of a request about a source: the owner of its lane answers."""

        async def answer(call: Call) -> web.StreamResponse:
            source = source_of(call, self.config.dc)
            return await self.forwarding.answer(call.request, source, partial(handle, call, source))

        return answer

    async def list_topics(self, call: Call) -> web.StreamResponse:
        call.knows_only(*_MORE)
        at_ms, sizes = optional_number(call.query, "at_ms"), flag(call.query, "sizes")
        return json_response({"topics": await self.topics.describe_all(call.caller.may_see, at_ms, sizes=sizes)})

    async def get_topic(self, call: Call) -> web.StreamResponse:
        call.knows_only(*_MORE)
        at_ms, sizes = optional_number(call.query, "at_ms"), flag(call.query, "sizes")
        return json_response(await self.topics.describe(call.first("topic"), at_ms, sizes=sizes))

    async def put_topic(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        name = check_topic(call.first("topic"))
        wanted = await self.admission.document(call.request, TopicBody)
        call.facts.update(wanted.model_dump(exclude_none=True))
        found, created = await self.topics.put(name, wanted.partitions, wanted.retention_ms)
        return json_response(found, status=201 if created else 200)

    async def get(self, call: Call) -> web.StreamResponse:
        call.knows_only("partition_key", "dc")
        dc = call.query.get("dc", self.config.dc)
        return await (self._by_owner(self._get)(call) if dc == self.config.dc else self._get_elsewhere(call, dc))

    async def _get_elsewhere(self, call: Call, dc: str) -> web.StreamResponse:
        """The state acknowledged by another data centre, and how much of it is mirrored here."""
        if dc not in self.config.known_dcs:
            raise Malformed(f"dc: {dc[:40]!r} is not one of {', '.join(sorted(self.config.known_dcs))}")
        source = source_of(call, dc)
        if not call.caller.may_see_source(source.topic, source.source_id):
            raise Problem("forbidden", f"the token {call.caller.name} does not have the right to see {source.topic}")
        found = await self.moved.find(dc, source)
        facts = described(source, None if found is None else found.state, self.ownership.url)
        return json_response({**facts, "mirrored_seqno": None if found is None else found.mirrored})

    async def _get(self, call: Call, source: SourceIdentity, lane: Lane) -> web.StreamResponse:
        if lane.state != "serving":
            raise LaneMoved("not-owner-yet", f"lane {lane.number} is {lane.state}: {lane.why}")
        facts = await self.topics.facts(source.topic)
        lane.check_owns(source.key)
        # A hint: a client relies on the answer of opening a session alone.
        return json_response(described(source, lane.table.get(source, facts.id), self.ownership.url))

    async def _write(self, call: Call, source: SourceIdentity, lane: Lane) -> web.StreamResponse:
        reserved = self.admission.reserve(call.request)
        try:
            facts = self.topics.fresh(source.topic) or await self.topics.facts(source.topic)
            check_durable(facts)
            if self.quotas.is_active:
                self.quotas.take(call.caller.name, source.topic)
            session, chunks, size = await self._chunks(call, facts)
            size += len(source.state_key())
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
        return ShortAnswer(written(source, outcome, answered.offsets))

    async def _chunks(self, call: Call, facts: TopicFacts) -> tuple[int | None, list[Chunk], int]:
        limits, query, headers = self.config.limits, call.query, call.request.headers
        room = max(0, facts.max_message_bytes - RECORD_OVERHEAD_BYTES)
        bounds = ChunkLimits(min(limits.chunk_bytes, room), room, limits.request_chunks)
        session = optional_number(query, "session")
        encoding = headers.get("Content-Encoding", "")
        if headers.get("Content-Type", "").partition(";")[0].strip().lower() == MSGPACK:
            call.knows_only("session", "partition_key")
            body = await decoded(await self.admission.body(call.request), encoding, limits.request_bytes)
            chunks = await unpacked(body, bounds, trace_of(headers))
            return session, chunks, len(body) + CHUNK_OVERHEAD_BYTES * len(chunks)
        call.knows_only("seqno", "prev", "session", "created_ms", "partition_key")
        if "seqno" not in query:
            raise Malformed("seqno: is missing from the query")
        seqno, prev = number(query["seqno"], "seqno"), optional_number(query, "prev")
        created_ms = optional_number(query, "created_ms")
        attributes = header_attributes(headers.items())
        body = await decoded(await self.admission.body(call.request), encoding, limits.request_bytes)
        chunk = checked(Chunk(seqno, prev, created_ms, attributes, body), "chunk", bounds)
        return session, [traced(chunk, trace_of(headers))], len(body) + CHUNK_OVERHEAD_BYTES

    async def _open_session(self, call: Call, source: SourceIdentity, lane: Lane) -> web.StreamResponse:
        call.knows_only("partition_key")
        reserved = self.admission.reserve(call.request)
        try:
            if await self.admission.body(call.request):
                raise Malformed("body: must be empty to open a session")
            facts = await self.topics.facts(source.topic)
            check_durable(facts)
            size = charge_state(self.quotas, call, source)
            is_admin = call.caller.admin.match(source.topic)
            answered = await lane.submit(OpenSession(facts, source, size, call.caller.name, is_admin))
        finally:
            self.admission.release(reserved)
        if isinstance(answered.outcome, Refusal):
            raise refused(answered.outcome)
        facts_now = described(source, cast(SessionOutcome, answered.outcome).state, self.ownership.url)
        return json_response({**facts_now, "source_retention_ms": self.config.source_retention_ms})

    async def _heartbeat(self, call: Call, source: SourceIdentity, lane: Lane) -> web.StreamResponse:
        call.knows_only("partition_key", "session")
        session = optional_number(call.query, "session")
        body = await self.admission.document(call.request, HeartbeatBody)
        facts = await self.topics.facts(source.topic)
        said = Heartbeat(self.topics.clock.now_ms(), body.watermark_ms, body.position, body.size, body.finished)
        size = charge_state(self.quotas, call, source)
        answered = await lane.submit(RecordHeartbeat(facts, source, session, said, size, call.caller.name))
        if isinstance(answered.outcome, Refusal):
            raise refused(answered.outcome)
        return json_response(described(source, cast(HeartbeatOutcome, answered.outcome).state, self.ownership.url))

    async def _forget(self, call: Call, source: SourceIdentity, lane: Lane) -> web.StreamResponse:
        call.knows_only("partition_key")
        if await self.admission.read(call.request):
            raise Malformed("body: must be empty to forget a source")
        facts = await self.topics.facts(source.topic)
        before = cast(ForgetOutcome, (await lane.submit(ForgetSource(facts, source))).outcome).before
        return json_response({**described(source, before, self.ownership.url), "forgotten": before is not None})

    async def list(self, call: Call) -> web.StreamResponse:
        """A page of the topic's sources in the order of their ids; ``next`` is the ``after`` of the next page."""
        topic = topic_of(self.config.dc, call.segments[3])
        call.knows_only("prefix", "idle_for_ms", "after")
        prefix, after = call.query.get("prefix", ""), call.query.get("after", "")
        idle_for_ms = optional_number(call.query, "idle_for_ms")
        await self.admission.read(call.request)
        facts = await self.topics.facts(topic)
        lanes = {number: lane for number, lane in self.ownership.lanes.items() if lane.state != "closed"}
        before_ms = None if idle_for_ms is None else self.topics.clock.now_ms() - idle_for_ms

        def wanted(source_id: str) -> bool:
            return call.caller.may_see_source(topic, source_id)

        def counts(state: SourceState) -> bool:
            return state.topic_id == facts.id and (before_ms is None or state.alive_ms < before_ms)

        rows = await first_rows(lanes.values(), topic, prefix, after, _PAGE + 1, wanted, counts)
        epochs = sorted({max(1, lane.table.count.epoch) for lane in lanes.values()})
        if FORWARDED in call.request.headers:
            return json_response({"sources": rows, "lanes": sorted(lanes), "epochs": epochs})
        covered = set(lanes)
        for answer in await self.forwarding.ask_others(call.request):
            rows.extend(answer["sources"])
            covered.update(answer["lanes"])
            # An older version says none; its lanes cannot read the states after the first change.
            epochs = sorted({*epochs, *answer.get("epochs", [1])})
        if len(epochs) > 1:
            raise Problem("not-owner-yet", "the number of lanes has just changed; the list would be incomplete")
        missing = set(range(self.ownership.number_of_lanes())) - covered
        if missing:
            raise Problem("not-owner-yet", f"lanes {sorted(missing)} are moving; the list would be incomplete")
        rows.sort(key=_sort_key)
        after_this = _sort_key(rows[_PAGE - 1]) if len(rows) > _PAGE else None
        return json_response({"sources": rows[:_PAGE], "next": after_this})


def _row(source: SourceIdentity, state: SourceState) -> dict[str, Any]:
    beat = state.heartbeat
    return {
        "source_id": source.source_id,
        "partition_key": source.partition_key,
        "partition": state.partition,
        "recorded_seqno": state.recorded,
        "session": state.session or None,
        "written_ms": state.written_ms,
        "heartbeat_ms": beat.at_ms if beat else None,
        "watermark_ms": beat.watermark_ms if beat else None,
        "position": beat.position if beat else None,
        "size": beat.size if beat else None,
        "finished": bool(beat and beat.finished),
    }


def _sort_key(row: dict[str, Any]) -> str:
    return sort_key(row["source_id"], row["partition_key"])


def check_durable(facts: TopicFacts) -> None:
    if facts.weakness is not None:
        raise Problem("topic-not-durable", facts.weakness, topic=facts.name)


async def decoded(body: bytes, encoding: str, limit: int) -> bytes:
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


async def unpacked(body: bytes, bounds: ChunkLimits, trace: str | None) -> list[Chunk]:
    """Other requests run in between: a body may hold thousands of chunks. ``trace``: of the request."""
    chunks, turns = list[Chunk](), Turns()
    for chunk in iter_chunks(body, bounds):
        chunks.append(traced(chunk, trace))
        if turns.over:
            await turns.give()
    return chunks
