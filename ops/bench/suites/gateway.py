"""Benchmarks of a gateway: writing, reading, latency, isolation, the console's pages, and its event loop."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import statistics
import time
from typing import Any, Final

import aiohttp
import cramjam
import msgpack
import uvloop
from aiokafka import AIOKafkaProducer
from logferry.ops.bench.harness import gateways
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared, median_ratio, medians
from logferry.ops.bench.harness.gateways import (
    CHUNK_BYTES,
    PARTITIONS,
    SECONDS,
    Load,
    filled,
    loaded,
    make_topic,
    read_over_http,
    running_stack,
)
from logferry.ops.bench.harness.kafka import chunks, connected, java_consumer, java_producer
from logferry.ops.bench.harness.librdkafka import librdkafka_producer
from logferry.ops.bench.harness.peers import bare_handler
from logferry.ops.bench.harness.usage import UsageMeter, quantile_ms, read_lags

_ROUNDS: Final = 5
_FEW_ROUNDS: Final = 3
_RECORDS: Final = 12_000
_READERS: Final = 8
_LANES: Final = 8
_PACKED_BYTES: Final = 512 * 1024
_CREATED: Final = 7
_PAGE_SOURCES: Final = 10_000
_PAGE_PARTITIONS: Final = 1000
_PAGE_ROUNDS: Final = 40
_AT_ONCE: Final = 64
_PAGE_TOPIC: Final = "console"

# ---- writing -----------------------------------------------------------------------------------------------------


def ingest_vs_java_producer() -> Figure:
    """64 KiB chunks of log lines from 64 sources, plain bodies, zstd in Kafka; against the transactional Java producer.

    The Java producer runs with its default batches and with batches of 1 MiB; the faster of the two counts.
    """
    payloads = chunks(256, CHUNK_BYTES)
    with running_stack(2) as stack:

        def theirs(number: int) -> Side:
            sides = []
            for batch in (16_384, 1 << 20):
                topic = make_topic(stack, f"theirs{number}-{batch}")
                rate, cpu_s = java_producer(
                    *(stack.cluster().bootstrap, topic, payloads, _RECORDS),
                    *("--transactional-id", f"bench-{topic}", "--transaction-duration-ms", "50"),
                    compression_type="zstd",
                    batch_size=batch,
                    max_request_size=1 << 24,
                    buffer_memory=1 << 27,
                )
                sides.append({"mb_s": rate, "cpu_s_per_gb": cpu_s / (_RECORDS * len(payloads[0]) / 1e9)})
            return max(sides, key=lambda side: side["mb_s"])

        rounds = alternate(_ROUNDS, lambda number: loaded(stack, Load(f"ours{number}", payloads)), theirs)
    return compared("MB/s ours / theirs", "mb_s", rounds)


def ingest_vs_librdkafka() -> Figure:
    """64 KiB chunks of log lines from 64 sources, each in a request with a plain body, zstd in Kafka.

    Against librdkafka's transactions of 50 ms with batches of 1 MiB and zstd at level 1. The CPU is that of the workers
    and of the program with librdkafka.
    """
    return _against_librdkafka(1)


def ingest_batches_vs_librdkafka() -> Figure:
    """As `ingest_vs_librdkafka`, with the chunks in requests of 1 MiB, as the library makes them."""
    return _against_librdkafka((1 << 20) // CHUNK_BYTES)


def _against_librdkafka(batch: int) -> Figure:
    payloads = chunks(256, CHUNK_BYTES)
    size_gb = sum(len(payloads[number % len(payloads)]) for number in range(_RECORDS)) / 1e9
    with running_stack(2) as stack:

        def theirs(number: int) -> Side:
            topic = make_topic(stack, f"theirs{number}")
            rate, cpu_s = librdkafka_producer(stack.cluster().bootstrap, topic, payloads, _RECORDS)
            return {"mb_s": rate, "cpu_s_per_gb": cpu_s / size_gb}

        load = Load("any", payloads, batch=batch)
        rounds = alternate(_ROUNDS, lambda number: loaded(stack, load._replace(topic=f"ours{number}")), theirs)
    return compared("MB/s ours / theirs", "mb_s", rounds)


def small_requests_vs_bare_handler() -> Figure:
    """Requests/s of 1 KiB chunks to one worker, against one process of a bare aiohttp handler under the same load."""
    load = Load("any", chunks(2000, 1024), 512)
    with bare_handler() as (bare_url, bare_pid), running_stack(1) as stack:
        rounds = alternate(
            _ROUNDS,
            lambda number: loaded(stack, load._replace(topic=f"small{number}")),
            lambda _: gateways.measured([bare_url], [bare_pid], load),
        )
    return compared("requests/s ours / theirs", "requests_s", rounds)


def topic_spread() -> Figure:
    """64 sources over 4 topics of 16 partitions, against the same load on 1 topic of 4 partitions."""
    payloads = chunks(256, CHUNK_BYTES)
    with running_stack(2) as stack:
        rounds = alternate(
            _ROUNDS,
            lambda number: loaded(stack, *(Load(f"spread{number}-{n}", payloads, 16, partitions=16) for n in range(4))),
            lambda number: loaded(stack, Load(f"single{number}", payloads, partitions=4)),
        )
    return compared("MB/s 4 x 16 / 1 x 4", "mb_s", rounds)


def lane_isolation() -> Figure:
    """Throughput of healthy sources while others of the same lane write to a partition below its minimum of replicas in
    sync, of that without these. One broker of three is down in both; one lane, one worker.
    """
    payloads = chunks(64, 16 * 1024)
    good, bad = Load("good", payloads, 32), Load("bad", payloads[:1], 8)
    # It takes nothing as soon as one broker is down.
    settings = {"min.insync.replicas": "3", "unclean.leader.election.enable": "false"}

    async def make_bad_topic(bootstrap: str) -> None:
        async with connected(bootstrap) as kafka:
            await kafka.create_topic("dc1.bad", 1, 3, settings)

    with running_stack(1, brokers=3, lanes=1, restart=False) as stack:
        make_topic(stack, good.topic)
        uvloop.run(make_bad_topic(stack.cluster().bootstrap))
        stack.cluster().kill(3)

        def side(*loads: Load) -> Side:
            tally, *_ = uvloop.run(gateways.run(stack.urls(), *loads))
            return gateways.side_of(tally)

        rounds = alternate(_FEW_ROUNDS, lambda _: side(good, bad), lambda _: side(good))
    return compared("MB/s beside a bad partition / without", "mb_s", rounds)


# ---- reading -----------------------------------------------------------------------------------------------------


def read_vs_java_consumer() -> Figure:
    """A whole topic over HTTP, one reader per partition, against ConsumerPerformance on Kafka."""
    with running_stack(2) as stack:
        records = filled(stack)

        def theirs(number: int) -> Side:
            return {"mb_s": java_consumer(stack.cluster().bootstrap, "dc1.read", records, f"bench-{number}")}

        rounds = alternate(_FEW_ROUNDS, lambda _: read_over_http(stack, 1), theirs)
    return compared("MB/s ours / theirs", "mb_s", rounds)


def read_fan_out() -> Figure:
    """Eight readers of the whole topic at once, against one: total throughput."""
    with running_stack(2) as stack:
        filled(stack)
        rounds = alternate(_FEW_ROUNDS, lambda _: read_over_http(stack, _READERS), lambda _: read_over_http(stack, 1))
    return compared("MB/s of 8 readers / of 1", "mb_s", rounds)


# ---- latency -----------------------------------------------------------------------------------------------------


def created_to_readable_ms() -> Figure:
    """64 sources write 64 KiB chunks at half of the full load of the same run; readers get all over HTTP."""
    payloads = chunks(256, CHUNK_BYTES)
    rounds: list[Side] = []
    with running_stack(2) as stack:
        full = loaded(stack, Load("full", payloads))
        for number in range(_FEW_ROUNDS):
            half = Load(f"half{number}", payloads, pause_s=2 * 64 / full["requests_s"], created=True)
            make_topic(stack, half.topic)
            with UsageMeter(gateways.gateway_pids(stack)) as meter:
                ages_ms, reached_mb_s = uvloop.run(_followed(stack.urls(), half))
            shares = {f"share_under_{s}s": sum(age < 1000 * s for age in ages_ms) / len(ages_ms) for s in (1, 5)}
            cost = {"mb_s": reached_mb_s, "cpu_s_per_gb": meter.cpu_s / (reached_mb_s * SECONDS / 1e3)}
            rounds.append(gateways.percentiles(ages_ms) | shares | cost)
    ours = {**medians(rounds), "full_load_mb_s": round(full["mb_s"], 1)}
    # Figures published for Logbroker: 88 % within one second, 99 % within five.
    theirs = {"share_under_1s": 0.88, "share_under_5s": 0.99}
    return Figure("ms, p99", ours, theirs, _FEW_ROUNDS, value=ours["p99_ms"])


async def _followed(urls: list[str], load: Load) -> tuple[list[float], float]:
    """The age of each chunk when it arrived at a reader, in ms, and the throughput of the load in MB/s."""
    found_ms: list[float] = []

    async def follow(partition: int) -> None:
        async for page in gateways.pages(urls[partition % len(urls)], f"dc1.{load.topic}", partition, wait_ms=500):
            now_ms = time.time() * 1000
            unpacker = msgpack.Unpacker(max_buffer_size=len(page) or 1)
            unpacker.feed(page)
            found_ms.extend(now_ms - row[_CREATED] for row in unpacker)

    followers = [asyncio.create_task(follow(partition)) for partition in range(PARTITIONS)]
    [tally] = await gateways.run(urls, load)
    while len(found_ms) < len(tally.latencies_s):
        await asyncio.sleep(0.01)
        for follower in followers:
            if follower.done():
                follower.result()
    for follower in followers:
        follower.cancel()
    await asyncio.gather(*followers, return_exceptions=True)
    return found_ms, tally.bytes / tally.took_s / 1e6


def latency_vs_kafka_transaction() -> Figure:
    """p99 of a 64 KiB chunk at half load, against the same transactional writes of aiokafka without HTTP."""
    payloads = chunks(256, CHUNK_BYTES)
    with running_stack(2) as stack:
        pause_s = 2 * 64 / loaded(stack, Load("full", payloads))["requests_s"]

        def theirs(number: int) -> Side:
            topic = make_topic(stack, f"theirs{number}")
            return gateways.percentiles(uvloop.run(_transactions(stack.cluster().bootstrap, topic, payloads, pause_s)))

        rounds = alternate(
            _FEW_ROUNDS, lambda number: loaded(stack, Load(f"ours{number}", payloads, pause_s=pause_s)), theirs
        )
    return compared("p99 ours / theirs", "p99_ms", rounds)


async def _transactions(bootstrap: str, topic: str, payloads: list[bytes], pause_s: float) -> list[float]:
    """The same writes without HTTP: 8 transactional producers, each with the sources of its lane. Returns ms."""
    ages_ms: list[float] = []
    until = time.perf_counter() + SECONDS

    async def commit(lane: int) -> None:
        """A transaction holds a chunk of each source whose turn it is."""
        turns = dict.fromkeys(range(lane, 64, _LANES), time.perf_counter())
        options = {"compression_type": "zstd", "max_batch_size": 1 << 20, "transactional_id": f"bench-{topic}-{lane}"}
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, **options) as producer:
            for number in itertools.count():
                await asyncio.sleep(min(turns.values()) - time.perf_counter())
                now = time.perf_counter()
                if now > until:
                    return
                ready = [source for source, turn in turns.items() if turn <= now]
                async with producer.transaction():
                    chosen = (payloads[(source + number) % len(payloads)] for source in ready)
                    await asyncio.gather(*[await producer.send(topic, data, partition=lane) for data in chosen])
                done = time.perf_counter()
                for source in ready:
                    ages_ms.append((done - turns[source]) * 1000)
                    turns[source] = max(done, turns[source] + pause_s)

    await asyncio.gather(*map(commit, range(_LANES)))
    return ages_ms


def console_page_ms() -> Figure:
    """p95 of each request that a page of the console repeats, one at a time, at a data centre of two workers.

    10,000 sources with a chunk each in 1,000 partitions, and a consumer that has read nothing of them. ``ours`` has
    the p95 of each; the value is that of the slowest. A list of all sources takes ten of its requests.
    """
    with running_stack(workers=2) as stack:
        measured = asyncio.run(_page_times(stack.urls()[0]))
    return Figure("ms", measured, {}, _PAGE_ROUNDS, value=max(measured.values()))


async def _page_times(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=_AT_ONCE)) as session:
        await _ask(session, "PUT", f"/v1/topics/{_PAGE_TOPIC}", json={"partitions": _PAGE_PARTITIONS})
        await asyncio.gather(*(_write_source(session, number) for number in range(_PAGE_SOURCES)))
        offsets = "/v1/consumers/console/offsets"
        await _ask(session, "PUT", offsets, json={"topic": f"dc1.{_PAGE_TOPIC}", "to": "earliest"})
        last_page = (await _ask(session, "GET", f"/v1/topics/{_PAGE_TOPIC}/sources"))["next"]
        paths = {
            "workers": "/v1/workers",
            "mirror": "/v1/mirror",
            "topics": "/v1/topics",
            "topics_sizes": "/v1/topics?sizes=true",
            "topics_at": "/v1/topics?at_ms={at_ms}",
            "sources_page": f"/v1/topics/{_PAGE_TOPIC}/sources?after={last_page}",
            "sources_silent": f"/v1/topics/{_PAGE_TOPIC}/sources?idle_for_ms=3600000",
            "source": f"/v1/topics/{_PAGE_TOPIC}/sources/host7",
            "consumers": "/v1/consumers",
            "offsets": f"{offsets}?records_only=true",
            "subscriptions": "/v1/subscriptions",
        }
        return {name: await _p95_ms(session, path) for name, path in paths.items()}


async def _p95_ms(session: aiohttp.ClientSession, path: str) -> float:
    took_ms = []
    for number in range(_PAGE_ROUNDS):
        began = time.perf_counter()
        await _ask(session, "GET", path.replace("{at_ms}", str(int(time.time() - 3600 + number) * 1000)))
        took_ms.append(1000 * (time.perf_counter() - began))
    return round(statistics.quantiles(took_ms, n=20)[-1], 1)


async def _write_source(session: aiohttp.ClientSession, number: int) -> None:
    await _ask(
        session, "POST", f"/v1/topics/{_PAGE_TOPIC}/sources/host{number}/chunks?seqno=100&prev=0", data=b"x" * 100
    )


async def _ask(session: aiohttp.ClientSession, method: str, path: str, **request: Any) -> Any:
    """The answer; what changes something is asked for until it is done, which may be repeated."""
    while True:
        async with session.request(method, path, **request) as answer:
            if answer.status != 503 or method == "GET":
                answer.raise_for_status()
                return await answer.json()
        await asyncio.sleep(1)


# ---- the event loop ----------------------------------------------------------------------------------------------


def loop_lag_p99_ms() -> Figure:
    """The 99th percentile of the event loop's lag in one worker at full load with packed bodies of 512 KiB, by the
    histogram that the worker itself exports.

    Half of them gzip and half zstd, beside the same bodies unpacked. ``of_plain``: the median of the rounds' ratios.
    """
    bodies = chunks(32, _PACKED_BYTES)
    gzipped = [gzip.compress(body, 6) for body in bodies]
    zstd = [bytes(cramjam.zstd.compress(body, 3)) for body in bodies]
    bodies_of = {"gzip": gzipped, "zstd": zstd}
    packed = [Load(name, of, 16, headers=f"Content-Encoding: {name}\r\n") for name, of in bodies_of.items()]
    with running_stack(1) as stack:

        def side(*loads: Load) -> Side:
            before = read_lags(stack.urls()[0])
            found = loaded(stack, *loads)
            after = read_lags(stack.urls()[0])
            lags = {f"lag_p{percent}_ms": quantile_ms(before, after, percent / 100) for percent in (50, 99)}
            return {**found, **lags, "mb_s": found["requests_s"] * _PACKED_BYTES / 1e6}

        rounds = alternate(_ROUNDS, lambda _: side(*packed), lambda _: side(Load("plain", bodies, 32)))
    ours = {**medians(rounds[0]), "of_plain": median_ratio(rounds, "lag_p99_ms")}
    return Figure("ms packed", ours, medians(rounds[1]), _ROUNDS, value=ours["lag_p99_ms"])
