"""The routes about sources: state, heartbeat, forgetting, and the list of a topic's sources.

The sources of a topic are spread over the lanes, so a list is assembled from every worker; it is complete or rejected,
never silently partial.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Final, cast
from urllib.parse import quote

from aiohttp import web
from logferry.gateway.api.forwarding import FORWARDED, Forwarding
from logferry.gateway.config import Config
from logferry.gateway.contract.names import MAX_SEQNO, Malformed, check_source_id, check_topic, full_topic
from logferry.gateway.contract.source_state import Heartbeat, SourceIdentity, SourceState
from logferry.gateway.errors import LaneMoved, Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Right
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.request import optional_number, percent_decoded
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.lanes.authority import Refusal
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.lanes.transaction import ForgetOutcome, ForgetSource, HeartbeatOutcome, RecordHeartbeat
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.gateway.topics.copies import RemoteSources
from pydantic import BaseModel, ConfigDict, Field

_PAGE: Final = 1000
_STATE_BYTES: Final = 256
_Count = Annotated[int, Field(ge=0, le=MAX_SEQNO)]


class HeartbeatBody(BaseModel):
    """The body of ``POST …/heartbeat``; a field left out keeps its previous value."""

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


def source_of(call: Call, dc: str) -> SourceIdentity:
    """The source that path and query name. Raises Malformed."""
    source_id = check_source_id(call.second("sourceId"))
    key = call.query.get("partition_key")
    return SourceIdentity(topic_of(call, dc), key if key is None else check_source_id(key, "partition_key"), source_id)


def source_bytes(source: SourceIdentity) -> int:
    """The bytes of its key, which stand in Kafka and in memory as long as its state."""
    return len(source.state_key())


def charge_state(quotas: Quotas, call: Call, source: SourceIdentity) -> int:
    """The bytes of a state alone: a session or heartbeat counts as one chunk of so many. Raises Problem ``quota``."""
    size = _STATE_BYTES + source_bytes(source)
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


def refused(refusal: Refusal) -> Problem:
    return Problem(refusal.kind, refusal.detail, retry_after_s=refusal.retry_after_s, recorded_seqno=refusal.recorded)


class SourcePage:
    """The first rows after a sort key. Where it is bounded, the state of a source behind a full page is not read.

    ``is_cut``: sources were left out by their ids alone, so rows may be missing if others of the page did not count.
    """

    def __init__(self, after: str, wanted: Callable[[str], bool], size: int, *, is_bounded: bool) -> None:
        self._after, self._wanted, self._size, self._is_bounded = after, wanted, size, is_bounded
        self._after_id = after.partition(" ")[0]
        self._first: list[str] = []
        self.is_cut = False

    def wants(self, source_id: str) -> bool:
        name = quote(source_id, safe="")
        if name < self._after_id or not self._wanted(source_id):
            return False
        # The id of ``after`` itself may belong to a source of the previous page.
        if self._is_bounded and name > self._after_id:
            if len(self._first) >= self._size and name > self._first[-1]:
                self.is_cut = True
                return False
            insort(self._first, name)
            del self._first[self._size :]
        return True

    async def rows(
        self, topic: str, lanes: Iterable[Lane], counts: Callable[[SourceState], bool]
    ) -> list[dict[str, Any]]:
        """Other requests run in between: a lane may have a million sources."""
        first: list[tuple[str, SourceIdentity, SourceState]] = []
        for lane in lanes:
            found = await lane.sources(topic, self.wants)
            for at in range(0, len(found), self._size):
                for source, state in found[at : at + self._size]:
                    key = _key(source.source_id, source.partition_key)
                    if key > self._after and counts(state):
                        first.append((key, source, state))
                first.sort(key=lambda item: item[0])
                del first[self._size :]
                await asyncio.sleep(0)
        # Sources behind the last name were left out, except those that were read before the page was full.
        last = self._first[-1] if self.is_cut else None
        kept = (item for item in first if last is None or quote(item[1].source_id, safe="") <= last)
        return [_row(source, state) for _, source, state in kept]


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
        return await self.forwarding.answer(call.request, source, partial(self._get, source))

    async def _get_elsewhere(self, call: Call, dc: str) -> web.StreamResponse:
        """The state acknowledged by another data centre, and how much of it is mirrored here."""
        call.knows_only("partition_key", "dc")
        if dc not in self.config.known_dcs:
            raise Malformed(f"dc: {dc[:40]!r} is not one of {', '.join(sorted(self.config.known_dcs))}")
        source = source_of(call, dc)
        if not call.caller.may_see_source(source.topic, source.source_id):
            raise Problem("forbidden", f"the token {call.caller.name} does not have the right to see {source.topic}")
        found = await self.moved.find(dc, source)
        facts = described(source, None if found is None else found.state, self.ownership.url)
        return json_response({**facts, "mirrored_seqno": None if found is None else found.mirrored})

    async def _get(self, source: SourceIdentity, lane: Lane) -> web.StreamResponse:
        if lane.state != "serving":
            raise LaneMoved("not-owner-yet", f"lane {lane.number} is {lane.state}: {lane.why}")
        facts = await self.topics.facts(source.topic)
        # A hint: a client relies on the answer of opening a session alone.
        return json_response(described(source, lane.table.get(source, facts.id), self.ownership.url))

    async def heartbeat(self, call: Call) -> web.StreamResponse:
        source = source_of(call, self.config.dc)
        return await self.forwarding.answer(call.request, source, partial(self._heartbeat, call, source))

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

    async def forget(self, call: Call) -> web.StreamResponse:
        source = source_of(call, self.config.dc)
        call.knows_only("partition_key")
        return await self.forwarding.answer(call.request, source, partial(self._forget, call, source))

    async def _forget(self, call: Call, source: SourceIdentity, lane: Lane) -> web.StreamResponse:
        if await self.admission.read(call.request):
            raise Malformed("body: must be empty to forget a source")
        facts = await self.topics.facts(source.topic)
        before = cast(ForgetOutcome, (await lane.submit(ForgetSource(facts, source))).outcome).before
        return json_response({**described(source, before, self.ownership.url), "forgotten": before is not None})

    async def list(self, call: Call) -> web.StreamResponse:
        """A page of the topic's sources in the order of their ids; ``next`` is the ``after`` of the next page."""
        topic = topic_of(call, self.config.dc)
        call.knows_only("prefix", "idle_for_ms", "after")
        prefix, after = call.query.get("prefix", ""), call.query.get("after", "")
        idle_for_ms = optional_number(call.query, "idle_for_ms")
        await self.admission.read(call.request)
        facts = await self.topics.facts(topic)
        lanes = {number: lane for number, lane in self.ownership.lanes.items() if lane.state != "closed"}
        before_ms = None if idle_for_ms is None else self.topics.clock.now_ms() - idle_for_ms

        def wanted(source_id: str) -> bool:
            return source_id.startswith(prefix) and call.caller.may_see_source(topic, source_id)

        def counts(state: SourceState) -> bool:
            return state.topic_id == facts.id and (before_ms is None or state.alive_ms < before_ms)

        # Nearly all states count, unless those of idle sources are asked for.
        page = SourcePage(after, wanted, _PAGE + 1, is_bounded=before_ms is None)
        rows = await page.rows(topic, lanes.values(), counts)
        if page.is_cut and len(rows) <= _PAGE:
            page = SourcePage(after, wanted, _PAGE + 1, is_bounded=False)
            rows = await page.rows(topic, lanes.values(), counts)
        if FORWARDED in call.request.headers:
            return json_response({"sources": rows, "lanes": sorted(lanes)})
        covered = set(lanes)
        for answer in await self.forwarding.ask_others(call.request):
            rows.extend(answer["sources"])
            covered.update(answer["lanes"])
        missing = set(range(self.config.lanes)) - covered
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
    return _key(row["source_id"], row["partition_key"])


def _key(source_id: str, key: str | None) -> str:
    """The sort key of a source: its id, then its partition key; escaped, so that the two cannot run together."""
    return quote(source_id, safe="") + ("" if key is None else " " + quote(key, safe=""))
