"""One worker process: connects, checks Kafka, joins the group, serves HTTP, and leaves in order."""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack

from aiohttp import web
from logferry.gateway import log, observing
from logferry.gateway.api import openapi
from logferry.gateway.api.consumers import Consumers
from logferry.gateway.api.forwarding import Routing
from logferry.gateway.api.sources import SourcesApi
from logferry.gateway.api.status import StatusApi
from logferry.gateway.api.write import Api
from logferry.gateway.arrival import arrive
from logferry.gateway.config import Config, ConfigError
from logferry.gateway.cursors import Cursors
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.server import Server, Site, listen
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.metrics import REGISTRY, LaneMetrics
from logferry.gateway.reading.registry import Readers
from logferry.gateway.service import preflight
from logferry.gateway.tls import kafka_options, load_certificate, server_context
from logferry.gateway.topics.catalog import Topics
from logferry.gateway.topics.offset_translation import Translation
from logferry.gateway.topics.remote_sources import MovedSources
from logferry.gateway.upkeep import expire_requests, retire_sources

_DRAIN_S = 5.0


async def serve(config: Config, worker: int, reload: Callable[[], Config]) -> None:
    """Serves until SIGTERM or SIGINT; on SIGHUP takes over what ``reload`` finds and `_take_over` names.

    Raises KafkaError when Kafka can't be reached, WeakKafka or ConfigError.
    """
    # Thousands of requests are alive at once and none of them is garbage: looking for cycles less often made small
    # requests a third faster.
    gc.set_threshold(100_000, 50, 100)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gate, quotas = Gate(config), Quotas(config)
    context = None if config.tls is None else server_context(config.tls)
    loop.add_signal_handler(signal.SIGHUP, _take_over, reload, gate, quotas, context)
    url = config.url(worker)
    kafka = Kafka(kafka_options(config.kafka), url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kafka.close)
        await arrive(kafka)
        await preflight.check(kafka, config, (f"{config.dc}.",))
        topics = Topics(kafka, config)
        ownership: Ownership[Lane] = Ownership(
            config, url, kafka, lambda number, grace_s: _lane(number, grace_s, config, kafka, topics, ownership)
        )
        admission = Admission(config.limits)
        routing = Routing(config, ownership, admission)
        await routing.start()
        stack.push_async_callback(routing.stop)
        readers = Readers(config, kafka, url)
        translation = Translation(kafka, config.prefix, config.dc)
        api = Api(
            config,
            kafka,
            topics,
            ownership,
            routing,
            admission,
            SourcesApi(config, topics, ownership, routing, admission, MovedSources(kafka, config.prefix, translation)),
            Consumers(config, kafka, routing, admission, readers, url, gate, Cursors(config.dc, translation)),
            StatusApi(config, kafka, ownership, quotas),
            gate,
            quotas,
            translation,
        )
        routes = api.routes()
        openapi.add_to(routes)
        server = Server(routes, config.limits)
        runner = web.ServerRunner(server, shutdown_timeout=_DRAIN_S)
        await runner.setup()
        # In the order of leaving, from the end: the lanes go to others, what waits here is handed on to them, and
        # only then nobody needs to know any more where they are.
        stack.push_async_callback(ownership.stop)
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(readers.stop)
        site = Site(runner, config.host, config.port(worker), context)
        await listen(site, site.name)
        await ownership.start()
        ownership.keep_up(expire_requests(ownership))
        ownership.keep_up(retire_sources(ownership, config.source_retention_ms))
        stack.push_async_callback(ownership.leave)
        observers = _observers(config, worker, ownership)
        stack.push_async_callback(_ended, observers)
        log.event("info", "worker_started", url=url, dc=config.dc, worker=worker)
        stopping = asyncio.ensure_future(stop.wait())
        ownership.failed.add_done_callback(lambda _: stop.set())
        await stopping
        if ownership.failed.done():
            ownership.failed.result()
        routes.is_leaving = True
        log.event("info", "worker_stopping", url=url)
    log.event("info", "worker_stopped", url=url)


def _lane(
    number: int, grace_s: float, config: Config, kafka: Kafka, topics: Topics, ownership: Ownership[Lane]
) -> Lane:
    return Lane(
        number=number,
        grace_s=grace_s,
        config=config,
        kafka=kafka,
        topics=topics,
        metrics=LaneMetrics(str(number)),
        confirm_ownership=ownership.confirm,
    )


def _observers(config: Config, worker: int, ownership: Ownership[Lane]) -> list[asyncio.Task[None]]:
    REGISTRY.register(observing.Lanes(ownership.lanes, lambda: ownership.view.owners))
    tasks = [asyncio.create_task(observing.watch_loop())]
    if config.graphite is not None:
        tasks.append(asyncio.create_task(observing.send_to_graphite(config.graphite, config.dc, worker)))
    return tasks


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _take_over(reload: Callable[[], Config], gate: Gate, quotas: Quotas, context: ssl.SSLContext | None) -> None:
    """Tokens, quotas and the certificate of the configuration as they are now; bad ones change nothing.

    Connections live on.
    """
    try:
        fresh = reload()
        if context is not None and fresh.tls is not None:
            server_context(fresh.tls)  # one that nobody uses: half of a pair must not get in
        gate.replace(fresh.tokens)
        quotas.replace(fresh)
        if context is not None and fresh.tls is not None:
            load_certificate(context, fresh.tls)
    except (ConfigError, ValueError) as error:
        log.event("error", "configuration_not_reloaded", reason=str(error))
    else:
        log.event("info", "configuration_reloaded", tokens=[token.name for token in fresh.tokens])
