"""The HTTP interface of the keeper: health, metrics, its status and plan, pausing and resuming."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from aiohttp import web
from logferry.gateway.config import Limits
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.ops.keeper.journal import NotActing
from logferry.ops.keeper.keeper import Keeper
from logferry.ops.keeper.planning import keeper_state
from logferry.ops.keeper.planning.move_plan import startable
from logferry.ops.keeper.planning.watchdog import KINDS
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

LIMITS: Final = Limits()
_SHOWN: Final = 200


class PauseBody(BaseModel):
    """The body of ``POST /v1/pause``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    why: Annotated[str, Field(min_length=1, max_length=500)]


class KeeperMetrics(Collector):
    """Computed when metrics are requested. Labels are few: kind, broker and directory."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def collect(self) -> Iterable[Metric]:
        keeper, view = self._keeper, self._keeper.view
        acts = GaugeMetricFamily("logferry_keeper_acting", "1 while this keeper acts, 0 while it stands by")
        acts.add_metric([], int(keeper.may_act()))
        paused = GaugeMetricFamily("logferry_keeper_paused", "1 while acts are paused")
        paused.add_metric([], int(keeper.state.paused is not None))
        looked = GaugeMetricFamily(
            "logferry_keeper_look_timestamp_seconds", "Unix time of the last look that succeeded"
        )
        looked.add_metric([], keeper.looked_ms / 1000)
        findings = GaugeMetricFamily("logferry_keeper_findings", "What is wrong now, by kind", labels=["kind"])
        present = list(keeper.findings.present.values())
        for kind in KINDS:
            findings.add_metric([kind], sum(one.kind == kind for one in present))
        moving = GaugeMetricFamily("logferry_keeper_moving_replicas", "Moves that the keeper began and that last")
        moving.add_metric([], len(keeper.state.moves))
        planned = GaugeMetricFamily("logferry_keeper_planned_bytes", "Bytes of all moves of the plan")
        planned.add_metric([], sum(move.size_bytes for move in keeper.plan.moves))
        records = CounterMetricFamily("logferry_keeper_records_total", "Records of the log of acts", labels=["kind"])
        for kind, count in sorted(keeper.counts.items()):
            records.add_metric([kind], count)
        deleted = CounterMetricFamily("logferry_keeper_deleted_bytes_total", "Bytes of forced deletions, estimated")
        deleted.add_metric([], keeper.bytes_deleted)
        yield from (acts, paused, looked, findings, moving, planned, records, deleted)
        names = ["broker", "dir"]
        size = GaugeMetricFamily("logferry_keeper_dir_size_bytes", "Size of the directory's file system", labels=names)
        free = GaugeMetricFamily("logferry_keeper_dir_free_bytes", "Free bytes of it", labels=names)
        full = GaugeMetricFamily(
            "logferry_keeper_dir_full_seconds", "Time until it is full, while it grows", labels=names
        )
        for state in view.dirs.values() if view else ():
            labels = [str(state.id.broker), state.id.path]
            if state.error:
                continue
            size.add_metric(labels, state.total_bytes)
            free.add_metric(labels, state.usable_bytes)
            if view and (left_s := keeper.growth.full_in_s(view, state.id)) is not None:
                full.add_metric(labels, left_s)
        yield from (size, free, full)


@dataclass(frozen=True, slots=True)
class KeeperApi:
    """The handlers, created when the keeper starts."""

    keeper: Keeper
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    admission: Admission = field(default_factory=lambda: Admission(LIMITS))

    def add_to(self, routes: Routes) -> None:
        self.registry.register(KeeperMetrics(self.keeper))
        routes.add("GET", "/healthz", "healthz", self.healthz, Right.OPEN)
        routes.add("GET", "/readyz", "readyz", self.readyz, Right.OPEN)
        routes.add("GET", "/metrics", "metrics", self.metrics, Right.METRICS)
        routes.add("GET", "/v1/status", "status", self.status, Right.EVERYTHING)
        routes.add("POST", "/v1/pause", "pause", self.pause, Right.EVERYTHING)
        routes.add("POST", "/v1/resume", "resume", self.resume, Right.EVERYTHING)

    async def healthz(self, call: Call) -> web.StreamResponse:
        return json_response({"status": "alive"})

    async def readyz(self, call: Call) -> web.StreamResponse:
        if self.keeper.error is not None:
            raise Problem("kafka-unavailable", f"it cannot look at the cluster: {self.keeper.error}")
        return json_response({"status": "ready"})

    async def metrics(self, call: Call) -> web.StreamResponse:
        body = await asyncio.to_thread(generate_latest, self.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def status(self, call: Call) -> web.StreamResponse:
        acting = None if self.keeper.election is None else await self.keeper.election.acting_url()
        return json_response(status_document(self.keeper, acting))

    async def pause(self, call: Call) -> web.StreamResponse:
        """``{"why"}``: nothing begins any more, and the moves that the keeper began are cancelled."""
        _refuse_browsers(call.request)
        return await self._set((await self.admission.document(call.request, PauseBody)).why)

    async def resume(self, call: Call) -> web.StreamResponse:
        _refuse_browsers(call.request)
        return await self._set(None)

    async def _set(self, why: str | None) -> web.StreamResponse:
        try:
            await self.keeper.pause(why)
        except NotActing as error:
            election = self.keeper.election
            acting = None if election is None else await election.acting_url()
            there = "" if acting in (None, self.keeper.url) else f"; {acting} does"
            raise Problem("not-owner-yet", f"{error}{there}") from None
        return json_response({"paused": why})


def _refuse_browsers(request: web.BaseRequest) -> None:
    """No browser changes anything here, as at the mirror. Raises Problem."""
    if request.content_type != "application/json":
        raise Problem("unsupported-media-type", "the body must have Content-Type: application/json")
    if "Origin" in request.headers or "Sec-Fetch-Site" in request.headers:
        raise Problem("forbidden", "requests of browsers are refused; use logferry keeper pause")


def status_document(keeper: Keeper, acting: str | None) -> dict[str, Any]:
    """Everything that the keeper saw, plans and did; lists are cut, with their length beside them."""
    view, plan = keeper.view, keeper.plan
    now = startable(view, plan, keeper.move_limits) if view else []
    return {
        "dc": keeper.config.dc,
        "url": keeper.url,
        "acts": keeper.config.act,
        "acting": acting,
        "paused": keeper.state.paused,
        "looked_ms": keeper.looked_ms,
        "error": keeper.error,
        "findings": [{**one._asdict(), "wrong": one.is_wrong} for one in _some(keeper.findings.present.values())],
        "findings_total": len(keeper.findings.present),
        "brokers": [one._asdict() for one in view.brokers.values()] if view else [],
        "dirs": _dirs(keeper),
        "under_way": [keeper_state.move_document(move) for move in keeper.state.moves.values()],
        "moves": [keeper_state.move_document(move) for move in plan.moves[:_SHOWN]],
        "moves_total": len(plan.moves),
        "moves_bytes": sum(move.size_bytes for move in plan.moves),
        "next": [keeper_state.name_of(move) for move in now],
        "blocked": dict(list(plan.blocked.items())[:_SHOWN]),
        "deletions": [
            {
                "dir": str(one.place),
                "why": one.why,
                "missing_bytes": one.missing_bytes,
                "held_by": one.held_by,
                "ranges": [part._asdict() for part in one.ranges[:_SHOWN]],
            }
            for one in keeper.deletions
        ],
        "log": list(keeper.recent),
    }


def _some(items: Iterable[Any]) -> list[Any]:
    return list(items)[:_SHOWN]


def _dirs(keeper: Keeper) -> list[dict[str, Any]]:
    view = keeper.view
    if view is None:
        return []
    return [
        {
            "broker": state.id.broker,
            "dir": state.id.path,
            "error": state.error,
            "total_bytes": state.total_bytes,
            "free_bytes": state.usable_bytes,
            "replicas": sum(1 for _ in view.in_dir(state.id)),
            "retired": keeper.retired.get(state.id),
            "growth_bytes_per_s": keeper.growth.rate(state.id),
            "full_in_s": None if state.error else keeper.growth.full_in_s(view, state.id),
        }
        for state in view.dirs.values()
    ]
