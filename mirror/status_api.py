"""What a worker of the mirror tells: whether it is alive and owns its lanes, its metrics, and how far everything is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from aiohttp import web
from aiokafka import errors
from logferry.gateway.course import now_ms
from logferry.gateway.lanes.ownership import Ownership
from logferry.mirror.config import MirrorConfig
from logferry.mirror.copy.partition import STOPS, MirroredPartition
from logferry.mirror.lanes.lane import CannotResume, MirrorLane
from logferry.mirror.metrics import REGISTRY
from logferry.mirror.remote.cluster import Link
from logferry.mirror.remote.flow_control import Budget
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PROBLEM = "application/problem+json"
# Fetches are answered four times a second, also when there is nothing new.
_SILENT_S = 2.0


def _problem(status: int, kind: str, detail: str) -> web.Response:
    body = {"type": kind, "title": kind.replace("-", " "), "status": status, "detail": detail}
    return web.Response(status=status, text=json.dumps(body), content_type=_PROBLEM)


def partitions_of(ownership: Ownership[MirrorLane]) -> list[MirroredPartition]:
    """Those of this worker's lanes."""
    return [partition for lane in ownership.held() for partition in lane.partitions.values()]


class Lag(NamedTuple):
    """Of several partitions: ``age_s`` is that of the one that is furthest behind. None: not known yet."""

    records: int
    size_bytes: int | None
    age_s: float | None


def lag_of(partitions: Iterable[MirroredPartition]) -> Lag:
    found = list(partitions)
    records, size, unsized = 0, 0, 0
    for partition in found:
        records += partition.lag_records or 0
        if partition.lag_bytes is None:
            unsized += partition.lag_records or 0
        else:
            size += partition.lag_bytes
    moved_records, moved_bytes = (sum(p.moved_records for p in found), sum(p.moved_bytes for p in found))
    ages = [partition.lag_s for partition in found if partition.lag_s is not None]
    if unsized and not moved_records:
        return Lag(records, None, max(ages, default=None))
    # What nothing was moved of yet is taken to be like the others.
    more = round(unsized * moved_bytes / moved_records) if unsized else 0
    return Lag(records, size + more, max(ages, default=None))


class _Lag(Collector):
    """Of the partitions of this worker, when metrics are asked for."""

    def __init__(self, partitions: Callable[[], Iterable[MirroredPartition]]) -> None:
        self._partitions = partitions

    def collect(self) -> Iterable[Metric]:
        records = GaugeMetricFamily("logferry_mirror_lag_records", "Records there and not here", labels=["dc"])
        size = GaugeMetricFamily("logferry_mirror_lag_bytes", "Bytes of these, by the mean of others", labels=["dc"])
        seconds = GaugeMetricFamily("logferry_mirror_lag_seconds", "Age of the last record here", labels=["dc"])
        stopped = GaugeMetricFamily("logferry_mirror_stopped_partitions", "By reason", labels=["dc", "reason"])
        by_dc: dict[str, list[MirroredPartition]] = {}
        for partition in self._partitions():
            by_dc.setdefault(partition.dc, []).append(partition)
        for dc, found in by_dc.items():
            lag = lag_of(found)
            records.add_metric([dc], lag.records)
            size.add_metric([dc], lag.size_bytes or 0)
            seconds.add_metric([dc], lag.age_s or 0.0)
            for reason in STOPS:
                count = sum(p.stop is not None and p.stop.kind == reason for p in found)
                stopped.add_metric([dc, reason], count)
        return [records, size, seconds, stopped]


class Api:
    """The handlers. Made when the worker starts."""

    def __init__(
        self, config: MirrorConfig, ownership: Ownership[MirrorLane], links: dict[str, Link], budget: Budget
    ) -> None:
        self._config, self._ownership, self._links, self._budget = config, ownership, links, budget
        REGISTRY.register(_Lag(lambda: partitions_of(ownership)))

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 16)
        app.add_routes(
            [
                web.get("/healthz", self.healthz),
                web.get("/readyz", self.readyz),
                web.get("/metrics", self.metrics),
                web.get("/v1/status", self.status),
                web.post("/v1/resume", self.resume),
            ]
        )
        return app

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "alive"})

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        lanes = {str(number): lane.state for number, lane in sorted(self._ownership.lanes.items())}
        if self._ownership.is_settled:
            return web.json_response({"status": "ready", "lanes": lanes})
        return _problem(503, "not-owner-yet", f"lanes: {lanes or 'the group has not assigned them yet'}")

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def status(self, request: web.Request) -> web.StreamResponse:
        """Of this worker; ``workers`` names the others."""
        partitions = sorted(partitions_of(self._ownership), key=lambda partition: partition.place)
        return web.json_response(
            {
                "dc": self._config.dc,
                "now_ms": now_ms(),
                "lanes_total": self._config.lanes,
                "url": self._ownership.url,
                "workers": sorted({self._ownership.url, *self._ownership.other_workers()}),
                "waiting_bytes": {"used": self._budget.used_bytes, "limit": self._budget.limit_bytes},
                "lanes": [_lane(lane) for lane in self._ownership.held()],
                "links": [_link(link, [p for p in partitions if p.dc == dc]) for dc, link in self._links.items()],
                "partitions": [_partition(partition) for partition in partitions],
            }
        )

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """``{"topic", "partition", "from": "earliest" or an offset}``."""
        try:
            body = await request.json()
            topic, number, start = body["topic"], body["partition"], body["from"]
            wrong = (
                not isinstance(topic, str)
                or type(number) is not int
                or (start != "earliest" and type(start) is not int)
            )
        except (ValueError, KeyError, TypeError):
            wrong = True
        if wrong:
            return _problem(400, "bad-request", 'wanted is {"topic", "partition", "from": "earliest" or an offset}')
        number_of_lane = self._config.lane_of(topic, number)
        lane = self._ownership.lanes.get(number_of_lane)
        if lane is None:
            owner = self._ownership.owner(number_of_lane)
            if owner is None:
                return _problem(503, "not-owner-yet", f"lane {number_of_lane} has no owner at the moment; try again")
            raise web.HTTPTemporaryRedirect(f"{owner}/v1/resume")
        try:
            at = await lane.resume((topic, number), None if start == "earliest" else start)
        except CannotResume as error:
            return _problem(409, "conflict", str(error))
        except (errors.KafkaError, OSError, TimeoutError) as error:
            return _problem(503, "kafka-unavailable", repr(error))
        return web.json_response({"topic": topic, "partition": number, "from": at})


def _lane(lane: MirrorLane) -> dict[str, Any]:
    course = lane.course
    wait = None if course.wait is None else asdict(course.wait)
    return {
        "lane": lane.number,
        "state": lane.state,
        "why": lane.why,
        "since_ms": course.since_ms,
        "partitions": len(lane.partitions),
        "committed_ms": course.committed_ms,
        "wait": wait,
        "error": course.error,
        "error_ms": course.error_ms,
    }


def _link(link: Link, partitions: list[MirroredPartition]) -> dict[str, Any]:
    """``partitions``: those of this worker's lanes."""
    lag, wait = lag_of(partitions), link.last_wait
    age_s = lag.age_s
    if link.silent_s > _SILENT_S:
        # Nothing is known of what is there since; so much is missing at least.
        age_s = max(age_s or 0.0, link.silent_s)
    return {
        "dc": link.remote.dc,
        "topics": len(link.topics),
        "fetched_bytes": link.fetched_bytes,
        "bytes_per_s": link.remote.bytes_per_s,
        "partitions": len(partitions),
        "stopped": sum(partition.stop is not None for partition in partitions),
        "moved_records": sum(partition.moved_records for partition in partitions),
        "moved_bytes": sum(partition.moved_bytes for partition in partitions),
        "lag_records": lag.records,
        "lag_bytes": lag.size_bytes,
        "lag_s": None if age_s is None else round(age_s, 3),
        "last_wait": None if wait is None else asdict(wait),
    }


def _partition(partition: MirroredPartition) -> dict[str, Any]:
    stop, done = partition.stop, partition.progress
    found: dict[str, Any] = {
        "topic": partition.topic,
        "partition": partition.number,
        "dc": partition.dc,
        "state": partition.state,
        "source_next": None if done is None else done.source_next,
        "local_next": None if done is None else done.local_next,
        "source_end": partition.end,
        "lag_records": partition.lag_records,
        "lag_bytes": partition.lag_bytes,
        "lag_s": None if partition.lag_s is None else round(partition.lag_s, 3),
        "waiting_bytes": partition.waiting_bytes,
        "last_record_ms": None if done is None or done.last_base < 0 else done.last_ms,
    }
    if stop is not None:
        found["stop"] = {**asdict(stop), "what_to_do": STOPS[stop.kind]}
    return found
