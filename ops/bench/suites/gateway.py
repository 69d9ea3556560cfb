"""Benchmarks of a gateway: writing, reading, latency, isolation, the lag of its event loop, and the cost of many known
sources: memory of the worker that owns them, and time of a take-over."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import time
from functools import cache
from typing import Final

import cramjam
import msgpack
import uvloop
from aiokafka import AIOKafkaProducer
from logferry.gateway.config import Config
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.hanging_transactions import OpenTransaction, WriteTxnMarkersRequest
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.group_commit import GroupCommit
from logferry.gateway.lanes.transaction import Draft
from logferry.gateway.service.lane_change import Changed, LaneChange
from logferry.gateway.topics.catalog import TopicCatalog
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
from logferry.ops.bench.harness.usage import UsageMeter, quantile_ms, read_lags, rss_mb
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 5
_FEW_ROUNDS: Final = 3
_RECORDS: Final = 12_000
_READERS: Final = 8
_LANES: Final = 8
_PACKED_BYTES: Final = 512 * 1024
_CREATED: Final = 7
_SOURCES: Final = 1_000_000
_FEW_SOURCES: Final = 10_000
_REWRITES: Final = 20_000_000
_STATES_A_TRANSACTION: Final = 500
_MOVED_SOURCES: Final = 300_000
_MARKERS: Final = 2_000_000
_MARKERS_AT_ONCE: Final = 500

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
    """64 KiB chunks of log lines from 64 sources, plain bodies, zstd in Kafka; against librdkafka's transactions of
    50 ms with batches of 1 MiB and zstd at level 1. The CPU is that of the workers, and of the program with librdkafka.
    """
    payloads = chunks(256, CHUNK_BYTES)
    size_gb = sum(len(payloads[number % len(payloads)]) for number in range(_RECORDS)) / 1e9
    with running_stack(2) as stack:

        def theirs(number: int) -> Side:
            topic = make_topic(stack, f"theirs{number}")
            rate, cpu_s = librdkafka_producer(stack.cluster().bootstrap, topic, payloads, _RECORDS)
            return {"mb_s": rate, "cpu_s_per_gb": cpu_s / size_gb}

        rounds = alternate(_ROUNDS, lambda number: loaded(stack, Load(f"ours{number}", payloads)), theirs)
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


# ---- many known sources ------------------------------------------------------------------------------------------


def many_sources_rss_mb() -> Figure:
    """Resident memory of a worker that owns a million sources; throughput of 100 more sources, before and with them."""
    ours = _measured(_SOURCES, _SOURCES)
    return Figure("MB", ours, {"mb_s": ours["mb_s_before"]}, 1, value=round(ours["rss_mb"], 1))


def many_sources_takeover_s() -> Figure:
    """Fence and replay of all lanes with a million sources by one worker."""
    ours = _measured(_SOURCES, _SOURCES)
    return Figure("s", ours, {}, 1, value=round(ours["takeover_s"], 2))


def rewritten_states_takeover_s() -> Figure:
    """Fence and replay of all lanes by one worker, directly after 20 million states of 10,000 sources were written."""
    ours = _measured(_FEW_SOURCES, _REWRITES)
    return Figure("s", ours, {}, 1, value=round(ours["takeover_s"], 2))


def takeover_per_million_markers_s() -> Figure:
    """Fence and replay of all lanes by one worker, with as many markers of old transactions, for a million of them.

    A marker is what a transaction leaves when its states are compacted.
    """
    with running_stack(1, lanes=_LANES, restart=False) as stack:
        without_s = _taken_over_s(stack)
        uvloop.run(_write_markers(stack.cluster().bootstrap, "logferry.gateway.dc1.state"))
        with_s = _taken_over_s(stack)
    ours = {"takeover_s": with_s, "without_s": without_s}
    return Figure("s", ours, {}, 1, value=round(with_s * 1_000_000 / _MARKERS, 2))


def lane_change_paused_s() -> Figure:
    """For so long nothing can be recorded while 8 lanes with 300,000 sources become 32."""
    with running_stack(1, lanes=_LANES, restart=False) as stack:
        topic, bootstrap = make_topic(stack, "many", 16), stack.cluster().bootstrap
        uvloop.run(_write_states(bootstrap, topic, _MOVED_SOURCES, _MOVED_SOURCES))
        changed = uvloop.run(_change_lanes(bootstrap, 32))
    ours = {"paused_s": changed.paused_s, "moved": float(changed.moved)}
    return Figure("s", ours, {}, 1, value=round(changed.paused_s, 2))


async def _change_lanes(bootstrap: str, to: int) -> Changed:
    weak = ["replication", "min-isr"]
    settings = {"dc": "dc1", "lanes": _LANES, "accept_weak_kafka": weak, "kafka": {"bootstrap_servers": bootstrap}}
    async with connected(bootstrap) as kafka:
        return await LaneChange(kafka, Config.model_validate(settings), to, print).run()


async def _write_markers(bootstrap: str, topic: str) -> None:
    """Ends transactions of producers that have written nothing: Kafka keeps the markers."""
    async with connected(bootstrap) as kafka:

        async def write(lane: int) -> None:
            leader = await kafka.present_leader(topic, lane)
            for _ in range(_MARKERS // _LANES // _MARKERS_AT_ONCE):
                ends = [OpenTransaction((topic, lane), leader, 10**6 + n, 1, 0, 0, 0) for n in range(_MARKERS_AT_ONCE)]
                await kafka.send(leader, WriteTxnMarkersRequest(ends, 1, committed=True))

        await asyncio.gather(*map(write, range(_LANES)))


@cache
def _measured(sources: int, writes: int) -> Side:
    """A worker takes over its lanes after ``writes`` states of ``sources`` were written."""
    payloads = chunks(256, CHUNK_BYTES)
    with running_stack(1, lanes=_LANES, restart=False) as stack:
        few = loaded(stack, Load("few", payloads, 100))
        topic = make_topic(stack, "many", 16)
        uvloop.run(_write_states(stack.cluster().bootstrap, topic, sources, writes))
        taken_over_s = _taken_over_s(stack)
        rss = rss_mb(gateways.gateway_pids(stack))
        many = loaded(stack, Load("with-many", payloads, 100))
    return {"rss_mb": rss, "takeover_s": taken_over_s, "mb_s": many["mb_s"], "mb_s_before": few["mb_s"]}


async def _write_states(bootstrap: str, topic: str, sources: int, writes: int) -> None:
    """Writes the states in transactions of the lanes, as a gateway does."""
    config = Config.model_validate({"dc": "dc1", "lanes": _LANES, "kafka": {"bootstrap_servers": bootstrap}})
    keys: list[list[bytes]] = [[] for _ in range(_LANES)]
    for number in range(sources):
        source = SourceIdentity(topic, None, f"host-{number:07d}.example.net:/var/log/nginx/access.log")
        keys[lane_of(source.key, _LANES)].append(source.state_key())

    async def write(kafka: KafkaClient, topic_id: bytes, lane: int) -> None:
        producer = GroupCommit(kafka, TopicCatalog(kafka, config), config, lane)
        await producer.fence()
        seqno, now_ms = 250_000, int(time.time() * 1000)
        wanted = itertools.islice(itertools.cycle(keys[lane]), len(keys[lane]) * writes // sources)
        while batch := list(itertools.islice(wanted, _STATES_A_TRANSACTION)):
            draft = Draft(SourceTable(), now_ms)
            for key in batch:
                seqno += 1
                draft.states[key] = SourceState(topic_id, lane, seqno, 0, now_ms, now_ms).encode()
            await producer.settled()
            await producer.transact(draft)
        await producer.discard()

    async with connected(bootstrap) as kafka:
        topic_id = (await kafka.describe_topic(topic)).id
        await asyncio.gather(*(write(kafka, topic_id, lane) for lane in range(_LANES)))


def _taken_over_s(stack: Stack) -> float:
    """Restarts the worker. Time from its first fence until the last lane serves, by its log."""
    log = stack.child("gateway-0").log
    since = len(log.read_text())
    stack.restart("gateway-0")
    stack.wait_ready()
    events = [json.loads(line) for line in log.read_text()[since:].splitlines() if line.startswith("{")]
    opened = [event for event in events if event["event"] == "lane_open"]
    if len(opened) < _LANES:
        raise RuntimeError(f"{len(opened)} lanes opened, {_LANES} were expected")
    slowest_ms: int = max(event["fence_ms"] + event["replay_ms"] for event in opened)
    return slowest_ms / 1000
