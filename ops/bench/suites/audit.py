"""Benchmark of the audit against a bare read of the same log and rows, which verifies nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition
from deltalake import DeltaTable
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared
from logferry.ops.bench.harness.kafka import connected, create_topics
from logferry.ops.bench.harness.usage import ended_cpu_s
from logferry.ops.bench.suites.load import _filled, _ours

_TOPIC: Final = "dc1.access"
_STATES: Final = "logferry.gateway.dc1.state"
_PARTITIONS: Final = 4
_CHUNK: Final = 128 << 10
_BYTES: Final = 250_000_000
_ROUNDS: Final = 3
_BOUND_S: Final = 1200


def audit_mb_s() -> Figure:
    """250 MB of access-log lines and a table with their parsed columns, in MB/s of log and lines of the rows together.

    The peer reads the log with aiokafka's consumer, and then all columns of the rows with pyarrow, in one process.
    """

    with _filled(_TOPIC, _CHUNK, _BYTES // _CHUNK) as (folder, bootstrap):
        table = Path(tempfile.mkdtemp(dir=folder)) / "table"
        _ours(bootstrap, _TOPIC, str(table), "access", 0)
        asyncio.run(_write_states(bootstrap))
        rounds = alternate(
            _ROUNDS, lambda _: _audited(bootstrap, table), lambda _: _read(bootstrap, table), warm_up_s=0
        )
    return compared("MB/s of the audit / of a bare read", "mb_s", rounds)


def _audited(bootstrap: str, table: Path) -> Side:
    command = [sys.executable, "-m", "logferry.ops", "audit", "--bootstrap", bootstrap, "--table", str(table), "--json"]
    before = ended_cpu_s()
    run = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=_BOUND_S)
    cpu_s = ended_cpu_s() - before
    report = json.loads(run.stdout)
    if run.returncode or report["table"]["parsed"] != report["counts"]["lines"]:
        raise RuntimeError(f"{report['verdict']}; {report['table']}")
    size = 2 * report["counts"]["bytes"]
    return _side(size, report["seconds"], cpu_s, report["table"]["rows"])


def _side(size: int, seconds: float, cpu_s: float, rows: int) -> Side:
    return {"mb_s": size / 1e6 / seconds, "seconds": seconds, "cpu_s_gb": cpu_s / size * 1e9, "rows": rows}


def _read(bootstrap: str, table: Path) -> Side:
    started, before = time.perf_counter(), time.process_time()
    size = asyncio.run(_consumed(bootstrap))
    rows = 0
    for batch in DeltaTable(str(table)).to_pyarrow_dataset().scanner(use_threads=False).to_batches():
        rows += batch.num_rows
    seconds = time.perf_counter() - started
    return _side(2 * size, seconds, time.process_time() - before, rows)


async def _consumed(bootstrap: str) -> int:
    """The bytes of the topic's records."""
    places = [TopicPartition(_TOPIC, number) for number in range(_PARTITIONS)]
    size = 0
    options: dict[str, Any] = {"isolation_level": "read_committed", "max_partition_fetch_bytes": 4 << 20}
    options["auto_offset_reset"] = "earliest"  # `seek_to_beginning` may come before the reset to the end
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, **options) as consumer:
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        # After the last record of each transaction comes its marker, which no consumer returns.
        left = {place for place, end in ends.items() if end}
        while left:
            found = await consumer.getmany(timeout_ms=500)
            size += sum(len(record.value or b"") for records in found.values() for record in records)
            left -= {place for place in left if await consumer.position(place) >= ends[place] - 1}
    return size


async def _write_states(bootstrap: str) -> None:
    """The states that a gateway would have written with the chunks."""
    await create_topics(bootstrap, [_STATES], _PARTITIONS)
    async with connected(bootstrap) as kafka:
        topic = await kafka.describe_topic(_TOPIC)
    places = [TopicPartition(_TOPIC, number) for number in range(_PARTITIONS)]
    last: dict[int, int] = {}
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False) as consumer:
        consumer.assign(places)
        for place, end in (await consumer.end_offsets(places)).items():
            consumer.seek(place, max(0, end - 2))
            record = await consumer.getone(place)
            last[place.partition] = int.from_bytes(dict(record.headers)["seqno"], "big")
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for number, seqno in last.items():
            source = SourceIdentity(_TOPIC, None, f"web{number}:/var/log/access.log")
            state = SourceState(topic.id, number, seqno, 0, 1, int(time.time() * 1000))
            lane = lane_of(source.key, _PARTITIONS)
            await producer.send_and_wait(_STATES, state.encode(), key=source.state_key(), partition=lane)
