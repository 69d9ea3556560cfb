"""A Kafka for one benchmark, the data that is written to it, and Kafka's own producer and consumer as peers."""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from logferry.gateway.kafka.client import LATEST, KafkaClient
from logferry.ops.bench.harness.usage import ended_cpu_s
from logferry.ops.runtime.jars import kafka_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import LONG_RUN, KafkaCluster

_DELIMITER: Final = "\x01EOR\x01"
_RESULT: Final = re.compile(r"(\d+) records sent, ([\d.]+) records/sec \(([\d.]+) MB/sec\)")

_PATHS = ("/", "/index.html", "/search", "/api/v1/items", "/static/app.js", "/static/app.css", "/login", "/korzina")
_AGENTS = (
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0 Safari/537.36",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) AppleWebKit/605.1.15 Version/17.5 Mobile/15E148",
    "curl/8.5.0",
)


# ---- data --------------------------------------------------------------------------------------------------------


def access_line(rng: random.Random, second: int) -> str:
    """One line of an access log in the combined format."""
    ip = ".".join(str(rng.randrange(1, 255)) for _ in range(4))
    path = f"{rng.choice(_PATHS)}?id={rng.randrange(10**9)}&s={rng.getrandbits(64):x}"
    size, status = rng.randrange(200, 90_000), rng.choice((200, 200, 200, 200, 304, 404, 500))
    stamp = f"21/Nov/2026:{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d} +0000"
    return f'{ip} - - [{stamp}] "GET {path} HTTP/1.1" {status} {size} "-" "{rng.choice(_AGENTS)}"\n'


def chunks(count: int, size_bytes: int) -> list[bytes]:
    """``count`` chunks of whole lines, each as large as fits into ``size_bytes``."""
    rng = random.Random(1)
    found = []
    for number in range(count):
        chunk = bytearray()
        while len(chunk) + len(line := access_line(rng, number).encode()) <= size_bytes:
            chunk += line
        found.append(bytes(chunk) or line[:size_bytes])
    return found


# ---- a cluster ---------------------------------------------------------------------------------------------------


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


async def create_topics(bootstrap: str, topics: Sequence[str], partitions: int) -> None:
    async with connected(bootstrap) as kafka:
        for topic in topics:
            await kafka.create_topic(topic, partitions, 1, {})
        # A broker creates some hundred partitions per second, and lists them earlier.
        for topic in topics:
            await kafka.offsets([(topic, number) for number in range(partitions)], LATEST)


# ---- Kafka's performance tools -----------------------------------------------------------------------------------


def java_producer(
    bootstrap: str, topic: str, payloads: list[bytes], records: int, *options: str, **properties: object
) -> tuple[float, float]:
    """ProducerPerformance at full speed; ``batch_size=1`` stands for the property ``batch.size``.

    Returns MB/s (10^6) and CPU seconds. The rate is its own, without the start of the JVM.
    """
    given = [f"{name.replace('_', '.')}={value}" for name, value in properties.items()]
    with tempfile.NamedTemporaryFile() as file:
        file.write(_DELIMITER.encode().join(payloads))
        file.flush()
        said, cpu_s = _run_tool(
            "ProducerPerformance",
            *("--topic", topic, "--num-records", str(records), "--throughput", "-1"),
            *("--payload-file", file.name, "--payload-delimiter", _DELIMITER, *options),
            *("--producer-props", f"bootstrap.servers={bootstrap}", *given),
        )
    rates = _RESULT.findall(said)
    if not rates or int(rates[-1][0]) != records:
        raise RuntimeError(f"ProducerPerformance did not send {records} records: {said[-500:]}")
    return float(rates[-1][2]) * 1.048576, cpu_s


def java_consumer(bootstrap: str, topic: str, records: int, group: str) -> float:
    """ConsumerPerformance over the whole topic, committed records only. Returns its own fetch rate in MB/s (10^6)."""
    said, _ = _run_tool(
        "ConsumerPerformance",
        *("--bootstrap-server", bootstrap, "--topic", topic, "--num-records", str(records)),
        *("--group", group, "--hide-header", "--command-property", "isolation.level=read_committed"),
    )
    fields = [field.strip() for field in said.strip().splitlines()[-1].split(",")]
    if int(fields[4]) < records:
        raise RuntimeError(f"ConsumerPerformance read {fields[4]} of {records} records")
    # start, end, MB, MB/s, records, records/s, rebalance ms, fetch ms, fetch MB/s, fetch records/s
    return float(fields[8]) * 1.048576


def _run_tool(name: str, *options: str) -> tuple[str, float]:
    """The output of one of Kafka's performance tools, and its CPU seconds."""
    java = [str(find_java().executable), "-Xmx512m", "-cp", ":".join(map(str, kafka_jars()))]
    before_s = ended_cpu_s()
    command = [*java, f"org.apache.kafka.tools.{name}", *options]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    return said, ended_cpu_s() - before_s
