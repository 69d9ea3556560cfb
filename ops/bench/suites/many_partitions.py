"""10,000 partitions in two clusters, 100 of them active: what their mirror holds, costs and adds, and how it starts.

Each partition has one record when the mirror starts, so that all have been looked at, written to and are known.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Final

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from logferry.gateway.kafka.client import LATEST, Kafka
from logferry.ops.bench.harness.figures import Figure, Side
from logferry.ops.bench.harness.mirror_maker import mirror_maker, ours_of
from logferry.ops.bench.harness.usage import Meter, peak_rss_mb, rss_mb
from logferry.ops.stack.kafka_cluster import LONG_RUN, Cluster
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
# A broker maps two index files of each partition into memory; one that is busy with many is not to be taken for dead.
_SETTINGS: Final = {"log.index.size.max.bytes": str(1 << 16), "broker.session.timeout.ms": "20000"}

_NAMES: Final = [f"dc1.t{number:03d}" for number in range(_TOPICS)]
_ALL: Final = [(name, number) for name in _NAMES for number in range(_PARTITIONS)]
_ACTIVE: Final = [TopicPartition(name, index % _PARTITIONS) for index, name in enumerate(_NAMES)]

Make = Callable[[Cluster, Cluster, str, Path], Child]


def _cluster(name: str, folder: Path) -> Cluster:
    return Cluster(name, folder / name, heap="1g", jvm=LONG_RUN, settings=_SETTINGS)


async def _create(bootstrap: str) -> None:
    kafka = Kafka({"bootstrap_servers": bootstrap}, "bench")
    await kafka.start()
    try:
        for name in _NAMES:
            await kafka.create_topic(name, _PARTITIONS, 1, {})
        # A broker makes some hundred partitions a second, and tells of them before.
        for name in _NAMES:
            await kafka.offsets([(name, number) for number in range(_PARTITIONS)], LATEST)
    finally:
        await kafka.close()


async def _ends(kafka: Kafka) -> dict[tuple[str, int], int]:
    return await kafka.offsets(_ALL, LATEST)


async def _one_each(bootstrap: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=50)
    await producer.start()
    try:
        await asyncio.gather(*[await producer.send(name, bytes(_BYTES), partition=number) for name, number in _ALL])
    finally:
        await producer.stop()


async def _arrive(bootstrap: str, child: Child) -> Side:
    """Seconds until the first record is in the copy, and until all are."""
    kafka = Kafka({"bootstrap_servers": bootstrap}, "bench")
    await kafka.start()
    await _ends(kafka)
    started, found = time.perf_counter(), dict[str, float]()
    child.start()
    try:
        while (now := time.perf_counter() - started) < _DEADLINE_S:
            ends = await _ends(kafka)
            arrived = sum(end > 0 for end in ends.values())
            if arrived:
                found.setdefault("until_first_s", round(now, 1))
            if arrived == len(_ALL):
                return found | {"until_all_s": round(now, 1)}
            if not child.running:
                raise child.failed("ended")
            await asyncio.sleep(0.2)
        return found | {"deadline_s": _DEADLINE_S, "arrived_by_then": arrived}
    finally:
        await kafka.close()


async def _added_ms(there: str, here: str) -> list[float]:
    """From when a record is acknowledged there until it is read here, of each."""
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


def _run(make: Make, there: Cluster) -> Side:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _cluster("here", folder) as here:
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
                    with Meter([pid]) as idle, Meter(brokers) as their_idle:
                        time.sleep(_IDLE_S)
                    found["idle_rss_mb"] = round(rss_mb([pid]), 1)
                    found["idle_cores"] = round(idle.cpu_s / idle.wall_s, 3)
                    found["idle_cores_of_both_brokers"] = round(their_idle.cpu_s / their_idle.wall_s, 3)
                    with Meter([pid]) as active:
                        added = quantiles(uvloop.run(_added_ms(there.bootstrap, here.bootstrap)), n=100)
                    found["active_cores"] = round(active.cpu_s / active.wall_s, 3)
                    found |= {"added_p50_ms": round(added[49], 1), "added_p99_ms": round(added[98], 1)}
                found["peak_rss_mb"] = round(peak_rss_mb(pid), 1)
            finally:
                child.stop(10)
    return found


def mirror_10k_partitions_rss_mb() -> Figure:
    """The largest resident size of the mirror of 10,000 partitions, in one round; beside it what else there is to say.

    ``idle_cores``: nothing is written. ``added``: 100 partitions get two records a second each; from when each is
    acknowledged there until it is read here. MirrorMaker has four minutes to copy the first record of each partition.
    """
    with tempfile.TemporaryDirectory() as name, _cluster("there", Path(name)) as there:
        uvloop.run(_create(there.bootstrap))
        uvloop.run(_one_each(there.bootstrap))
        ours = _run(ours_of, there)
        theirs = _run(partial(mirror_maker, heap="2g"), there)
    return Figure("mirror_10k_partitions_rss_mb", "MB", ours, theirs, 1, value=ours["peak_rss_mb"])
