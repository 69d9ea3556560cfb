"""``GET /v1/status``: what this worker does and what is wrong with it, for an operator.

It answers within a few seconds whatever is away, and never with a secret. It names topics, errors and other workers,
so only who may administer everything gets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Final, Literal, cast

from aiohttp import web
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError
from logferry.gateway.api.schemas import (
    BrokerStatus,
    GroupStatus,
    KafkaStatus,
    LaneStatus,
    PartitionsStatus,
    Status,
    ThrottledStatus,
    Usage,
    WaitStatus,
)
from logferry.gateway.config import Config
from logferry.gateway.course import now_ms
from logferry.gateway.http.auth import Right
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.metadata_request import TopicView
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.metrics import CONNECTIONS, IN_FLIGHT, SESSIONS
from prometheus_client import Gauge

_LOOK_S: Final = 2.0
_EXAMPLES: Final = 10
_KAFKAS_OWN: Final = ("__transaction_state", "__consumer_offsets")


@dataclass(frozen=True, slots=True)
class StatusApi:
    """The handler. Made when the worker starts."""

    config: Config
    kafka: Kafka
    ownership: Ownership[Lane]
    quotas: Quotas
    started_ms: int = field(default_factory=now_ms)

    def add_to(self, routes: Routes) -> None:
        routes.add("GET", "/v1/status", "status", self.get, Right.EVERYTHING)

    async def get(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        kafka = await self._kafka()
        view, lanes, now = self.ownership.view, self.ownership.held(), now_ms()
        status = Status(
            version=version("logferry"),
            dc=self.config.dc,
            url=self.ownership.url,
            now_ms=now,
            started_ms=self.started_ms,
            lanes_total=self.config.lanes,
            lanes=[lane_status(lane, self.config.state_topic) for lane in lanes],
            group=GroupStatus(
                name=self.config.group,
                members=view.members,
                owners={str(lane): url for lane, url in sorted(view.owners.items())},
                seen_ms=view.seen_ms,
                error=view.error,
            ),
            kafka=kafka,
            limits=self._limits(lanes),
            throttled=[
                ThrottledStatus(
                    scope=cast(Literal["token", "topic"], scope),
                    name=name,
                    count=count,
                    wait_s=wait_s,
                    last_ms=now - int(ago_s * 1000),
                )
                for scope, name, count, wait_s, ago_s in self.quotas.throttled()
            ],
        )
        return json_response(status.model_dump())

    def _limits(self, lanes: Iterable[Lane]) -> dict[str, Usage]:
        limits = self.config.limits
        return {
            "process_bytes": Usage(used=_value(IN_FLIGHT), limit=limits.process_bytes),
            "lane_bytes": Usage(used=max((lane.queued_bytes for lane in lanes), default=0), limit=limits.lane_bytes),
            "lane_sources": Usage(used=max((len(lane.table) for lane in lanes), default=0), limit=limits.lane_sources),
            "connections": Usage(used=_value(CONNECTIONS), limit=limits.connections),
            "sessions": Usage(used=_value(SESSIONS), limit=limits.sessions),
        }

    async def _kafka(self) -> KafkaStatus:
        brokers = await asyncio.gather(*(_broker(self.kafka.options, *known) for known in self.kafka.brokers()))
        reachable = any(broker.error is None for broker in brokers)
        partitions, error = None, None if reachable else "no broker answers"
        if reachable:
            try:
                async with asyncio.timeout(_LOOK_S):
                    topics = (await self.kafka.describe()).topics.values()
                ours = (f"{self.config.dc}.", self.config.state_topic, *_KAFKAS_OWN)
                partitions = partitions_status([topic for topic in topics if topic.name.startswith(ours)])
            except (KafkaError, OSError, TimeoutError) as failure:
                error = f"the topics could not be looked at: {_text(failure)}"
        return KafkaStatus(
            cluster_id=self.kafka.cluster_id,
            reachable=reachable,
            # The group is looked at every few seconds, so that tells when Kafka answered last.
            answered_ms=now_ms() if reachable else self.ownership.view.seen_ms,
            error=error,
            brokers=brokers,
            partitions=partitions,
        )


async def _broker(options: dict[str, Any], node: int, host: str, port: int) -> BrokerStatus:
    """On a connection of its own: others may stand behind what hangs, and do not say why they can't be made."""
    settings = {name: value for name, value in options.items() if name != "bootstrap_servers"}
    try:
        async with asyncio.timeout(_LOOK_S):
            # Connecting takes an answer of the broker: which versions it speaks, and whether it knows us.
            (await create_conn(host, port, **settings)).close()
        error = None
    except (KafkaError, OSError, TimeoutError) as failure:
        error = _text(failure)
    return BrokerStatus(id=node, host=host, port=port, error=error)


def lane_status(lane: Lane, state_topic: str) -> LaneStatus:
    course, wait = lane.course, lane.course.wait
    state = "closing" if not lane.is_open and course.state != "closed" else course.state
    return LaneStatus(
        lane=lane.number,
        topic=state_topic,
        partition=lane.number,
        state=cast(Any, state),
        why=course.why,
        since_ms=course.since_ms,
        sources=len(lane.table),
        in_flight_bytes=lane.queued_bytes,
        transaction_ms=course.transaction_ms,
        committed_ms=course.committed_ms,
        last_wait=None if wait is None else WaitStatus.model_validate(asdict(wait)),
        last_error=course.error,
        last_error_ms=course.error_ms,
    )


def partitions_status(topics: Iterable[TopicView]) -> PartitionsStatus:
    """Those without a leader come first among the examples."""
    all_of_them = [(topic.name, partition) for topic in topics for partition in topic.partitions]
    lost = [f"{name}-{p.partition}" for name, p in all_of_them if p.leader < 0]
    thin = [f"{name}-{p.partition}" for name, p in all_of_them if p.leader >= 0 and len(p.isr) < len(p.replicas)]
    return PartitionsStatus(
        total=len(all_of_them),
        without_leader=len(lost),
        under_replicated=len(thin),
        examples=[*lost, *thin][:_EXAMPLES],
    )


def _value(gauge: Gauge) -> int:
    return int(next(iter(gauge.collect())).samples[0].value)


def _text(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_LOOK_S:g} s"
    return str(error) or type(error).__name__
