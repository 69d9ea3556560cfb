"""Benchmarks of the mirror against MirrorMaker 2 with exactly-once: the same data, and 10,000 partitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from statistics import quantiles
from typing import Final, NamedTuple

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from logferry.gateway.kafka.client import LATEST, KafkaClient
from logferry.ops.bench.harness.figures import Figure, Side, alternate, medians
from logferry.ops.bench.harness.kafka import chunks, connected, create_topics, java_producer, temporary_kafka
from logferry.ops.bench.harness.peers import MakeMirror, mirror_maker, our_mirror
from logferry.ops.bench.harness.usage import UsageMeter, peak_rss_mb, rss_mb
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child

_ROUNDS: Final = 3
_PARTITIONS: Final = 4
_BYTES: Final = 1_000_000_000
_LOOK_S: Final = 0.1
_DEADLINE_S: Final = 600.0
# A broker takes times up to an hour ahead.
_AHEAD_MS: Final = 1_800_000


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

_MANY_TOPICS: Final = 100
_MANY_PARTITIONS: Final = 100
_RECORD_BYTES: Final = 1000
_RATE: Final = 2.0
_IDLE_S: Final = 20.0
_SETTLE_S: Final = 10.0
_ACTIVE_S: Final = 30.0
_WARM_UP_S: Final = 5.0
_LATE_S: Final = 20.0
_MANY_DEADLINE_S: Final = 240.0
# A broker maps two index files per partition into memory; a broker that is busy with them must not count as dead.
_SETTINGS: Final = {"log.index.size.max.bytes": str(1 << 16), "broker.session.timeout.ms": "20000"}

Places = list[tuple[str, int]]


def mirror_throughput_vs_mm2() -> Figure:
    """1 GB of lines: records of 64 KiB, a batch each and many in one, and of 1 KiB in zstd batches; the worst ratio."""
    return _figure("MB/s ours / theirs", "mb_s", min)


def mirror_cpu_vs_mm2() -> Figure:
    """CPU seconds per GB of the mirror's process alone, from the first record to the last; the worst ratio."""
    return _figure("CPU s/GB ours / theirs", "cpu_s_per_gb", max)


def mirror_rss_vs_mm2() -> Figure:
    """Peak resident memory; the worst ratio."""
    return _figure("MB ours / theirs", "peak_rss_mb", max)


def mirror_10k_partitions_rss_mb() -> Figure:
    """Peak resident memory of a mirror of 10,000 partitions, in one round; and its CPU time, added latency and start.

    Each partition has one record when the mirror starts, so that the mirror has to copy from all of them.
    ``idle_cores``: without writes. ``added``: 100 partitions get two records per second each; time from the
    acknowledgement there to the arrival here. MirrorMaker has four minutes to copy the first record of each partition.
    """
    names = [f"dc1.t{number:03d}" for number in range(_MANY_TOPICS)]
    places = [(name, number) for name in names for number in range(_MANY_PARTITIONS)]

    async def fill(bootstrap: str) -> None:
        await create_topics(bootstrap, names, _MANY_PARTITIONS)
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=50) as producer:
            sends = [await producer.send(name, bytes(_RECORD_BYTES), partition=number) for name, number in places]
            await asyncio.gather(*sends)

    with temporary_kafka("there", settings=_SETTINGS) as (there, _):
        uvloop.run(fill(there.bootstrap))
        ours = _copy_many(our_mirror, there, names, places)
        theirs = _copy_many(partial(mirror_maker, heap="2g"), there, names, places)
    return Figure("MB", ours, theirs, 1, value=ours["peak_rss_mb"])


# ---- the same data ------------------------------------------------------------------------------------------------


def _figure(unit: str, key: str, worst: Callable[[list[float]], float]) -> Figure:
    ours, theirs = _measured()
    ratio = worst([ours[f"{key}_{data.name}"] / theirs[f"{key}_{data.name}"] for data in _DATA])
    keys = [of for of in ours if of.startswith((key, "until_first"))]
    return Figure(unit, {of: ours[of] for of in keys}, {of: theirs[of] for of in keys}, _ROUNDS, round(ratio, 3))


@cache
def _measured() -> tuple[Side, Side]:
    """Medians of both mirrors, over all data."""
    with temporary_kafka("there") as (there, _):
        last_ms = {data: _fill(there.bootstrap, data) for data in _DATA}

        def copies(make: MakeMirror) -> Side:
            return {key: value for data in _DATA for key, value in _copy(make, there, data, last_ms[data]).items()}

        ours, theirs = alternate(_ROUNDS, lambda _: copies(our_mirror), lambda _: copies(mirror_maker), warm_up_s=0)
    return medians(ours), medians(theirs)


def _fill(bootstrap: str, data: _Data) -> int:
    """Returns the time of the last record of each partition, which is later than any other: it tells a whole copy."""
    last_ms = int(time.time() * 1000) + _AHEAD_MS

    async def write_last() -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
            for partition in range(_PARTITIONS):
                await producer.send_and_wait(data.topic, b"last", partition=partition, timestamp_ms=last_ms)

    uvloop.run(create_topics(bootstrap, [data.topic], _PARTITIONS))
    java_producer(
        *(bootstrap, data.topic, chunks(2000, data.record_bytes), _BYTES // data.record_bytes),
        linger_ms=100,
        compression_type=data.codec,
        batch_size=data.batch_bytes,
    )
    uvloop.run(write_last())
    return last_ms


def _copy(make: MakeMirror, there: KafkaCluster, data: _Data, last_ms: int) -> Side:
    """One copy: its cost from the first record to the last."""
    places = [(data.topic, number) for number in range(_PARTITIONS)]

    async def watch(bootstrap: str, child: Child, pid: int) -> Side:
        started = time.perf_counter()
        async with connected(bootstrap) as kafka, asyncio.timeout(_DEADLINE_S):
            await _await(kafka, child, places, LATEST, 1)
            until_first_s = time.perf_counter() - started
            with UsageMeter([pid]) as meter:
                await _await(kafka, child, places, last_ms, len(places))
        return {
            f"mb_s_{data.name}": _BYTES / meter.wall_s / 1e6,
            f"cpu_s_per_gb_{data.name}": meter.cpu_s / (_BYTES / 1e9),
            f"peak_rss_mb_{data.name}": peak_rss_mb(pid),
            f"until_first_s_{data.name}": until_first_s,
        }

    with _started(make, there, data.name, [data.topic], _PARTITIONS) as (here, child, pid):
        return uvloop.run(watch(here.bootstrap, child, pid))


@contextmanager
def _started(
    make: MakeMirror,
    there: KafkaCluster,
    which: str,
    topics: list[str],
    partitions: int,
    settings: Mapping[str, str] | None = None,
) -> Iterator[tuple[KafkaCluster, Child, int]]:
    """A new cluster, and the process of a mirror into it that has just started, with its pid."""
    with temporary_kafka("here", settings=settings) as (here, folder):
        # Created in advance, so that the first record is noticed at once.
        uvloop.run(create_topics(here.bootstrap, topics, partitions))
        child = make(there, here, which, folder)
        child.start()
        try:
            yield here, child, child.pid or 0
        finally:
            child.stop(10)


async def _await(kafka: KafkaClient, child: Child, places: Places, time_ms: int, count: int) -> None:
    """Waits until so many partitions have committed records, at `LATEST` or of that time."""
    while await _arrived(kafka, places, time_ms) < count:
        if not child.running:
            raise child.failed("ended")
        await asyncio.sleep(_LOOK_S)


async def _arrived(kafka: KafkaClient, places: Places, time_ms: int) -> int:
    return sum(offset > 0 for offset in (await kafka.offsets(places, time_ms)).values())


# ---- many partitions ---------------------------------------------------------------------------------------------


def _copy_many(make: MakeMirror, there: KafkaCluster, topics: list[str], places: Places) -> Side:
    active = [TopicPartition(name, index % _MANY_PARTITIONS) for index, name in enumerate(topics)]
    with _started(make, there, "*", topics, _MANY_PARTITIONS, _SETTINGS) as (here, child, pid):
        found = uvloop.run(_arrivals(here.bootstrap, child, places))
        if "until_all_s" in found:
            time.sleep(_SETTLE_S)
            brokers = [*there.pids.values(), *here.pids.values()]
            with UsageMeter([pid]) as idle, UsageMeter(brokers) as their_idle:
                time.sleep(_IDLE_S)
            found["idle_rss_mb"] = round(rss_mb([pid]), 1)
            found["idle_cores"] = round(idle.cpu_s / idle.wall_s, 3)
            found["idle_cores_of_both_brokers"] = round(their_idle.cpu_s / their_idle.wall_s, 3)
            with UsageMeter([pid]) as meter:
                added = quantiles(uvloop.run(_added_ms(there.bootstrap, here.bootstrap, active)), n=100)
            found["active_cores"] = round(meter.cpu_s / meter.wall_s, 3)
            found |= {"added_p50_ms": round(added[49], 1), "added_p99_ms": round(added[98], 1)}
        return found | {"peak_rss_mb": round(peak_rss_mb(pid), 1)}


async def _arrivals(bootstrap: str, child: Child, places: Places) -> Side:
    """Seconds until the first record is in the copy, and until all of them are; how many are when the time is over."""
    started, found = time.perf_counter(), dict[str, float]()
    async with connected(bootstrap) as kafka:
        with suppress(TimeoutError):
            async with asyncio.timeout(_MANY_DEADLINE_S):
                for name, count in (("until_first_s", 1), ("until_all_s", len(places))):
                    await _await(kafka, child, places, LATEST, count)
                    found[name] = round(time.perf_counter() - started, 1)
        return found | {"arrived": await _arrived(kafka, places, LATEST)}


async def _added_ms(there: str, here: str, active: list[TopicPartition]) -> list[float]:
    """Per record: milliseconds from its acknowledgement there to its arrival at a reader here."""
    pause = 1 / (_RATE * len(active))
    count = int((_WARM_UP_S + _ACTIVE_S) / pause)
    acknowledged: dict[int, float] = {}
    arrived: dict[int, float] = {}

    async def read(consumer: AIOKafkaConsumer) -> None:
        while len(arrived) < count:
            for records in (await consumer.getmany(timeout_ms=1000)).values():
                now = time.perf_counter()
                arrived.update((int.from_bytes(record.value[:8], "big"), now) for record in records if record.value)

    async def write(producer: AIOKafkaProducer, number: int) -> None:
        to = active[number % len(active)]
        record = number.to_bytes(8, "big") + bytes(_RECORD_BYTES - 8)
        await producer.send_and_wait(to.topic, record, partition=to.partition)
        acknowledged[number] = time.perf_counter()

    options = {"isolation_level": "read_committed", "fetch_max_wait_ms": 100}
    async with (
        AIOKafkaProducer(bootstrap_servers=there, acks="all", linger_ms=0) as producer,
        AIOKafkaConsumer(bootstrap_servers=here, **options) as consumer,
    ):
        consumer.assign(active)
        await consumer.seek_to_end()
        async with asyncio.timeout(_WARM_UP_S + _ACTIVE_S + _LATE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(read(consumer))
            started = time.perf_counter()
            for number in range(count):
                await asyncio.sleep(started + number * pause - time.perf_counter())
                tasks.create_task(write(producer, number))
    measured = range(int(_WARM_UP_S / pause), count)
    return [max(0.0, arrived[number] - acknowledged[number]) * 1000 for number in measured]
