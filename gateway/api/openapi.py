"""The interface as an OpenAPI 3.1 document, at ``GET /v1/openapi.json``.

Made of the routes, the models of bodies and answers, and the table of problems. The rest (the problems of a route,
the parameters of its query) is in ``operations.toml``, by the route's name; a test compares them, both ways.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from logferry.gateway.api import schemas
from logferry.gateway.errors import PROBLEMS
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

Schema = dict[str, Any]
_JSON: Final = "application/json"
_PROBLEM: Final = "application/problem+json"
_REF: Final = "#/components/schemas/{model}"
_TABLES: Final[Schema] = tomllib.loads(Path(__file__).with_name("operations.toml").read_text(encoding="utf-8"))
OPERATIONS: Final[dict[str, Schema]] = _TABLES["operations"]
_ALWAYS: Final = ("bad-request", "internal", "overloaded", "timeout", "too-large")
_AUTHORISED: Final = ("unauthenticated", "forbidden", "issuer-unavailable", "quota")


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
        named = {name: _TABLES["path"][name] for name in re.findall(r"\{(\w+)\}", declared.path)}
        path = paths.setdefault(declared.path, {"parameters": _parameters("path", named, list(named))})
        path[declared.method.lower()] = _operation(declared.name, declared.right)
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


def _parameters(place: str, named: dict[str, list[str]], required: list[str]) -> list[Schema]:
    return [
        {
            "in": place,
            "name": name,
            "schema": _TABLES["types"][kind],
            "description": description,
            "required": name in required,
        }
        for name, (kind, description) in named.items()
    ]


def _operation(name: str, right: Right) -> Schema:
    said = OPERATIONS[name]
    found: Schema = {
        "operationId": name,
        "summary": said["summary"],
        "parameters": _parameters("query", said.get("query", {}), said.get("required", [])),
        "responses": _responses(said, is_open=right is Right.OPEN),
    }
    if "body" in said:
        found["requestBody"] = {"required": True, "content": _content(said["body"])}
    if right is not Right.OPEN:
        found["security"] = [{"token": []}]
    return found


def _responses(said: Schema, *, is_open: bool) -> Schema:
    done: Schema = {"description": "done", "content": _content(said["answer"])}
    if "headers" in said:
        text = {"type": "string"}
        done["headers"] = {name: {"description": what, "schema": text} for name, what in said["headers"].items()}
    found: Schema = {"200": done, **({"201": done} if "creates" in said else {})}
    if "redirects" in said:
        found["307"] = {"description": said["redirects"]}
    kinds: dict[int, list[str]] = {}
    for kind in {*_ALWAYS, *(() if is_open else _AUTHORISED), *said.get("problems", ())}:
        kinds.setdefault(PROBLEMS[kind][0], []).append(kind)
    for status, of_status in sorted(kinds.items()):
        texts = "; ".join(f"`{kind}`: {PROBLEMS[kind][1]}" for kind in sorted(of_status))
        content: Schema = {_PROBLEM: {"schema": {"$ref": _REF.format(model="ProblemDocument")}}}
        if "errors" in said:
            content = {said["errors"]: {"schema": {"type": "object"}}}  # of another protocol
        found[str(status)] = {"description": texts, "content": content}
        if status in (429, 503):
            found[str(status)]["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer"}}}
    return found


def _content(of: str | dict[str, Schema]) -> Schema:
    if isinstance(of, dict):
        return {media_type: {"schema": schema} for media_type, schema in of.items()}
    return {_JSON: {"schema": {"$ref": _REF.format(model=of)}}}


def _component_schemas() -> Schema:
    named = [of for said in OPERATIONS.values() for of in (said.get("body"), said["answer"]) if isinstance(of, str)]
    models: list[type[BaseModel]] = [getattr(schemas, name) for name in dict.fromkeys(("ProblemDocument", *named))]
    _, made = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    found: Schema = json.loads(json.dumps(made["$defs"]))
    return found
