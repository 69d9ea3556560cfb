"""Benchmarks of the loader against plain Spark Structured Streaming: same topic, same settings; and of `logferry query`
on a tail, against a bare consumer that reads the same bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow.dataset as ds
from aiokafka import AIOKafkaProducer
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.loaders.location import Location
from logferry.loaders.storage.tables import count_rows
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared, median_ratio, medians
from logferry.ops.bench.harness.kafka import chunks, create_topics, java_consumer, temporary_kafka
from logferry.ops.bench.harness.spark_cluster import standalone
from logferry.ops.bench.harness.usage import Program, ended_cpu_s
from logferry.ops.runtime.jars import spark_environment
from logferry.ops.stack.s3_server import BUCKET, S3Server

_PARTITIONS: Final = 4
_TRANSACTION: Final = 200  # chunks
_CHUNK: Final = 128 << 10
_BYTES: Final = 1_000_000_000
_S3_BYTES: Final = _BYTES
_CLUSTER_BYTES: Final = 800_000_000
_WARM_UP_BATCHES: Final = 2
_ROUNDS: Final = 3
_FORMATS: Final = ("lines", "access")
_SMALL_OFFSETS: Final = 100
_SMALL_BATCHES: Final = 40
_MANY_BATCHES: Final = 1000
_BOUND_S: Final = 3600.0
_QUERY_LINES: Final = 5_000_000
_QUERY_TOPIC: Final = "dc1.access"
_STATEMENTS: Final = {
    "count": "SELECT count(*) AS n FROM logs",
    "group": "SELECT status, count(*), sum(body_bytes) FROM logs WHERE path LIKE '/api/%' GROUP BY ALL ORDER BY ALL",
}


@contextmanager
def _filled(topic: str, chunk_bytes: int, count: int) -> Iterator[tuple[Path, str]]:
    """A folder, and the address of a Kafka whose topic has ``count`` chunks."""
    with temporary_kafka("dc1", heap="512m") as (cluster, folder):
        asyncio.run(create_topics(cluster.bootstrap, [topic], _PARTITIONS))
        asyncio.run(_fill(cluster.bootstrap, topic, chunks(64, chunk_bytes), count, _PARTITIONS))
        yield folder, cluster.bootstrap


async def _fill(bootstrap: str, topic: str, payloads: Sequence[bytes], count: int, partitions: int) -> None:
    """Writes ``count`` chunks in transactions, as a gateway does."""
    seqnos = [0] * partitions
    options = {"transactional_id": "bench", "compression_type": "zstd", "max_batch_size": 1 << 20}
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, **options) as producer:
        for first in range(0, count, _TRANSACTION):
            async with producer.transaction():
                for number in range(first, min(count, first + _TRANSACTION)):
                    place, data = number % partitions, payloads[number % len(payloads)]
                    before, seqnos[place] = seqnos[place], seqnos[place] + len(data)
                    headers = record_headers(Chunk(seqnos[place], before, 1_764_000_000_000, {"host": "web1"}, data))
                    key = f"web{place}:/var/log/access.log".encode()
                    await producer.send(topic, data, key=key, partition=place, headers=headers)
                await producer.flush()


def _run(*arguments: str) -> dict[str, Any]:
    """Runs a program to its end. Returns its JSON output and the peak memory of it and its JVM."""
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-m", *arguments]
        program = Program(command, stdout=out, env={**spark_environment(), **os.environ}).until(bound_s=_BOUND_S)
        out.seek(0)
        return {**json.load(out), "python_mb": program.peak_mb, "jvm_mb": program.children_peak_mb}


# Of a loader: Kafka's address, topic, new table, parser, and offsets of a batch (0: it chooses).
Load = Callable[[str, str, str, str, int], dict[str, Any]]


def _ours(bootstrap: str, topic: str, table: str, form: str, offsets: int, more: Sequence[str] = ()) -> dict[str, Any]:
    more = [*more, *(["--max-records", str(offsets)] if offsets else [])]
    command = ["logferry.loaders", "--table", table, "--topics", topic, "--bootstrap", bootstrap, "--parser", form]
    result = _run(*command, "--json", *more)
    loaded = result["tables"][0]
    return {**result, "seconds": loaded["seconds"], "batches": [batch["seconds"] for batch in loaded["batches"]]}


def _theirs(bootstrap: str, topic: str, table: str, form: str, offsets: int) -> dict[str, Any]:
    peer = "logferry.ops.bench.harness.structured_streaming"
    with tempfile.TemporaryDirectory() as scratch:
        return _run(peer, bootstrap, topic, table, form, str(offsets), scratch)


def _table(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder)) / "table"


def load_rows_vs_structured_streaming() -> Figure:
    """1 GB of lines from Kafka into a Delta table: rows per second after Spark's start, with two parsers.

    The peer loads all in one batch, its fastest way; the loader chooses its batches. ``ratio``: of the slower parser.
    """
    with _filled("dc1.lines", _CHUNK, _BYTES // _CHUNK) as (folder, bootstrap):
        return _rows_of_both(bootstrap, lambda: str(_table(folder)), _FORMATS)


def load_rows_vs_structured_streaming_s3() -> Figure:
    """The same for a table on a local S3 server, which keeps it in memory, with one parser."""
    with (
        _filled("dc1.lines", _CHUNK, _S3_BYTES // _CHUNK) as (folder, bootstrap),
        S3Server(folder) as server,
        _environment({**server.environment, **spark_environment(s3=True)}),
    ):
        return _rows_of_both(bootstrap, lambda: f"s3://{BUCKET}/{uuid.uuid4().hex}/table", _FORMATS[:1])


def load_two_workers() -> Figure:
    """800 MB of access logs on a standalone cluster: rows per second with two workers of one core, of that with one.

    Each worker is pinned to a core; driver and Kafka share these cores. The first two batches do not count: there each
    executor compiles the same code.
    """
    with _filled("dc1.lines", _CHUNK, _CLUSTER_BYTES // _CHUNK) as (folder, bootstrap):

        def side(workers: int, number: int) -> Side:
            with standalone(folder / f"cluster-{workers}-{number}", workers, are_pinned=True) as cluster:
                more = ("--spark-conf", "spark.executor.memory=768m", "--master", cluster.url)
                loaded = _ours(bootstrap, "dc1.lines", str(_table(folder)), "access", 0, more)["tables"][0]
            warm = loaded["batches"][_WARM_UP_BATCHES:]
            seconds = sum(batch["seconds"] for batch in warm)
            return {"rows_s": sum(batch["rows"] for batch in warm) / seconds, "seconds": seconds}

        rounds = alternate(_ROUNDS, partial(side, 2), partial(side, 1), warm_up_s=0)
    return compared("rows/s of two workers / of one", "rows_s", rounds)


def load_large_batch() -> Figure:
    """Lines in one batch of 10 GB, and in one of 1 GB: the peak memory, executors and driver in one JVM."""
    sides: list[Side] = []
    for size in (10 * _BYTES, _BYTES):
        with _filled("dc1.lines", _CHUNK, size // _CHUNK) as (folder, bootstrap):
            config = folder / "load.toml"
            config.write_text(
                f'[kafka]\nbootstrap_servers = "{bootstrap}"\n[[tables]]\npath = "{_table(folder)}"\n'
                f'topics = ["dc1.lines"]\nparser = {{ format = "lines" }}\nmax_records = 10_000_000\n'
                f"batch_bytes = {1 << 40}\n"
            )
            result = _run("logferry.loaders", "--config", str(config), "--json")
        (batch,) = result["tables"][0]["batches"]
        memory = {"jvm_mb": result["jvm_mb"], "python_mb": result["python_mb"]}
        sides.append({"seconds": batch["seconds"], **memory, "memory_mb": sum(memory.values())})
    large, small = sides
    ratio = round(large["memory_mb"] / small["memory_mb"], 3)
    return Figure("memory of a batch of 10 GB / of 1 GB", large, small, 1, ratio=ratio)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rows_of_both(bootstrap: str, new_table: Callable[[], str], forms: Sequence[str]) -> Figure:
    ratios: list[float] = []
    ours: Side = {}
    theirs: Side = {}

    def side(load: Load, form: str, _: int) -> Side:
        table = new_table()
        result = load(bootstrap, "dc1.lines", table, form, 0)
        rows, seconds = count_rows(Location.of(table), ds.scalar(True)), result["seconds"]
        memory = {"jvm_mb": result["jvm_mb"], "python_mb": result["python_mb"]}
        return {"rows_s": rows / seconds, "seconds": seconds, "rows": rows, **memory}

    for form in forms:
        rounds = alternate(_ROUNDS, partial(side, _ours, form), partial(side, _theirs, form), warm_up_s=0)
        if len({one["rows"] for one in (*rounds[0], *rounds[1])}) > 1:
            raise RuntimeError(f"the tables differ: {rounds}")
        ratios.append(median_ratio(rounds, "rows_s"))
        for found, sides in zip((ours, theirs), rounds, strict=True):
            found |= {f"{form}_{key}": value for key, value in medians(sides).items()}
    return Figure("rows/s of the loader / of Structured Streaming", ours, theirs, _ROUNDS, ratio=min(ratios))


def load_small_batches_vs_structured_streaming() -> Figure:
    """Batches of 100 small chunks: median seconds of a batch, each side in one session; below 1 is faster."""
    with _filled("dc1.small", 1024, _SMALL_OFFSETS * _SMALL_BATCHES) as (folder, bootstrap):

        def side(load: Load, _: int) -> Side:
            result = load(bootstrap, "dc1.small", str(_table(folder)), "lines", _SMALL_OFFSETS)
            return {"batch_s": result["seconds"] / len(result["batches"]), "batches": len(result["batches"])}

        rounds = alternate(_ROUNDS, partial(side, _ours), partial(side, _theirs), warm_up_s=0)
    return compared("time of a small batch / Structured Streaming's", "batch_s", rounds)


def load_thousand_batches() -> Figure:
    """1,000 batches into one table: median time of the last hundred, divided by that of the batches 50 to 150."""
    with _filled("dc1.small", 1024, 21 * _MANY_BATCHES) as (folder, bootstrap):
        result = _ours(bootstrap, "dc1.small", str(_table(folder)), "lines", 20)
    each = result["batches"]
    early, late = statistics.median(each[50:150]), statistics.median(each[-100:])
    ours = {"batches": len(each), "early_s": early, "late_s": late, "seconds": result["seconds"]}
    ours |= {"jvm_mb": result["jvm_mb"], "python_mb": result["python_mb"]}
    return Figure("time of a batch after 1,000 / at the start", ours, {}, 1, ratio=round(late / early, 3))


# ---- query ----------------------------------------------------------------------------------------------------------


def query_tail() -> Figure:
    """5 million lines of an access log behind a table of one chunk: seconds of ``count(*)``, and of a filter with
    groups on parsed columns, from the start of the command; ``ratio``: of the count to Kafka's ConsumerPerformance.
    """
    payloads = chunks(64, _CHUNK)
    count = 1 + _QUERY_LINES * 64 // sum(payload.count(b"\n") for payload in payloads)
    size_mb = sum(len(payloads[number % 64]) for number in range(count)) / 1e6
    with _filled(_QUERY_TOPIC, _CHUNK, count) as (folder, bootstrap):
        table = folder / "table"
        which = ["--table", str(table), "--topics", _QUERY_TOPIC, "--bootstrap", bootstrap, "--parser", "access"]
        _run("logferry.loaders", *which, "--json", "--max-records", "1", "--stop-records", "1")
        rounds = alternate(_ROUNDS, partial(_query, bootstrap, table), partial(_bare, bootstrap, count, size_mb), 0)
    return compared("seconds of count(*) over a tail / of a bare consumer", "count_s", rounds)


def _query(bootstrap: str, table: Path, _: int) -> Side:
    found: Side = {}
    for name, sql in _STATEMENTS.items():
        before_s = ended_cpu_s()
        options = [sql, "--table", str(table), "--format", "csv", "--bootstrap", bootstrap]
        command = [sys.executable, "-m", "logferry.ops.cli.main", "query", *options]
        program = Program(command, stdout=subprocess.PIPE).until(bound_s=600)
        found |= {f"{name}_s": program.took_s, f"{name}_cpu_s": ended_cpu_s() - before_s, f"{name}_mb": program.peak_mb}
    return found


def _bare(bootstrap: str, records: int, size_mb: float, number: int) -> Side:
    rate = java_consumer(bootstrap, _QUERY_TOPIC, records, f"bare-{number}")
    return {"count_s": size_mb / rate, "mb_s": rate}
