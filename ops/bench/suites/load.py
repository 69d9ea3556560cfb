"""Benchmarks of the loader against plain Spark Structured Streaming: same topic, same settings."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from aiokafka import AIOKafkaProducer
from deltalake import DeltaTable
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared, median_ratio, medians
from logferry.ops.bench.harness.kafka_clients import create_topic, temporary_kafka
from logferry.ops.bench.harness.usage import peak_rss_mb
from logferry.ops.bench.harness.workload import chunks
from logferry.ops.runtime.jars import spark_environment

_PARTITIONS: Final = 4
_TRANSACTION: Final = 200  # chunks
_CHUNK: Final = 128 << 10
_BYTES: Final = 1_000_000_000
_ROUNDS: Final = 3
_FORMATS: Final = ("lines", "access")
_SMALL_OFFSETS: Final = 100
_SMALL_BATCHES: Final = 40
_MANY_BATCHES: Final = 1000
_SEEN_S: Final = 0.5


class Load(Protocol):
    __name__: str

    def __call__(self, bootstrap: str, topic: str, table: Path, form: str, offsets: int = ..., /) -> dict[str, Any]: ...


@contextmanager
def _filled(topic: str, chunk_bytes: int, count: int) -> Iterator[tuple[Path, str]]:
    """A folder, and the address of a Kafka whose topic has ``count`` chunks."""
    with temporary_kafka("dc1", heap="512m") as (cluster, folder):
        asyncio.run(_fill(cluster.bootstrap, topic, chunks(64, chunk_bytes), count))
        yield folder, cluster.bootstrap


async def _fill(bootstrap: str, topic: str, payloads: Sequence[bytes], count: int) -> None:
    """Writes ``count`` chunks in transactions, as a gateway does."""
    await create_topic(bootstrap, topic, _PARTITIONS)
    seqnos = [0] * _PARTITIONS
    options = {"transactional_id": "bench", "compression_type": "zstd", "max_batch_size": 1 << 20}
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, **options) as producer:
        for first in range(0, count, _TRANSACTION):
            async with producer.transaction():
                for number in range(first, min(count, first + _TRANSACTION)):
                    place, data = number % _PARTITIONS, payloads[number % len(payloads)]
                    before, seqnos[place] = seqnos[place], seqnos[place] + len(data)
                    headers = record_headers(Chunk(seqnos[place], before, 1_764_000_000_000, {"host": "web1"}, data))
                    key = f"web{place}:/var/log/access.log".encode()
                    await producer.send(topic, data, key=key, partition=place, headers=headers)
                await producer.flush()


def _run(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a program to its end. Returns its JSON output and the peak memory of it and its JVM."""
    child = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, env={**os.environ, **spark_environment()}
    )
    peak, over = {"python": 0.0, "jvm": 0.0}, threading.Event()

    def watch() -> None:
        while not over.wait(_SEEN_S):
            # A process that is starting or ending has no value.
            with suppress(OSError, StopIteration):
                peak["python"] = peak_rss_mb(child.pid)
                for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
                    peak["jvm"] = max(peak["jvm"], peak_rss_mb(int(pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        out, _ = child.communicate()
    finally:
        over.set()
        watcher.join()
    if child.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {child.returncode}")
    return {**json.loads(out), "python_mb": peak["python"], "jvm_mb": peak["jvm"]}


def _ours(bootstrap: str, topic: str, table: Path, form: str, offsets: int = 0) -> dict[str, Any]:
    more = ["--max-records", str(offsets)] if offsets else []
    command = ["logferry.loaders", "--table", str(table), "--topics", topic, "--bootstrap", bootstrap, "--parser", form]
    result = _run([*command, "--json", *more])
    loaded = result["tables"][0]
    return {**result, "seconds": loaded["seconds"], "batches": [batch["seconds"] for batch in loaded["batches"]]}


def _theirs(bootstrap: str, topic: str, table: Path, form: str, offsets: int = 0) -> dict[str, Any]:
    scratch = table.with_name(f"{table.name}-scratch")
    peer = "logferry.ops.bench.harness.structured_streaming"
    return _run([peer, bootstrap, topic, str(table), form, str(offsets), str(scratch)])


def load_rows_vs_structured_streaming() -> Figure:
    """1 GB of lines from Kafka into a Delta table: rows per second after Spark's start, with two parsers.

    The peer loads all in one batch, its fastest way; the loader chooses its batches. ``ratio``: of the slower parser.
    """
    ratios: list[float] = []
    ours: Side = {}
    theirs: Side = {}
    with _filled("dc1.lines", _CHUNK, _BYTES // _CHUNK) as (folder, bootstrap):

        def side(load: Load, form: str, number: int) -> Side:
            table = folder / f"{load.__name__[1:]}-{form}-{number}"
            result = load(bootstrap, "dc1.lines", table, form)
            rows, seconds = int(DeltaTable(str(table)).to_pyarrow_dataset().count_rows()), result["seconds"]
            memory = {"jvm_mb": result["jvm_mb"], "python_mb": result["python_mb"]}
            return {"rows_s": rows / seconds, "seconds": seconds, "rows": rows, **memory}

        for form in _FORMATS:
            a, b = alternate(_ROUNDS, partial(side, _ours, form), partial(side, _theirs, form), warm_up_s=0)
            if {one["rows"] for one in (*a, *b)} != {a[0]["rows"]}:
                raise RuntimeError(f"the tables differ: {a} {b}")
            ratios.append(median_ratio(a, b, "rows_s"))
            ours |= {f"{form}_{key}": value for key, value in medians(a).items()}
            theirs |= {f"{form}_{key}": value for key, value in medians(b).items()}
    unit = "rows/s of the loader / of Structured Streaming"
    return Figure("load_rows_vs_structured_streaming", unit, ours, theirs, _ROUNDS, ratio=min(ratios))


def load_small_batches_vs_structured_streaming() -> Figure:
    """Batches of 100 small chunks: median seconds of a batch, each side in one session; below 1 is faster."""
    with _filled("dc1.small", 1024, _SMALL_OFFSETS * _SMALL_BATCHES) as (folder, bootstrap):

        def side(load: Load, number: int) -> Side:
            result = load(bootstrap, "dc1.small", folder / f"{load.__name__[1:]}-{number}", "lines", _SMALL_OFFSETS)
            return {"batch_s": result["seconds"] / len(result["batches"]), "batches": len(result["batches"])}

        a, b = alternate(_ROUNDS, partial(side, _ours), partial(side, _theirs), warm_up_s=0)
    unit = "time of a small batch / Structured Streaming's"
    return compared("load_small_batches_vs_structured_streaming", unit, a, b, "batch_s")


def load_thousand_batches() -> Figure:
    """1,000 batches into one table: median time of the last hundred, divided by that of the batches 50 to 150."""
    with _filled("dc1.small", 1024, 21 * _MANY_BATCHES) as (folder, bootstrap):
        began = time.monotonic()
        result = _ours(bootstrap, "dc1.small", folder / "table", "lines", 20)
        took = time.monotonic() - began
    each = result["batches"]
    early, late = statistics.median(each[50:150]), statistics.median(each[-100:])
    ours = {"batches": len(each), "early_s": early, "late_s": late, "seconds": took}
    ours |= {"jvm_mb": result["jvm_mb"], "python_mb": result["python_mb"]}
    unit = "time of a batch after 1,000 / at the start"
    return Figure("load_thousand_batches", unit, ours, {}, 1, ratio=round(late / early, 3))
