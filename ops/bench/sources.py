"""How much a million known sources cost: memory of the worker that owns them, and the time to take them over."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Final

import uvloop
from aiokafka import AIOKafkaProducer
from logferry.gateway.contract import lane_of
from logferry.gateway.sources import Source, SourceState
from logferry.ops.bench import http_load
from logferry.ops.bench.chunks import chunks
from logferry.ops.bench.figures import Figure, Side
from logferry.ops.bench.usage import rss_mb
from logferry.ops.bench.writing import gateway_pids, make_topic
from logferry.ops.stack import Stack

_SOURCES: Final = 1_000_000
_LANES: Final = 8
_STATE_TOPIC: Final = "logferry.gateway.dc1.state"


async def _write_states(bootstrap: str, topic: str, topic_id: bytes) -> None:
    """The states of a million sources that have written once, as the gateway would have left them."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap, max_batch_size=1 << 20, linger_ms=20, compression_type="zstd"
    )
    await producer.start()
    now_ms = int(time.time() * 1000)
    for number in range(_SOURCES):
        source = Source(topic, None, f"host-{number:07d}.example.net:/var/log/nginx/access.log")
        state = SourceState(topic_id, number % 16, 250_000 + number, 0, now_ms, now_ms)
        lane = lane_of(source.key, _LANES)
        await producer.send(_STATE_TOPIC, state.encode(), source.state_key(), lane)
    await producer.stop()


async def _topic_id(bootstrap: str, topic: str) -> bytes:
    from logferry.gateway.kafka import Kafka

    kafka = Kafka({"bootstrap_servers": bootstrap}, "bench")
    await kafka.start()
    try:
        return (await kafka.describe_topic(topic)).id
    finally:
        await kafka.close()


def _throughput(stack: Stack, name: str) -> float:
    make_topic(stack.urls()[0], name, 8)
    tally, took = uvloop.run(http_load.run(stack.urls(), name, 100, chunks(256, 64 * 1024), 6.0))
    return tally.bytes / took / 1e6


def _taken_over_s(log: Path, since: int) -> float:
    """From the first fence to the last lane that serves, by the worker's own log."""
    events = [json.loads(line) for line in log.read_text()[since:].splitlines() if line.startswith("{")]
    opened = [event for event in events if event["event"] == "lane_open"]
    if len(opened) < _LANES:
        raise RuntimeError(f"{len(opened)} lanes opened, {_LANES} were expected")
    slowest_ms: int = max(event["fence_ms"] + event["replay_ms"] for event in opened)
    return slowest_ms / 1000


def _measured() -> Side:
    with tempfile.TemporaryDirectory() as folder:
        with Stack(Path(folder), workers=1, lanes=_LANES, heap="1g", jvm=(), restart=False) as stack:
            few_mb_s = _throughput(stack, "few")
            topic = make_topic(stack.urls()[0], "many", 16)
            bootstrap = stack.cluster().bootstrap
            uvloop.run(_write_states(bootstrap, topic, asyncio.run(_topic_id(bootstrap, topic))))
            log = Path(folder) / "logs" / "dc1-gateway-0.log"
            since = len(log.read_text())
            stack.restart("gateway-0")
            stack.wait_ready()
            taken_over_s = _taken_over_s(log, since)
            rss = rss_mb(gateway_pids(stack))
            many_mb_s = _throughput(stack, "with-many")
    return {"rss_mb": rss, "takeover_s": taken_over_s, "mb_s": many_mb_s, "mb_s_before": few_mb_s}


def many_sources_rss_mb() -> Figure:
    """Resident memory of a worker that owns a million sources; the throughput of 100 sources beside and before."""
    ours = _measured()
    return Figure("many_sources_rss_mb", "MB", ours, {"mb_s": ours["mb_s_before"]}, 1, value=round(ours["rss_mb"], 1))


def many_sources_takeover_s() -> Figure:
    """Fence and replay of all lanes with a million sources, by one worker."""
    ours = _measured()
    return Figure("many_sources_takeover_s", "s", ours, {}, 1, value=round(ours["takeover_s"], 2))
