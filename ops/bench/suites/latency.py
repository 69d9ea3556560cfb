"""How long from the making of a chunk at its source until a reader over HTTP has it, at half load."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

import msgpack
import uvloop
from aiokafka import AIOKafkaProducer
from logferry.ops.bench.harness import http_load
from logferry.ops.bench.harness.figures import Figure, Side, alternate, median_ratio, medians
from logferry.ops.bench.harness.usage import Meter
from logferry.ops.bench.harness.workload import chunks
from logferry.ops.bench.suites.throughput import gateway_pids, make_topic
from logferry.ops.stack.kafka_cluster import LONG_RUN
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 3
_SECONDS: Final = 10.0
_SOURCES: Final = 64
_PARTITIONS: Final = 8
_LANES: Final = 8
_CREATED: Final = 7


async def _follow(url: str, topic: str, partition: int, found_ms: list[float], stop: asyncio.Event) -> None:
    """Reads a partition by long polls; notes the age of each chunk when it arrives."""
    connection = await http_load.connect(url)
    offset = 0
    while not stop.is_set():
        path = f"/v1/topics/{topic}/partitions/{partition}/chunks?offset={offset}&wait_ms=500&max_bytes=4000000"
        status, head, body = await connection.ask(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode(), b"")
        now_ms = time.time() * 1000
        if status != 200:
            raise RuntimeError(f"reading answered {status}: {body[:200]!r}")
        unpacker = msgpack.Unpacker(max_buffer_size=len(body) or 1)
        unpacker.feed(body)
        found_ms.extend(now_ms - row[_CREATED] for row in unpacker)
        offset = int(head.lower().split(b"x-next-offset: ", 1)[1].split(b"\r\n", 1)[0])
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


def created_to_readable_ms() -> Figure:
    """64 sources write 64 KiB chunks at half of the full load of the same run, and all is read over HTTP."""
    payloads = chunks(256, 64 * 1024)
    rounds: list[Side] = []
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), workers=2, heap="1g", jvm=LONG_RUN) as stack:
        urls = stack.urls()
        make_topic(urls[0], "full", _PARTITIONS)
        tally, took = uvloop.run(http_load.run(urls, "full", _SOURCES, payloads, _SECONDS))
        full_mb_s = tally.bytes / took / 1e6
        for number in range(_ROUNDS):
            make_topic(urls[0], f"half{number}", _PARTITIONS)
            with Meter(gateway_pids(stack)) as meter:
                ages, reached = uvloop.run(_round(urls, f"half{number}", payloads, full_mb_s / 2))
            ages.sort()
            rounds.append(
                {
                    "p50_ms": ages[len(ages) // 2],
                    "p99_ms": ages[int(len(ages) * 0.99)],
                    "share_under_1s": sum(age < 1000 for age in ages) / len(ages),
                    "share_under_5s": sum(age < 5000 for age in ages) / len(ages),
                    "mb_s": reached,
                    "cpu_s_per_gb": meter.cpu_s / (reached * _SECONDS / 1e3),
                }
            )
    ours = medians(rounds)
    # Logbroker's own figures, published by its makers: 88 % within one second, 99 % within five.
    theirs = {"share_under_1s": 0.88, "share_under_5s": 0.99}
    full = {"full_load_mb_s": round(full_mb_s, 1)}
    return Figure("created_to_readable_ms", "ms, p99", {**ours, **full}, theirs, _ROUNDS, value=ours["p99_ms"])


async def _transactions(bootstrap: str, topic: str, payloads: list[bytes], pause_s: float) -> list[float]:
    """The same writes without HTTP: 8 plain transactional producers, each with the writers of its lane."""
    ages_s: list[float] = []
    until = time.perf_counter() + _SECONDS
    queues: list[asyncio.Queue[tuple[bytes, asyncio.Future[None]]]] = [asyncio.Queue() for _ in range(_LANES)]

    async def commits(lane: int) -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            transactional_id=f"bench-{topic}-{lane}",
            compression_type="zstd",
            max_batch_size=1 << 20,
        )
        await producer.start()
        try:
            while True:
                waiting = [await queues[lane].get()]
                while not queues[lane].empty():
                    waiting.append(queues[lane].get_nowait())
                async with producer.transaction():
                    sends = [await producer.send(topic, data, partition=lane) for data, _ in waiting]
                    await asyncio.gather(*sends)
                for _, done in waiting:
                    done.set_result(None)
        finally:
            await producer.stop()

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
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), workers=2, heap="1g", jvm=LONG_RUN) as stack:
        urls, bootstrap = stack.urls(), stack.cluster().bootstrap
        make_topic(urls[0], "full", _PARTITIONS)
        tally, took = uvloop.run(http_load.run(urls, "full", _SOURCES, payloads, _SECONDS))
        pause_s = _SOURCES * took / tally.requests * 2

        def side(ages_s: list[float]) -> Side:
            ages_s.sort()
            return {"p50_ms": ages_s[len(ages_s) // 2] * 1e3, "p99_ms": ages_s[int(len(ages_s) * 0.99)] * 1e3}

        def ours(number: int) -> Side:
            make_topic(urls[0], f"ours{number}", _PARTITIONS)
            done, _ = uvloop.run(http_load.run(urls, f"ours{number}", _SOURCES, payloads, _SECONDS, pause_s))
            return side(done.latencies_s)

        def theirs(number: int) -> Side:
            topic = make_topic(urls[0], f"theirs{number}", _PARTITIONS)
            return side(uvloop.run(_transactions(bootstrap, topic, payloads, pause_s)))

        mine, others = alternate(_ROUNDS, ours, theirs)
    ratio = median_ratio(mine, others, "p99_ms")
    return Figure("latency_vs_kafka_transaction", "p99 ours / theirs", medians(mine), medians(others), _ROUNDS, ratio)
