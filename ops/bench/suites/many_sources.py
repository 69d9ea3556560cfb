"""The cost of many known sources: memory of the worker that owns them, and time of a take-over."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from functools import cache
from typing import Final

import uvloop
from logferry.gateway.config import Config
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.group_commit import GroupCommit
from logferry.gateway.lanes.transaction import Draft
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.ops.bench.harness.figures import Figure, Side
from logferry.ops.bench.harness.gateways import Load, gateway_pids, loaded, make_topic, running_stack
from logferry.ops.bench.harness.kafka import chunks, connected
from logferry.ops.bench.harness.usage import rss_mb
from logferry.ops.stack.stack import Stack

_SOURCES: Final = 1_000_000
_FEW_SOURCES: Final = 10_000
_REWRITES: Final = 20_000_000
_STATES_A_TRANSACTION: Final = 500
_LANES: Final = 8


def many_sources_rss_mb() -> Figure:
    """Resident memory of a worker that owns a million sources; throughput of 100 more sources, before and with them."""
    ours = _measured(_SOURCES, _SOURCES)
    return Figure("MB", ours, {"mb_s": ours["mb_s_before"]}, 1, value=round(ours["rss_mb"], 1))


def many_sources_takeover_s() -> Figure:
    """Fence and replay of all lanes with a million sources by one worker."""
    ours = _measured(_SOURCES, _SOURCES)
    return Figure("s", ours, {}, 1, value=round(ours["takeover_s"], 2))


def rewritten_states_takeover_s() -> Figure:
    """Fence and replay of all lanes by one worker, directly after 20 million states of 10,000 sources were written."""
    ours = _measured(_FEW_SOURCES, _REWRITES)
    return Figure("s", ours, {}, 1, value=round(ours["takeover_s"], 2))


@cache
def _measured(sources: int, writes: int) -> Side:
    """A worker takes over its lanes after ``writes`` states of ``sources`` were written."""
    payloads = chunks(256, 64 * 1024)
    with running_stack(1, lanes=_LANES, restart=False) as stack:
        few = loaded(stack, Load("few", payloads, 100))
        topic = make_topic(stack, "many", 16)
        uvloop.run(_write_states(stack.cluster().bootstrap, topic, sources, writes))
        taken_over_s = _taken_over_s(stack)
        rss = rss_mb(gateway_pids(stack))
        many = loaded(stack, Load("with-many", payloads, 100))
    return {"rss_mb": rss, "takeover_s": taken_over_s, "mb_s": many["mb_s"], "mb_s_before": few["mb_s"]}


async def _write_states(bootstrap: str, topic: str, sources: int, writes: int) -> None:
    """Writes the states in transactions of the lanes, as a gateway does."""
    config = Config.model_validate({"dc": "dc1", "lanes": _LANES, "kafka": {"bootstrap_servers": bootstrap}})
    keys: list[list[bytes]] = [[] for _ in range(_LANES)]
    for number in range(sources):
        source = SourceIdentity(topic, None, f"host-{number:07d}.example.net:/var/log/nginx/access.log")
        keys[lane_of(source.key, _LANES)].append(source.state_key())

    async def write(kafka: KafkaClient, topic_id: bytes, lane: int) -> None:
        producer = GroupCommit(kafka, TopicCatalog(kafka, config), config, lane)
        await producer.fence()
        seqno, now_ms = 250_000, int(time.time() * 1000)
        wanted = itertools.islice(itertools.cycle(keys[lane]), len(keys[lane]) * writes // sources)
        while batch := list(itertools.islice(wanted, _STATES_A_TRANSACTION)):
            draft = Draft(SourceTable(), now_ms)
            for key in batch:
                seqno += 1
                draft.states[key] = SourceState(topic_id, lane, seqno, 0, now_ms, now_ms).encode()
            await producer.settled()
            await producer.transact(draft)
        await producer.discard()

    async with connected(bootstrap) as kafka:
        topic_id = (await kafka.describe_topic(topic)).id
        await asyncio.gather(*(write(kafka, topic_id, lane) for lane in range(_LANES)))


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
