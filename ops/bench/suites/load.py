"""Benchmarks of the loader: against plain Spark Structured Streaming, on the same topic, with the same settings."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from deltalake import DeltaTable
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.loaders.__main__ import JARS_VARIABLE
from logferry.ops.bench.harness.figures import Figure, Side, alternate, median_ratio, medians
from logferry.ops.bench.harness.usage import peak_rss_mb
from logferry.ops.bench.harness.workload import chunks
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import LONG_RUN, Cluster

_PARTITIONS: Final = 4
_CHUNK: Final = 128 << 10
_BYTES: Final = 1_000_000_000
_ROUNDS: Final = 3
_FORMATS: Final = ("lines", "access")
_SMALL_OFFSETS: Final = 100
_SMALL_BATCHES: Final = 40
_MANY_BATCHES: Final = 1000
_SEEN_S: Final = 0.5


def _cluster(folder: Path) -> Cluster:
    return Cluster("dc1", folder / "kafka", heap="512m", jvm=LONG_RUN)


async def _fill(bootstrap: str, topic: str, payloads: Sequence[bytes], count: int, each: int) -> None:
    """So many chunks, as a gateway writes them; ``each`` in a transaction."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(topic, _PARTITIONS, 1)])
    await admin.close()
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap, transactional_id="bench", compression_type="zstd", max_batch_size=1 << 20
    )
    await producer.start()
    seqnos = [0] * _PARTITIONS
    try:
        for first in range(0, count, each):
            async with producer.transaction():
                for number in range(first, min(count, first + each)):
                    place, data = number % _PARTITIONS, payloads[number % len(payloads)]
                    before, seqnos[place] = seqnos[place], seqnos[place] + len(data)
                    headers = record_headers(Chunk(seqnos[place], before, 1_764_000_000_000, {"host": "web1"}, data))
                    key = f"web{place}:/var/log/access.log".encode()
                    await producer.send(topic, data, key=key, partition=place, headers=headers)
                await producer.flush()
    finally:
        await producer.stop()


def _env() -> dict[str, str]:
    return {
        **os.environ,
        "JAVA_HOME": str(find_java().home),
        JARS_VARIABLE: os.pathsep.join(map(str, spark_jars())),
    }


def _run(arguments: Sequence[str]) -> dict[str, Any]:
    """One program to its end; what it says, and the most memory that it and its JVM held."""
    child = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, env=_env())
    peak, over = {"python": 0.0, "jvm": 0.0}, threading.Event()

    def watch() -> None:
        while not over.wait(_SEEN_S):
            # A process that is about to end, or to begin, has none.
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
    return _run([*command, "--json", *more])


def _theirs(bootstrap: str, topic: str, table: Path, form: str, offsets: int = 0) -> dict[str, Any]:
    scratch = table.with_name(f"{table.name}-scratch")
    return _run(
        [
            "logferry.ops.bench.harness.structured_streaming",
            bootstrap,
            topic,
            str(table),
            form,
            str(offsets),
            str(scratch),
        ]
    )


def _rows(table: Path) -> int:
    return int(DeltaTable(str(table)).to_pyarrow_dataset().count_rows())


def load_rows_vs_structured_streaming() -> Figure:
    """1 GB of lines out of Kafka into a Delta table: rows a second, after Spark's start; the parsers lines and access.

    The peer takes all in one batch, which is its fastest way; the loader cuts it, as by itself. ``ratio`` is the lower
    one of the two parsers'.
    """
    payloads = chunks(64, _CHUNK)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with _cluster(folder) as cluster:
            topic = "dc1.lines"
            asyncio.run(_fill(cluster.bootstrap, topic, payloads, _BYTES // _CHUNK, 200))
            ratios: list[float] = []
            ours: Side = {}
            theirs: Side = {}
            for form in _FORMATS:

                def mine(number: int, form: str = form) -> Side:
                    table = folder / f"ours-{form}-{number}"
                    said = _ours(cluster.bootstrap, topic, table, form)
                    return _side(table, said, said["tables"][0]["seconds"])

                def other(number: int, form: str = form) -> Side:
                    table = folder / f"theirs-{form}-{number}"
                    said = _theirs(cluster.bootstrap, topic, table, form)
                    return _side(table, said, said["seconds"])

                a, b = alternate(_ROUNDS, mine, other, warm_up=0)
                if {side["rows"] for side in (*a, *b)} != {a[0]["rows"]}:
                    raise RuntimeError(f"the tables differ: {a} {b}")
                ratios.append(median_ratio(a, b, "rows_s"))
                ours |= {f"{form}_{key}": value for key, value in medians(a).items()}
                theirs |= {f"{form}_{key}": value for key, value in medians(b).items()}
    unit = "rows/s of the loader / of Structured Streaming"
    return Figure("load_rows_vs_structured_streaming", unit, ours, theirs, _ROUNDS, ratio=min(ratios))


def _side(table: Path, said: dict[str, Any], seconds: float) -> Side:
    rows = _rows(table)
    return {
        "rows_s": rows / seconds,
        "seconds": seconds,
        "rows": rows,
        "jvm_mb": said["jvm_mb"],
        "python_mb": said["python_mb"],
    }


def load_small_batches_vs_structured_streaming() -> Figure:
    """Batches of 100 small chunks: seconds of one, in the median, both in one session; below 1 is faster."""
    payloads = chunks(64, 1024)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with _cluster(folder) as cluster:
            topic = "dc1.small"
            asyncio.run(_fill(cluster.bootstrap, topic, payloads, _SMALL_OFFSETS * _SMALL_BATCHES, 200))

            def mine(number: int) -> Side:
                said = _ours(cluster.bootstrap, topic, folder / f"ours-{number}", "lines", _SMALL_OFFSETS)
                table = said["tables"][0]
                return {"batch_s": table["seconds"] / len(table["batches"]), "batches": len(table["batches"])}

            def other(number: int) -> Side:
                said = _theirs(cluster.bootstrap, topic, folder / f"theirs-{number}", "lines", _SMALL_OFFSETS)
                return {"batch_s": said["seconds"] / len(said["batches"]), "batches": len(said["batches"])}

            a, b = alternate(_ROUNDS, mine, other, warm_up=0)
    unit = "time of a small batch / Structured Streaming's"
    name = "load_small_batches_vs_structured_streaming"
    return Figure(name, unit, medians(a), medians(b), _ROUNDS, ratio=median_ratio(a, b, "batch_s"))


def load_thousand_batches() -> Figure:
    """1,000 batches into one table: the median time of the last hundred, over that of the batches 50 to 150."""
    payloads = chunks(64, 1024)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with _cluster(folder) as cluster:
            asyncio.run(_fill(cluster.bootstrap, "dc1.small", payloads, 21 * _MANY_BATCHES, 200))
            began = time.monotonic()
            said = _ours(cluster.bootstrap, "dc1.small", folder / "table", "lines", 20)
            took = time.monotonic() - began
    each = [batch["seconds"] for batch in said["tables"][0]["batches"]]
    early, late = statistics.median(each[50:150]), statistics.median(each[-100:])
    ours = {"batches": len(each), "early_s": early, "late_s": late, "seconds": took}
    ours |= {"jvm_mb": said["jvm_mb"], "python_mb": said["python_mb"]}
    unit = "time of a batch after 1,000 / at the start"
    return Figure("load_thousand_batches", unit, ours, {}, 1, ratio=round(late / early, 3))
