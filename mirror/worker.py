"""One worker of the mirror: its parts, and its work in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from aiokafka import errors
from logferry.gateway.config import ConfigError
from logferry.gateway.contract.mirror_state import mirror_lane_of
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.router import Routes
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.error_codes import TOPIC_AUTHORIZATION_FAILED
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.service import preflight
from logferry.gateway.service.processes import Parts, serve_worker
from logferry.gateway.tls import kafka_options
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.gateway.topics.present_lanes import PresentLanes
from logferry.mirror.config import MirrorConfig
from logferry.mirror.lanes.chain import ChainHistories, reject_cycles
from logferry.mirror.lanes.consumer_offsets import ConsumerOffsetSync
from logferry.mirror.lanes.history import HistoryRetention, prune_history
from logferry.mirror.lanes.lane import MirrorLane
from logferry.mirror.lanes.target_topics import TargetTopics
from logferry.mirror.remote import MemoryBudget, RemoteCluster
from logferry.mirror.status_api import LIMITS, MirrorApi

# How often the stops that end by themselves are looked at.
_RETRY_STOPS_S: Final = 0.5
# Kafka removes nothing of the offset history: `HistoryRetention` knows what is needed.
_HISTORY_CONFIGS: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "compression.type": "producer",
    "unclean.leader.election.enable": "false",
}


async def serve(config: MirrorConfig, worker: int, reload: Callable[[], MirrorConfig]) -> None:
    """Mirrors as long as `serve_worker` serves. A remote that is away is waited for."""
    await serve_worker(config, worker, reload, partial(_parts, config))


async def _parts(
    config: MirrorConfig, url: str, kafka: KafkaClient, gate: Gate, stack: AsyncExitStack
) -> Parts[MirrorLane]:
    # First: it names the weakness where no topic can be created like ours.
    lanes = PresentLanes(kafka, config)
    await preflight.check(kafka, config, (config.history_topic,), await lanes.read())
    await preflight.create_topic(kafka, config, config.history_topic, config.lanes, _HISTORY_CONFIGS)
    await preflight.wait_until_created(kafka, config.history_topic)
    targets = TargetTopics(kafka, config.accept_weak_kafka, alters=config.carry_settings, replicas=config.replicas)
    budget = MemoryBudget(config.limits.waiting_bytes)
    chains = ChainHistories({})
    links: dict[str, RemoteCluster] = {}
    make_lane = partial(
        MirrorLane, config=config, kafka=kafka, targets=targets, links=links, budget=budget, chains=chains, lanes=lanes
    )
    ownership = Ownership(config, url, kafka, make_lane, lanes.number)
    without_cycle = set[str]()

    async def on_topics(link: RemoteCluster, topics: dict[str, TopicMetadata]) -> None:
        """Each topic that a remote reports goes to the lanes that follow it."""
        dc = link.remote.dc
        try:
            if link.kafka.cluster_id == kafka.cluster_id:
                raise ConfigError(f"remote {dc}: this is the cluster of {config.dc} itself, a replication cycle")
            try:
                await targets.ensure(link.kafka, topics, link.remote.there)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                # The copies that exist are written all the same.
                link.report_failure(f"the topics of {dc} cannot be created here: {error!r}")
            if dc not in without_cycle:
                await reject_cycles(chains, link.remote, topics, targets.known)
                without_cycle.add(dc)
            hidden = await _hidden(link, topics, ownership.lanes.values())
        except (errors.KafkaError, OSError, TimeoutError) as error:
            link.report_failure(f"whether {dc} mirrors topics from here cannot be read: {error!r}")
            return
        for lane in list(ownership.lanes.values()):
            lane.adopt(link, topics, hidden)

    for remote in config.remotes:
        there = KafkaClient(kafka_options(remote.kafka), f"{config.group}-{remote.dc}")
        stack.push_async_callback(there.close)
        if set(remote.taken) != {remote.dc}:
            # The mirror there must have the same prefix as this one.
            chains.histories[remote.dc] = OffsetTranslation(there, config.prefix, remote.dc)
        sources = config.sources_of(remote)
        links[remote.dc] = RemoteCluster(remote, there, config.limits, budget, sources, on_topics)
    routes = Routes(gate)
    MirrorApi(config, ownership, links, budget, targets, kafka).add_to(routes)
    for link in links.values():
        ownership.run_in_background(link.run())
    ownership.run_in_background(targets.health.watch(kafka, targets.min_in_sync))
    ownership.run_in_background(_retry_stops(ownership))
    ownership.run_in_background(lanes.watch(partial(_lanes_changed, ownership, lanes)))
    translation = OffsetTranslation(kafka, config.prefix, config.dc)
    retention = HistoryRetention(kafka, translation, config.history_topic, config.history_retention_ms)
    ownership.run_in_background(prune_history(retention, ownership.lanes, lanes.number))
    if config.carry_positions:
        owns = partial(_carries, lanes, ownership)
        ownership.run_in_background(ConsumerOffsetSync(kafka, links, translation, chains, owns).run())
    return Parts(ownership, routes, LIMITS)


async def _hidden(link: RemoteCluster, topics: Collection[str], lanes: Iterable[MirrorLane]) -> Collection[str]:
    """Of the topics that are copied and not among these: those that the remote has, and does not let the mirror see."""
    copied = {p.topic for lane in lanes for p in lane.partitions.values() if p.dc == link.remote.dc}
    there = {link.remote.there(name): name for name in copied - {*topics}}
    found = (await link.kafka.describe(sorted(there))).errors if there else {}
    return {there[name] for name, code in found.items() if code == TOPIC_AUTHORIZATION_FAILED}


def _carries(lanes: PresentLanes, ownership: Ownership[MirrorLane], group: str) -> bool:
    """Whether the positions of a consumer group are this worker's: those of its lanes, also of one that is stopped."""
    return mirror_lane_of(group, 0, lanes.number()) in ownership.lanes


def _lanes_changed(ownership: Ownership[MirrorLane], lanes: PresentLanes) -> None:
    """The lanes that have not noticed it are opened again, with the checkpoints that they have now."""
    for lane in ownership.lanes.values():
        if not lane.count.is_as(lanes.count):
            lane.invalidate()
    ownership.reassign()


async def _retry_stops(ownership: Ownership[MirrorLane]) -> None:
    while True:
        await asyncio.sleep(_RETRY_STOPS_S)
        for lane in ownership.held():
            lane.retry_stops()
