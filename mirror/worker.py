"""One worker of the mirror: its parts, and its work in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from aiokafka import errors
from logferry.gateway.config import ConfigError
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.router import Routes
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.service import preflight
from logferry.gateway.service.processes import Parts, serve_worker
from logferry.gateway.tls import kafka_options
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.mirror.config import MirrorConfig, Remote
from logferry.mirror.lanes.chain import chain_histories, reject_cycles
from logferry.mirror.lanes.consumer_offsets import ConsumerOffsetSync
from logferry.mirror.lanes.lane import MirrorLane
from logferry.mirror.lanes.target_topics import TargetTopics
from logferry.mirror.remote import MemoryBudget, RemoteCluster
from logferry.mirror.status_api import LIMITS, MirrorApi

# How often the stops that end by themselves are looked at.
_RETRY_STOPS_S: Final = 0.5
# The offset history is retained permanently: it is small, also for records that are gone.
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
    await preflight.check(kafka, config, (config.history_topic,))
    await preflight.create_topic(kafka, config, config.history_topic, _HISTORY_CONFIGS)
    await preflight.wait_until_created(kafka, config.history_topic)
    remotes = []
    for remote in config.remotes:
        there = KafkaClient(kafka_options(remote.kafka), f"{config.group}-{remote.dc}")
        stack.push_async_callback(there.close)
        remotes.append((remote, there))
    joined = _Joined(config, url, kafka, remotes)
    ownership, links = joined.ownership, joined.links
    routes = Routes(gate)
    MirrorApi(config, ownership, links, joined.budget, joined.targets, kafka).add_to(routes)
    for link in links.values():
        ownership.run_in_background(link.run())
    ownership.run_in_background(joined.targets.health.watch(kafka, joined.targets.min_in_sync))
    ownership.run_in_background(_retry_stops(ownership))
    if config.carry_positions:
        translation = OffsetTranslation(kafka, config.prefix, config.dc)
        owns = partial(_carries, config, ownership)
        ownership.run_in_background(ConsumerOffsetSync(kafka, links, translation, joined.chained, owns).run())
    return Parts(ownership, routes, LIMITS)


class _Joined:
    """The parts of a worker, and what joins them: each topic that a remote reports goes to the lanes that follow it."""

    def __init__(
        self, config: MirrorConfig, url: str, kafka: KafkaClient, remotes: list[tuple[Remote, KafkaClient]]
    ) -> None:
        self.config, self.kafka = config, kafka
        self.targets = TargetTopics(kafka, config.accept_weak_kafka, alters=config.carry_settings)
        self.budget = MemoryBudget(config.limits.waiting_bytes)
        self.chained = chain_histories(config, remotes)
        self.links: dict[str, RemoteCluster] = {}
        make_lane = partial(
            MirrorLane,
            config=config,
            kafka=kafka,
            targets=self.targets,
            links=self.links,
            budget=self.budget,
            chains=self.chained,
        )
        self.ownership = Ownership(config, url, kafka, make_lane)
        for remote, there in remotes:
            sources = config.sources_of(remote)
            self.links[remote.dc] = RemoteCluster(remote, there, config.limits, self.budget, sources, self._on_topics)
        self._without_cycle: set[str] = set()

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
