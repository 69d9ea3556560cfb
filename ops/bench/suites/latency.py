"""Latency from the creation of a chunk at its source to a reader over HTTP, at half load."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgpack
import uvloop
from aiokafka import AIOKafkaProducer
from logferry.ops.bench.harness import http_load
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared, medians
from logferry.ops.bench.harness.usage import UsageMeter
from logferry.ops.bench.harness.workload import chunks
from logferry.ops.bench.suites.throughput import gateway_pids, make_topic, running_stack

_ROUNDS: Final = 3
_SECONDS: Final = 10.0
_SOURCES: Final = 64
_PARTITIONS: Final = 8
_LANES: Final = 8
_CREATED: Final = 7


async def _follow(url: str, topic: str, partition: int, found_ms: list[float], stop: asyncio.Event) -> None:
    """Reads a partition by long polls; records the age of each chunk at its arrival."""
    connection = await http_load.connect(url)
    offset = 0
    while not stop.is_set():
        offset, body = await http_load.read_page(connection, topic, partition, offset, "&wait_ms=500")
        now_ms = time.time() * 1000
        unpacker = msgpack.Unpacker(max_buffer_size=len(body) or 1)
        unpacker.feed(body)
        found_ms.extend(now_ms - row[_CREATED] for row in unpacker)
    connection.close()


async def _round(urls: list[str], name: str, payloads: list[bytes], mb_s: float) -> tuple[list[float], float]:
    stop = asyncio.Event()
    found_ms: list[float] = []
    followers = [
        asyncio.create_task(_follow(urls[p % len(urls)], f"dc1.{name}", p, found_ms, stop)) for p in range(_PARTITIONS)
    ]
    pause_s = _SOURCES * len(payloads[0]) / (mb_s * 1e6)
    tally, took = await http_load.run(urls, name, _SOURCES, payloads, _SECONDS, pause_s, stamp_created=True)
    while len(found_ms) < tally.requests:
        await asyncio.sleep(0.01)
        for follower in followers:
            if follower.done():
                follower.result()
    stop.set()
    await asyncio.gather(*followers)
    return found_ms, tally.bytes / took / 1e6


def _percentiles(ages_ms: list[float]) -> Side:
    ages_ms.sort()
    return {"p50_ms": ages_ms[len(ages_ms) // 2], "p99_ms": ages_ms[int(len(ages_ms) * 0.99)]}


def created_to_readable_ms() -> Figure:
    """64 sources write 64 KiB chunks at half of the full load of the same run; readers get all over HTTP."""
    payloads = chunks(256, 64 * 1024)
    rounds: list[Side] = []
    with running_stack(2) as stack:
        urls = stack.urls()
        make_topic(urls[0], "full", _PARTITIONS)
        tally, took = uvloop.run(http_load.run(urls, "full", _SOURCES, payloads, _SECONDS))
        full_mb_s = tally.bytes / took / 1e6
        for number in range(_ROUNDS):
            make_topic(urls[0], f"half{number}", _PARTITIONS)
            with UsageMeter(gateway_pids(stack)) as meter:
                ages, reached = uvloop.run(_round(urls, f"half{number}", payloads, full_mb_s / 2))
            shares = {f"share_under_{s}s": sum(age < 1000 * s for age in ages) / len(ages) for s in (1, 5)}
            cost = {"mb_s": reached, "cpu_s_per_gb": meter.cpu_s / (reached * _SECONDS / 1e3)}
            rounds.append(_percentiles(ages) | shares | cost)
    ours = medians(rounds)
    # Figures published for Logbroker: 88 % within one second, 99 % within five.
    theirs = {"share_under_1s": 0.88, "share_under_5s": 0.99}
    full = {"full_load_mb_s": round(full_mb_s, 1)}
    return Figure("created_to_readable_ms", "ms, p99", {**ours, **full}, theirs, _ROUNDS, value=ours["p99_ms"])


async def _transactions(bootstrap: str, topic: str, payloads: list[bytes], pause_s: float) -> list[float]:
    """The same writes without HTTP: 8 transactional producers, each with the writers of its lane."""
    ages_s: list[float] = []
    until = time.perf_counter() + _SECONDS
    queues: list[asyncio.Queue[tuple[bytes, asyncio.Future[None]]]] = [asyncio.Queue() for _ in range(_LANES)]

    async def commits(lane: int) -> None:
        options = {"compression_type": "zstd", "max_batch_size": 1 << 20, "transactional_id": f"bench-{topic}-{lane}"}
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, **options) as producer:
            while True:
                waiting = [await queues[lane].get()]
                while not queues[lane].empty():
                    waiting.append(queues[lane].get_nowait())
                async with producer.transaction():
                    sends = [await producer.send(topic, data, partition=lane) for data, _ in waiting]
                    await asyncio.gather(*sends)
                for _, done in waiting:
                    done.set_result(None)

    async def writes(source: int) -> None:
        number = 0
        while time.perf_counter() < until:
            started, done = time.perf_counter(), asyncio.get_running_loop().create_future()
            await queues[source % _LANES].put((payloads[(source + number) % len(payloads)], done))
            await done
            took = time.perf_counter() - started
            ages_s.append(took)
            number += 1
            await asyncio.sleep(max(0.0, pause_s - took))

    lanes = [asyncio.create_task(commits(lane)) for lane in range(_LANES)]
    await asyncio.gather(*(writes(source) for source in range(_SOURCES)))
    for lane in lanes:
        lane.cancel()
    await asyncio.gather(*lanes, return_exceptions=True)
    return ages_s


def latency_vs_kafka_transaction() -> Figure:
    """p99 of a 64 KiB chunk at half load, against the same transactional writes of aiokafka without HTTP."""
    payloads = chunks(256, 64 * 1024)
    with running_stack(2) as stack:
        urls, bootstrap = stack.urls(), stack.cluster().bootstrap
        make_topic(urls[0], "full", _PARTITIONS)
        tally, took = uvloop.run(http_load.run(urls, "full", _SOURCES, payloads, _SECONDS))
        pause_s = _SOURCES * took / tally.requests * 2

        def ours(number: int) -> Side:
            make_topic(urls[0], f"ours{number}", _PARTITIONS)
            done, _ = uvloop.run(http_load.run(urls, f"ours{number}", _SOURCES, payloads, _SECONDS, pause_s))
            return _percentiles([age_s * 1e3 for age_s in done.latencies_s])

        def theirs(number: int) -> Side:
            topic = make_topic(urls[0], f"theirs{number}", _PARTITIONS)
            ages_s = uvloop.run(_transactions(bootstrap, topic, payloads, pause_s))
            return _percentiles([age_s * 1e3 for age_s in ages_s])

        mine, others = alternate(_ROUNDS, ours, theirs)
    return compared("latency_vs_kafka_transaction", "p99 ours / theirs", mine, others, "p99_ms")
