"""The status of this worker, of all workers, of the mirror's and deliver's, for an operator; the caller's rights.

A status answers within a few seconds, whatever is down, and never with a secret. It names topics, errors and other
workers, so it needs the right to administer everything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, Final, cast

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway.api import status_schemas
from logferry.gateway.api.diagnosis import AllWorkers, SilentWorker, as_document, diagnose
from logferry.gateway.api.forwarding import Forwarding, is_worker
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.aiokafka_internals import create_conn
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.lifecycle import now_ms
from logferry.gateway.lanes.ownership import Ownership
from logferry.gateway.metrics import CONNECTIONS, IN_FLIGHT, SESSIONS
from logferry.gateway.reading.registry import SessionRegistry
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.gateway.topics.open_transactions import OpenTransactions
from prometheus_client import Gauge

_DEADLINE_S: Final = 2.0
# Of another worker's answer: its own looks at Kafka have two deadlines.
_ANSWER_S: Final = 6.0
_EXAMPLES: Final = 10
_STRANGER: Final = "stranger.invalid:1"
_KAFKAS_OWN: Final = ("__transaction_state", "__consumer_offsets")


@dataclass(frozen=True, slots=True)
class StatusApi:
    """The handlers; created when the worker starts."""

    config: Config
    kafka: KafkaClient
    topics: TopicCatalog
    ownership: Ownership[Lane]
    forwarding: Forwarding
    quotas: Quotas
    sessions: SessionRegistry
    open_transactions: OpenTransactions
    gate: Gate
    started_ms: int = field(default_factory=now_ms)

    def add_to(self, routes: Routes) -> None:
        routes.add("GET", "/v1/status", "status", self.get, Right.EVERYTHING)
        routes.add("GET", "/v1/workers", "workers", self.workers, Right.EVERYTHING)
        for service in ("mirror", "deliver"):
            routes.add("GET", f"/v1/{service}", service, partial(self._service, service), Right.EVERYTHING)
        routes.add("GET", "/v1/caller", "caller", self.caller, Right.KNOWN)

    async def get(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        return json_response((await self._status()).model_dump())

    async def workers(self, call: Call) -> web.StreamResponse:
        """The status of every worker that the group knows, and what is wrong with them all."""
        call.knows_only()
        view = self.ownership.view
        others = sorted({*view.members, *view.owners.values()} - {self.ownership.url})
        own, *answers = await asyncio.gather(self._status(), *(self._ask(call, url, "the worker") for url in others))
        known, silent = {self.ownership.url: own}, dict[str, SilentWorker]()
        for url, answer in zip(others, answers, strict=True):
            if isinstance(answer, str):
                silent[url] = SilentWorker(answer)
            else:
                # A newer worker may send more fields.
                known[url] = status_schemas.Status.model_validate(answer, extra="ignore")
        service = AllWorkers(known, silent)
        return json_response(as_document(diagnose(service), now_ms() / 1000, service))

    async def _service(self, service: str, call: Call) -> web.StreamResponse:
        """The status of each worker of the mirror or of deliver in this data centre, asked with the caller's token."""
        call.knows_only()
        group = f"{self.config.prefix}.{service}.{self.config.dc}"
        members = await self.kafka.group_assignment(group, f"{group}.state")
        if members is None:
            raise Problem("not-owner-yet", f"the workers of {service} are changing; ask again")
        urls = sorted(members)
        answers = await asyncio.gather(*(self._ask(call, url, f"the worker of {service}") for url in urls))
        said = ({"error": answer} if isinstance(answer, str) else answer for answer in answers)
        return json_response({"group": group, "workers": dict(zip(urls, said, strict=True))})

    async def caller(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        caller, dcs = call.caller, sorted(self.config.known_dcs)
        rights = {name: not getattr(caller, name).is_nothing for name in ("write", "read", "admin")}
        place = {"dc": self.config.dc, "data_centres": dcs, "version": version("logferry")}
        return json_response({"name": caller.name, **place, **rights, "everything": caller.admin.is_everything})

    async def _ask(self, call: Call, url: str, who: str) -> dict[str, Any] | str:
        """The status of another worker, or why there is none."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self.forwarding.get(call.request, url, "/v1/status", who)
        except Problem as problem:
            return problem.detail
        except TimeoutError:
            return f"no answer within {_ANSWER_S:g} s"
        body = bytes(cast(bytes, answer.body))
        document = await computed(len(body), json.loads, body)
        return cast(dict[str, Any], document) if answer.status == 200 else f"{answer.status}: {document.get('detail')}"

    async def _status(self) -> status_schemas.Status:
        kafka = await self._kafka()
        view, lanes, now = self.ownership.view, self.ownership.held(), now_ms()
        refused = [(*tp, known.why, known.since_ms) for tp, known in sorted(self.topics.health.refused().items())]
        weak = [(topic, None, why, None) for topic, why in self.topics.weak().items()]
        return status_schemas.Status(
            version=version("logferry"),
            dc=self.config.dc,
            url=self.ownership.url,
            now_ms=now,
            started_ms=self.started_ms,
            lanes_total=self.ownership.number_of_lanes(),
            lanes=[lane_status(lane, self.config.state_topic) for lane in lanes],
            group=status_schemas.GroupStatus(
                name=self.config.group,
                members=view.members,
                owners={str(lane): url for lane, url in sorted(view.owners.items())},
                seen_ms=view.seen_ms,
                error=view.error,
            ),
            kafka=kafka,
            refused=[
                status_schemas.RefusedStatus(topic=topic, partition=number, why=why, since_ms=since_ms)
                for topic, number, why, since_ms in [*refused, *weak]
            ],
            open_transactions=list(self.open_transactions.overdue.values()),
            warnings=[
                *warnings(self.config, self.kafka.clock),
                *self.kafka.risks,
                *self.sessions.warnings(),
                *self.gate.warnings(),
                *self.quotas.warnings(),
            ],
            limits=self._limits(lanes),
            throttled=[
                status_schemas.ThrottledStatus(
                    scope=scope, name=name, count=count, wait_s=wait_s, last_ms=now - int(ago_s * 1000)
                )
                for scope, name, count, wait_s, ago_s in self.quotas.throttled()
            ],
        )

    def _limits(self, lanes: Iterable[Lane]) -> dict[str, status_schemas.Usage]:
        used = {
            "process_bytes": _value(IN_FLIGHT),
            "lane_bytes": max((lane.queued_bytes for lane in lanes), default=0),
            "lane_sources": max((len(lane.table) for lane in lanes), default=0),
            "connections": _value(CONNECTIONS),
            "sessions": _value(SESSIONS),
        }
        limits = self.config.limits
        return {name: status_schemas.Usage(used=value, limit=getattr(limits, name)) for name, value in used.items()}

    async def _kafka(self) -> status_schemas.KafkaStatus:
        brokers = await asyncio.gather(*(_broker(self.kafka.options, *known) for known in self.kafka.brokers()))
        reachable = any(broker.error is None for broker in brokers)
        partitions, error = None, None if reachable else "no broker answers"
        if reachable:
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    topics = (await self.kafka.describe()).topics.values()
                ours = (f"{self.config.dc}.", self.config.state_topic, *_KAFKAS_OWN)
                partitions = partitions_status([topic for topic in topics if topic.name.startswith(ours)])
            except (KafkaError, OSError, TimeoutError) as failure:
                error = f"the topics cannot be described: {_text(failure)}"
        return status_schemas.KafkaStatus(
            cluster_id=self.kafka.cluster_id,
            reachable=reachable,
            # The group is read every few seconds, which shows when Kafka answered last.
            answered_ms=now_ms() if reachable else self.ownership.view.seen_ms,
            error=error,
            brokers=brokers,
            partitions=partitions,
        )


def warnings(config: Config, clock: BrokerClock) -> list[str]:
    """Risks of the configuration that an operator may have accepted, and clocks that differ."""
    found = config.warnings
    # With an authority of their own, strangers have no certificate.
    is_verified = config.tls is not None and config.tls.ca is not None
    scheme = "http" if config.tls is None else "https"
    if config.tokens and not is_verified and is_worker(config, f"{scheme}://{_STRANGER}"):
        what = f"whoever may join the group {config.group} in Kafka can get tokens of callers"
        found.append(f"{what}: list the hosts of all workers in worker_hosts")
    return found if clock.warning is None else [*found, clock.warning]


async def _broker(options: dict[str, Any], node: int, host: str, port: int) -> status_schemas.BrokerStatus:
    """Connects separately: the shared connections may hang, and do not report why they cannot be opened."""
    settings = {name: value for name, value in options.items() if name != "bootstrap_servers"}
    try:
        async with asyncio.timeout(_DEADLINE_S):
            # Connecting includes an answer of the broker: its versions, and authentication.
            (await create_conn(host, port, **settings)).close()
        error = None
    except (KafkaError, OSError, TimeoutError) as failure:
        error = _text(failure)
    return status_schemas.BrokerStatus(id=node, host=host, port=port, error=error)


def lane_status(lane: Lane, state_topic: str) -> status_schemas.LaneStatus:
    lane_state, wait = lane.lane_state, lane.lane_state.wait
    state = "closing" if not lane.is_open and lane_state.state != "closed" else lane_state.state
    return status_schemas.LaneStatus(
        lane=lane.number,
        topic=state_topic,
        partition=lane.number,
        state=cast(Any, state),
        why=lane_state.why,
        since_ms=lane_state.since_ms,
        sources=len(lane.table),
        in_flight_bytes=lane.queued_bytes,
        transaction_ms=lane_state.transaction_ms,
        committed_ms=lane_state.committed_ms,
        last_wait=None if wait is None else status_schemas.WaitStatus.model_validate(asdict(wait)),
        last_error=lane_state.error,
        last_error_ms=lane_state.error_ms,
    )


def partitions_status(topics: Iterable[TopicMetadata]) -> status_schemas.PartitionsStatus:
    """Counts; partitions without a leader come first among the examples."""
    all_of_them = [(topic.name, partition) for topic in topics for partition in topic.partitions]
    lost = [f"{name}-{p.partition}" for name, p in all_of_them if p.leader < 0]
    thin = [f"{name}-{p.partition}" for name, p in all_of_them if p.leader >= 0 and len(p.isr) < len(p.replicas)]
    return status_schemas.PartitionsStatus(
        total=len(all_of_them),
        without_leader=len(lost),
        under_replicated=len(thin),
        examples=[*lost, *thin][:_EXAMPLES],
    )


def _value(gauge: Gauge) -> int:
    return int(next(iter(gauge.collect())).samples[0].value)


def _text(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_DEADLINE_S:g} s"
    return str(error) or type(error).__name__
