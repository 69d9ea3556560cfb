"""Benchmarks of the mirror: against MirrorMaker 2 with exactly-once, on the same data."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError
from logferry.ops.bench.harness.figures import Figure, Side, medians
from logferry.ops.bench.harness.kafka_clients import DELIMITER
from logferry.ops.bench.harness.mirror_maker import mirror_maker, ours_of
from logferry.ops.bench.harness.usage import cpu_s, peak_rss_mb
from logferry.ops.bench.harness.workload import chunks, payload_file
from logferry.ops.runtime.jars import kafka_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import LONG_RUN, Cluster
from logferry.ops.stack.processes import Child

_ROUNDS: Final = 3
_PARTITIONS: Final = 4
_BYTES: Final = 1_000_000_000
_LOOK_S: Final = 0.05
_DEADLINE_S: Final = 600.0


class _Data(NamedTuple):
    """``batch_bytes``: of the producer that writes them; ``stored``: what the batches take in Kafka."""

    name: str
    record_bytes: int
    codec: str
    batch_bytes: int

    @property
    def topic(self) -> str:
        return f"dc1.{self.name}"


# A batch each, as a producer of such records writes them; the same as a gateway writes them, in batches of up to 1 MiB.
_DATA: Final = (
    _Data("64k", 65_536, "none", 16_384),
    _Data("64k-in-batches", 65_536, "none", 1 << 20),
    _Data("1k", 1024, "zstd", 262_144),
)


async def _create(bootstrap: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, _PARTITIONS, 1)])
    finally:
        await admin.close()


def _fill(bootstrap: str, data: _Data, folder: Path) -> None:
    file = payload_file(folder / data.name, chunks(2000, data.record_bytes), DELIMITER.encode())
    asyncio.run(_create(bootstrap, data.topic))
    command = [str(find_java().executable), "-Xmx512m", "-cp", ":".join(map(str, kafka_jars()))]
    command += ["org.apache.kafka.tools.ProducerPerformance", "--topic", data.topic, "--throughput", "-1"]
    command += ["--num-records", str(_BYTES // data.record_bytes)]
    command += ["--payload-file", str(file), "--payload-delimiter", DELIMITER, "--producer-props"]
    command += [f"bootstrap.servers={bootstrap}", f"compression.type={data.codec}", f"batch.size={data.batch_bytes}"]
    subprocess.run([*command, "linger.ms=100"], capture_output=True, timeout=300, check=True)


Last = dict[TopicPartition, tuple[int, int]]
"""Of each partition: its end, and the time of its last record."""


async def _last(consumer: AIOKafkaConsumer, ends: dict[TopicPartition, int]) -> Last:
    """A control record may stand at the end, so a few offsets before it are read, too."""
    found: Last = {}
    for partition, end in ends.items():
        consumer.seek(partition, max(0, end - 3))
    while len(found) < len(ends):
        for partition, records in (await consumer.getmany(timeout_ms=500)).items():
            found[partition] = (ends[partition], records[-1].timestamp)
    return found


async def _original(bootstrap: str, partitions: list[TopicPartition]) -> Last:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
    await consumer.start()
    try:
        consumer.assign(partitions)
        return await _last(consumer, await consumer.end_offsets(partitions))
    finally:
        await consumer.stop()


async def _watch(bootstrap: str, original: Last, on_first: Callable[[], None]) -> float:
    """Seconds from the first committed record in the copy to the last one."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed", fetch_max_wait_ms=50)
    await consumer.start()
    began, deadline = 0.0, time.perf_counter() + _DEADLINE_S
    try:
        consumer.assign(list(original))
        while time.perf_counter() < deadline:
            await asyncio.sleep(_LOOK_S)
            try:
                ends = await consumer.end_offsets(list(original))
            except KafkaError:
                continue
            now = time.perf_counter()
            if not began and any(ends.values()):
                began = now
                on_first()
            if all(ends[partition] >= end for partition, (end, _) in original.items()):
                copied = await _last(consumer, ends)
                if all(copied[partition][1] == last_ms for partition, (_, last_ms) in original.items()):
                    return now - began
    finally:
        await consumer.stop()
    raise RuntimeError(f"not mirrored within {_DEADLINE_S:.0f} s")


def _run(make: Callable[[Cluster, Cluster, str, Path], Child], there: Cluster, data: _Data) -> Side:
    """One copy into a new cluster; what it took from the first record to the last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Cluster("here", folder / "here", heap="1g", jvm=LONG_RUN) as here:
            partitions = [TopicPartition(data.topic, number) for number in range(_PARTITIONS)]
            original = asyncio.run(_original(there.bootstrap, partitions))
            # Made before, so that the first record is seen when it is there.
            asyncio.run(_create(here.bootstrap, data.topic))
            child = make(there, here, data.name, folder)
            started = time.perf_counter()
            child.start()
            at_first: list[float] = []

            def note() -> None:
                at_first.extend((cpu_s([child.pid or 0]), time.perf_counter() - started))

            try:
                took = asyncio.run(_watch(here.bootstrap, original, note))
                pid = child.pid
                if pid is None:
                    raise child.failed("ended")
                cpu = cpu_s([pid]) - at_first[0]
                peak = peak_rss_mb(pid)
            finally:
                child.stop(10)
    return {
        f"mb_s_{data.name}": _BYTES / took / 1e6,
        f"cpu_s_per_gb_{data.name}": cpu / (_BYTES / 1e9),
        f"peak_rss_mb_{data.name}": peak,
        f"until_first_s_{data.name}": at_first[1],
    }


@functools.cache
def _measured() -> tuple[Side, Side]:
    """Medians of both, over all data."""
    ours: list[Side] = []
    theirs: list[Side] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Cluster("there", folder / "there", heap="1g", jvm=LONG_RUN) as there:
            for data in _DATA:
                _fill(there.bootstrap, data, folder)
            for _ in range(_ROUNDS):
                ours.append(functools.reduce(lambda a, b: a | b, (_run(ours_of, there, data) for data in _DATA)))
                theirs.append(functools.reduce(lambda a, b: a | b, (_run(mirror_maker, there, data) for data in _DATA)))
    return medians(ours), medians(theirs)


def _figure(name: str, unit: str, key: str, worst: Callable[[list[float]], float]) -> Figure:
    ours, theirs = _measured()
    ratio = worst([ours[f"{key}_{data.name}"] / theirs[f"{key}_{data.name}"] for data in _DATA])

    def only(side: Side) -> Side:
        return {of: value for of, value in side.items() if of.startswith((key, "until_first"))}

    return Figure(name, unit, only(ours), only(theirs), _ROUNDS, round(ratio, 3))


def mirror_throughput_vs_mm2() -> Figure:
    """1 GB of lines: records of 64 KiB, a batch each and many in one, and of 1 KiB in zstd batches; the worst ratio."""
    return _figure("mirror_throughput_vs_mm2", "MB/s ours / theirs", "mb_s", min)


def mirror_cpu_vs_mm2() -> Figure:
    """CPU seconds a GB of the mirror's process alone, from the first record to the last; the worst ratio."""
    return _figure("mirror_cpu_vs_mm2", "CPU s/GB ours / theirs", "cpu_s_per_gb", max)


def mirror_rss_vs_mm2() -> Figure:
    """The largest resident size; the worst ratio."""
    return _figure("mirror_rss_vs_mm2", "MB ours / theirs", "peak_rss_mb", max)
