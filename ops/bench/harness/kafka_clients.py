"""Peers: Kafka's own producer and consumer, and a bare HTTP handler."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from logferry.gateway.kafka.client import KafkaClient
from logferry.ops.runtime.jars import kafka_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import LONG_RUN, KafkaCluster
from logferry.ops.stack.ports import free_ports

DELIMITER: Final = "\x01EOR\x01"
_RESULT: Final = re.compile(r"(\d+) records sent, ([\d.]+) records/sec \(([\d.]+) MB/sec\)")

_BARE_HANDLER: Final = """
import asyncio, json, sys, uvloop
from aiohttp import web

async def handler(request):
    body = await request.read()
    return web.Response(body=json.dumps({"size": len(body)}).encode(), content_type="application/json")

async def main():
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1]), backlog=4096).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


def run_tool(name: str, *options: str) -> tuple[str, float]:
    """Runs one of Kafka's performance tools; returns its output and its CPU seconds."""
    java = [str(find_java().executable), "-Xmx512m", "-cp", ":".join(map(str, kafka_jars()))]
    command = ["/usr/bin/env", "bash", "-c", 'time "$@"', "bash", *java, f"org.apache.kafka.tools.{name}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    cpu = sum(int(m) * 60 + float(s) for m, s in re.findall(r"(?:user|sys)\s+(\d+)m([\d.]+)s", done.stderr))
    return done.stdout, round(cpu, 2)


@contextmanager
def temporary_kafka(
    name: str, heap: str = "1g", settings: Mapping[str, str] | None = None
) -> Iterator[tuple[KafkaCluster, Path]]:
    """A cluster of one broker, and the temporary folder that holds its data."""
    with tempfile.TemporaryDirectory() as folder:
        with KafkaCluster(name, Path(folder) / name, heap=heap, settings=settings, jvm=LONG_RUN) as cluster:
            yield cluster, Path(folder)


@asynccontextmanager
async def connected(bootstrap: str) -> AsyncIterator[KafkaClient]:
    kafka = KafkaClient({"bootstrap_servers": bootstrap}, "bench")
    await kafka.start()
    try:
        yield kafka
    finally:
        await kafka.close()


async def create_topic(bootstrap: str, topic: str, partitions: int) -> None:
    async with connected(bootstrap) as kafka:
        await kafka.create_topic(topic, partitions, 1, {})


def java_producer(bootstrap: str, topic: str, payloads: Path, records: int, batch_bytes: int) -> tuple[float, float]:
    """ProducerPerformance at full speed: transactions of 50 ms, zstd. Returns MB/s (10^6) and CPU seconds.

    The rate is its own, without the start of the JVM.
    """
    said, cpu = run_tool(
        "ProducerPerformance",
        *("--topic", topic, "--num-records", str(records), "--throughput", "-1"),
        *("--payload-file", str(payloads), "--payload-delimiter", DELIMITER),
        *("--transactional-id", f"bench-{topic}", "--transaction-duration-ms", "50"),
        *("--producer-props", f"bootstrap.servers={bootstrap}", "compression.type=zstd", f"batch.size={batch_bytes}"),
        *("max.request.size=16777216", "buffer.memory=134217728"),
    )
    rates = _RESULT.findall(said)
    if not rates or int(rates[-1][0]) != records:
        raise RuntimeError(f"ProducerPerformance did not send {records} records: {said[-500:]}")
    return float(rates[-1][2]) * 1.048576, cpu


def java_consumer(bootstrap: str, topic: str, records: int, group: str) -> float:
    """ConsumerPerformance over the whole topic, committed records only. Returns its own fetch rate in MB/s (10^6)."""
    said, _ = run_tool(
        "ConsumerPerformance",
        *("--bootstrap-server", bootstrap, "--topic", topic, "--num-records", str(records)),
        *("--group", group, "--hide-header", "--command-property", "isolation.level=read_committed"),
    )
    fields = [field.strip() for field in said.strip().splitlines()[-1].split(",")]
    if int(fields[4]) < records:
        raise RuntimeError(f"ConsumerPerformance read {fields[4]} of {records} records")
    # start, end, MB, MB/s, records, records/s, rebalance ms, fetch ms, fetch MB/s, fetch records/s
    return float(fields[8]) * 1.048576


@contextmanager
def bare_handler() -> Iterator[tuple[str, int]]:
    """A bare aiohttp handler in one process: reads the body and answers. Yields its URL and pid."""
    port = free_ports(1)[0]
    command = [sys.executable, "-c", _BARE_HANDLER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline().strip() != b"ready":
                raise RuntimeError("the bare handler did not start")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
