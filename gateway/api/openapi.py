"""The interface as an OpenAPI 3.1 document, at ``GET /v1/openapi.json``.

Made of the routes, the models of requests and answers, and the table of problems. The rest (the problems of a route,
the parameters of its query) is in `SUMMARIES` and `OPERATIONS`, by the route's name; a test compares them, both ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, NamedTuple

from aiohttp import web
from logferry.gateway.api import schemas
from logferry.gateway.api.consumers import CommitBody, PositionsBody
from logferry.gateway.api.sources import HeartbeatBody
from logferry.gateway.api.topics import TopicBody
from logferry.gateway.contract.chunk import MSGPACK, NDJSON
from logferry.gateway.contract.names import MAX_SEQNO
from logferry.gateway.errors import PROBLEMS
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes
from logferry.gateway.reading.formats import PLAIN
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

Schema = dict[str, Any]
_JSON: Final = "application/json"
_PROBLEM: Final = "application/problem+json"
_REF: Final = "#/components/schemas/{model}"

NUMBER: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_SEQNO}
SMALL: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXT: Final[Schema] = {"type": "string"}
BYTES: Final[Schema] = {}
_ID: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 512}
_TOPIC: Final[Schema] = {"type": "string", "pattern": r"^[a-zA-Z0-9._-]{1,200}$"}
_CONSUMER: Final[Schema] = {"type": "string", "pattern": r"^[a-zA-Z0-9._-]{1,200}$"}
_OFFSET: Final[Schema] = {"anyOf": [NUMBER, {"enum": ["earliest", "latest"]}]}

# The parameters of paths, whatever the route.
PATH: Final[dict[str, tuple[Schema, str]]] = {
    "topic": (_TOPIC, "the topic's name; for reading its full name, as in dc1.nginx"),
    "source": (_ID, "the source's id, percent-encoded: 1 to 512 bytes of UTF-8, no control characters, not . or .."),
    "partition": (SMALL, "the number of the partition"),
    "consumer": (_CONSUMER, "the consumer's name, which is that of its group at Kafka"),
    "session": (TEXT, "the id of the read session, from its first frame"),
}

_ALWAYS: Final = ("bad-request", "internal", "overloaded", "timeout", "too-large")
_AUTHORISED: Final = ("unauthenticated", "forbidden")
_KAFKA: Final = ("kafka-unavailable",)
_WRITTEN: Final = ("topic-not-durable", "quota")
_LANE: Final = ("unknown-topic", "not-owner-yet", "kafka-unavailable", "outcome-unknown")


class Query(NamedTuple):
    name: str
    schema: Schema
    description: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """The documentation of a route beside its own declaration and `SUMMARIES`.

    ``body``: a model, or media types. ``answer``: a model, or media types, of each status.
    """

    answer: Mapping[int, type[BaseModel] | Mapping[str, Schema]]
    problems: tuple[str, ...] = ()
    query: tuple[Query, ...] = ()
    body: type[BaseModel] | Mapping[str, Schema] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    redirects: bool = False


SUMMARIES: Final = {
    "write": "Writes one chunk (the body), or many of one source (a stream of MessagePack arrays)",
    "session": "Opens a session, which supersedes earlier ones, and pins the source to a partition",
    "source": "The recorded state of a source; opens and pins nothing. A hint: rely on the answer of opening a session",
    "forget": "Forgets a source, for instance one that was silenced by a wrong seqno",
    "heartbeat": "Records the heartbeat of a source that has no new chunk",
    "sources": "The sources of a topic, in pages",
    "topics": "The topics",
    "topic": "A topic",
    "put_topic": "Creates a topic, or gives it more partitions",
    "read": "Reads committed chunks of a partition; repeatable; compressed by zstd or gzip if accepted",
    "translate": "Translates an offset between a mirrored partition and its original",
    "stream": "A read session: shares the partitions with the consumer's other sessions, and streams their chunks",
    "commit": "Commits positions of a read session",
    "offsets": "Committed positions and lag",
    "put_offsets": "Sets a consumer's positions while it has no live session",
    "healthz": "Whether the process answers",
    "readyz": "Whether the worker serves its lanes",
    "metrics": "Metrics, for Prometheus",
    "status": "The state of this worker and its problems",
    "openapi": "This document",
}

_KEY: Final = Query("partition_key", _ID, "sources with the same key share a partition; part of the source's identity")
_SESSION: Final = Query("session", NUMBER, "the number that opening the session gave")
_DC: Final = Query("dc", TEXT, "the state of another data centre, as far as it is mirrored here")
_TOPICS: Final = {"type": "array", "items": {**TEXT, "minLength": 1}, "maxItems": 100}
_PREFIX: Final = Query("source_prefix", TEXT, "only chunks of sources whose id begins so")
_MIRRORED: Final = ("not-mirrored", "behind", "out-of-range")

OPERATIONS: Final[dict[str, Operation]] = {
    "write": Operation(
        {200: schemas.ChunksWritten},
        (*_LANE, *_WRITTEN, "gap", "overlap", "superseded", "out-of-order", "unsupported-media-type"),
        (
            Query("seqno", NUMBER, "of one chunk: its number within the source; required for one"),
            Query("prev", NUMBER, "of one chunk: the number of the chunk before it"),
            Query("created_ms", NUMBER, "of one chunk: Unix time; default: when it is recorded"),
            *(_SESSION, _KEY),
        ),
        {"application/octet-stream": BYTES, MSGPACK: BYTES},
        redirects=True,
    ),
    "session": Operation(
        {200: schemas.SourceDescription}, (*_LANE, *_WRITTEN, "source-in-use"), (_KEY,), redirects=True
    ),
    "source": Operation({200: schemas.SourceDescription}, (*_LANE, "not-mirrored"), (_KEY, _DC), redirects=True),
    "forget": Operation({200: schemas.SourceForgotten}, _LANE, (_KEY,), redirects=True),
    "heartbeat": Operation(
        {200: schemas.SourceDescription},
        (*_LANE, "superseded", "quota"),
        (_SESSION, _KEY),
        HeartbeatBody,
        redirects=True,
    ),
    "sources": Operation(
        {200: schemas.SourcesPage},
        _LANE,
        (
            Query("prefix", TEXT, "only sources whose id begins so"),
            Query("idle_for_ms", NUMBER, "only sources without a chunk, session or heartbeat for so long"),
            Query("after", TEXT, "`next` of the previous page"),
        ),
    ),
    "topics": Operation({200: schemas.TopicsList}, _KAFKA),
    "topic": Operation({200: schemas.TopicDescription}, (*_KAFKA, "unknown-topic")),
    "put_topic": Operation(
        {200: schemas.TopicDescription, 201: schemas.TopicDescription}, (*_KAFKA, "conflict"), body=TopicBody
    ),
    "read": Operation(
        {200: {MSGPACK: BYTES, NDJSON: BYTES, PLAIN: BYTES}},
        (*_KAFKA, "unknown-topic", "not-found", "not-mirrored", "out-of-range"),
        (
            Query("offset", _OFFSET, "where to begin; default earliest"),
            Query("time_ms", NUMBER, "instead: at the first record at or after that time"),
            Query("cursor", TEXT, "instead: at a cursor, as in dc1.nginx:3:81234"),
            Query("max_bytes", SMALL, "the approximate size of the answer"),
            Query("wait_ms", SMALL, "the longest wait for a chunk if there is none"),
            _PREFIX,
        ),
        headers={"X-Next-Offset": "the position to continue at", "X-Next-Cursor": "the same as a cursor"},
    ),
    "translate": Operation(
        {200: schemas.TranslatedOffset},
        (*_KAFKA, "unknown-topic", "not-found", *_MIRRORED),
        (
            Query("offset", NUMBER, "a position: the offset of the next record", required=True),
            Query("from", TEXT, "the data centre of the offset; default the original's"),
            Query("to", TEXT, "the other one"),
        ),
    ),
    "stream": Operation(
        {200: {MSGPACK: BYTES, NDJSON: BYTES}},
        (*_KAFKA, "unknown-topic", "conflict", *_MIRRORED),
        (
            Query("topic", _TOPICS, "a full name or a pattern, *.nginx for all data centres", required=True),
            Query("from", {"enum": ["earliest", "latest"]}, "where partitions without a position begin"),
            Query("cursor", _TOPICS, "sets the consumer's positions first, as dc1.nginx:3:81234; one a partition"),
            _PREFIX,
        ),
    ),
    "commit": Operation(
        {200: schemas.PositionsCommitted},
        (*_KAFKA, "unknown-topic", "conflict", "superseded", "out-of-range", "not-owner-yet", "outcome-unknown"),
        body=CommitBody,
        redirects=True,
    ),
    "offsets": Operation(
        {200: schemas.ConsumerOffsets},
        (*_KAFKA, "unknown-topic", "conflict"),
        (Query("topic", _TOPICS, "only these, and these also without a position"),),
    ),
    "put_offsets": Operation(
        {200: schemas.PositionsSet},
        (*_KAFKA, "unknown-topic", "not-found", "conflict", *_MIRRORED),
        body=PositionsBody,
    ),
    "healthz": Operation({200: schemas.Alive}),
    "readyz": Operation({200: schemas.Ready}, ("not-owner-yet",)),
    "metrics": Operation({200: {PLAIN: BYTES}}),
    "status": Operation({200: schemas.Status}),
    "openapi": Operation({200: {_JSON: {"type": "object"}}}),
}


def all_routes(gate: Gate, resources: Iterable[Callable[[Routes], None]]) -> Routes:
    """The routes that the resources add, with that of the document, which has all of them in it, itself too.

    The document is made here, before anything is served: it takes 14 ms, for which no request has to wait.
    """
    routes = Routes(gate)
    for add_to in resources:
        add_to(routes)

    async def openapi(call: Call) -> web.StreamResponse:
        call.knows_only()
        return web.Response(body=body, headers={"Content-Type": _JSON})

    routes.add("GET", "/v1/openapi.json", "openapi", openapi, Right.OPEN)
    body = json.dumps(document(routes)).encode()
    return routes


def document(routes: Routes) -> Schema:
    paths: dict[str, Schema] = {}
    for declared in routes.declared:
        path = paths.setdefault(declared.path, {"parameters": _path_parameters(declared.path)})
        path[declared.method.lower()] = _operation(declared.name, declared.right, OPERATIONS[declared.name])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "logferry gateway",
            "version": version("logferry"),
            "description": "4xx: rejected, do not send it again as it is. 429, 503: surely not recorded, send it again "
            "after Retry-After. Any other 5xx, or a broken connection: outcome unknown, send the same again.",
        },
        "paths": paths,
        "components": {
            "schemas": _component_schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _path_parameters(path: str) -> list[Schema]:
    named = ((name, *PATH[name]) for name in re.findall(r"\{(\w+)\}", path))
    return [{"in": "path", **Query(name, schema, text, required=True)._asdict()} for name, schema, text in named]


def _operation(name: str, right: Right, operation: Operation) -> Schema:
    found: Schema = {
        "operationId": name,
        "summary": SUMMARIES[name],
        "parameters": [{"in": "query", **query._asdict()} for query in operation.query],
        "responses": _responses(right, operation),
    }
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": _content(operation.body)}
    if right is not Right.OPEN:
        found["security"] = [{"token": []}]
    return found


def _responses(right: Right, operation: Operation) -> Schema:
    headers = {name: {"description": text, "schema": TEXT} for name, text in operation.headers.items()}
    found: Schema = {
        str(status): {"description": "done", "content": _content(answer), **({"headers": headers} if headers else {})}
        for status, answer in operation.answer.items()
    }
    if operation.redirects:
        found["307"] = {"description": "another worker owns it, and the caller sent X-Logferry-Redirect: 1"}
    kinds: dict[int, list[str]] = {}
    authorised = () if right is Right.OPEN else _AUTHORISED
    for kind in (*_ALWAYS, *authorised, *operation.problems):
        kinds.setdefault(PROBLEMS[kind][0], []).append(kind)
    for status, of_status in sorted(kinds.items()):
        texts = "; ".join(f"`{kind}`: {PROBLEMS[kind][1]}" for kind in sorted(set(of_status)))
        found[str(status)] = {
            "description": texts,
            "content": {_PROBLEM: {"schema": _reference(schemas.ProblemDocument)}},
        }
        if status in (429, 503):
            found[str(status)]["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer"}}}
    return found


def _content(of: type[BaseModel] | Mapping[str, Schema]) -> Schema:
    if isinstance(of, Mapping):
        return {media_type: {"schema": schema} for media_type, schema in of.items()}
    return {_JSON: {"schema": _reference(of)}}


def _reference(model: type[BaseModel]) -> Schema:
    return {"$ref": _REF.format(model=model.__name__)}


def _component_schemas() -> Schema:
    models: dict[str, type[BaseModel]] = {schemas.ProblemDocument.__name__: schemas.ProblemDocument}
    for operation in OPERATIONS.values():
        for model in (operation.body, *operation.answer.values()):
            if isinstance(model, type):
                models[model.__name__] = model
    _, made = models_json_schema([(model, "validation") for model in models.values()], ref_template=_REF)
    found: Schema = json.loads(json.dumps(made["$defs"]))
    return found
