"""Benchmarks of writing and reading: against Kafka's own producer and consumer, a bare HTTP handler, many readers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import uvloop
from logferry.ops.bench.harness import http_load
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared
from logferry.ops.bench.harness.kafka_clients import DELIMITER, bare_handler, java_consumer, java_producer
from logferry.ops.bench.harness.usage import UsageMeter, cpu_s, rss_mb
from logferry.ops.bench.harness.workload import chunks, payload_file
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.stack.kafka_cluster import LONG_RUN
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 5
_SECONDS: Final = 6.0
_PARTITIONS: Final = 8
_READ_ROUNDS: Final = 3
_FILL_SECONDS: Final = 12.0
_READERS: Final = 8


@contextmanager
def running_stack(workers: int, **options: Any) -> Iterator[Stack]:
    """A stack in a temporary folder, as the benchmarks use it."""
    with tempfile.TemporaryDirectory() as folder:
        with Stack(Path(folder), workers=workers, heap="1g", jvm=LONG_RUN, **options) as stack:
            yield stack


def make_topic(url: str, name: str, partitions: int) -> str:
    """Creates a topic through the gateway; returns its full name."""
    return str(GatewayClient(url).request("PUT", f"/v1/topics/{name}", {"partitions": partitions})["topic"])


def gateway_pids(stack: Stack) -> list[int]:
    return [pid for name, pid in stack.pids.items() if "gateway" in name]


def ingest_vs_java_producer() -> Figure:
    """64 KiB chunks of log lines from 64 sources, plain bodies, zstd in Kafka; against the transactional Java producer.

    The Java producer runs with its default batches and with batches of 1 MiB; the faster of the two counts.
    """
    payloads = chunks(256, 64 * 1024)
    with running_stack(2) as stack:
        file = payload_file(stack.data / "payloads", payloads, DELIMITER.encode())
        urls, bootstrap = stack.urls(), stack.cluster().bootstrap

        def ours(number: int) -> Side:
            make_topic(urls[0], f"ours{number}", _PARTITIONS)
            pids = gateway_pids(stack)
            with UsageMeter(pids) as meter:
                tally, took = uvloop.run(http_load.run(urls, f"ours{number}", 64, payloads, _SECONDS))
            if tally.refused:
                raise RuntimeError(f"{tally.refused} requests were refused")
            per_gb = meter.cpu_s / (tally.bytes / 1e9)
            return {"mb_s": tally.bytes / took / 1e6, "cpu_s_per_gb": per_gb, "rss_mb": rss_mb(pids)}

        def theirs(number: int) -> Side:
            sides = []
            for batch in (16_384, 1 << 20):
                topic = make_topic(urls[0], f"theirs{number}-{batch}", _PARTITIONS)
                records = 12_000
                rate, cpu = java_producer(bootstrap, topic, file, records, batch)
                sides.append({"mb_s": rate, "cpu_s_per_gb": cpu / (records * len(payloads[0]) / 1e9)})
            return max(sides, key=lambda side: side["mb_s"])

        mine, others = alternate(_ROUNDS, ours, theirs)
    return compared("ingest_vs_java_producer", "MB/s ours / theirs", mine, others, "mb_s")


def small_requests_vs_bare_handler() -> Figure:
    """Requests/s of 1 KiB chunks to one worker, against one process of a bare aiohttp handler under the same load."""
    payloads, sources = chunks(2000, 1024), 512
    with bare_handler() as (bare_url, bare_pid), running_stack(1) as stack:
        url = stack.urls()[0]

        def load(target: str, pids: list[int], name: str) -> Side:
            before = cpu_s(pids)
            tally, took = uvloop.run(http_load.run([target], name, sources, payloads, _SECONDS))
            if tally.refused:
                raise RuntimeError(f"{tally.refused} requests were refused")
            micros = (cpu_s(pids) - before) / tally.requests * 1e6
            return {"requests_s": tally.requests / took, "cpu_us_per_request": micros, "rss_mb": rss_mb(pids)}

        def ours(number: int) -> Side:
            make_topic(url, f"small{number}", _PARTITIONS)
            return load(url, gateway_pids(stack), f"small{number}")

        def theirs(number: int) -> Side:
            return load(bare_url, [bare_pid], "any")

        mine, others = alternate(_ROUNDS, ours, theirs)
    return compared("small_requests_vs_bare_handler", "requests/s ours / theirs", mine, others, "requests_s")


def topic_spread() -> Figure:
    """64 sources over 4 topics of 16 partitions, against the same load on 1 topic of 4 partitions."""
    payloads = chunks(256, 64 * 1024)
    with running_stack(2) as stack:
        urls = stack.urls()

        def load(topics: list[str], partitions: int) -> Side:
            for topic in topics:
                make_topic(urls[0], topic, partitions)

            async def run() -> list[tuple[http_load.LoadTally, float]]:
                sources = 64 // len(topics)
                return await asyncio.gather(
                    *(http_load.run(urls, topic, sources, payloads, _SECONDS) for topic in topics)
                )

            done = uvloop.run(run())
            return {"mb_s": sum(tally.bytes for tally, _ in done) / max(took for _, took in done) / 1e6}

        mine, others = alternate(
            _ROUNDS,
            lambda number: load([f"spread{number}-{topic}" for topic in range(4)], 16),
            lambda number: load([f"single{number}"], 4),
        )
    return compared("topic_spread", "MB/s 4 x 16 / 1 x 4", mine, others, "mb_s")


# ---- reading -----------------------------------------------------------------------------------------------------


async def _read_partition(url: str, topic: str, partition: int) -> int:
    """Reads from the start to the present end. Returns the bytes of the answers."""
    connection = await http_load.connect(url)
    offset, size = 0, 0
    while True:
        offset, body = await http_load.read_page(connection, topic, partition, offset)
        if not body:
            connection.close()
            return size
        size += len(body)


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
def _filled() -> Iterator[tuple[Stack, str, http_load.LoadTally]]:
    """A stack with one topic of 64 KiB chunks of log lines."""
    with running_stack(2) as stack:
        topic = make_topic(stack.urls()[0], "read", _PARTITIONS)
        tally, _ = uvloop.run(http_load.run(stack.urls(), "read", 64, chunks(256, 64 * 1024), _FILL_SECONDS))
        yield stack, topic, tally


def _http(stack: Stack, topic: str, readers: int) -> Side:
    with UsageMeter(gateway_pids(stack)) as meter:
        size = uvloop.run(_read_all(stack.urls(), topic, readers))
    return {"mb_s": size / meter.wall_s / 1e6, "cpu_s_per_gb": meter.cpu_s / (size / 1e9)}


def read_vs_java_consumer() -> Figure:
    """A whole topic over HTTP, one reader per partition, against ConsumerPerformance on Kafka."""
    with _filled() as (stack, topic, tally):
        bootstrap = stack.cluster().bootstrap

        def theirs(number: int) -> Side:
            return {"mb_s": java_consumer(bootstrap, topic, tally.requests, f"bench-{number}")}

        mine, others = alternate(_READ_ROUNDS, lambda _: _http(stack, topic, 1), theirs)
    return compared("read_vs_java_consumer", "MB/s ours / theirs", mine, others, "mb_s")


def read_fan_out() -> Figure:
    """Eight readers of the whole topic at once, against one: total throughput."""
    with _filled() as (stack, topic, _):
        mine, others = alternate(
            _READ_ROUNDS, lambda _: _http(stack, topic, _READERS), lambda _: _http(stack, topic, 1)
        )
    return compared("read_fan_out", "MB/s of 8 readers / of 1", mine, others, "mb_s")
