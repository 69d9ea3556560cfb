"""The HTTP interface of a mirror worker: health, metrics, status, and resuming stopped partitions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

from aiohttp import web
from logferry.gateway.config import Limits
from logferry.gateway.contract.mirror_state import mirror_lane_of
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.lanes.lifecycle import now_ms
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.service.processes import HealthApi
from logferry.mirror.config import MirrorConfig
from logferry.mirror.copy.partition import STOPS, MirroredPartition
from logferry.mirror.lanes.lane import REGISTRY, MirrorLane
from logferry.mirror.lanes.stops import CannotResume
from logferry.mirror.lanes.target_topics import TargetTopics
from logferry.mirror.remote import MemoryBudget, RemoteCluster
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

LIMITS: Final = Limits()
# Fetches are answered four times a second, also when there is nothing new.
_SILENT_S: Final = 2.0
# So long a resume waits for its lane to open.
_OPENS_S: Final = 10.0


class ResumeBody(BaseModel):
    """The body of ``POST /v1/resume``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    topic: str
    partition: Annotated[int, Field(ge=0)]
    start: Annotated[int | Literal["earliest"], Field(alias="from")]


def _refuse_browsers(request: web.BaseRequest) -> None:
    """No browser changes anything here: there is no page to do it from, so another site's page would be behind it.

    A page may send a body of another type without a question to this server first, and a browser names the page.
    Raises Problem.
    """
    if request.content_type != "application/json":
        raise Problem("unsupported-media-type", "the body must have Content-Type: application/json")
    if "Origin" in request.headers or "Sec-Fetch-Site" in request.headers:
        raise Problem("forbidden", "requests of browsers are refused; use logferry mirror resume")


def partitions_of(ownership: Ownership[MirrorLane]) -> list[MirroredPartition]:
    """Those of this worker's lanes. Safe to call from another thread."""
    return [partition for lane in ownership.held() for partition in list(lane.partitions.values())]


class Lag(NamedTuple):
    """The lag of several partitions; ``age_s``: of the one furthest behind. None: not known yet."""

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
    copied_records, copied_bytes = (sum(p.copied_records for p in found), sum(p.copied_bytes for p in found))
    age_s = max((partition.lag_s for partition in found if partition.lag_s is not None), default=None)
    if unsized and not copied_records:
        return Lag(records, None, age_s)
    # Partitions without a copied record are assumed to be like the others.
    return Lag(records, size + (round(unsized * copied_bytes / copied_records) if unsized else 0), age_s)


def _lag_of_link(link: RemoteCluster, partitions: Iterable[MirroredPartition]) -> Lag:
    """When the remote is silent its state is unknown since then, so the lag is at least that."""
    lag, silent_s = lag_of(partitions), link.silent_s
    return lag._replace(age_s=max(lag.age_s or 0.0, silent_s)) if silent_s > _SILENT_S else lag


class _Lag(Collector):
    """Lag and stops of this worker's partitions, computed when metrics are requested."""

    def __init__(self, ownership: Ownership[MirrorLane], links: dict[str, RemoteCluster]) -> None:
        self._ownership, self._links = ownership, links

    def collect(self) -> Iterable[Metric]:
        gauge = partial(GaugeMetricFamily, labels=["dc"])
        lags = (  # in the order of `Lag`
            gauge("logferry_mirror_lag_records", "Records in the remote data centre that are not mirrored yet"),
            gauge("logferry_mirror_lag_bytes", "Their size in bytes, estimated by the mean size of copied records"),
            gauge(
                "logferry_mirror_lag_seconds",
                "Age of the last mirrored record while more are to come, or of the last answer; 0 when caught up",
            ),
        )
        stopped = GaugeMetricFamily(
            "logferry_mirror_stopped_partitions", "Stopped partitions by reason", labels=["dc", "reason"]
        )
        by_dc: dict[str, list[MirroredPartition]] = {dc: [] for dc in self._links}
        for partition in partitions_of(self._ownership):
            by_dc[partition.dc].append(partition)
        for dc, found in by_dc.items():
            for family, value in zip(lags, _lag_of_link(self._links[dc], found), strict=True):
                family.add_metric([dc], value or 0)
            kinds = Counter(stop.kind for partition in found if (stop := partition.last_stop) is not None)
            for reason in STOPS:
                stopped.add_metric([dc, reason], kinds[reason])
        later = gauge("logferry_mirror_copies_begun_later", "Copies whose first records the remote had removed")
        for dc, link in self._links.items():
            later.add_metric([dc], len(link.begun_later))
        return [*lags, stopped, later]


@dataclass(frozen=True, slots=True)
class MirrorApi:
    """The handlers, created when the worker starts."""

    config: MirrorConfig
    ownership: Ownership[MirrorLane]
    links: dict[str, RemoteCluster]
    budget: MemoryBudget
    targets: TargetTopics
    kafka: KafkaClient
    admission: Admission = field(default_factory=lambda: Admission(LIMITS))

    def add_to(self, routes: Routes) -> None:
        REGISTRY.register(_Lag(self.ownership, self.links))
        HealthApi(self.ownership, REGISTRY).add_to(routes)
        routes.add("GET", "/v1/status", "status", self.status, Right.EVERYTHING)
        routes.add("POST", "/v1/resume", "resume", self.resume, Right.EVERYTHING)

    async def status(self, call: Call) -> web.StreamResponse:
        """Of this worker; ``workers`` names the others."""
        partitions = sorted(partitions_of(self.ownership), key=lambda partition: partition.tp)
        return json_response(
            {
                "dc": self.config.dc,
                "now_ms": now_ms(),
                "lanes_total": self.ownership.number_of_lanes(),
                "url": self.ownership.url,
                "workers": sorted({self.ownership.url, *self.ownership.other_workers()}),
                "waiting_bytes": {"used": self.budget.used_bytes, "limit": self.budget.limit_bytes},
                "lanes": [_lane(lane) for lane in self.ownership.held()],
                "links": [_link(link, [p for p in partitions if p.dc == dc]) for dc, link in self.links.items()],
                "partitions": [_partition(partition) for partition in partitions],
                "unaltered": dict(sorted(self.targets.unaltered.items())),
                "warnings": [*self.config.warnings, *self.kafka.risks, *self._begun_later()],
            }
        )

    def _begun_later(self) -> Iterable[str]:
        for dc, link in self.links.items():
            for (topic, number), first in sorted(link.begun_later.items()):
                lost = "older records are gone there, and lost here if a worker restarted before the first commit"
                yield f"the copy of {topic}-{number} begins at offset {first} of {dc}: {lost}"

    async def resume(self, call: Call) -> web.StreamResponse:
        """``{"topic", "partition", "from": "earliest" or an offset}``."""
        _refuse_browsers(call.request)
        wanted = await self.admission.document(call.request, ResumeBody)
        tp = (wanted.topic, wanted.partition)
        number = mirror_lane_of(*tp, self.ownership.number_of_lanes())
        await self._opened(number, tp)
        lane = self.ownership.lanes.get(number)
        if lane is None:
            owner = self.ownership.owner(number)
            if owner is None:
                raise Problem("not-owner-yet", f"lane {number} has no owner at the moment; try again")
            return web.Response(status=307, headers={"Location": f"{owner}/v1/resume"})
        try:
            at = await lane.resume(tp, None if wanted.start == "earliest" else wanted.start)
        except CannotResume as error:
            raise Problem("conflict", str(error)) from None
        except OSError as error:
            raise Problem("kafka-unavailable", repr(error)) from None
        return json_response({"topic": wanted.topic, "partition": wanted.partition, "from": at})

    async def _opened(self, number: int, tp: TopicPartition) -> None:
        """Returns when this worker's lane knows the partition, or after a moment: a lane that failed opens again."""
        if not any(tp[0] in link.topics for link in self.links.values()):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPENS_S):
                while (lane := self.ownership.lanes.get(number)) is not None and tp not in lane.partitions:
                    await self.ownership.wait_for_news()


def _lane(lane: MirrorLane) -> dict[str, Any]:
    facts = asdict(lane.lane_state)
    shown = {name: facts[name] for name in ("state", "why", "since_ms", "committed_ms", "wait", "error", "error_ms")}
    return {"lane": lane.number, "partitions": len(lane.partitions), **shown}


def _link(link: RemoteCluster, partitions: list[MirroredPartition]) -> dict[str, Any]:
    """``partitions``: those of this worker's lanes."""
    lag, wait = _lag_of_link(link, partitions), link.last_wait
    return {
        "dc": link.remote.dc,
        "topics": len(link.topics),
        "fetched_bytes": link.fetched_bytes,
        "bytes_per_s": link.remote.bytes_per_s,
        "partitions": len(partitions),
        "stopped": sum(partition.last_stop is not None for partition in partitions),
        "moved_records": sum(partition.copied_records for partition in partitions),
        "moved_bytes": sum(partition.copied_bytes for partition in partitions),
        "lag_records": lag.records,
        "lag_bytes": lag.size_bytes,
        "lag_s": None if lag.age_s is None else round(lag.age_s, 3),
        "last_wait": None if wait is None else asdict(wait),
    }


def _partition(partition: MirroredPartition) -> dict[str, Any]:
    stop, done = partition.last_stop, partition.checkpoint
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
