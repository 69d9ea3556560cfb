"""The document of the interface is true: it has every route, every answer fits it, and a machine that reads it and
tries to break things finds nothing but what the document says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema_rs
import pytest
from aiohttp import web
from logferry.gateway.admin_log.routes import AdminLogApi
from logferry.gateway.api import openapi
from logferry.gateway.api.consumers import ConsumersApi
from logferry.gateway.api.read import ReadApi
from logferry.gateway.api.sources import SourcesApi
from logferry.gateway.api.status import StatusApi
from logferry.gateway.api.subscriptions import SubscriptionsApi
from logferry.gateway.console.pages import ConsoleApi
from logferry.gateway.contract.chunk import MSGPACK
from logferry.gateway.errors import PROBLEMS
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes
from logferry.gateway.receivers.append import Appender
from logferry.gateway.receivers.archive import ArchiveApi
from logferry.gateway.receivers.elasticsearch import ElasticsearchApi
from logferry.gateway.receivers.lines import LinesApi
from logferry.gateway.receivers.opentelemetry import OtlpApi
from logferry.gateway.receivers.splunk import SplunkApi
from logferry.gateway.reports.routes import KINDS, ReportsApi
from logferry.gateway.service.processes import HealthApi
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.served_gateway import Gateway


def every_route() -> Routes:
    """All that a worker answers, without anything behind it."""
    nothing = cast(Any, SimpleNamespace())
    kinds: list[Any] = [SourcesApi, ConsumersApi, StatusApi, ReadApi, HealthApi, SubscriptionsApi]
    kinds += [AdminLogApi, Appender, LinesApi, ElasticsearchApi, SplunkApi, OtlpApi, ArchiveApi, ConsoleApi]
    resources = [kind(**dict.fromkeys(kind.__dataclass_fields__, nothing)).add_to for kind in kinds]
    resources += [ReportsApi(nothing, nothing, nothing, kind).add_to for kind in KINDS]
    return openapi.all_routes(nothing, resources)


def test_every_route_is_in_the_document_and_nothing_else_is() -> None:
    routes = every_route()
    document = openapi.document(routes)
    declared = {(route.method.lower(), route.path, route.name) for route in routes.declared}
    described = {
        (method, path, operation["operationId"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if method != "parameters"
    }
    assert described == declared
    assert set(openapi.OPERATIONS) == {name for _, _, name in declared}
    assert len(declared) == len({name for _, _, name in declared})


async def test_the_document_is_made_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 14 ms, which would hold the event loop."""
    routes = every_route()
    expected = openapi.document(routes)
    monkeypatch.setattr(openapi, "document", lambda _: pytest.fail("a request waits for the document"))
    (route,) = [route for route in routes.declared if route.name == "openapi"]
    for _ in range(2):
        answer = await route.handler(Call(cast(Any, None), [], {}))
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        assert (json.loads(answer.body), answer.content_type) == (expected, "application/json")


def test_every_route_was_thought_about_who_may_call_it() -> None:
    silent = {route.name for route in every_route().declared if route.right is Right.EVERYTHING}
    assert silent == {"admin_log", "status", "workers", "mirror", "deliver"}
    assert {route.name for route in every_route().declared if route.right is Right.OPEN} == {
        "healthz",
        "readyz",
        "openapi",
        "hec_health",
        "console",
        "console_page",
    }


def test_the_document_is_whole() -> None:
    document = openapi.document(every_route())
    schemas = document["components"]["schemas"]

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            reference = node.get("$ref")
            assert reference is None or reference.rpartition("/")[2] in schemas
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    for operations in document["paths"].values():
        for method, operation in operations.items():
            if method == "parameters":
                continue
            statuses = set(operation["responses"])
            assert "400" in statuses
            assert ("401" in statuses) == ("security" in operation)
            if "503" in statuses:
                assert "Retry-After" in operation["responses"]["503"]["headers"]


def test_every_problem_is_somewhere() -> None:
    text = str(openapi.document(every_route()))
    # Those two belong to no route.
    for kind in PROBLEMS.keys() - {"not-found", "method-not-allowed"}:
        assert f"`{kind}`" in text


# ---- against a running gateway --------------------------------------------------------------------------------


@pytest.fixture
async def gateway(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, kafka.bootstrap, 1) as gateway:
        yield gateway


async def test_answers_fit_the_document(gateway: Gateway) -> None:
    status, document, headers = await gateway.ask("GET", "/v1/openapi.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    topic = f"shape-{time.time_ns()}"
    source = f"/v1/topics/{topic}/sources/web1"
    consumer = f"/v1/consumers/c{time.time_ns()}/offsets"
    msgpack = {"headers": {"Content-Type": MSGPACK}}
    seen = set()
    for name, method, path, request in (
        ("put_topic", "PUT", f"/v1/topics/{topic}", {"data": '{"partitions": 2}'}),
        ("put_topic", "PUT", f"/v1/topics/{topic}", {"data": '{"partitions": 2}'}),
        ("put_topic", "PUT", f"/v1/topics/{topic}", {"data": '{"partitions": 1}'}),
        ("source", "GET", source, {}),
        ("session", "POST", source + "/session", {}),
        ("write", "POST", source + "/chunks?seqno=5&prev=0", {"data": b"one\n"}),
        ("write", "POST", source + "/chunks?seqno=5&prev=0", {"data": b"one\n"}),
        ("write", "POST", source + "/chunks?seqno=9&prev=7", {"data": b"two\n"}),
        ("write", "POST", source + "/chunks?seqno=9&prev=3", {"data": b"two\n"}),
        ("write", "POST", source + "/chunks?seqno=9&session=1", {"data": b"two\n"}),
        ("write", "POST", source + "/chunks", {"data": b"no", **msgpack}),
        ("write", "POST", f"/v1/topics/no{topic}/sources/web1/chunks?seqno=1", {"data": b"x"}),
        ("heartbeat", "POST", source + "/heartbeat", {"data": '{"position": 7, "finished": true}'}),
        ("heartbeat", "POST", source + "/heartbeat", {"data": '{"position": -7}'}),
        ("source", "GET", source, {}),
        ("sources", "GET", f"/v1/topics/{topic}/sources", {}),
        ("topics", "GET", "/v1/topics", {}),
        ("topic", "GET", f"/v1/topics/{topic}", {}),
        ("topic", "GET", f"/v1/topics/no{topic}", {}),
        ("topics", "GET", "/v1/topics?at_ms=1&sizes=true", {}),
        ("topic", "GET", f"/v1/topics/{topic}?at_ms=1&sizes=true", {}),
        ("read", "GET", f"/v1/topics/dc1.{topic}/partitions/0/chunks?offset=1000", {}),
        ("read", "GET", f"/v1/topics/dc1.{topic}/partitions/0/chunks", {}),
        ("put_offsets", "PUT", consumer, {"json": {"topic": f"dc1.{topic}", "to": "latest"}}),
        ("put_offsets", "PUT", consumer, {"json": {"topic": f"dc1.no{topic}", "to": "latest"}}),
        ("put_offsets", "PUT", consumer + "?dry_run=true", {"json": {"topic": f"dc1.{topic}", "to": "earliest"}}),
        ("offsets", "GET", consumer, {}),
        ("consumers", "GET", "/v1/consumers", {}),
        ("commit", "POST", consumer.replace("offsets", "sessions/none/commit"), {"json": {}}),
        ("forget", "DELETE", source, {}),
        ("healthz", "GET", "/healthz", {}),
        ("readyz", "GET", "/readyz", {}),
        ("status", "GET", "/v1/status", {}),
        ("workers", "GET", "/v1/workers", {}),
        ("mirror", "GET", "/v1/mirror", {}),
        ("deliver", "GET", "/v1/deliver", {}),
        ("caller", "GET", "/v1/caller", {}),
        ("openapi", "GET", "/v1/openapi.json", {}),
    ):
        status, answer, headers = await gateway.ask(method, path, **request)
        check(document, name, status, answer, headers["Content-Type"])
        seen.add((name, status))
    assert {("put_topic", status) for status in (200, 201, 409)} <= seen
    assert {("write", status) for status in (200, 400, 404, 409)} <= seen
    assert {("read", status) for status in (200, 416)} <= seen


def check(document: dict[str, Any], name: str, status: int, answer: Any, content_type: str) -> None:
    (operation,) = (
        operation
        for operations in document["paths"].values()
        for operation in operations.values()
        if isinstance(operation, dict) and operation["operationId"] == name
    )
    assert str(status) in operation["responses"], (name, status, answer)
    content = operation["responses"][str(status)]["content"]
    media_type = content_type.partition(";")[0]
    assert media_type in content, (name, status, content_type)
    schema = {"components": document["components"], **content[media_type]["schema"]}
    if "json" in media_type:
        jsonschema_rs.validate(schema, answer)


LIMITED = 'write = ["nginx", "0"]\nread = ["nginx", "0"]'
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)

# Its own list lacks 413: what has too many items may be too large as well.
REJECTED = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429]
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("narrowed", [False, True])
async def test_a_machine_that_reads_the_document_cannot_break_the_gateway(
    kafka: KafkaCluster, tmp_path: Path, narrowed: bool
) -> None:
    """Thousands of generated requests, valid and not: no 5xx, and every answer is one that the document names.

    Narrowed to a topic that exists, more of them get behind the first checks. Otherwise the token may not make
    topics: what is made up would have thousands of partitions.
    """
    token, sha256 = new_token()
    rights = 'write = ["*"]\nread = ["*"]\nadmin = ["*"]' if narrowed else LIMITED
    # What the narrowed document does not know is still known to the gateway.
    more_checks = () if narrowed else ("negative_data_rejection",)
    tables = f'[[tokens]]\nname = "machine"\nsha256 = "{sha256}"\n{rights}\n'
    async with Gateway(tmp_path, kafka.bootstrap, 1, tables) as gateway:
        _, document, _ = await gateway.ask("GET", "/v1/openapi.json")
        (tmp_path / "openapi.json").write_text(json.dumps(narrow(document) if narrowed else document))
        (tmp_path / "schemathesis.toml").write_text(REJECTED)
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", str(tmp_path / "openapi.json"), "--url", gateway.urls[0]),
            *("-H", f"Authorization: Bearer {token}", "--checks", ",".join((*CHECKS, *more_checks))),
            # A stream does not end by itself.
            *("--exclude-operation-id", "stream", "--max-examples", "100", "--phases", "examples,coverage,fuzzing"),
            *("--request-timeout", "40", "--generation-database", ":memory:", "--no-color"),
        ]
        found = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False
        )
        failures = found.stdout[max(found.stdout.find(" FAILURES "), 0) :]
        assert found.returncode == 0, failures[:8000] + found.stderr[-2000:]
        assert "request_failed" not in gateway.said()
        assert token not in gateway.said()


def narrow(document: dict[str, Any]) -> dict[str, Any]:
    """The same interface, of a few topics, sources and partitions."""
    few = {
        "topic": {"enum": ["machine", "dc1.machine", "machine-2", "none"]},
        "source": {"enum": ["a", "b", "\u00e9\u00df/\u6f22 %41+&?#"]},
        "partition": {"type": "integer", "minimum": 0, "maximum": 2},
        "consumer": {"enum": ["machine-c", "machine-d"]},
    }
    for operations in document["paths"].values():
        for parameter in operations["parameters"]:
            parameter["schema"] = few.get(parameter["name"], parameter["schema"])
    document["components"]["schemas"]["TopicBody"]["properties"]["partitions"]["maximum"] = 4
    return document
