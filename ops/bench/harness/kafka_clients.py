"""What we are measured against: Kafka's own producer, and a bare HTTP handler."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from logferry.ops.runtime.jars import kafka_jars
from logferry.ops.runtime.java import find_java
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


def java_producer(bootstrap: str, topic: str, payloads: Path, records: int, batch_bytes: int) -> tuple[float, float]:
    """ProducerPerformance: transactions of 50 ms, zstd, as fast as it goes. Returns MB/s (10^6) and its CPU seconds.

    Its own rate, taken without the start of the JVM.
    """
    command = [
        "/usr/bin/env",
        "bash",
        "-c",
        'time "$@"',
        "bash",
        str(find_java().executable),
        "-Xmx512m",
        "-cp",
        ":".join(map(str, kafka_jars())),
        "org.apache.kafka.tools.ProducerPerformance",
        *("--topic", topic, "--num-records", str(records), "--throughput", "-1"),
        *("--payload-file", str(payloads), "--payload-delimiter", DELIMITER),
        *("--transactional-id", f"bench-{topic}", "--transaction-duration-ms", "50"),
        "--producer-props",
        f"bootstrap.servers={bootstrap}",
        "compression.type=zstd",
        f"batch.size={batch_bytes}",
        "max.request.size=16777216",
        "buffer.memory=134217728",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rates = _RESULT.findall(done.stdout)
    if not rates or int(rates[-1][0]) != records:
        raise RuntimeError(f"ProducerPerformance did not send {records} records: {done.stdout[-500:]}")
    cpu = sum(int(m) * 60 + float(s) for m, s in re.findall(r"(?:user|sys)\s+(\d+)m([\d.]+)s", done.stderr))
    return float(rates[-1][2]) * 1.048576, round(cpu, 2)


def java_consumer(bootstrap: str, topic: str, records: int, group: str) -> float:
    """ConsumerPerformance over the whole topic, committed records alone; its own rate of fetching in MB/s (10^6)."""
    command = [
        str(find_java().executable),
        "-Xmx512m",
        "-cp",
        ":".join(map(str, kafka_jars())),
        "org.apache.kafka.tools.ConsumerPerformance",
        *("--bootstrap-server", bootstrap, "--topic", topic, "--num-records", str(records)),
        *("--group", group, "--hide-header", "--command-property", "isolation.level=read_committed"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    fields = [field.strip() for field in done.stdout.strip().splitlines()[-1].split(",")]
    if int(fields[4]) < records:
        raise RuntimeError(f"ConsumerPerformance read {fields[4]} of {records} records")
    # start, end, MB, MB/s, records, records/s, rebalance ms, fetch ms, fetch MB/s, fetch records/s
    return float(fields[8]) * 1.048576


@contextmanager
def bare_handler() -> Iterator[tuple[str, int]]:
    """A bare aiohttp handler that reads the body and answers, in one process. Yields its URL and pid."""
    port = free_ports(1)[0]
    command = [sys.executable, "-c", _BARE_HANDLER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline().strip() != b"ready":
                raise RuntimeError("the bare handler did not start")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
