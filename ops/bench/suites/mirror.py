"""Benchmarks of the mirror: against MirrorMaker 2 with exactly-once, on the same data."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from logferry.ops.bench.harness.figures import Figure, Side, alternate, medians
from logferry.ops.bench.harness.kafka_clients import DELIMITER, create_topic, run_tool, temporary_kafka
from logferry.ops.bench.harness.mirror_maker import MakeMirror, mirror_maker, our_mirror
from logferry.ops.bench.harness.usage import cpu_s, peak_rss_mb
from logferry.ops.bench.harness.workload import chunks, payload_file
from logferry.ops.stack.kafka_cluster import KafkaCluster

_ROUNDS: Final = 3
_PARTITIONS: Final = 4
_BYTES: Final = 1_000_000_000
_LOOK_S: Final = 0.05
_DEADLINE_S: Final = 600.0


class _Data(NamedTuple):
    """Records of one benchmark. ``batch_bytes``: batch size of their producer."""

    name: str
    record_bytes: int
    codec: str
    batch_bytes: int

    @property
    def topic(self) -> str:
        return f"dc1.{self.name}"


# Large records in a batch each, as a producer writes them; the same in batches of up to 1 MiB, as a gateway does.
_DATA: Final = (
    _Data("64k", 65_536, "none", 16_384),
    _Data("64k-in-batches", 65_536, "none", 1 << 20),
    _Data("1k", 1024, "zstd", 262_144),
)


def _fill(bootstrap: str, data: _Data, folder: Path) -> None:
    file = payload_file(folder / data.name, chunks(2000, data.record_bytes), DELIMITER.encode())
    asyncio.run(create_topic(bootstrap, data.topic, _PARTITIONS))
    run_tool(
        "ProducerPerformance",
        *("--topic", data.topic, "--throughput", "-1", "--num-records", str(_BYTES // data.record_bytes)),
        *("--payload-file", str(file), "--payload-delimiter", DELIMITER, "--producer-props", "linger.ms=100"),
        *(f"bootstrap.servers={bootstrap}", f"compression.type={data.codec}", f"batch.size={data.batch_bytes}"),
    )


Last = dict[TopicPartition, tuple[int, int]]
"""Per partition: end offset, and timestamp of the last record."""


async def _last(consumer: AIOKafkaConsumer, ends: dict[TopicPartition, int]) -> Last:
    """Reads the last few offsets of each partition, because a control record may be at the end."""
    found: Last = {}
    for partition, end in ends.items():
        consumer.seek(partition, max(0, end - 3))
    while len(found) < len(ends):
        for partition, records in (await consumer.getmany(timeout_ms=500)).items():
            found[partition] = (ends[partition], records[-1].timestamp)
    return found


async def _original(bootstrap: str, partitions: list[TopicPartition]) -> Last:
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as consumer:
        consumer.assign(partitions)
        return await _last(consumer, await consumer.end_offsets(partitions))


async def _watch(bootstrap: str, original: Last, on_first: Callable[[], None]) -> float:
    """Seconds from the first committed record in the copy to the last one."""
    options = {"isolation_level": "read_committed", "fetch_max_wait_ms": 50}
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap, **options) as consumer:
        began, deadline = 0.0, time.perf_counter() + _DEADLINE_S
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
    raise RuntimeError(f"not mirrored within {_DEADLINE_S:.0f} s")


def _run(make: MakeMirror, there: KafkaCluster, data: _Data) -> Side:
    """One copy into a new cluster: cost from the first record to the last."""
    with temporary_kafka("here") as (here, folder):
        partitions = [TopicPartition(data.topic, number) for number in range(_PARTITIONS)]
        original = asyncio.run(_original(there.bootstrap, partitions))
        # Created in advance, so that the first record is noticed at once.
        asyncio.run(create_topic(here.bootstrap, data.topic, _PARTITIONS))
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
            cpu, peak = cpu_s([pid]) - at_first[0], peak_rss_mb(pid)
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
    """Medians of both mirrors, over all data."""
    with temporary_kafka("there") as (there, folder):

        def copies(make: MakeMirror) -> Side:
            return {key: value for data in _DATA for key, value in _run(make, there, data).items()}

        for data in _DATA:
            _fill(there.bootstrap, data, folder)
        ours, theirs = alternate(_ROUNDS, lambda _: copies(our_mirror), lambda _: copies(mirror_maker), warm_up_s=0)
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
    """CPU seconds per GB of the mirror's process alone, from the first record to the last; the worst ratio."""
    return _figure("mirror_cpu_vs_mm2", "CPU s/GB ours / theirs", "cpu_s_per_gb", max)


def mirror_rss_vs_mm2() -> Figure:
    """Peak resident memory; the worst ratio."""
    return _figure("mirror_rss_vs_mm2", "MB ours / theirs", "peak_rss_mb", max)
