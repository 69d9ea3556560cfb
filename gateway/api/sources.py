"""The routes about a source itself: what is known of it, its heartbeat, forgetting it, and the list of all.

The sources of a topic are spread over the lanes, so a list is put together from every worker; it is complete or
refused, never silently partial.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Final, cast
from urllib.parse import quote

from aiohttp import web
from logferry.gateway.api.forwarding import FORWARDED, Routing
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import MAX_SEQNO, Malformed, check_source_id, check_topic, full_topic
from logferry.gateway.errors import Moved, Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Right
from logferry.gateway.http.request import optional_number, percent_decoded, validated
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.lanes.dedup import Heartbeat, Refusal, Source, SourceState
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.lanes.transaction import Beat, Beaten, Forget, Forgotten
from logferry.gateway.topics.catalog import Topics
from logferry.gateway.topics.remote_sources import MovedSources
from pydantic import BaseModel, ConfigDict, Field

_PAGE: Final = 1000
_Count = Annotated[int, Field(ge=0, le=MAX_SEQNO)]


class HeartbeatBody(BaseModel):
    """The body of ``POST …/heartbeat``; what is left out stays as it was said before."""

    model_config = ConfigDict(extra="forbid", strict=True)
    watermark_ms: _Count | None = None
    position: _Count | None = None
    size: _Count | None = None
    finished: bool | None = None


@lru_cache(maxsize=4096)
def _topic_of(dc: str, escaped: str) -> str:
    return full_topic(dc, check_topic(percent_decoded(escaped, "topic")))


def topic_of(call: Call, dc: str) -> str:
    """The full name of the topic that the path names for writing. Raises Malformed."""
    return _topic_of(dc, call.segments[3])


def source_of(call: Call, dc: str) -> Source:
    """The source that path and query name. Raises Malformed."""
    source_id = check_source_id(call.second("sourceId"))
    key = call.query.get("partition_key")
    return Source(topic_of(call, dc), key if key is None else check_source_id(key, "partition_key"), source_id)


@dataclass(frozen=True, slots=True)
class SourcesApi:
    """The handlers about sources."""

    config: Config
    topics: Topics
    ownership: Ownership[Lane]
    routing: Routing
    admission: Admission
    moved: MovedSources

    def add_to(self, routes: Routes) -> None:
        sources = "/v1/topics/{topic}/sources"
        routes.add("GET", sources, "sources", self.list, Right.SOURCE)
        routes.add("GET", sources + "/{source}", "source", self.get, Right.SOURCE)
        routes.add("DELETE", sources + "/{source}", "forget", self.forget, Right.ADMIN)
        routes.add("POST", sources + "/{source}/heartbeat", "heartbeat", self.heartbeat, Right.WRITE)

    async def get(self, call: Call) -> web.StreamResponse:
        dc = call.query.get("dc", self.config.dc)
        if dc != self.config.dc:
            return await self._get_elsewhere(call, dc)
        source = source_of(call, self.config.dc)
        call.knows_only("partition_key", "dc")
        return await self.routing.answer(call.request, source, partial(self._get, source))

    async def _get_elsewhere(self, call: Call, dc: str) -> web.StreamResponse:
        """What another data centre acknowledged, and what of it is here."""
        call.knows_only("partition_key", "dc")
        if dc not in self.config.known_dcs:
            raise Malformed(f"dc: {dc[:40]!r} is not one of {', '.join(sorted(self.config.known_dcs))}")
        source = source_of(call, dc)
        if not call.caller.may_see_source(source.topic, source.source_id):
            raise Problem("forbidden", f"the token {call.caller.name} does not have the right to see {source.topic}")
        found = await self.moved.find(dc, source)
        facts = self._facts(source, None if found is None else found.state)
        return json_response({**facts, "mirrored_seqno": None if found is None else found.mirrored})

    async def _get(self, source: Source, lane: Lane) -> web.StreamResponse:
        if lane.state != "serving":
            raise Moved("not-owner-yet", f"lane {lane.number} is {lane.state}: {lane.why}")
        facts = await self.topics.facts(source.topic)
        return json_response(self._facts(source, lane.look_up(source, facts.id)))

    async def heartbeat(self, call: Call) -> web.StreamResponse:
        source = source_of(call, self.config.dc)
        return await self.routing.answer(call.request, source, partial(self._heartbeat, call, source))

    async def _heartbeat(self, call: Call, source: Source, lane: Lane) -> web.StreamResponse:
        call.knows_only("partition_key", "session")
        session = optional_number(call.query, "session")
        body = validated(HeartbeatBody, await self.admission.read(call.request))
        facts = await self.topics.facts(source.topic)
        now_ms = int(time.time() * 1000)
        said = Heartbeat(now_ms, body.watermark_ms, body.position, body.size, body.finished)
        answered = await lane.submit(Beat(facts, source, session, said))
        if isinstance(answered.outcome, Refusal):
            refusal = answered.outcome
            raise Problem(refusal.kind, refusal.detail, recorded_seqno=refusal.recorded)
        return json_response(self._facts(source, cast(Beaten, answered.outcome).state))

    async def forget(self, call: Call) -> web.StreamResponse:
        source = source_of(call, self.config.dc)
        call.knows_only("partition_key")
        return await self.routing.answer(call.request, source, partial(self._forget, call, source))

    async def _forget(self, call: Call, source: Source, lane: Lane) -> web.StreamResponse:
        if await self.admission.read(call.request):
            raise Malformed("body: forgetting a source takes none")
        facts = await self.topics.facts(source.topic)
        before = cast(Forgotten, (await lane.submit(Forget(facts, source))).outcome).before
        return json_response({**self._facts(source, before), "forgotten": before is not None})

    async def list(self, call: Call) -> web.StreamResponse:
        """A page of the topic's sources in the order of their ids; ``next`` is the ``after`` of the next page."""
        topic = topic_of(call, self.config.dc)
        call.knows_only("prefix", "idle_for_ms", "after")
        prefix, after = call.query.get("prefix", ""), call.query.get("after", "")
        idle_for_ms = optional_number(call.query, "idle_for_ms")
        facts = await self.topics.facts(topic)
        rows: list[dict[str, Any]] = []
        lanes = {number: lane for number, lane in self.ownership.lanes.items() if lane.state != "closed"}
        before_ms = None if idle_for_ms is None else time.time() * 1000 - idle_for_ms
        caller = call.caller

        def wanted(source_id: str) -> bool:
            return source_id.startswith(prefix) and caller.may_see_source(topic, source_id)

        for lane in lanes.values():
            found = await lane.sources(topic, wanted)
            rows.extend(
                _row(source, state)
                for source, state in found
                if state.topic_id == facts.id and (before_ms is None or state.alive_ms < before_ms)
            )
        rows = sorted((row for row in rows if _place(row) > after), key=_place)[: _PAGE + 1]
        if FORWARDED in call.request.headers:
            return json_response({"sources": rows, "lanes": sorted(lanes)})
        covered = set(lanes)
        for answer in await self.routing.ask_others(call.request):
            rows.extend(answer["sources"])
            covered.update(answer["lanes"])
        missing = set(range(self.config.lanes)) - covered
        if missing:
            raise Problem("not-owner-yet", f"lanes {sorted(missing)} are moving; the list would not be complete")
        rows.sort(key=_place)
        more = len(rows) > _PAGE
        return json_response({"sources": rows[:_PAGE], "next": _place(rows[_PAGE - 1]) if more else None})

    def _facts(self, source: Source, state: SourceState | None) -> dict[str, Any]:
        return {
            "source_id": source.source_id,
            "topic": source.topic,
            "session": state.session or None if state else None,
            "partition": state.partition if state else None,
            "recorded_seqno": state.recorded if state else None,
            "url": self.ownership.url,
        }


def _row(source: Source, state: SourceState) -> dict[str, Any]:
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


def _place(row: dict[str, Any]) -> str:
    """Where a source stands in the list: by its id, then its key. Escaped, so that the two can't run together."""
    key = row["partition_key"]
    return quote(row["source_id"], safe="") + ("" if key is None else " " + quote(key, safe=""))
