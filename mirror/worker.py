"""One worker process of the mirror: wiring, start, and ordered stop."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Final

from aiohttp import web
from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.config import ConfigError
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.router import Routes
from logferry.gateway.http.server import ListeningSite, Server
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.service import preflight
from logferry.gateway.service.preflight import connect_to_kafka
from logferry.gateway.service.reload import reload_on_hangup
from logferry.gateway.tls import kafka_options, server_context
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.gateway.topics.health import replication
from logferry.mirror.config import MirrorConfig, Remote
from logferry.mirror.lanes.chain import chain_histories, reject_cycles
from logferry.mirror.lanes.consumer_offsets import ConsumerOffsetSync
from logferry.mirror.lanes.lane import MirrorLane
from logferry.mirror.lanes.target_topics import TargetTopics
from logferry.mirror.remote import MemoryBudget, RemoteCluster
from logferry.mirror.status_api import LIMITS, MirrorApi

# How often the stops that end by themselves are looked at.
_RETRY_STOPS_S: Final = 0.5
_DRAIN_S: Final = 5.0


async def serve(config: MirrorConfig, worker: int, reload: Callable[[], MirrorConfig]) -> None:
    """Mirrors until SIGTERM or SIGINT; on SIGHUP reloads tokens and certificate. A remote that is away is waited for.

    Raises KafkaError when Kafka here can't be reached, WeakKafka or ConfigError.
    """
    gc.set_threshold(100_000, 50, 100)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gate = Gate(config)
    context = None if config.tls is None else server_context(config.tls)
    reload_on_hangup(reload, gate, context)
    url = config.url(worker)
    kafka = KafkaClient(kafka_options(config.kafka), url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kafka.close)
        await connect_to_kafka(kafka)
        # First: it names the weakness where no topic can be created like ours.
        await preflight.check(kafka, config, (config.history_topic,))
        await _create_history_topic(kafka, config)
        remotes = []
        for remote in config.remotes:
            there = KafkaClient(kafka_options(remote.kafka), f"{config.group}-{remote.dc}")
            stack.push_async_callback(there.close)
            remotes.append((remote, there))
        parts = _WorkerParts(config, url, kafka, remotes)
        ownership, links = parts.ownership, parts.links
        routes = Routes(gate)
        MirrorApi(config, ownership, links, parts.budget, parts.targets).add_to(routes)
        runner = web.ServerRunner(Server(routes, LIMITS), shutdown_timeout=_DRAIN_S)
        await runner.setup()
        stack.push_async_callback(ownership.stop)
        stack.push_async_callback(runner.cleanup)
        await ListeningSite(runner, config.host, config.port(worker), context).start()
        await ownership.start()
        stack.push_async_callback(ownership.leave)
        for link in links.values():
            ownership.run_in_background(link.run())
        ownership.run_in_background(parts.targets.health.watch(kafka, parts.targets.min_in_sync))
        ownership.run_in_background(_retry_stops(ownership))
        if config.carry_positions:
            translation = OffsetTranslation(kafka, config.prefix, config.dc)
            owns = partial(_carries, config, ownership)
            sync = ConsumerOffsetSync(kafka, links, translation, parts.chained, owns)
            ownership.run_in_background(sync.run())
        log.event("worker_started", url=url, dc=config.dc, worker=worker)
        if config.shows_tokens:
            log.event("tokens_unencrypted", listen=config.listen)
        ownership.failed.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if ownership.failed.done():
            ownership.failed.result()
        log.event("worker_stopping", url=url)
    log.event("worker_stopped", url=url)


class _WorkerParts:
    """The parts of a worker, and what joins them: each topic that a remote reports goes to the lanes that follow it."""

    def __init__(
        self, config: MirrorConfig, url: str, kafka: KafkaClient, remotes: list[tuple[Remote, KafkaClient]]
    ) -> None:
        self.config, self.kafka = config, kafka
        self.targets = TargetTopics(kafka, config.accept_weak_kafka, alters=config.carry_settings)
        self.budget = MemoryBudget(config.limits.waiting_bytes)
        self.chained = chain_histories(config, remotes)
        self.ownership = Ownership(config, url, kafka, self._make_lane)
        self.links: dict[str, RemoteCluster] = {}
        for remote, there in remotes:
            sources = config.sources_of(remote)
            self.links[remote.dc] = RemoteCluster(remote, there, config.limits, self.budget, sources, self._on_topics)
        self._without_cycle: set[str] = set()

    def _make_lane(self, number: int, grace_s: float) -> MirrorLane:
        return MirrorLane(
            number=number,
            grace_s=grace_s,
            confirm_ownership=self.ownership.confirm,
            config=self.config,
            kafka=self.kafka,
            targets=self.targets,
            links=self.links,
            budget=self.budget,
            chains=self.chained,
        )

    async def _on_topics(self, link: RemoteCluster, topics: dict[str, TopicMetadata]) -> None:
        dc = link.remote.dc
        try:
            if link.kafka.cluster_id == self.kafka.cluster_id:
                raise ConfigError(f"remote {dc}: this is the cluster of {self.config.dc} itself, a replication cycle")
            try:
                await self.targets.ensure(link.kafka, topics)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                # The copies that exist are written all the same.
                link.report_failure(f"the topics of {dc} cannot be created here: {error!r}")
            if dc not in self._without_cycle:
                await reject_cycles(self.chained, link.remote, topics, self.targets.known)
                self._without_cycle.add(dc)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            link.report_failure(f"whether {dc} mirrors topics from here cannot be read: {error!r}")
            return
        for lane in list(self.ownership.lanes.values()):
            lane.adopt(link, topics)


def _carries(config: MirrorConfig, ownership: Ownership[MirrorLane], group: str) -> bool:
    """Whether the positions of a consumer group are this worker's: those of its lanes, also of one that is stopped."""
    return config.lane_of(group, 0) in ownership.lanes


async def _retry_stops(ownership: Ownership[MirrorLane]) -> None:
    while True:
        await asyncio.sleep(_RETRY_STOPS_S)
        for lane in ownership.held():
            lane.retry_stops()


async def _create_history_topic(kafka: KafkaClient, config: MirrorConfig) -> None:
    """The offset history is retained permanently: it is small, also for records that are gone."""
    topic = config.history_topic
    if topic in (await kafka.describe([topic])).topics:
        return
    brokers = len((await kafka.describe([])).brokers)
    replicas, in_sync = replication(config.accept_weak_kafka, brokers)
    settings = {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "compression.type": "producer",
        "unclean.leader.election.enable": "false",
        "min.insync.replicas": str(in_sync),
    }
    with suppress(errors.TopicAlreadyExistsError):
        await kafka.create_topic(topic, config.lanes, replicas, settings)
    await preflight.wait_until_created(kafka, topic)
