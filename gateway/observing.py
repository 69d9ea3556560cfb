"""What is looked at instead of counted: the state of the lanes when metrics are asked for, how late the loop is, and
the bridge to Graphite.

A loop that is late is late for every request; what it costs to know is one timer.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from logferry.gateway import log
from logferry.gateway.config import Graphite
from logferry.gateway.course import STATES
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.metrics import LOOP_LAG, REGISTRY
from prometheus_client.bridge.graphite import GraphiteBridge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_TICK_S: Final = 0.25
_GRAPHITE_TIMEOUT_S: Final = 10.0


class Lanes(Collector):
    """This worker's lanes as they are at the moment, and what each holds; and who has which, as it was seen last.

    Safe to call from another thread.
    """

    def __init__(self, lanes: Mapping[int, Lane], owners: Callable[[], Mapping[int, str]]) -> None:
        self._lanes, self._owners = lanes, owners

    def collect(self) -> Iterator[GaugeMetricFamily]:
        states = GaugeMetricFamily("logferry_lane_state", "1 for the state of a lane here", labels=["lane", "state"])
        queued = GaugeMetricFamily("logferry_lane_queued_bytes", "Bytes that wait in a lane", labels=["lane"])
        sources = GaugeMetricFamily("logferry_lane_sources", "Sources known to a lane", labels=["lane"])
        for number, lane in list(self._lanes.items()):
            for state in STATES:
                states.add_metric([str(number), state], float(lane.state == state))
            queued.add_metric([str(number)], lane.queued_bytes)
            sources.add_metric([str(number)], len(lane.table))
        owners = GaugeMetricFamily("logferry_lane_owner", "1 for the worker that has a lane", labels=["lane", "owner"])
        for number, url in sorted(self._owners().items()):
            owners.add_metric([str(number), url], 1)
        yield from (states, queued, sources, owners)


async def watch_loop() -> None:
    """Measures for ever by how much a timer comes late."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _TICK_S
        await asyncio.sleep(_TICK_S)
        LOOP_LAG.observe(max(0.0, loop.time() - due))


def graphite_prefix(settings: Graphite, dc: str, worker: int, host: str) -> str:
    """Where a worker's metrics stand: each worker counts for itself, so each has a place of its own."""
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", host)
    return f"{settings.prefix}.{dc}.{name}.worker-{worker}"


async def send_to_graphite(settings: Graphite, dc: str, worker: int) -> None:
    """Sends all metrics for ever, once in each interval. A Graphite that is away is told of once, and tried again."""
    bridge = GraphiteBridge(
        (settings.host, settings.port), registry=REGISTRY, timeout_seconds=_GRAPHITE_TIMEOUT_S, tags=settings.tags
    )
    prefix = graphite_prefix(settings, dc, worker, socket.gethostname())
    is_away = False
    while True:
        await asyncio.sleep(settings.interval_s)
        try:
            # In a thread, for it is a blocking socket.
            await asyncio.to_thread(bridge.push, prefix)
        except OSError as error:
            if not is_away:
                log.event("warning", "graphite_away", host=settings.host, port=settings.port, error=str(error))
            is_away = True
        else:
            if is_away:
                log.event("info", "graphite_back", host=settings.host, port=settings.port)
            is_away = False
