"""Benchmarks of the read path: against Kafka's own consumer on the same data, and to many readers at once."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import uvloop
from logferry.ops.bench.harness import http_load
from logferry.ops.bench.harness import kafka_clients as peers
from logferry.ops.bench.harness.figures import Figure, Side, alternate, median_ratio, medians
from logferry.ops.bench.harness.usage import Meter
from logferry.ops.bench.harness.workload import chunks
from logferry.ops.bench.suites.throughput import gateway_pids, make_topic
from logferry.ops.stack.kafka_cluster import LONG_RUN
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 3
_PARTITIONS: Final = 8
_WRITE_SECONDS: Final = 12.0
_READERS: Final = 8


async def _read_partition(url: str, topic: str, partition: int) -> int:
    """Reads from the start to the end that it finds; the bytes of the chunks' frames."""
    connection = await http_load.connect(url)
    offset, size = 0, 0
    while True:
        path = f"/v1/topics/{topic}/partitions/{partition}/chunks?offset={offset}&max_bytes=4000000"
        status, head, body = await connection.ask(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode(), b"")
        if status != 200:
            raise RuntimeError(f"reading answered {status}: {body[:200]!r}")
        if not body:
            connection.close()
            return size
        size += len(body)
        offset = int(head.lower().split(b"x-next-offset: ", 1)[1].split(b"\r\n", 1)[0])


async def _read_all(urls: list[str], topic: str, readers: int) -> int:
    sizes = await asyncio.gather(
        *(
            _read_partition(urls[(reader + partition) % len(urls)], topic, partition)
            for reader in range(readers)
            for partition in range(_PARTITIONS)
        )
    )
    return sum(sizes)


@contextmanager
def _filled(folder: Path) -> Iterator[tuple[Stack, str, http_load.Tally]]:
    """A stack with one topic of 64 KiB chunks of log lines."""
    with Stack(folder, workers=2, heap="1g", jvm=LONG_RUN) as stack:
        topic = make_topic(stack.urls()[0], "read", _PARTITIONS)
        tally, _ = uvloop.run(http_load.run(stack.urls(), "read", 64, chunks(256, 64 * 1024), _WRITE_SECONDS))
        yield stack, topic, tally


def _http(stack: Stack, topic: str, readers: int) -> Side:
    with Meter(gateway_pids(stack)) as meter:
        size = uvloop.run(_read_all(stack.urls(), topic, readers))
    return {"mb_s": size / meter.wall_s / 1e6, "cpu_s_per_gb": meter.cpu_s / (size / 1e9)}


def read_vs_java_consumer() -> Figure:
    """All of a topic over HTTP, a reader a partition, against ConsumerPerformance reading it from Kafka."""
    with tempfile.TemporaryDirectory() as folder, _filled(Path(folder)) as (stack, topic, tally):
        bootstrap = stack.cluster().bootstrap

        def theirs(number: int) -> Side:
            return {"mb_s": peers.java_consumer(bootstrap, topic, tally.requests, f"bench-{number}")}

        mine, others = alternate(_ROUNDS, lambda _: _http(stack, topic, 1), theirs)
    ratio = median_ratio(mine, others, "mb_s")
    return Figure("read_vs_java_consumer", "MB/s ours / theirs", medians(mine), medians(others), _ROUNDS, ratio)


def read_fan_out() -> Figure:
    """Eight readers of everything at once, against one: how much more is delivered in all."""
    with tempfile.TemporaryDirectory() as folder, _filled(Path(folder)) as (stack, topic, _):
        mine, others = alternate(_ROUNDS, lambda _: _http(stack, topic, _READERS), lambda _: _http(stack, topic, 1))
    ratio = median_ratio(mine, others, "mb_s")
    return Figure("read_fan_out", "MB/s of 8 readers / of 1", medians(mine), medians(others), _ROUNDS, ratio)
