"""The cost of a million known sources: memory of the worker that owns them, and time of a take-over."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from functools import cache
from typing import Final

import uvloop
from aiokafka import AIOKafkaProducer
from logferry.gateway.config import Config
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.group_commit import GroupCommit
from logferry.gateway.lanes.transaction import Draft
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.ops.bench.harness import http_load
from logferry.ops.bench.harness.figures import Figure, Side
from logferry.ops.bench.harness.kafka_clients import connected
from logferry.ops.bench.harness.usage import rss_mb
from logferry.ops.bench.harness.workload import chunks
from logferry.ops.bench.suites.throughput import gateway_pids, make_topic, running_stack
from logferry.ops.stack.stack import Stack

_SOURCES: Final = 1_000_000
_FEW_SOURCES: Final = 10_000
_REWRITES: Final = 20_000_000
_STATES_A_TRANSACTION: Final = 500
_LANES: Final = 8
_STATE_TOPIC: Final = "logferry.gateway.dc1.state"


async def _write_states(bootstrap: str, topic: str, topic_id: bytes) -> None:
    """Writes the states of a million sources with one chunk each, as the gateway stores them."""
    options = {"max_batch_size": 1 << 20, "linger_ms": 20, "compression_type": "zstd"}
    now_ms = int(time.time() * 1000)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, **options) as producer:
        for number in range(_SOURCES):
            source = SourceIdentity(topic, None, f"host-{number:07d}.example.net:/var/log/nginx/access.log")
            state = SourceState(topic_id, number % 16, 250_000 + number, 0, now_ms, now_ms)
            lane = lane_of(source.key, _LANES)
            await producer.send(_STATE_TOPIC, state.encode(), source.state_key(), lane)


async def _topic_id(bootstrap: str, topic: str) -> bytes:
    async with connected(bootstrap) as kafka:
        return (await kafka.describe_topic(topic)).id


def _throughput(stack: Stack, name: str) -> float:
    make_topic(stack.urls()[0], name, 8)
    tally, took = uvloop.run(http_load.run(stack.urls(), name, 100, chunks(256, 64 * 1024), 6.0))
    return tally.bytes / took / 1e6


def _taken_over_s(stack: Stack) -> float:
    """Restarts the worker. Time from its first fence until the last lane serves, by its log."""
    log = stack.child("gateway-0").log
    since = len(log.read_text())
    stack.restart("gateway-0")
    stack.wait_ready()
    events = [json.loads(line) for line in log.read_text()[since:].splitlines() if line.startswith("{")]
    opened = [event for event in events if event["event"] == "lane_open"]
    if len(opened) < _LANES:
        raise RuntimeError(f"{len(opened)} lanes opened, {_LANES} were expected")
    slowest_ms: int = max(event["fence_ms"] + event["replay_ms"] for event in opened)
    return slowest_ms / 1000


@cache
def _measured() -> Side:
    with running_stack(1, lanes=_LANES, restart=False) as stack:
        few_mb_s = _throughput(stack, "few")
        topic = make_topic(stack.urls()[0], "many", 16)
        bootstrap = stack.cluster().bootstrap
        uvloop.run(_write_states(bootstrap, topic, asyncio.run(_topic_id(bootstrap, topic))))
        taken_over_s = _taken_over_s(stack)
        rss = rss_mb(gateway_pids(stack))
        many_mb_s = _throughput(stack, "with-many")
    return {"rss_mb": rss, "takeover_s": taken_over_s, "mb_s": many_mb_s, "mb_s_before": few_mb_s}


async def _rewrite_states(bootstrap: str, topic: str, topic_id: bytes) -> None:
    """Writes 20 million states of 10,000 sources, in transactions of the lanes with 500 states each."""
    config = Config.model_validate({"dc": "dc1", "lanes": _LANES, "kafka": {"bootstrap_servers": bootstrap}})
    keys: list[list[bytes]] = [[] for _ in range(_LANES)]
    for number in range(_FEW_SOURCES):
        source = SourceIdentity(topic, None, f"host-{number:05d}.example.net:/var/log/nginx/access.log")
        keys[lane_of(source.key, _LANES)].append(source.state_key())

    async def rewrite(kafka: KafkaClient, lane: int) -> None:
        producer = GroupCommit(kafka, TopicCatalog(kafka, config), config, lane)
        await producer.fence()
        mine, seqno, now_ms = itertools.cycle(keys[lane]), 250_000, int(time.time() * 1000)
        for _ in range(_REWRITES // _LANES // _STATES_A_TRANSACTION):
            draft = Draft(SourceTable(), now_ms)
            for key in itertools.islice(mine, _STATES_A_TRANSACTION):
                seqno += 1
                draft.states[key] = SourceState(topic_id, lane, seqno, 0, now_ms, now_ms).encode()
            await producer.settled()
            await producer.transact(draft)
        await producer.discard()

    async with connected(bootstrap) as kafka:
        await asyncio.gather(*(rewrite(kafka, lane) for lane in range(_LANES)))


def rewritten_states_takeover_s() -> Figure:
    """Fence and replay of all lanes by one worker, directly after 20 million states of 10,000 sources were written."""
    with running_stack(1, lanes=_LANES, restart=False) as stack:
        topic = make_topic(stack.urls()[0], "rewritten", 16)
        bootstrap = stack.cluster().bootstrap
        uvloop.run(_rewrite_states(bootstrap, topic, asyncio.run(_topic_id(bootstrap, topic))))
        taken_over_s = _taken_over_s(stack)
    ours = {"writes": float(_REWRITES), "sources": float(_FEW_SOURCES)}
    return Figure("rewritten_states_takeover_s", "s", ours, {}, 1, value=round(taken_over_s, 2))


def many_sources_rss_mb() -> Figure:
    """Resident memory of a worker that owns a million sources; throughput of 100 more sources, before and with them."""
    ours = _measured()
    return Figure("many_sources_rss_mb", "MB", ours, {"mb_s": ours["mb_s_before"]}, 1, value=round(ours["rss_mb"], 1))


def many_sources_takeover_s() -> Figure:
    """Fence and replay of all lanes with a million sources by one worker."""
    ours = _measured()
    return Figure("many_sources_takeover_s", "s", ours, {}, 1, value=round(ours["takeover_s"], 2))
