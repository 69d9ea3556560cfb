"""The routes. Each handler checks its input, asks the lane, the topics or the reader, and shapes the answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final, cast

from aiohttp import web
from logferry.gateway.api.consumers import Consumers
from logferry.gateway.api.forwarding import Routing
from logferry.gateway.api.sources import SourcesApi, source_of
from logferry.gateway.api.status import StatusApi
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import (
    MSGPACK,
    Chunk,
    Cursor,
    Malformed,
    check_topic,
    split_topic,
)
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.request import (
    ChunkLimits,
    checked,
    decoded_body,
    header_attributes,
    number,
    optional_number,
    unpack_chunks,
    validated,
)
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.lanes.dedup import Refusal, Source
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.lanes.transaction import OpenSession, SessionOpened, TopicFacts, Write, Written
from logferry.gateway.metrics import READ_BYTES, REGISTRY, count_chunks
from logferry.gateway.reading import page as reading
from logferry.gateway.reading.page import Page, Read
from logferry.gateway.topics.catalog import Topics
from logferry.gateway.topics.offset_translation import Translation
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field

_RECORD_OVERHEAD_BYTES: Final = 4096
# What a chunk takes in a transaction beside its data, so that many tiny ones stay within the limits of bytes, too.
_CHUNK_OVERHEAD_BYTES: Final = 100


class TopicWanted(BaseModel):
    """The body of ``PUT /v1/topics/{topic}``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    partitions: Annotated[int, Field(ge=1, le=10_000)]
    retention_ms: Annotated[int, Field(ge=-1)] | None = None


@dataclass(frozen=True, slots=True)
class Api:
    """The handlers of one worker."""

    config: Config
    kafka: Kafka
    topics: Topics
    ownership: Ownership[Lane]
    routing: Routing
    admission: Admission
    sources: SourcesApi
    consumers: Consumers
    status: StatusApi
    gate: Gate
    quotas: Quotas
    translation: Translation

    def routes(self) -> Routes:
        """All that this worker answers."""
        routes = Routes(self.gate)
        topic, source = "/v1/topics/{topic}", "/v1/topics/{topic}/sources/{source}"
        routes.add("POST", source + "/chunks", "write", self.write, Right.WRITE)
        routes.add("POST", source + "/session", "session", self.open_session, Right.WRITE)
        self.sources.add_to(routes)
        self.consumers.add_to(routes)
        self.status.add_to(routes)
        routes.add("GET", topic + "/partitions/{partition}/chunks", "read", self.read, Right.READ)
        routes.add("GET", topic + "/partitions/{partition}/translate", "translate", self.translate, Right.READ)
        routes.add("GET", "/v1/topics", "topics", self.list_topics, Right.KNOWN)
        routes.add("GET", topic, "topic", self.get_topic, Right.TOPIC)
        routes.add("PUT", topic, "put_topic", self.put_topic, Right.ADMIN)
        routes.add("GET", "/healthz", "healthz", self.healthz, Right.OPEN)
        routes.add("GET", "/readyz", "readyz", self.readyz, Right.OPEN)
        routes.add("GET", "/metrics", "metrics", self.metrics, Right.METRICS)
        return routes

    # ---- writing ----------------------------------------------------------------------------------------------

    async def write(self, call: Call) -> web.StreamResponse:
        source = source_of(call, self.config.dc)
        return await self.routing.answer(call.request, source, partial(self._write, call, source))

    async def _write(self, call: Call, source: Source, lane: Lane) -> web.StreamResponse:
        reserved = self.admission.reserve(call.request)
        try:
            facts = self.topics.fresh(source.topic) or await self.topics.facts(source.topic)
            if self.quotas.is_active:
                self.quotas.take(call.caller.name, source.topic)
            session, chunks, size = await self._chunks(call, facts)
            if self.quotas.is_active:
                self.quotas.take(call.caller.name, source.topic, sum(len(c.data) for c in chunks), len(chunks))
            answered = await lane.submit(Write(facts, source, session, chunks, size))
        finally:
            self.admission.release(reserved)
        outcome = answered.outcome
        if isinstance(outcome, Refusal):
            count_chunks(source.topic, outcome.kind, chunks)
            raise _refused(outcome)
        outcome = cast(Written, outcome)
        if outcome.duplicates:
            # They are the first ones: what is above is written.
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
        room = max(0, facts.max_message_bytes - _RECORD_OVERHEAD_BYTES)
        bounds = ChunkLimits(min(limits.chunk_bytes, room), room, limits.request_chunks)
        session = optional_number(query, "session")
        encoding = headers.get("Content-Encoding", "")
        if headers.get("Content-Type", "").partition(";")[0].strip().lower() == MSGPACK:
            call.knows_only("session", "partition_key")
            body = decoded_body(await self.admission.body(call.request), encoding, limits.request_bytes)
            chunks = unpack_chunks(body, bounds)
            return session, chunks, len(body) + _CHUNK_OVERHEAD_BYTES * len(chunks)
        call.knows_only("seqno", "prev", "session", "created_ms", "partition_key")
        if "seqno" not in query:
            raise Malformed("seqno: is missing from the query")
        seqno, prev = number(query["seqno"], "seqno"), optional_number(query, "prev")
        created_ms = optional_number(query, "created_ms")
        attributes = header_attributes(headers.items())
        body = decoded_body(await self.admission.body(call.request), encoding, limits.request_bytes)
        chunk = checked(Chunk(seqno, prev, created_ms, attributes, body), "chunk", bounds)
        return session, [chunk], len(body) + _CHUNK_OVERHEAD_BYTES

    async def open_session(self, call: Call) -> web.StreamResponse:
        source = source_of(call, self.config.dc)
        return await self.routing.answer(call.request, source, partial(self._open_session, call, source))

    async def _open_session(self, call: Call, source: Source, lane: Lane) -> web.StreamResponse:
        call.knows_only("partition_key")
        reserved = self.admission.reserve(call.request)
        try:
            if await self.admission.body(call.request):
                raise Malformed("body: opening a session takes none")
            facts = await self.topics.facts(source.topic)
            answered = await lane.submit(OpenSession(facts, source))
        finally:
            self.admission.release(reserved)
        if isinstance(answered.outcome, Refusal):
            raise _refused(answered.outcome)
        state = cast(SessionOpened, answered.outcome).state
        return json_response(
            {
                "source_id": source.source_id,
                "topic": source.topic,
                "session": state.session,
                "partition": state.partition,
                "recorded_seqno": state.recorded,
                "url": self.ownership.url,
            }
        )

    # ---- reading ----------------------------------------------------------------------------------------------

    async def read(self, call: Call) -> web.StreamResponse:
        topic = call.first("topic")
        dc, _ = split_topic(topic)
        wanted = _read(call, topic, dc)
        media_type, encode = reading.encoder(call.request.headers.get("Accept", ""))
        page, cursor = await self._page(wanted, "cursor" in call.query)
        body = encode(page.rows)
        READ_BYTES.labels(topic).inc(sum(len(row[-1]) for row in page.rows))
        headers = {"Content-Type": media_type, "X-Next-Offset": str(page.next_offset), "Vary": "Accept-Encoding"}
        coding = reading.content_coding(call.request.headers.get("Accept-Encoding", ""))
        if coding is not None and len(body) > reading.SMALL_BYTES:
            body = await asyncio.to_thread(reading.compressed, body, coding)
            headers["Content-Encoding"] = coding
        if cursor is not None:
            headers["X-Next-Cursor"] = str(Cursor(topic, wanted.partition, cursor))
        return web.Response(body=body, headers=headers)

    async def _page(self, wanted: Read, by_cursor: bool) -> tuple[Page, int | None]:
        """What is read, and the position after it in the original partition; None: of a copy that no mirror made."""
        limits, place = self.config.limits, (wanted.topic, wanted.partition)
        if wanted.dc == self.config.dc:
            page = await reading.read(self.kafka, limits, wanted)
            return page, page.next_offset
        if by_cursor:
            original = int(wanted.offset or 0)
            here = await self.translation.wait_for(place, original, min(wanted.wait_ms, limits.read_wait_ms) / 1000)
            if here is None:
                # What the reader has already is not here yet: nothing that it does not have can be here.
                return Page([], (await self.translation.progress(place)).local_next), original
            wanted = replace(wanted, offset=here)
        page = await reading.read(self.kafka, limits, wanted)
        try:
            if page.last_offset is None and by_cursor:
                return page, original
            return page, await self.translation.to_original(place, page.next_offset, page.last_offset)
        except Problem as problem:
            if by_cursor or problem.kind != "not-mirrored":
                raise
            return page, None

    async def translate(self, call: Call) -> web.StreamResponse:
        """Which offset of the copy is which of the original; one of the two is this data centre's."""
        topic, query = call.first("topic"), call.query
        dc, _ = split_topic(topic)
        call.knows_only("offset", "from", "to")
        partition = number(call.second("partition"), "partition", 2**31 - 1)
        offset = number(query.get("offset", ""), "offset")
        here = self.config.dc
        start = query.get("from", here if query.get("to", here) != here else dc)
        end = query.get("to", here if start == dc else dc)
        if {start, end} != {dc, here}:
            raise Malformed(f"query: from and to must be {dc} and {here}: others are asked at their own gateways")
        place = (topic, partition)
        translated: int | None = offset
        if start != end:
            is_from_original = start == dc
            found = self.translation.to_here if is_from_original else self.translation.to_original
            translated = await found(place, offset)
        if translated is None:
            reached = (await self.translation.progress(place)).original.next_offset
            raise Problem("behind", f"{topic}-{partition} is mirrored to {reached} so far")
        names = {"topic": topic, "partition": partition, "from": start, "offset": offset, "to": end}
        return json_response({**names, "translated": translated})

    # ---- topics -----------------------------------------------------------------------------------------------

    async def list_topics(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        return json_response({"topics": await self.topics.describe_all(call.caller.may_see)})

    async def get_topic(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        return json_response(await self.topics.describe(self.topics.full_name(call.first("topic"))))

    async def put_topic(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        name = check_topic(call.first("topic"))
        wanted = validated(TopicWanted, await self.admission.read(call.request))
        described, created = await self.topics.put(name, wanted.partitions, wanted.retention_ms)
        return json_response(described, status=201 if created else 200)

    # ---- the worker itself ------------------------------------------------------------------------------------

    async def healthz(self, call: Call) -> web.StreamResponse:
        return json_response({"status": "alive"})

    async def readyz(self, call: Call) -> web.StreamResponse:
        lanes = {str(number): lane.state for number, lane in sorted(self.ownership.lanes.items())}
        if self.ownership.is_settled:
            return json_response({"status": "ready", "lanes": lanes})
        waits = [f"lane {lane.number}: {lane.why}" for lane in self.ownership.lanes.values() if lane.state != "serving"]
        detail = "; ".join(waits) or "the group has not assigned the lanes yet"
        raise Problem("not-owner-yet", detail, lanes=lanes)

    async def metrics(self, call: Call) -> web.StreamResponse:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})


# ---- input ----------------------------------------------------------------------------------------------------

_READ: Final = ("offset", "time_ms", "cursor", "max_bytes", "wait_ms", "source_prefix")


def _read(call: Call, topic: str, dc: str) -> Read:
    query = call.query
    filters = {name[5:]: query[name] for name in query if name.startswith("attr.")}
    call.knows_only(*_READ, *(f"attr.{name}" for name in filters))
    partition = number(call.second("partition"), "partition", 2**31 - 1)
    if sum(name in query for name in ("offset", "time_ms", "cursor")) > 1:
        raise Malformed("query: only one of offset, time_ms and cursor may be given")
    offset: int | str = query.get("offset", "earliest")
    if offset not in ("earliest", "latest"):
        offset = number(str(offset), "offset")
    if "cursor" in query:
        offset = _cursor_offset(query["cursor"], topic, partition)
    return Read(
        topic=topic,
        dc=dc,
        partition=partition,
        offset=offset,
        time_ms=optional_number(query, "time_ms"),
        max_bytes=number(query["max_bytes"], "max_bytes", 2**31 - 1) if "max_bytes" in query else 1 << 20,
        wait_ms=number(query["wait_ms"], "wait_ms", 2**31 - 1) if "wait_ms" in query else 0,
        source_prefix=query.get("source_prefix", ""),
        attributes=filters,
    )


def _cursor_offset(text: str, topic: str, partition: int) -> int:
    cursor = Cursor.parse(text)
    if (cursor.topic, cursor.partition) != (topic, partition):
        raise Malformed(f"cursor: {text} is not of {topic}, partition {partition}")
    return cursor.offset


# ---- output ---------------------------------------------------------------------------------------------------


def _refused(refusal: Refusal) -> Problem:
    return Problem(refusal.kind, refusal.detail, recorded_seqno=refusal.recorded)
