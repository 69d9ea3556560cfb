"""Lanes that are opened again without a rival: after the time-out of their transactions, and after Kafka was frozen."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from logferry.gateway.kafka.transaction_coordinator import TRANSACTION_TIMEOUT_MS
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.checker import read_back, violations
from tests.support.clients import ALL_KINDS, Load
from tests.support.gateway import gateway

# A transaction gives up after 20 s; after half a minute a broker knows of none for a moment.
_FROZEN_S = 34


@pytest.mark.long
async def test_a_worker_without_a_rival_is_fenced_by_the_time_out_of_its_transaction(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """Frozen in the middle of transactions for longer than Kafka keeps them open, it must come back by itself."""
    with gateway(kafka, tmp_path, "alone", workers=1) as running:
        topic = await running.make_topic(topic_name, 4)
        [worker] = running.workers
        async with Load(topic_name, running.urls, seed=22, kinds=ALL_KINDS) as load:
            for _ in range(2):
                await load.acknowledged(300)
                worker.child.send(signal.SIGSTOP)
                await asyncio.sleep(TRANSACTION_TIMEOUT_MS / 1000 + 12)  # Kafka looks for them every ten seconds
                worker.child.send(signal.SIGCONT)
                await load.acknowledged(300)
        assert '"lane_failed"' in worker.child.log.read_text(), "no transaction was under way when it froze"
    assert violations(load.history, await read_back(kafka.bootstrap, topic)) == []


@pytest.mark.long
async def test_kafka_freezes_for_longer_than_a_transaction_may_take(topic_name: str, tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    with (
        KafkaCluster("frozen", tmp_path / "kafka") as kafka,
        gateway(kafka, tmp_path / "workers", "frozen", 2) as running,
    ):
        topic = await running.make_topic(topic_name, 4)
        pids = running.pids
        async with Load(topic_name, running.urls, seed=23, kinds=ALL_KINDS) as load:
            for _ in range(2):
                await load.acknowledged(300)
                kafka.kill(1, signal.SIGSTOP)
                await asyncio.sleep(_FROZEN_S)  # the fault itself
                kafka.kill(1, signal.SIGCONT)
                await load.acknowledged(300, within_s=120)
        assert running.pids == pids
        assert all('"lane_failed"' in worker.child.log.read_text() for worker in running.workers)
        assert violations(load.history, await read_back(kafka.bootstrap, topic)) == []
