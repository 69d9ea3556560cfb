"""The part of Elasticsearch's interface that agents need to ship logs: ``_bulk``, and what they ask at their start."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import full_topic
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, json_response, problem_of
from logferry.gateway.receivers.append import CHUNK_BYTES, Appender, Part, idempotency_key
from logferry.gateway.receivers.bulk import Bulk, answer_of, parse_bulk
from logferry.gateway.receivers.lines import joined, sender

# Clients of version 8 refuse a server that does not send it, and one of another major version.
_PRODUCT: Final = {"X-Elastic-Product": "Elasticsearch"}
_VERSION: Final = "8.15.0"
_ITEMS: Final = 100_000
_REPEATED: Final = (429, 503)


def problem_answer(problem: Problem, _path: str) -> web.Response:
    """A problem as Elasticsearch says it. Agents repeat 429 and 503.

    These two are plain text, as from a proxy: rsyslog drops the lines of a request that is answered by any JSON.
    """
    status = _status(problem)
    if status in _REPEATED:
        response = web.Response(text=f"{problem.kind}: {problem.detail}\n", status=status)
    else:
        error = {"type": problem.kind.replace("-", "_") + "_exception", "reason": problem.detail}
        response = json_response({"error": {**error, "root_cause": [error]}, "status": status}, status)
    response.headers.update(_PRODUCT)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(problem.retry_after_s)))
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = 'Basic realm="logferry"'
    return response


def _answer(document: Any) -> web.Response:
    response = json_response(document)
    response.headers.update(_PRODUCT)
    return response


@dataclass(frozen=True, slots=True)
class ElasticsearchApi:
    appender: Appender

    def add_to(self, routes: Routes) -> None:
        for method, path, name, handler in (
            ("GET", "/elasticsearch/", "es_info", self.info),
            ("HEAD", "/elasticsearch/", "es_ping", self.ping),
            ("GET", "/elasticsearch/_license", "es_license", self.license),
            ("GET", "/elasticsearch/{index}/health", "es_health", self.health),
            ("POST", "/elasticsearch/_bulk", "es_bulk", self.bulk),
            ("PUT", "/elasticsearch/_bulk", "es_put_bulk", self.bulk),
            ("POST", "/elasticsearch/{index}/_bulk", "es_index_bulk", self.bulk_into),
            ("PUT", "/elasticsearch/{index}/_bulk", "es_put_index_bulk", self.bulk_into),
        ):
            routes.add(method, path, name, handler, Right.AGENT, problem=problem_answer)

    async def info(self, call: Call) -> web.StreamResponse:
        version = {"number": _VERSION, "build_flavor": "default", "lucene_version": "9.11.1"}
        version |= {"minimum_wire_compatibility_version": "7.17.0", "minimum_index_compatibility_version": "7.0.0"}
        names = {"name": "logferry", "cluster_name": "logferry", "cluster_uuid": "logferry"}
        return _answer({**names, "version": version, "tagline": "You Know, for Search"})

    async def ping(self, call: Call) -> web.StreamResponse:
        return web.Response(headers=_PRODUCT)

    async def license(self, call: Call) -> web.StreamResponse:
        """Beats ask for it before they send anything."""
        said = {"status": "active", "uid": "logferry", "type": "basic", "mode": "basic"}
        return _answer({"license": said})

    async def health(self, call: Call) -> web.StreamResponse:
        """rsyslog asks for ``_cat/health`` before it sends, and again after an error."""
        if call.segments[2] != "_cat":
            raise Problem("not-found", "only _cat/health is answered here")
        return web.Response(text="logferry green\n", headers=_PRODUCT)

    async def bulk(self, call: Call) -> web.StreamResponse:
        return await self._bulk(call, None)

    async def bulk_into(self, call: Call) -> web.StreamResponse:
        return await self._bulk(call, call.segment(2, "index"))

    async def _bulk(self, call: Call, index: str | None) -> web.StreamResponse:
        """Parameters of the query are passed over: they choose what is answered, or what only a search engine has."""
        began, appender = time.monotonic(), self.appender
        config, headers = appender.config, call.request.headers
        key = idempotency_key(headers)
        source_id = sender(call, "elasticsearch")
        with appender.admission.reserved(call.request):
            body = await appender.body(call)
            bulk = await appender.parsed(body, parse_bulk, body, index, config.receivers.elasticsearch, _ITEMS)
            failed = await self._append(call, bulk, source_id, key)
        call.refused.extend(failed.values())
        again = [problem for problem in failed.values() if _status(problem) in _REPEATED]
        if again and not bulk.has_recorded(failed):
            # Not by its items: there are agents that repeat a request, but not an item.
            raise again[0]
        refused = {
            topic: (_status(problem), problem.kind.replace("-", "_") + "_exception", problem.detail)
            for topic, problem in failed.items()
        }
        took_ms = int(1000 * (time.monotonic() - began))
        answer = await computed(200 * len(bulk.items), answer_of, bulk.items, refused, took_ms)
        return web.Response(body=answer, headers={**_PRODUCT, "Content-Type": "application/json"})

    async def _append(self, call: Call, bulk: Bulk, source_id: str, key: str | None) -> dict[str, Problem]:
        """Appends each topic's lines. Returns the topics that failed."""
        appender, parts, failed = self.appender, dict[str, Part](), dict[str, Problem]()
        for topic, lines in bulk.lines.items():
            source = SourceIdentity(full_topic(appender.config.dc, topic), None, source_id)
            try:
                limit = min(CHUNK_BYTES, (await appender.bounds(call.caller, source)).data_bytes)
            except (Problem, KafkaError, TimeoutError) as error:
                failed[topic] = problem_of(error)
                continue
            fitting = bulk.fitting(topic, limit)
            if fitting:
                pieces = await computed(sum(map(len, fitting)), joined, fitting, limit)
                chunks = [Chunk(0, None, None, {}, piece) for piece in pieces]
                parts[topic] = Part(source, chunks, key or bulk.key(topic), len(lines))
        answers = await appender.append_all(call, "elasticsearch", list(parts.values()))
        return failed | {topic: a for topic, a in zip(parts, answers, strict=True) if isinstance(a, Problem)}


def _status(problem: Problem) -> int:
    """Agents repeat 429 and 503; other statuses are for good."""
    return 503 if problem.status >= 500 else problem.status
