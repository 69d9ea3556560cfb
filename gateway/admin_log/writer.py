"""Writes the log of acts and refusals to a topic: acts to partition 0, refusals to 1, so that none displaces an act.

* No request waits for it, fails by it, or takes memory without a bound: what cannot be written is counted, in
  ``logferry_admin_log_records_total``.
* A record is written within a second or two of the act, and a refusal at the end of its window. A worker that is killed
  in between loses them.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from aiohttp import web
from aiokafka import AIOKafkaProducer, errors
from logferry.gateway import log
from logferry.gateway.admin_log.records import ACTS, REFUSALS, WINDOW_S, Record, Refusals, reason_of, shortened
from logferry.gateway.errors import Problem
from logferry.gateway.http.router import FORWARDED, Observation
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.metrics import ADMIN_LOG
from logferry.gateway.topics.health import replication

PARTITIONS: Final = {"acts": 0, "refusals": 1}
_INTERVAL_S: Final = 1.0
_WRITE_S: Final = 15.0
_PAUSE_S: Final = 0.1
# What waits for Kafka, of each partition.
_WAITING: Final = 1000
_RETENTION_BYTES: Final = 1 << 30


def admin_log_topic(group: str) -> str:
    return f"{group}.admin-log"


class AdminLog:
    """``observe`` is called for each request that may matter; `run` writes until it is cancelled."""

    def __init__(self, kafka: KafkaClient, group: str, url: str, days: int, accepted: Sequence[str]) -> None:
        self._kafka, self.topic, self._url, self._days, self._accepted = (
            *(kafka, admin_log_topic(group), url, days, accepted),
        )
        self._waiting: dict[str, deque[Record]] = {kind: deque() for kind in PARTITIONS}
        self._refusals = Refusals()
        self._is_created = self._is_failing = False

    def observe(self, seen: Observation) -> None:
        """Notes the request if it is an act, or was refused."""
        problem, call = seen.problem, seen.call
        if problem is not None and problem.kind in REFUSALS:
            self._refuse(seen, problem)
        elif seen.route in ACTS:
            # Of a request that another worker answered there is the status alone.
            self._add("acts", self._record(seen, problem, "done" if seen.status < 400 else "failed", seen.status))
        for part in () if call is None else call.refused:
            if part.kind in REFUSALS:
                self._refuse(seen, part)

    def _refuse(self, seen: Observation, problem: Problem) -> None:
        self._refusals.add(self._record(seen, problem, "refused", problem.status), problem.kind)

    def _record(self, seen: Observation, problem: Problem | None, result: str, status: int) -> Record:
        request, call, now_ms = seen.request, seen.call, self._kafka.clock.now_ms()
        refused = None if problem is None else problem.caller
        return {
            "id": uuid.uuid4().hex,
            "at_ms": now_ms,
            "caller": refused if call is None else call.caller.name,
            "address": request.remote,
            "is_forwarded": FORWARDED in request.headers,
            "worker": self._url,
            "act": seen.route,
            "method": request.method,
            "path": shortened(_path(request)),
            "status": status,
            "result": result,
            "reason": reason_of(problem),
            "facts": {} if call is None else call.facts,
            "count": 1,
            "first_ms": now_ms,
        }

    def _add(self, kind: str, record: Record) -> None:
        if len(self._waiting[kind]) < _WAITING:
            self._waiting[kind].append(record)
        else:
            ADMIN_LOG.labels(kind, "lost").inc(record["count"])

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        window_s = loop.time() + WINDOW_S
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if loop.time() >= window_s:
                window_s = loop.time() + WINDOW_S
                self._end_window()
            await self._write()

    async def stop(self) -> None:
        """Writes what there is, within a bounded time; counts what is left."""
        self._end_window()
        await self._write()
        for kind, waiting in self._waiting.items():
            ADMIN_LOG.labels(kind, "lost").inc(sum(record["count"] for record in waiting))
            waiting.clear()

    def _end_window(self) -> None:
        for record in self._refusals.take():
            self._add("refusals", record)

    async def _write(self) -> None:
        """What is not written now waits for the next time."""
        if not any(self._waiting.values()):
            return
        try:
            async with asyncio.timeout(_WRITE_S):
                await self._create()
                await self._send()
        except Exception as error:  # noqa: BLE001  the log never ends a worker
            self._is_created = False
            if not self._is_failing:
                log.event("admin_log_failed", topic=self.topic, error=repr(error))
            self._is_failing = True
        else:
            self._is_failing = False

    async def _create(self) -> None:
        if self._is_created:
            return
        found = (await self._kafka.describe([self.topic])).topics.get(self.topic)
        if found is None:
            replicas, in_sync = replication(self._accepted, len((await self._kafka.describe([])).brokers))
            settings = {
                "cleanup.policy": "delete",
                "retention.ms": str(self._days * 86_400_000),
                "retention.bytes": str(_RETENTION_BYTES),
                "min.insync.replicas": str(in_sync),
                "unclean.leader.election.enable": "false",
            }
            with suppress(errors.TopicAlreadyExistsError):  # by another worker
                await self._kafka.create_topic(self.topic, len(PARTITIONS), replicas, settings)
        while found is None or any(partition.leader < 0 for partition in found.partitions):
            await asyncio.sleep(_PAUSE_S)
            found = (await self._kafka.describe([self.topic])).topics.get(self.topic)
        self._is_created = True

    async def _send(self) -> None:
        async with AIOKafkaProducer(acks="all", enable_idempotence=True, **self._kafka.options) as producer:
            for kind, waiting in self._waiting.items():
                records = [*waiting]
                sent = [
                    await producer.send(self.topic, json.dumps(record).encode(), partition=PARTITIONS[kind])
                    for record in records
                ]
                await asyncio.gather(*sent)
                for record in records:
                    waiting.popleft()
                    ADMIN_LOG.labels(kind, "written").inc(record["count"])


def _path(request: web.BaseRequest) -> str:
    """Without the query, and as text that any reader of JSON takes: it may hold what is not UTF-8."""
    return request.raw_path.partition("?")[0].encode("utf-8", "replace").decode()
