"""The routes. Each handler checks its input, asks the lane, the topics or the reader, and shapes the answer.

Every error leaves as an RFC 9457 problem document, by the one table in `errors`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway import log, reading
from logferry.gateway.admission import Admission
from logferry.gateway.config import Config
from logferry.gateway.contract import (
    MSGPACK,
    Chunk,
    Cursor,
    Malformed,
    check_attributes,
    check_source_id,
    check_topic,
    full_topic,
    split_topic,
)
from logferry.gateway.errors import Problem
from logferry.gateway.kafka import Kafka
from logferry.gateway.lane import Answered, Lane
from logferry.gateway.metrics import CHUNK_BYTES, CHUNKS, READ_BYTES, REGISTRY, REQUEST_SECONDS, REQUESTS
from logferry.gateway.ownership import Ownership
from logferry.gateway.reading import Read
from logferry.gateway.routing import Routing
from logferry.gateway.sources import Refusal, Source
from logferry.gateway.topics import Topics
from logferry.gateway.transaction import OpenSession, Request, SessionOpened, TopicFacts, Write, Written
from logferry.gateway.wire import checked, decoded_body, header_attributes, number, percent_decoded, unpack_chunks
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_RECORD_OVERHEAD_BYTES: Final = 4096


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
    ownership: Ownership
    routing: Routing
    admission: Admission

    def application(self) -> web.Application:
        app = web.Application(client_max_size=0, handler_args=None)
        source = "/v1/topics/{topic}/sources/{source}"
        routes: list[tuple[str, str, Handler, str]] = [
            ("POST", source + "/chunks", self.write, "write"),
            ("POST", source + "/session", self.open_session, "session"),
            ("GET", source, self.source, "source"),
            ("GET", "/v1/topics/{topic}/partitions/{partition}/chunks", self.read, "read"),
            ("GET", "/v1/topics", self.list_topics, "topics"),
            ("GET", "/v1/topics/{topic}", self.get_topic, "topic"),
            ("PUT", "/v1/topics/{topic}", self.put_topic, "put_topic"),
            ("GET", "/healthz", self.healthz, "healthz"),
            ("GET", "/readyz", self.readyz, "readyz"),
            ("GET", "/metrics", self.metrics, "metrics"),
        ]
        for method, path, handler, name in routes:
            app.router.add_route(method, path, _guarded(handler, name))
        app.middlewares.append(_no_such_route)
        return app

    # ---- writing ----------------------------------------------------------------------------------------------

    async def write(self, request: web.Request) -> web.StreamResponse:
        source, topic = _source(request, self.config.dc)
        lane = self.routing.here(source)
        if lane is None:
            return await self.routing.elsewhere(request, source)
        with self.admission.reserve(request):
            facts = await self.topics.facts(topic)
            session, chunks, size = await self._chunks(request, facts)
            answered = await self._ask(lane, Write(facts, source, session, chunks, size))
        outcome = answered.outcome
        if isinstance(outcome, Refusal):
            CHUNKS.labels(topic, outcome.kind).inc(len(chunks))
            raise _refused(outcome)
        assert isinstance(outcome, Written)
        CHUNKS.labels(topic, "written").inc(outcome.written)
        CHUNKS.labels(topic, "duplicate").inc(outcome.duplicates)
        CHUNK_BYTES.labels(topic).inc(size if outcome.written else 0)
        return _json(
            {
                "source_id": source.source_id,
                "topic": topic,
                "partition": outcome.state.partition,
                "recorded_seqno": outcome.state.recorded,
                "written": outcome.written,
                "duplicates": outcome.duplicates,
                "offsets": answered.offsets,
            }
        )

    async def _chunks(self, request: web.Request, facts: TopicFacts) -> tuple[int | None, list[Chunk], int]:
        limits = self.config.limits
        limit = min(limits.chunk_bytes, facts.max_message_bytes - _RECORD_OVERHEAD_BYTES)
        query = request.query
        many = request.content_type == MSGPACK
        _known_query(query, ("session", "partition_key") if many else _ONE_CHUNK)
        session = _optional_number(query, "session")
        one: Chunk | None = None
        if not many:
            if "seqno" not in query:
                raise Malformed("seqno: is missing from the query")
            one = Chunk(
                number(query["seqno"], "seqno"),
                _optional_number(query, "prev"),
                _optional_number(query, "created_ms"),
                check_attributes(header_attributes(request.headers.items())),
                b"",
            )
            checked(one, "query", limit)
        encoding = request.headers.get("Content-Encoding", "")
        body = decoded_body(await self.admission.body(request), encoding, limits.request_bytes)
        if one is not None:
            return session, [checked(one._replace(data=body), "body", limit)], len(body)
        return session, unpack_chunks(body, limit), len(body)

    async def open_session(self, request: web.Request) -> web.StreamResponse:
        source, topic = _source(request, self.config.dc)
        lane = self.routing.here(source)
        if lane is None:
            return await self.routing.elsewhere(request, source)
        _known_query(request.query, ("partition_key",))
        with self.admission.reserve(request):
            if await self.admission.body(request):
                raise Malformed("body: opening a session takes none")
            facts = await self.topics.facts(topic)
            answered = await self._ask(lane, OpenSession(facts, source))
        outcome = answered.outcome
        assert isinstance(outcome, SessionOpened)
        state = outcome.state
        return _json(
            {
                "source_id": source.source_id,
                "topic": topic,
                "session": state.session,
                "partition": state.partition,
                "recorded_seqno": state.recorded,
                "url": self.ownership.url,
            }
        )

    async def source(self, request: web.Request) -> web.StreamResponse:
        source, topic = _source(request, self.config.dc)
        _known_query(request.query, ("partition_key",))
        lane = self.routing.here(source)
        if lane is None:
            return await self.routing.elsewhere(request, source)
        if lane.state != "serving":
            raise Problem("not-owner-yet", f"lane {lane.number} is {lane.state}: {lane.why}")
        facts = await self.topics.facts(topic)
        state = lane.look_up(source, facts.id)
        return _json(
            {
                "source_id": source.source_id,
                "topic": topic,
                "session": state.session or None if state else None,
                "partition": state.partition if state else None,
                "recorded_seqno": state.recorded if state else None,
                "url": self.ownership.url,
            }
        )

    async def _ask(self, lane: Lane, request: Request) -> Answered:
        """Waits for the lane's answer, and says after the time-out what is certain: not recorded, or unknown."""
        pending = lane.submit(request)
        try:
            async with asyncio.timeout(self.config.limits.request_timeout_s):
                return await pending.answer
        except TimeoutError:
            if pending.in_flight:
                raise Problem("outcome-unknown", f"the commit is not answered yet: {lane.why}") from None
            raise Problem("kafka-unavailable", f"lane {lane.number} is {lane.state}: {lane.why}") from None

    # ---- reading ----------------------------------------------------------------------------------------------

    async def read(self, request: web.Request) -> web.StreamResponse:
        topic = percent_decoded(request.raw_path.split("?", 1)[0].split("/")[3], "topic")
        dc, _ = split_topic(topic)
        wanted = _read(request, topic, dc)
        media_type, encode = reading.encoder(request.headers.get("Accept", ""))
        page = await reading.read(self.kafka, self.config.limits, wanted)
        body = encode(page.rows)
        READ_BYTES.labels(topic).inc(sum(len(row[-1]) for row in page.rows))
        headers = {"Content-Type": media_type, "X-Next-Offset": str(page.next_offset)}
        if dc == self.config.dc:
            headers["X-Next-Cursor"] = str(Cursor(topic, wanted.partition, page.next_offset))
        return web.Response(body=body, headers=headers)

    # ---- topics -----------------------------------------------------------------------------------------------

    async def list_topics(self, request: web.Request) -> web.StreamResponse:
        _known_query(request.query, ())
        return _json({"topics": await self.topics.describe_all()})

    async def get_topic(self, request: web.Request) -> web.StreamResponse:
        _known_query(request.query, ())
        return _json(await self.topics.describe(self.topics.full_name(_topic_segment(request))))

    async def put_topic(self, request: web.Request) -> web.StreamResponse:
        _known_query(request.query, ())
        name = check_topic(_topic_segment(request))
        with self.admission.reserve(request):
            body = await self.admission.body(request)
        try:
            wanted = TopicWanted.model_validate_json(body)
        except ValidationError as error:
            texts = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
            raise Malformed("; ".join(texts)) from None
        described, created = await self.topics.put(name, wanted.partitions, wanted.retention_ms)
        return _json(described, status=201 if created else 200)

    # ---- the worker itself ------------------------------------------------------------------------------------

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        return _json({"status": "alive"})

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        lanes = {str(number): lane.state for number, lane in sorted(self.ownership.lanes.items())}
        if self.ownership.is_settled:
            return _json({"status": "ready", "lanes": lanes})
        waits = [f"lane {lane.number}: {lane.why}" for lane in self.ownership.lanes.values() if lane.state != "serving"]
        detail = "; ".join(waits) or "the group has not assigned the lanes yet"
        raise Problem("not-owner-yet", detail, lanes=lanes)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})


# ---- input ----------------------------------------------------------------------------------------------------

_ONE_CHUNK: Final = ("seqno", "prev", "session", "created_ms", "partition_key")
_READ: Final = ("offset", "time_ms", "cursor", "max_bytes", "wait_ms", "source_prefix")


def _topic_segment(request: web.Request) -> str:
    return percent_decoded(request.raw_path.split("?", 1)[0].split("/")[3], "topic")


def _source(request: web.Request, dc: str) -> tuple[Source, str]:
    """The source that the path and the query name, from the raw path: escapes must be UTF-8 and are undone once."""
    segments = request.raw_path.split("?", 1)[0].split("/")
    topic = full_topic(dc, check_topic(percent_decoded(segments[3], "topic")))
    source_id = check_source_id(percent_decoded(segments[5], "sourceId"))
    key = request.query.get("partition_key")
    if key is not None:
        check_source_id(key, "partition_key")
    return Source(topic, key, source_id), topic


def _known_query(query: Any, known: tuple[str, ...]) -> None:
    for name in query:
        if name not in known:
            raise Malformed(f"query: {name[:60]!r} is not known here; known are {', '.join(known) or 'none'}")
        if len(query.getall(name)) > 1:
            raise Malformed(f"query: {name} is given more than once")


def _optional_number(query: Any, name: str) -> int | None:
    return number(query[name], name) if name in query else None


def _read(request: web.Request, topic: str, dc: str) -> Read:
    query = request.query
    filters = {name[5:]: query[name] for name in query if name.startswith("attr.")}
    _known_query(query, (*_READ, *(f"attr.{name}" for name in filters)))
    partition = number(request.match_info["partition"], "partition", 2**31 - 1)
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
        time_ms=_optional_number(query, "time_ms"),
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


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(text=json.dumps(document), status=status, content_type="application/json")


def _refused(refusal: Refusal) -> Problem:
    return Problem(refusal.kind, refusal.detail, recorded_seqno=refusal.recorded)


def _problem(problem: Problem, path: str) -> web.Response:
    response = web.Response(
        text=json.dumps({**problem.document(), "instance": path}),
        status=problem.status,
        content_type="application/problem+json",
    )
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(problem.retry_after_s)))
    return response


def _guarded(handler: Handler, route: str) -> Handler:
    """Counts and times the request, and turns every error into a problem document."""
    seconds = REQUEST_SECONDS.labels(route)

    async def guarded(request: web.Request) -> web.StreamResponse:
        started = time.monotonic()
        response = await _answered(handler, request)
        seconds.observe(time.monotonic() - started)
        REQUESTS.labels(route, str(response.status)).inc()
        return response

    return guarded


async def _answered(handler: Handler, request: web.Request) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as problem:
        return _problem(problem, request.raw_path)
    except Malformed as error:
        return _problem(Problem("bad-request", str(error)), request.raw_path)
    except (KafkaError, TimeoutError) as error:
        return _problem(Problem("kafka-unavailable", f"Kafka does not answer: {error!r}"), request.raw_path)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001  the last line: the worker must live, the caller must know
        log.event("error", "request_failed", path=request.raw_path, error=repr(error))
        return _problem(Problem("internal", "an error inside the gateway; it is in its log"), request.raw_path)


@web.middleware
async def _no_such_route(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return _problem(Problem("not-found", f"{request.path} is not part of the interface"), request.raw_path)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _problem(Problem("method-not-allowed", f"allowed here: {allowed}"), request.raw_path)
        response.headers["Allow"] = allowed
        return response
