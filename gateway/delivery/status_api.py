"""The HTTP interface of a worker of `deliver`: health, metrics, and what its units do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from aiohttp import web
from logferry.gateway.contract.delivery_state import UnitKey
from logferry.gateway.delivery.catalog import SubscriptionView
from logferry.gateway.delivery.config import DeliverConfig
from logferry.gateway.delivery.lane import DeliveryLane
from logferry.gateway.delivery.metrics import REGISTRY
from logferry.gateway.delivery.pages import BatchRoom
from logferry.gateway.delivery.progress import STOPS
from logferry.gateway.delivery.unit import DeliveryUnit
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.lanes.lifecycle import now_ms
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.service.processes import HealthApi
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def units_of(ownership: Ownership[DeliveryLane]) -> list[DeliveryUnit]:
    """Those of this worker's lanes. Safe to call from another thread."""
    return [unit for lane in ownership.held() for unit in list(lane.units.values())]


class UnitCollector(Collector):
    """Lag and trouble of this worker's units, by subscription, and the bytes of their batches in memory."""

    def __init__(self, units: Callable[[], list[DeliveryUnit]], room: BatchRoom) -> None:
        self._units, self._room = units, room
        # By unit: the position at the last scrape, and since when it is there.
        self._positions: dict[DeliveryUnit, tuple[int, float]] = {}

    def collect(self) -> Iterable[Metric]:
        held = GaugeMetricFamily(
            "logferry_delivery_held_bytes", "Bytes of batches that are ready or under way, in memory", self._room.used
        )
        lag = GaugeMetricFamily(
            "logferry_delivery_lag_records", "Records that are not delivered yet, by offsets", labels=["subscription"]
        )
        stopped = GaugeMetricFamily(
            "logferry_delivery_stopped_partitions",
            "Partitions (or shards) that deliver nothing until an operator acts",
            labels=["subscription"],
        )
        retrying = GaugeMetricFamily(
            "logferry_delivery_retrying_partitions",
            "Partitions (or shards) whose last attempt failed",
            labels=["subscription"],
        )
        stalled = GaugeMetricFamily(
            "logferry_delivery_stalled_seconds",
            "Longest time in which a partition with records to deliver did not advance; 0 while paused or stopped",
            labels=["subscription"],
        )
        now = time.monotonic()
        self._positions = {unit: self._at(unit, now) for unit in self._units()}
        by_name: dict[str, list[DeliveryUnit]] = {}
        for unit in self._positions:
            by_name.setdefault(unit.key.subscription, []).append(unit)
        for name, units in sorted(by_name.items()):
            lag.add_metric([name], sum(unit.lag_records or 0 for unit in units))
            stopped.add_metric([name], sum(unit.wanted.stop is not None for unit in units))
            retrying.add_metric([name], sum(unit.wanted.error is not None for unit in units))
            stalled.add_metric([name], now - min(self._positions[unit][1] for unit in units))
        return [held, lag, stopped, retrying, stalled]

    def _at(self, unit: DeliveryUnit, now: float) -> tuple[int, float]:
        """As far as the scrapes tell: since the first one that saw the unit at its position."""
        position = unit.wanted.position
        before, since = self._positions.get(unit, (position, now))
        waits = unit.lag_records and unit.wanted.stop is None and not unit.subscription.is_paused
        return position, since if waits and position == before else now


@dataclass(frozen=True, slots=True)
class DeliverApi:
    config: DeliverConfig
    ownership: Ownership[DeliveryLane]
    view: SubscriptionView
    room: BatchRoom

    def add_to(self, routes: Routes) -> None:
        REGISTRY.register(UnitCollector(partial(units_of, self.ownership), self.room))
        HealthApi(self.ownership, REGISTRY).add_to(routes)
        routes.add("GET", "/v1/status", "status", self.status, Right.EVERYTHING)

    async def status(self, call: Call) -> web.StreamResponse:
        """Of this worker; ``workers`` names the others."""
        call.knows_only()
        names = ("state", "why", "since_ms", "committed_ms", "wait", "error", "error_ms")
        lanes = []
        for lane in self.ownership.held():
            facts = asdict(lane.lane_state)
            lanes.append({"lane": lane.number, "units": len(lane.units), **{name: facts[name] for name in names}})
        units = sorted(units_of(self.ownership), key=lambda unit: unit.key)
        return json_response(
            {
                "dc": self.config.dc,
                "now_ms": now_ms(),
                "url": self.ownership.url,
                "workers": sorted({self.ownership.url, *self.ownership.other_workers()}),
                "lanes_total": self.config.lanes,
                "lanes": lanes,
                "batches_bytes": {"used": self.room.used, "limit": self.config.limits.batches_bytes},
                "subscriptions": sorted(self.view.subscriptions),
                "unreadable": self.view.store.unreadable,
                "units": [unit_status(unit.key, unit) for unit in units],
                "warnings": [*self.config.warnings, *self.view.warnings],
            }
        )


def unit_status(key: UnitKey, unit: DeliveryUnit) -> dict[str, Any]:
    state = unit.wanted
    return {
        **key._asdict(),
        "position": state.position,
        "lag_records": unit.lag_records,
        "epoch": state.epoch,
        "waits_for": "an operator" if state.stop is not None or unit.subscription.is_resting else unit.waits_for,
        "is_paused": unit.subscription.is_resting,
        "stop": None if state.stop is None else {**state.stop._asdict(), "what_to_do": STOPS.get(state.stop.kind, "")},
        "error": None if state.error is None else state.error._asdict(),
    }
