"""A mirror of 10,000 partitions, 100 of them active: its memory, CPU time, added latency and start.

Each partition has one record when the mirror starts, so that the mirror has to copy from all of them.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from statistics import quantiles
from typing import Final

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from logferry.gateway.kafka.client import LATEST
from logferry.ops.bench.harness.figures import Figure, Side
from logferry.ops.bench.harness.kafka_clients import connected, temporary_kafka
from logferry.ops.bench.harness.mirror_maker import MakeMirror, mirror_maker, our_mirror
from logferry.ops.bench.harness.usage import UsageMeter, peak_rss_mb, rss_mb
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child

_TOPICS: Final = 100
_PARTITIONS: Final = 100
_BYTES: Final = 1000
_RATE: Final = 2.0
_IDLE_S: Final = 20.0
_SETTLE_S: Final = 10.0
_ACTIVE_S: Final = 30.0
_WARM_UP_S: Final = 5.0
_LATE_S: Final = 20.0
_DEADLINE_S: Final = 240.0
# A broker maps two index files per partition into memory; a broker that is busy with them must not count as dead.
_SETTINGS: Final = {"log.index.size.max.bytes": str(1 << 16), "broker.session.timeout.ms": "20000"}

_NAMES: Final = [f"dc1.t{number:03d}" for number in range(_TOPICS)]
_ALL: Final = [(name, number) for name in _NAMES for number in range(_PARTITIONS)]
_ACTIVE: Final = [TopicPartition(name, index % _PARTITIONS) for index, name in enumerate(_NAMES)]


async def _create(bootstrap: str) -> None:
    async with connected(bootstrap) as kafka:
        for name in _NAMES:
            await kafka.create_topic(name, _PARTITIONS, 1, {})
        # A broker creates some hundred partitions per second, and lists them earlier.
        for name in _NAMES:
            await kafka.offsets([(name, number) for number in range(_PARTITIONS)], LATEST)


async def _one_each(bootstrap: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=50) as producer:
        await asyncio.gather(*[await producer.send(name, bytes(_BYTES), partition=number) for name, number in _ALL])


async def _arrive(bootstrap: str, child: Child) -> Side:
    """Seconds until the first record is in the copy, and until all of them are."""
    async with connected(bootstrap) as kafka:
        await kafka.offsets(_ALL, LATEST)
        started, found = time.perf_counter(), dict[str, float]()
        child.start()
        while (now := time.perf_counter() - started) < _DEADLINE_S:
            ends = await kafka.offsets(_ALL, LATEST)
            arrived = sum(end > 0 for end in ends.values())
            if arrived:
                found.setdefault("until_first_s", round(now, 1))
            if arrived == len(_ALL):
                return found | {"until_all_s": round(now, 1)}
            if not child.running:
                raise child.failed("ended")
            await asyncio.sleep(0.2)
        return found | {"deadline_s": _DEADLINE_S, "arrived_by_then": arrived}


async def _added_ms(there: str, here: str) -> list[float]:
    """Per record: milliseconds from its acknowledgement there to its arrival at a reader here."""
    pause = 1 / (_RATE * len(_ACTIVE))
    count = int((_WARM_UP_S + _ACTIVE_S) / pause)
    acknowledged: dict[int, float] = {}
    arrived: dict[int, float] = {}
    producer = AIOKafkaProducer(bootstrap_servers=there, acks="all", linger_ms=0)
    consumer = AIOKafkaConsumer(bootstrap_servers=here, isolation_level="read_committed", fetch_max_wait_ms=100)
    await producer.start()
    await consumer.start()
    consumer.assign(_ACTIVE)
    await consumer.seek_to_end()

    async def read() -> None:
        while len(arrived) < count:
            for records in (await consumer.getmany(timeout_ms=1000)).values():
                now = time.perf_counter()
                arrived.update((int.from_bytes(record.value[:8], "big"), now) for record in records if record.value)

    async def write(number: int, to: TopicPartition) -> None:
        await producer.send_and_wait(to.topic, number.to_bytes(8, "big") + bytes(_BYTES - 8), partition=to.partition)
        acknowledged[number] = time.perf_counter()

    reading = asyncio.create_task(read())
    writes: list[asyncio.Task[None]] = []
    try:
        started = time.perf_counter()
        for number in range(count):
            await asyncio.sleep(started + number * pause - time.perf_counter())
            writes.append(asyncio.create_task(write(number, _ACTIVE[number % len(_ACTIVE)])))
        await asyncio.gather(*writes)
        async with asyncio.timeout(_LATE_S):
            await reading
        measured = range(int(_WARM_UP_S / pause), count)
        return [max(0.0, arrived[number] - acknowledged[number]) * 1000 for number in measured]
    finally:
        reading.cancel()
        await producer.stop()
        await consumer.stop()


def _run(make: MakeMirror, there: KafkaCluster) -> Side:
    with temporary_kafka("here", settings=_SETTINGS) as (here, folder):
        uvloop.run(_create(here.bootstrap))
        child = make(there, here, "*", folder)
        try:
            found = uvloop.run(_arrive(here.bootstrap, child))
            pid = child.pid
            if pid is None:
                raise child.failed("ended")
            if "until_all_s" in found:
                time.sleep(_SETTLE_S)
                brokers = [*there.pids.values(), *here.pids.values()]
                with UsageMeter([pid]) as idle, UsageMeter(brokers) as their_idle:
                    time.sleep(_IDLE_S)
                found["idle_rss_mb"] = round(rss_mb([pid]), 1)
                found["idle_cores"] = round(idle.cpu_s / idle.wall_s, 3)
                found["idle_cores_of_both_brokers"] = round(their_idle.cpu_s / their_idle.wall_s, 3)
                with UsageMeter([pid]) as active:
                    added = quantiles(uvloop.run(_added_ms(there.bootstrap, here.bootstrap)), n=100)
                found["active_cores"] = round(active.cpu_s / active.wall_s, 3)
                found |= {"added_p50_ms": round(added[49], 1), "added_p99_ms": round(added[98], 1)}
            found["peak_rss_mb"] = round(peak_rss_mb(pid), 1)
        finally:
            child.stop(10)
    return found


def mirror_10k_partitions_rss_mb() -> Figure:
    """Peak resident memory of a mirror of 10,000 partitions, in one round; and its CPU time and latency.

    ``idle_cores``: without writes. ``added``: 100 partitions get two records per second each; time from the
    acknowledgement there to the arrival here. MirrorMaker has four minutes to copy the first record of each partition.
    """
    with temporary_kafka("there", settings=_SETTINGS) as (there, _):
        uvloop.run(_create(there.bootstrap))
        uvloop.run(_one_each(there.bootstrap))
        ours = _run(our_mirror, there)
        theirs = _run(partial(mirror_maker, heap="2g"), there)
    return Figure("mirror_10k_partitions_rss_mb", "MB", ours, theirs, 1, value=ours["peak_rss_mb"])
