"""Benchmarks of the write path: against Kafka's own producer, and against a bare HTTP handler."""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Final

import uvloop
from logferry.ops.bench.harness import http_load
from logferry.ops.bench.harness import kafka_clients as peers
from logferry.ops.bench.harness.figures import Figure, Side, alternate, median_ratio, medians
from logferry.ops.bench.harness.usage import Meter, cpu_s, rss_mb
from logferry.ops.bench.harness.workload import chunks, payload_file
from logferry.ops.stack.kafka_cluster import LONG_RUN
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 5
_SECONDS: Final = 6.0
_PARTITIONS: Final = 8


def make_topic(url: str, name: str, partitions: int) -> str:
    """Creates a topic through the gateway; returns its full name."""
    body = json.dumps({"partitions": partitions}).encode()
    request = urllib.request.Request(f"{url}/v1/topics/{name}", data=body, method="PUT")
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["topic"])


def gateway_pids(stack: Stack) -> list[int]:
    return [pid for name, pid in stack.pids.items() if "gateway" in name]


def ingest_vs_java_producer() -> Figure:
    """64 KiB chunks of log lines from 64 sources, plain bodies, zstd in Kafka; against the transactional Java producer.

    The Java producer is run with its default batches and with batches of 1 MiB; the faster of the two counts.
    """
    payloads = chunks(256, 64 * 1024)
    with tempfile.TemporaryDirectory() as folder:
        file = payload_file(Path(folder) / "payloads", payloads, peers.DELIMITER.encode())
        with Stack(Path(folder) / "stack", workers=2, heap="1g", jvm=LONG_RUN) as stack:
            urls, bootstrap = stack.urls(), stack.cluster().bootstrap

            def ours(number: int) -> Side:
                make_topic(urls[0], f"ours{number}", _PARTITIONS)
                pids = gateway_pids(stack)
                with Meter(pids) as meter:
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
                    rate, cpu = peers.java_producer(bootstrap, topic, file, records, batch)
                    sides.append({"mb_s": rate, "cpu_s_per_gb": cpu / (records * len(payloads[0]) / 1e9)})
                return max(sides, key=lambda side: side["mb_s"])

            mine, others = alternate(_ROUNDS, ours, theirs)
    ratio = median_ratio(mine, others, "mb_s")
    return Figure("ingest_vs_java_producer", "MB/s ours / theirs", medians(mine), medians(others), _ROUNDS, ratio=ratio)


def small_requests_vs_bare_handler() -> Figure:
    """Requests/s of 1 KiB chunks, one worker, against one process of a bare aiohttp handler, with the same load."""
    payloads, sources = chunks(2000, 1024), 512
    with tempfile.TemporaryDirectory() as folder, peers.bare_handler() as (bare_url, bare_pid):
        with Stack(Path(folder), workers=1, heap="1g", jvm=LONG_RUN) as stack:
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
    ratio = median_ratio(mine, others, "requests_s")
    return Figure(
        "small_requests_vs_bare_handler", "requests/s ours / theirs", medians(mine), medians(others), _ROUNDS, ratio
    )


def topic_spread() -> Figure:
    """64 sources over 4 topics of 16 partitions, against the same load on 1 topic of 4 partitions."""
    payloads = chunks(256, 64 * 1024)
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), workers=2, heap="1g", jvm=LONG_RUN) as stack:
        urls = stack.urls()

        def load(topics: list[str], partitions: int) -> Side:
            for topic in topics:
                make_topic(urls[0], topic, partitions)

            async def run() -> list[tuple[http_load.Tally, float]]:
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
    ratio = median_ratio(mine, others, "mb_s")
    return Figure("topic_spread", "MB/s 4 x 16 / 1 x 4", medians(mine), medians(others), _ROUNDS, ratio)
