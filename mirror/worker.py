"""One worker process of the mirror: connects to both sides, joins the group, moves, and leaves in order."""

from __future__ import annotations

import asyncio
import gc
import signal
from contextlib import AsyncExitStack, suppress

from aiohttp import web
from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.arrival import arrive
from logferry.gateway.config import ConfigError
from logferry.gateway.http.server import listen
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.metadata_request import TopicView
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.service import preflight
from logferry.gateway.tls import kafka_options
from logferry.gateway.topics.offset_translation import Translation
from logferry.mirror.carrying import Carrier
from logferry.mirror.config import MirrorConfig
from logferry.mirror.lanes.chain import chains, refuse_circles
from logferry.mirror.lanes.lane import MirrorLane
from logferry.mirror.lanes.target_topics import Targets
from logferry.mirror.remote.cluster import Link
from logferry.mirror.remote.flow_control import Budget
from logferry.mirror.status_api import Api, partitions_of

_SAME_CLUSTER = "would send its topics round in a circle"


async def serve(config: MirrorConfig, worker: int) -> None:
    """Mirrors until SIGTERM or SIGINT. A remote that is away is waited for.

    Raises KafkaError when Kafka here can't be reached, WeakKafka or ConfigError.
    """
    gc.set_threshold(100_000, 50, 100)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    url = config.url(worker)
    kafka = Kafka(kafka_options(config.kafka), url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kafka.close)
        await arrive(kafka)
        await _make_pairs_topic(kafka, config)
        await preflight.check(kafka, config, (config.pairs_topic,))
        targets, budget = Targets(kafka), Budget(config.limits.waiting_bytes)
        by_dc: dict[str, Link] = {}
        remotes = []
        for remote in config.remotes:
            there = Kafka(kafka_options(remote.kafka), f"{config.group}-{remote.dc}")
            stack.push_async_callback(there.close)
            remotes.append((remote, there))
        chained, seen = chains(config, remotes), set[str]()

        def make_lane(number: int, grace_s: float) -> MirrorLane:
            return MirrorLane(
                number=number,
                grace_s=grace_s,
                confirm_ownership=ownership.confirm,
                config=config,
                kafka=kafka,
                targets=targets,
                links=by_dc,
                budget=budget,
                chains=chained,
            )

        ownership = Ownership(config, url, kafka, make_lane)

        async def on_topics(link: Link, topics: dict[str, TopicView]) -> None:
            try:
                if link.kafka.cluster_id == kafka.cluster_id:
                    raise ConfigError(
                        f"remote {link.remote.dc} is the cluster of {config.dc} itself; it {_SAME_CLUSTER}"
                    )
                await targets.ensure(link.kafka, topics)
                if link.remote.dc not in seen:
                    await refuse_circles(chained, link.remote, topics, targets.known)
                    seen.add(link.remote.dc)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                link.is_troubled(f"the topics of {link.remote.dc} cannot be made here: {error!r}")
                return
            for lane in list(ownership.lanes.values()):
                lane.adopt(link, topics)

        for remote, there in remotes:
            sources = config.sources_of(remote)
            by_dc[remote.dc] = Link(remote, there, config.limits, budget, sources, on_topics)
        runner = web.AppRunner(Api(config, ownership, by_dc, budget).application(), access_log=None)
        await runner.setup()
        stack.push_async_callback(ownership.stop)
        stack.push_async_callback(runner.cleanup)
        await listen(web.TCPSite(runner, config.host, config.port(worker)), f"{config.host}:{config.port(worker)}")
        await ownership.start()
        stack.push_async_callback(ownership.leave)
        for link in by_dc.values():
            ownership.keep_up(link.run())
        if config.carry_positions:
            translation = Translation(kafka, config.prefix, config.dc)
            ownership.keep_up(Carrier(kafka, by_dc, translation, chained, lambda: partitions_of(ownership)).run())
        log.event("info", "worker_started", url=url, dc=config.dc, worker=worker)
        ownership.failed.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if ownership.failed.done():
            ownership.failed.result()
        log.event("info", "worker_stopping", url=url)
    log.event("info", "worker_stopped", url=url)


async def _make_pairs_topic(kafka: Kafka, config: MirrorConfig) -> None:
    """The history is kept for ever: what it says of records that are gone is small."""
    topic = config.pairs_topic
    if topic in (await kafka.describe([topic])).topics:
        return
    brokers = len((await kafka.describe([])).brokers)
    settings = {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "compression.type": "producer",
        "unclean.leader.election.enable": "false",
        "min.insync.replicas": "2" if brokers >= 3 else "1",
    }
    with suppress(errors.TopicAlreadyExistsError):
        await kafka.create_topic(topic, config.lanes, min(3, brokers), settings)
    await preflight.appeared(kafka, topic)
