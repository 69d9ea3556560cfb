"""The reports of quotas between workers, by the real topic: what was taken before a worker listens is no debt to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaProducer
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.shared_limits import QuotaReport
from logferry.gateway.http.shares import LimitUsage
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.service.quota_exchange import QuotaExchange, quota_usage_topic
from logferry.ops.stack.kafka_cluster import KafkaCluster

RATE = 1000.0
KEY = ("token", "a", "bytes")
MINE, OTHER = "http://mine", "http://other"


class Reports:
    """What the other worker publishes, and one worker that listens."""

    def __init__(self, kafka: KafkaClient, producer: AIOKafkaProducer) -> None:
        self.kafka, self.producer, self.group = kafka, producer, f"quotas-{time.time_ns()}"
        tokens = [{"name": "a", "sha256": "0" * 64, "write": ["*"], "bytes_per_s": RATE}]
        given = {"dc": "dc1", "kafka": {"bootstrap_servers": "x:1"}, "tokens": tokens}
        self.quotas = Quotas(Config.model_validate(given))
        self.quotas.shared.report({OTHER})
        self.quotas.take("a", "dc1.x")
        self.exchange = QuotaExchange(kafka, self.group, MINE, ["replication", "min-isr"], self.quotas, lambda: {OTHER})

    async def publish(self, taken: float, *, more: int = 0) -> None:
        """``more``: limits that are in the report, too."""
        usage = {("topic", f"dc1.{number:0200d}", "bytes"): LimitUsage(1.0, 1.0) for number in range(more)}
        data = QuotaReport({KEY: LimitUsage(taken, RATE / 2), **usage}).encode()
        await self.producer.send_and_wait(quota_usage_topic(self.group), data, key=OTHER.encode(), partition=0)

    def heard(self) -> float | None:
        """What the other one took, as far as it was heard."""
        found = self.quotas.shared._workers.get(OTHER)
        return None if found is None else found.taken.get(KEY)

    async def until_heard(self, taken: float) -> None:
        async with asyncio.timeout(60):
            while self.heard() != taken:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(reports: Reports) -> AsyncIterator[None]:
    task = asyncio.create_task(reports.exchange.listen())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def reports(kafka: KafkaCluster) -> AsyncIterator[Reports]:
    client = KafkaClient({"bootstrap_servers": kafka.bootstrap}, "tests")
    await client.start()
    try:
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, max_request_size=1 << 20) as producer:
            found = Reports(client, producer)
            await found.exchange._create()
            yield found
    finally:
        await client.close()


async def test_what_others_took_before_a_worker_listens_is_no_debt(reports: Reports) -> None:
    """It starts on minutes of large reports, more than one fetch brings."""
    for number in range(1, 30):
        await reports.publish(number * 100 * RATE, more=500)
    async with listening(reports):
        taken = 3000 * RATE
        async with asyncio.timeout(60):
            while reports.heard() != taken:
                await reports.publish(taken)
                await asyncio.sleep(0.05)
        reports.quotas.take("a", "dc1.x")
        # From then on what it takes counts here, too.
        await reports.publish(taken + 9 * RATE)
        await reports.until_heard(taken + 9 * RATE)
        with pytest.raises(Problem, match="over its quota") as refused:
            reports.quotas.take("a", "dc1.x")
        assert (refused.value.retry_after_s or 0) > 5
