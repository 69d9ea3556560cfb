"""One worker process of gateway or mirror: start, health, reload by SIGHUP, and ordered stop."""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from aiohttp import web
from logferry.gateway import log
from logferry.gateway.config import ConfigError, Limits, ServiceConfig
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.http.server import ListeningSite, Server
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.lanes.ownership import LaneT, Ownership
from logferry.gateway.service.preflight import connect_to_kafka
from logferry.gateway.tls import kafka_options, load_certificate, server_context
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_DRAIN_S: Final = 5.0

_Config = TypeVar("_Config", bound=ServiceConfig)


@dataclass(frozen=True, slots=True)
class Parts(Generic[LaneT]):
    """What a service is made of. ``before_close``: ends what keeps requests open."""

    ownership: Ownership[LaneT]
    routes: Routes
    limits: Limits
    before_close: Callable[[], Awaitable[None]] | None = None


async def serve_worker(
    config: _Config,
    worker: int,
    reload: Callable[[], _Config],
    make: Callable[[str, KafkaClient, Gate, AsyncExitStack], Awaitable[Parts[LaneT]]],
    take_over: Callable[[_Config], None] = lambda _: None,
) -> None:
    """Serves until SIGTERM or SIGINT; on SIGHUP reloads tokens and certificate, and what ``take_over`` does besides.

    ``make``: the service behind the worker's URL, with Kafka connected; what it puts on the stack is closed after the
    lanes. Raises KafkaError when Kafka can't be reached, WeakKafka or ConfigError.
    """
    # Thousands of requests are alive at once and none of them is garbage: looking for cycles less often made small
    # requests a third faster.
    gc.set_threshold(100_000, 50, 100)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gate = Gate(config)
    context = None if config.tls is None else server_context(config.tls)
    loop.add_signal_handler(signal.SIGHUP, partial(_reload, reload, gate, context, take_over))
    url = config.url(worker)
    kafka = KafkaClient(kafka_options(config.kafka), url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kafka.close)
        await connect_to_kafka(kafka)
        parts = await make(url, kafka, gate, stack)
        ownership, routes = parts.ownership, parts.routes
        runner = web.ServerRunner(Server(routes, parts.limits), shutdown_timeout=_DRAIN_S)
        await runner.setup()
        # Stopping goes from the end: the lanes move to other workers, waiting requests are forwarded to them, and only
        # then the owners are no longer followed.
        stack.push_async_callback(ownership.stop)
        stack.push_async_callback(runner.cleanup)
        if parts.before_close is not None:
            stack.push_async_callback(parts.before_close)
        await ListeningSite(runner, config.host, config.port(worker), context).start()
        await ownership.start()
        stack.push_async_callback(ownership.leave)
        log.event("worker_started", url=url, dc=config.dc, worker=worker)
        if config.shows_tokens:
            log.event("tokens_unencrypted", listen=config.listen)
        ownership.failed.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if ownership.failed.done():
            ownership.failed.result()
        routes.is_leaving = True
        log.event("worker_stopping", url=url)
    log.event("worker_stopped", url=url)


def _reload(
    reload: Callable[[], _Config], gate: Gate, context: ssl.SSLContext | None, take_over: Callable[[_Config], None]
) -> None:
    """Connections stay open; an invalid configuration changes nothing."""
    try:
        fresh = reload()
        if context is not None and fresh.tls is not None:
            server_context(fresh.tls)  # checked apart: half of a pair must not be loaded
        gate.replace(fresh.tokens)
        take_over(fresh)
        if context is not None and fresh.tls is not None:
            load_certificate(context, fresh.tls)
    except (ConfigError, ValueError) as error:
        log.event("configuration_not_reloaded", reason=str(error))
    else:
        log.event("configuration_reloaded", tokens=[token.name for token in fresh.tokens])


@dataclass(frozen=True, slots=True)
class HealthApi(Generic[LaneT]):
    """The routes about the worker itself: whether it answers, whether it is ready, and its metrics."""

    ownership: Ownership[LaneT]
    registry: CollectorRegistry

    def add_to(self, routes: Routes) -> None:
        routes.add("GET", "/healthz", "healthz", self.healthz, Right.OPEN)
        routes.add("GET", "/readyz", "readyz", self.readyz, Right.OPEN)
        routes.add("GET", "/metrics", "metrics", self.metrics, Right.METRICS)

    async def healthz(self, call: Call) -> web.StreamResponse:
        return json_response({"status": "alive"})

    async def readyz(self, call: Call) -> web.StreamResponse:
        lanes = {str(number): lane.state for number, lane in sorted(self.ownership.lanes.items())}
        if self.ownership.is_settled:
            return json_response({"status": "ready", "lanes": lanes})
        waits = [f"lane {lane.number}: {lane.why}" for lane in self.ownership.lanes.values() if lane.state != "serving"]
        detail = "; ".join(waits) or "the group has not assigned the lanes yet"
        raise Problem("not-owner-yet", detail, lanes=lanes)

    async def metrics(self, call: Call) -> web.StreamResponse:
        # There are a dozen lines for each topic.
        body = await asyncio.to_thread(generate_latest, self.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
