"""The interface as an OpenAPI 3.1 document, at ``GET /v1/openapi.json``.

Made from what is there anyway: the routes, the models of requests and answers, and the one table of problems. What it
cannot know from those (which problems a route has, what its query takes) stands in `OPERATIONS`, by the route's name; a
test holds that table against the routes, both ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from aiohttp import web
from logferry.gateway.api import schemas as answers
from logferry.gateway.api.consumers import CommitBody, PositionsBody
from logferry.gateway.api.sources import HeartbeatBody
from logferry.gateway.api.write import TopicWanted
from logferry.gateway.contract.chunk import MAX_SEQNO, MSGPACK, NDJSON
from logferry.gateway.errors import PROBLEMS
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.reading.page import PLAIN
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

# What the parts of a path are, whatever the route.
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
_LANE: Final = ("unknown-topic", "not-owner-yet", "kafka-unavailable", "outcome-unknown")


@dataclass(frozen=True, slots=True)
class Query:
    """A name in the query."""

    name: str
    schema: Schema
    text: str
    required: bool = False

    def parameter(self) -> Schema:
        return {
            "name": self.name,
            "in": "query",
            "required": self.required,
            "schema": self.schema,
            "description": self.text,
        }


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of a route beside what the route says itself.

    ``body``: a model, or media types. ``answer``: a model, or media types, of each status.
    """

    summary: str
    answer: Mapping[int, type[BaseModel] | Mapping[str, Schema]]
    problems: tuple[str, ...] = ()
    query: tuple[Query, ...] = ()
    body: type[BaseModel] | Mapping[str, Schema] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    redirects: bool = False


_KEY: Final = Query("partition_key", _ID, "sources with the same key share a partition; part of the source's identity")
_SESSION: Final = Query("session", NUMBER, "the number that opening the session gave")
_TOPICS: Final = {"type": "array", "items": {**TEXT, "minLength": 1}, "maxItems": 100}
_PREFIX: Final = Query("source_prefix", TEXT, "only chunks of sources whose id begins so")

OPERATIONS: Final[dict[str, Operation]] = {
    "write": Operation(
        "Writes one chunk (the body), or many of one source (a stream of MessagePack arrays)",
        {200: answers.ChunksWritten},
        (
            *_LANE,
            "gap",
            "overlap",
            "superseded",
            "out-of-order",
            "unsupported-media-type",
            "quota",
        ),
        (
            Query("seqno", NUMBER, "of one chunk: its number within the source; must be given for one"),
            Query("prev", NUMBER, "of one chunk: the number of the chunk before it"),
            Query("created_ms", NUMBER, "of one chunk: Unix time; default: when it is recorded"),
            _SESSION,
            _KEY,
        ),
        {"application/octet-stream": BYTES, MSGPACK: BYTES},
        redirects=True,
    ),
    "session": Operation(
        "Opens a session, which shuts out those before it, and pins the source to a partition",
        {200: answers.SourceFacts},
        _LANE,
        (_KEY,),
        redirects=True,
    ),
    "source": Operation(
        "What is recorded of a source; opens and pins nothing. A hint: a session's answer decides",
        {200: answers.SourceFacts},
        (*_LANE, "not-mirrored"),
        (_KEY, Query("dc", TEXT, "of another data centre, as far as the mirror has brought it here")),
        redirects=True,
    ),
    "forget": Operation(
        "Forgets a source, for one that was silenced by a wrong seqno",
        {200: answers.SourceForgotten},
        _LANE,
        (_KEY,),
        redirects=True,
    ),
    "heartbeat": Operation(
        "Records what a source knows of itself though it has no new chunk",
        {200: answers.SourceFacts},
        (*_LANE, "superseded"),
        (_SESSION, _KEY),
        HeartbeatBody,
        redirects=True,
    ),
    "sources": Operation(
        "The sources of a topic, in pages: which went silent",
        {200: answers.SourcesPage},
        ("unknown-topic", "not-owner-yet", "kafka-unavailable", "outcome-unknown"),
        (
            Query("prefix", TEXT, "only sources whose id begins so"),
            Query("idle_for_ms", NUMBER, "only those that were not heard of for so long"),
            Query("after", TEXT, "the next of the page before"),
        ),
    ),
    "topics": Operation("The topics", {200: answers.TopicsList}, _KAFKA),
    "topic": Operation("A topic", {200: answers.TopicDescription}, (*_KAFKA, "unknown-topic")),
    "put_topic": Operation(
        "Creates a topic, or gives it more partitions",
        {200: answers.TopicDescription, 201: answers.TopicDescription},
        (*_KAFKA, "conflict"),
        (),
        TopicWanted,
    ),
    "read": Operation(
        "Reads committed chunks of a partition; repeatable; in zstd or gzip for those who accept it",
        {200: {MSGPACK: BYTES, NDJSON: BYTES, PLAIN: BYTES}},
        (*_KAFKA, "unknown-topic", "not-found", "not-mirrored", "out-of-range"),
        (
            Query("offset", _OFFSET, "where to begin; default earliest"),
            Query("time_ms", NUMBER, "instead: at the first record that is as late"),
            Query("cursor", TEXT, "instead: at a cursor, as in dc1.nginx:3:81234"),
            Query("max_bytes", SMALL, "about how much to answer with"),
            Query("wait_ms", SMALL, "how long to wait for a chunk if there is none"),
            _PREFIX,
        ),
        headers={"X-Next-Offset": "where to go on", "X-Next-Cursor": "the same as a cursor"},
    ),
    "translate": Operation(
        "Which offset of a mirrored partition is which of its original",
        {200: answers.Translated},
        (*_KAFKA, "unknown-topic", "not-found", "not-mirrored", "behind", "out-of-range"),
        (
            Query("offset", NUMBER, "a position: the offset of the next record", required=True),
            Query("from", TEXT, "the data centre whose offset it is; default the original's"),
            Query("to", TEXT, "the other one"),
        ),
    ),
    "stream": Operation(
        "A read session: shares the partitions with the consumer's other sessions, and streams their chunks",
        {200: {MSGPACK: BYTES, NDJSON: BYTES}},
        (*_KAFKA, "unknown-topic", "conflict", "not-mirrored", "behind", "out-of-range"),
        (
            Query("topic", _TOPICS, "a full name or a pattern, *.nginx for all data centres", required=True),
            Query("from", {"enum": ["earliest", "latest"]}, "where partitions without a position begin"),
            Query("cursor", _TOPICS, "sets the consumer's positions first, as dc1.nginx:3:81234; one a partition"),
            _PREFIX,
        ),
    ),
    "commit": Operation(
        "Commits positions of a read session",
        {200: answers.Committed},
        (*_KAFKA, "unknown-topic", "conflict", "superseded", "out-of-range", "not-owner-yet", "outcome-unknown"),
        (),
        CommitBody,
        redirects=True,
    ),
    "offsets": Operation(
        "Committed positions and lag",
        {200: answers.ConsumerOffsets},
        (*_KAFKA, "unknown-topic", "conflict"),
        (Query("topic", _TOPICS, "only these, and these also without a position"),),
    ),
    "put_offsets": Operation(
        "Sets a consumer's positions while it has no live session",
        {200: answers.PositionsSet},
        (*_KAFKA, "unknown-topic", "not-found", "conflict", "not-mirrored", "behind", "out-of-range"),
        (),
        PositionsBody,
    ),
    "healthz": Operation("Whether the process answers", {200: answers.Alive}),
    "readyz": Operation("Whether the worker serves its lanes", {200: answers.Ready}, ("not-owner-yet",)),
    "metrics": Operation("Metrics, for Prometheus", {200: {PLAIN: BYTES}}),
    "status": Operation("What this worker does, and what is wrong with it", {200: answers.Status}),
    "openapi": Operation("This document", {200: {_JSON: {"type": "object"}}}),
}


def add_to(routes: Routes) -> None:
    """The route of the document, which has all the routes in it, this one too."""
    made: list[web.Response] = []

    async def openapi(call: Call) -> web.StreamResponse:
        call.knows_only()
        if not made:
            made.append(json_response(document(routes)))
        return web.Response(body=made[0].body, headers=made[0].headers)

    routes.add("GET", "/v1/openapi.json", "openapi", openapi, Right.OPEN)


def document(routes: Routes) -> Schema:
    """The whole interface."""
    paths: dict[str, Schema] = {}
    for declared in routes.declared:
        path = paths.setdefault(declared.path, {"parameters": [_path_parameter(n) for n in _names(declared.path)]})
        path[declared.method.lower()] = _operation(declared.name, declared.right, OPERATIONS[declared.name])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "logferry gateway",
            "version": version("logferry"),
            "description": "4xx: rejected, do not send it again as it is. 429, 503: surely not recorded, send it again "
            "after Retry-After. Any other 5xx, or a cut connection: not known, send the same again.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _names(path: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", path)


def _path_parameter(name: str) -> Schema:
    schema, text = PATH[name]
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": text}


def _operation(name: str, right: Right, operation: Operation) -> Schema:
    found: Schema = {
        "operationId": name,
        "summary": operation.summary,
        "parameters": [query.parameter() for query in operation.query],
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
            "content": {_PROBLEM: {"schema": _reference(answers.ProblemDocument)}},
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


def _schemas() -> Schema:
    models: dict[str, type[BaseModel]] = {answers.ProblemDocument.__name__: answers.ProblemDocument}
    for operation in OPERATIONS.values():
        for model in (operation.body, *operation.answer.values()):
            if isinstance(model, type):
                models[model.__name__] = model
    _, schemas = models_json_schema([(model, "validation") for model in models.values()], ref_template=_REF)
    found: Schema = json.loads(json.dumps(schemas["$defs"]))
    return found
