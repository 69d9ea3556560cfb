"""A gateway whose user has a quota in Kafka: it pauses as Kafka asks, and neither fails nor takes brokers for dead."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.kafka.client import KafkaClient, raise_for
from logferry.gateway.kafka.requests import FlexibleRequest
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import LANES, gateway, log_of, write

_BYTES_PER_S = 100_000
_CHUNK_BYTES = 512 * 1024
_CHUNKS = 4


class AlterClientQuotasRequest(
    FlexibleRequest,
    key=49,
    version=1,
    asked="entries[entity[type:text name:text] operations[key:text value:float64 remove:bool]] validate_only:bool",
    answered="throttle_time_ms:int32 entries[error_code:int16 error_message:text entity[type:text name:text]]",
):
    def __init__(self, quota: str, client_ids: list[str], bytes_per_s: float) -> None:
        operations: list[Any] = [(quota, bytes_per_s, False, {})]
        super().__init__([([("client-id", name, {})], operations, {}) for name in client_ids], False)


async def limit(bootstrap: str, quota: str, client_ids: list[str]) -> None:
    kafka = KafkaClient({"bootstrap_servers": bootstrap}, "quotas")
    await kafka.start()
    try:
        node = kafka.brokers()[0][0]
        for code, message, _entity, _tags in (
            await kafka.send(node, AlterClientQuotasRequest(quota, client_ids, _BYTES_PER_S))
        ).entries:
            raise_for(code, message or "")
    finally:
        await kafka.close()


async def test_a_quota_of_writing_delays_and_fails_nothing(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    name = "throttled"
    with gateway(kafka, tmp_path, name, 1) as running:
        ids = [f"{name}.gateway.dc1.lane-{lane}" for lane in range(LANES)]
        await limit(kafka.bootstrap, "producer_byte_rate", ids)
        await running.make_topic(topic_name)
        data = random.Random(0).randbytes(_CHUNK_BYTES)
        for seqno in range(1, _CHUNKS + 1):
            assert (await write(running, topic_name, "a", f"seqno={seqno}", data)).document["written"] == 1
        metrics = (await running.ask("GET", "/metrics")).body.decode().splitlines()
        throttled = [line for line in metrics if line.startswith("logferry_kafka_throttled_seconds_total{")]
        assert sum(float(line.split()[1]) for line in throttled) > 1
        lanes = (await running.ask("GET", "/v1/status")).document["lanes"]
        assert any("a quota of Kafka delayed" in (lane["last_wait"] or {}).get("reason", "") for lane in lanes)
        assert [seqno for _, seqno, _ in await log_of(running, topic_name)] == list(range(1, _CHUNKS + 1))
    assert "lane_failed" not in (tmp_path / f"{name}-0.log").read_text(encoding="utf-8")


@pytest.mark.long
async def test_a_quota_of_reading_delays_and_fails_nothing(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    """Kafka answers a fetch over the quota without any partition."""
    with gateway(kafka, tmp_path, "slow-reads", 1) as running:
        topic = await running.make_topic(topic_name)
        data = random.Random(0).randbytes(_CHUNK_BYTES)
        for seqno in range(1, _CHUNKS + 1):
            await write(running, topic_name, "a", f"seqno={seqno}", data)
        await limit(kafka.bootstrap, "consumer_byte_rate", [running.urls[0]])
        offset, found = "0", b""
        while len(found) < _CHUNKS * _CHUNK_BYTES:
            path = f"/v1/topics/{topic}/partitions/0/chunks?offset={offset}&max_bytes={_CHUNK_BYTES}"
            page = await running.ask("GET", path, headers={"Accept": "text/plain"})
            offset, found = page.headers["X-Next-Offset"], found + page.body
        assert found == data * _CHUNKS
