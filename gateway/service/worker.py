"""One worker of the gateway: its parts, its work in the background, and its telemetry."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Final, cast

from aiokafka.errors import KafkaError, NodeNotReadyError, TopicAuthorizationFailedError
from logferry.gateway import log
from logferry.gateway.admin_log.records import ACTS
from logferry.gateway.admin_log.routes import AdminLogApi
from logferry.gateway.admin_log.writer import AdminLog, admin_log_topic
from logferry.gateway.api.consumers import ConsumersApi
from logferry.gateway.api.forwarding import Forwarding
from logferry.gateway.api.openapi import all_routes
from logferry.gateway.api.read import ReadApi
from logferry.gateway.api.sources import SourcesApi
from logferry.gateway.api.status import StatusApi
from logferry.gateway.api.subscriptions import SubscriptionsApi
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.config import Config, Graphite
from logferry.gateway.console.pages import ConsoleApi
from logferry.gateway.contract.names import lane_of
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.router import Routes
from logferry.gateway.http.server import CallerConnection
from logferry.gateway.kafka.client import PASSING, KafkaClient, raise_for
from logferry.gateway.kafka.requests import DescribeQuorumRequest, read_controller_ms
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.lifecycle import STATES
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.lanes.staging_topic import RecentPieces
from logferry.gateway.limits import FairShare
from logferry.gateway.metrics import CLOCK_AHEAD, LOOP_LAG, REGISTRY
from logferry.gateway.reading.registry import SessionRegistry
from logferry.gateway.receiver_settings import Receivers
from logferry.gateway.receivers.append import Appender
from logferry.gateway.receivers.archive import RECENT_BYTES, ArchiveApi
from logferry.gateway.receivers.elasticsearch import ElasticsearchApi
from logferry.gateway.receivers.lines import LinesApi
from logferry.gateway.receivers.opentelemetry import OtlpApi
from logferry.gateway.receivers.splunk import SplunkApi
from logferry.gateway.receivers.syslog import SyslogServer
from logferry.gateway.reports.routes import KINDS, ReportsApi
from logferry.gateway.reports.tables import CONFIGS
from logferry.gateway.service import preflight
from logferry.gateway.service.processes import HealthApi, Parts, serve_worker
from logferry.gateway.service.quota_exchange import QuotaExchange
from logferry.gateway.subscriptions import StoredSubscription
from logferry.gateway.tls import load_certificate, server_context
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.gateway.topics.compacted_store import CompactedStore, subscriptions_topic
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.gateway.topics.open_transactions import OpenTransactions
from logferry.gateway.topics.present_lanes import PresentLanes
from logferry.gateway.topics.remote_sources import RemoteSources
from prometheus_client.bridge.graphite import GraphiteBridge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_EXPIRE_INTERVAL_S: Final = 0.25
_RETIRE_INTERVAL_S: Final = 600.0
# A delayed event loop delays every request; measuring it costs one timer, 0.1 % of a core.
_TICK_S: Final = 0.02
_GRAPHITE_TIMEOUT_S: Final = 10.0
_CLOCK_INTERVAL_S: Final = 10.0
_OWNERS_INTERVAL_S: Final = 5.0
_NO_RIGHT_INTERVAL_S: Final = 3600.0


async def serve(config: Config, worker: int, reload: Callable[[], Config]) -> None:
    """Serves as `serve_worker` does; on SIGHUP the quotas and the certificate of syslog are reloaded, too."""
    quotas, settings = Quotas(config), config.receivers.syslog
    context = None
    if settings is not None and settings.tls and config.tls is not None:
        context = server_context(config.tls, settings.client_ca)

    def take_over(fresh: Config) -> None:
        quotas.replace(fresh)
        if context is not None and fresh.tls is not None:
            load_certificate(context, fresh.tls)

    await serve_worker(config, worker, reload, partial(_parts, config, worker, quotas, context), take_over)


async def _parts(
    config: Config,
    worker: int,
    quotas: Quotas,
    syslog_context: ssl.SSLContext | None,
    url: str,
    kafka: KafkaClient,
    gate: Gate,
    stack: AsyncExitStack,
) -> Parts[Lane]:
    lanes = PresentLanes(kafka, config)
    await preflight.check(kafka, config, (), await lanes.read())
    if config.receivers.archive is not None:
        await preflight.make_staging_topic(kafka, config, lanes.number())
    await compare_clocks(kafka)
    topics = TopicCatalog(kafka, config)
    make_lane = partial(Lane, config=config, kafka=kafka, topics=topics, lanes=lanes)
    ownership = Ownership(config, url, kafka, make_lane, lanes.number)
    admission = Admission(config.limits)
    forwarding = Forwarding(config, ownership, admission)
    await forwarding.start()
    stack.push_async_callback(forwarding.stop)
    sessions = SessionRegistry(config, kafka, url, quotas.reads)
    translation = OffsetTranslation(kafka, config.prefix, config.dc)
    remote_sources = RemoteSources(kafka, config.prefix, translation)
    looks_at = partial(_looks_at, ownership.lanes, lanes.number, config.known_dcs | {config.prefix})
    open_transactions = OpenTransactions(kafka, looks_at)
    appender = Appender(config, topics, ownership, forwarding, admission, quotas)
    topic = subscriptions_topic(config.prefix, config.dc)
    subscriptions = CompactedStore(kafka, topic, config.accept_weak_kafka, StoredSubscription.decode)
    reports = [
        ReportsApi(
            kafka,
            admission,
            CompactedStore(
                kafka, kind.topic(config.prefix, config.dc), config.accept_weak_kafka, kind.stored.decode, CONFIGS
            ),
            kind,
        )
        for kind in KINDS
    ]
    subscriptions_api = SubscriptionsApi(config, kafka, admission, subscriptions)
    routes = all_routes(
        gate,
        (
            SourcesApi(config, topics, ownership, forwarding, admission, remote_sources, quotas).add_to,
            *_receivers(config.receivers, appender),
            ConsumersApi(config, kafka, forwarding, admission, sessions, url, gate, translation).add_to,
            ReadApi(
                config, kafka, translation, FairShare(config.limits.reads_bytes), sessions, gate, quotas.reads
            ).add_to,
            StatusApi(config, kafka, topics, ownership, forwarding, quotas, sessions, open_transactions, gate).add_to,
            subscriptions_api.add_to,
            *(one.add_to for one in reports),
            AdminLogApi(kafka, admin_log_topic(config.group)).add_to,
            HealthApi(ownership, REGISTRY).add_to,
            ConsoleApi().add_to,
        ),
    )
    routes.clock = kafka.clock
    routes.charge = lambda name, request: quotas.take_request(name, cast(CallerConnection, request.protocol))
    if config.admin_log_days:
        admin_log = AdminLog(kafka, config.group, url, config.admin_log_days, config.accept_weak_kafka)
        routes.observe, routes.observed = admin_log.observe, ACTS
        ownership.run_in_background(admin_log.run())
        stack.push_async_callback(admin_log.stop)
    exchange = QuotaExchange(kafka, config.group, url, config.accept_weak_kafka, quotas, partial(_others, ownership))
    REGISTRY.register(TokenCollector(gate))
    REGISTRY.register(LaneCollector(ownership.lanes, lambda: ownership.view.owners))
    for work in (
        expire_requests(ownership),
        retire_sources(ownership, kafka.clock, config.source_retention_ms),
        watch_clocks(kafka),
        topics.health.watch(kafka, topics.min_in_sync),
        open_transactions.watch(),
        watch_owners(subscriptions_api, gate, ownership),
        watch_loop(),
        exchange.publish(),
        exchange.listen(),
        lanes.watch(partial(_lanes_changed, ownership, lanes)),
    ):
        ownership.run_in_background(work)
    if config.graphite is not None:
        ownership.run_in_background(send_to_graphite(config.graphite, config.dc, worker))
    if config.receivers.syslog is None:
        return Parts(ownership, routes, config.limits, sessions.stop)
    syslog = SyslogServer(appender, gate, config.receivers.syslog)
    await syslog.start(syslog_context)

    async def before_close() -> None:
        await asyncio.gather(sessions.stop(), syslog.stop())

    return Parts(ownership, routes, config.limits, before_close)


def _receivers(settings: Receivers, appender: Appender) -> Iterator[Callable[[Routes], None]]:
    """The routes of the receivers that are on."""
    if settings.is_on:
        yield appender.add_to
    if settings.lines:
        yield LinesApi(appender).add_to
    if settings.elasticsearch:
        yield ElasticsearchApi(appender).add_to
    if settings.splunk:
        yield SplunkApi(appender).add_to
    if settings.otlp:
        yield OtlpApi(appender).add_to
    if settings.archive is not None:
        recent = RecentPieces(RECENT_BYTES, settings.archive.commit_within_s)
        yield ArchiveApi(appender, settings.archive, recent).add_to


def _others(ownership: Ownership[Lane]) -> set[str] | None:
    """All other workers of the group, since any of them has callers; None: it was not seen yet."""
    view = ownership.view
    return None if view.seen_ms is None else {*view.members, *view.owners.values()} - {ownership.url}


def _looks_at(
    held: Collection[int], lanes: Callable[[], int], prefixes: frozenset[str], topic: str, partition: int
) -> bool:
    """The topics of all data centres, and logferry's own, divided among the workers by lane. For any thread."""
    return topic.partition(".")[0] in prefixes and lane_of(f"{topic}-{partition}", lanes()) in held


def _lanes_changed(ownership: Ownership[Lane], lanes: PresentLanes) -> None:
    """The lanes that have not noticed it are opened again, with the states that they have now."""
    for lane in ownership.lanes.values():
        if not lane.table.count.is_as(lanes.count):
            lane.invalidate()
    ownership.reassign()


async def expire_requests(ownership: Ownership[Lane]) -> None:
    """One clock for all requests costs less than one for each."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_EXPIRE_INTERVAL_S)
        for lane in ownership.held():
            lane.expire(loop.time())


async def retire_sources(ownership: Ownership[Lane], clock: BrokerClock, retention_ms: int) -> None:
    """Forgets sources that were silent for the retention; searches a few times per retention.

    Not while the clocks of host and brokers differ: nobody knows then how long a source was silent.
    """
    interval_s = min(_RETIRE_INTERVAL_S, retention_ms / 4000)
    while True:
        await asyncio.sleep(interval_s)
        for lane in list(ownership.lanes.values()):
            if clock.stop is None:
                await lane.find_expired(clock.now_ms())


async def watch_owners(subscriptions: SubscriptionsApi, gate: Gate, ownership: Ownership[Lane]) -> None:
    """Pauses subscriptions of callers that have lost the right; one of the workers does it.

    Not without tokens, nor in a Kafka where the gateway may not see the subscriptions: then it can make none, either.
    """
    while True:
        await asyncio.sleep(_OWNERS_INTERVAL_S)
        if 0 in ownership.lanes and gate.settings:
            try:
                await subscriptions.pause_orphans(gate)
            except TopicAuthorizationFailedError:
                await asyncio.sleep(_NO_RIGHT_INTERVAL_S)
            except (KafkaError, OSError, TimeoutError):
                continue


async def compare_clocks(kafka: KafkaClient, before: str | None = None) -> str | None:
    """Asks for the brokers' time. Returns the warning about the clocks, which is logged where it is a new one."""
    clock = kafka.clock
    try:
        await _ask_time(kafka)
    except (KafkaError, OSError, TimeoutError) as error:
        clock.failed(f"Kafka does not say its time: {error!r}")
    CLOCK_AHEAD.set(math.nan if clock.ahead_s is None else clock.ahead_s)
    after = clock.warning
    if after is not None and before is None:
        log.event("clock_differs", reason=after)
    if after is None and before is not None:
        log.event("clocks_agree")
    return after


async def _ask_time(kafka: KafkaClient) -> None:
    """Sets the clock by the first broker that answers; any passes the question on to the active controller."""
    for node, _host, _port in kafka.brokers():
        asked_s = kafka.clock.boot_s()
        try:
            code, now_ms = read_controller_ms(await kafka.send(node, DescribeQuorumRequest()))
        except PASSING:
            continue
        raise_for(code, "DescribeQuorum takes the right to describe the cluster")
        if now_ms:
            return kafka.clock.answered(now_ms, asked_s)
    raise NodeNotReadyError("no broker answers")


async def watch_clocks(kafka: KafkaClient) -> None:
    """Compares the clocks again and again: one may be set while the worker runs."""
    warning = kafka.clock.warning
    while True:
        await asyncio.sleep(_CLOCK_INTERVAL_S)
        warning = await compare_clocks(kafka, warning)


# ---- telemetry ---------------------------------------------------------------------------------------------------


class LaneCollector(Collector):
    """This worker's lanes and their content at the moment, and the last known owners of all lanes.

    Safe to call from another thread.
    """

    def __init__(self, lanes: Mapping[int, Lane], owners: Callable[[], Mapping[int, str]]) -> None:
        self._lanes, self._owners = lanes, owners

    def collect(self) -> Iterator[GaugeMetricFamily]:
        states = GaugeMetricFamily(
            "logferry_lane_state", "1 for the present state of a lane of this worker", labels=["lane", "state"]
        )
        queued = GaugeMetricFamily(
            "logferry_lane_queued_bytes", "Bytes of requests that wait in a lane", labels=["lane"]
        )
        sources = GaugeMetricFamily("logferry_lane_sources", "Sources in a lane", labels=["lane"])
        receipts = GaugeMetricFamily(
            "logferry_lane_receipts", "Requests with a key that a lane remembers", labels=["lane"]
        )
        uploads = GaugeMetricFamily(
            "logferry_lane_uploads", "Transactions of the archive that are open in a lane", labels=["lane"]
        )
        staged = GaugeMetricFamily(
            "logferry_lane_staged_bytes", "Bytes of pieces that a lane keeps of open transactions", labels=["lane"]
        )
        for number, lane in list(self._lanes.items()):
            for state in STATES:
                states.add_metric([str(number), state], float(lane.state == state))
            queued.add_metric([str(number)], lane.queued_bytes)
            sources.add_metric([str(number)], len(lane.table))
            receipts.add_metric([str(number)], len(lane.table.receipts))
            uploads.add_metric([str(number)], len(lane.table.uploads))
            staged.add_metric([str(number)], lane.table.uploads.staged.used)
        owners = GaugeMetricFamily("logferry_lane_owner", "1 for the worker that owns a lane", labels=["lane", "owner"])
        for number, url in sorted(self._owners().items()):
            owners.add_metric([str(number), url], 1)
        yield from (states, queued, sources, receipts, uploads, staged, owners)


class TokenCollector(Collector):
    """When the tokens of callers end. Safe to call from another thread."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ends = GaugeMetricFamily(
            "logferry_token_expires_timestamp_seconds",
            "Unix time from which on a caller has no valid token; callers whose tokens have no end are left out",
            labels=["token"],
        )
        for name, until_s in self._gate.ends():
            ends.add_metric([name], until_s)
        yield ends


async def watch_loop() -> None:
    """Measures the delay of a timer until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _TICK_S
        await asyncio.sleep(_TICK_S)
        LOOP_LAG.observe(max(0.0, loop.time() - due))


def graphite_prefix(settings: Graphite, dc: str, worker: int, host: str) -> str:
    """The name prefix of a worker's metrics: each worker counts for itself."""
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", host)
    return f"{settings.prefix}.{dc}.{name}.worker-{worker}"


async def send_to_graphite(settings: Graphite, dc: str, worker: int) -> None:
    """Sends all metrics once in each interval until it is cancelled. An unreachable Graphite is logged once."""
    bridge = GraphiteBridge(
        (settings.host, settings.port), registry=REGISTRY, timeout_seconds=_GRAPHITE_TIMEOUT_S, tags=settings.tags
    )
    prefix = graphite_prefix(settings, dc, worker, socket.gethostname())
    is_away = False
    while True:
        await asyncio.sleep(settings.interval_s)
        was_away, is_away = is_away, False
        try:
            # In a thread, for it is a blocking socket.
            await asyncio.to_thread(bridge.push, prefix)
        except Exception as error:  # noqa: BLE001 - telemetry never ends a worker
            is_away = True
            if not was_away:
                log.event("graphite_unreachable", host=settings.host, port=settings.port, error=str(error))
        if was_away and not is_away:
            log.event("graphite_back", host=settings.host, port=settings.port)
