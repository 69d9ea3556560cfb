"""Benchmarks of a gateway with many known sources: memory of the worker that owns them, time of a take-over, and of a
change of the number of lanes."""

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
from logferry.gateway.kafka.hanging_transactions import OpenTransaction, WriteTxnMarkersRequest
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.group_commit import GroupCommit
from logferry.gateway.lanes.transaction import Draft
from logferry.gateway.service.lane_change import Changed, LaneChange
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.ops.bench.harness import gateways
from logferry.ops.bench.harness.figures import Figure, Side
from logferry.ops.bench.harness.gateways import (
    CHUNK_BYTES,
    Load,
    loaded,
    make_topic,
    running_stack,
)
from logferry.ops.bench.harness.kafka import chunks, connected
from logferry.ops.bench.harness.usage import rss_mb
from logferry.ops.stack.stack import Stack

_LANES: Final = 8
_SOURCES: Final = 1_000_000
_FEW_SOURCES: Final = 10_000
_REWRITES: Final = 20_000_000
_STATES_A_TRANSACTION: Final = 500
_MOVED_SOURCES: Final = 300_000
_MARKERS: Final = 2_000_000
_MARKERS_AT_ONCE: Final = 500


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


def takeover_per_million_markers_s() -> Figure:
    """Fence and replay of all lanes by one worker, with as many markers of old transactions, for a million of them.

    A marker is what a transaction leaves when its states are compacted.
    """
    with running_stack(1, lanes=_LANES, restart=False) as stack:
        without_s = _taken_over_s(stack)
        uvloop.run(_write_markers(stack.cluster().bootstrap, "logferry.gateway.dc1.state"))
        with_s = _taken_over_s(stack)
    ours = {"takeover_s": with_s, "without_s": without_s}
    return Figure("s", ours, {}, 1, value=round(with_s * 1_000_000 / _MARKERS, 2))


def lane_change_paused_s() -> Figure:
    """For so long nothing can be recorded while 8 lanes with 300,000 sources become 32."""
    with running_stack(1, lanes=_LANES, restart=False) as stack:
        topic, bootstrap = make_topic(stack, "many", 16), stack.cluster().bootstrap
        uvloop.run(_write_states(bootstrap, topic, _MOVED_SOURCES, _MOVED_SOURCES))
        changed = uvloop.run(_change_lanes(bootstrap, 32))
    ours = {"paused_s": changed.paused_s, "moved": float(changed.moved)}
    return Figure("s", ours, {}, 1, value=round(changed.paused_s, 2))


async def _change_lanes(bootstrap: str, to: int) -> Changed:
    weak = ["replication", "min-isr"]
    settings = {"dc": "dc1", "lanes": _LANES, "accept_weak_kafka": weak, "kafka": {"bootstrap_servers": bootstrap}}
    async with connected(bootstrap) as kafka:
        return await LaneChange(kafka, Config.model_validate(settings), to, print).run()


async def _write_markers(bootstrap: str, topic: str) -> None:
    """Ends transactions of producers that have written nothing: Kafka keeps the markers."""
    async with connected(bootstrap) as kafka:

        async def write(lane: int) -> None:
            leader = await kafka.present_leader(topic, lane)
            for _ in range(_MARKERS // _LANES // _MARKERS_AT_ONCE):
                ends = [OpenTransaction((topic, lane), leader, 10**6 + n, 1, 0, 0, 0) for n in range(_MARKERS_AT_ONCE)]
                await kafka.send(leader, WriteTxnMarkersRequest(ends, 1, committed=True))

        await asyncio.gather(*map(write, range(_LANES)))


@cache
def _measured(sources: int, writes: int) -> Side:
    """A worker takes over its lanes after ``writes`` states of ``sources`` were written."""
    payloads = chunks(256, CHUNK_BYTES)
    with running_stack(1, lanes=_LANES, restart=False) as stack:
        few = loaded(stack, Load("few", payloads, 100))
        topic = make_topic(stack, "many", 16)
        uvloop.run(_write_states(stack.cluster().bootstrap, topic, sources, writes))
        taken_over_s = _taken_over_s(stack)
        rss = rss_mb(gateways.gateway_pids(stack))
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
