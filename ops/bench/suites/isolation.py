"""What a partition that takes nothing costs the other sources of its lane."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import uvloop
from logferry.ops.bench.harness import http_load
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared
from logferry.ops.bench.harness.kafka_clients import connected
from logferry.ops.bench.harness.workload import chunks
from logferry.ops.bench.suites.throughput import make_topic, running_stack

_ROUNDS: Final = 3
_SECONDS: Final = 8.0
_SOURCES: Final = 32
_BAD_SOURCES: Final = 8
_CHUNK_BYTES: Final = 16 * 1024


async def _make_bad_topic(bootstrap: str) -> None:
    """It takes nothing as soon as one broker is down."""
    settings = {"min.insync.replicas": "3", "unclean.leader.election.enable": "false"}
    async with connected(bootstrap) as kafka:
        await kafka.create_topic("dc1.bad", 1, 3, settings)


async def _load(url: str, payloads: list[bytes], *, beside_bad: bool) -> Side:
    bad = http_load.run([url], "bad", _BAD_SOURCES, payloads[:1], _SECONDS) if beside_bad else asyncio.sleep(0)
    (tally, took), _ = await asyncio.gather(http_load.run([url], "good", _SOURCES, payloads, _SECONDS), bad)
    tally.latencies_s.sort()
    p99_ms = 1000 * tally.latencies_s[int(0.99 * len(tally.latencies_s))]
    return {"mb_s": tally.bytes / took / 1e6, "p99_ms": p99_ms, "refused": tally.refused}


def lane_isolation() -> Figure:
    """Throughput of healthy sources while others of the same lane write to a partition below its minimum of replicas in
    sync, of that without these. One broker of three is down in both; one lane, one worker.
    """
    payloads = chunks(64, _CHUNK_BYTES)
    with running_stack(1, brokers=3, lanes=1, restart=False) as stack:
        [url] = stack.urls()
        make_topic(url, "good", 8)
        cluster = stack.cluster()
        uvloop.run(_make_bad_topic(cluster.bootstrap))
        cluster.kill(3)

        def side(_: int, *, beside_bad: bool) -> Side:
            return uvloop.run(_load(url, payloads, beside_bad=beside_bad))

        ours, theirs = alternate(_ROUNDS, partial(side, beside_bad=True), partial(side, beside_bad=False))
    return compared("lane_isolation", "MB/s beside a bad partition / without", ours, theirs, "mb_s")
