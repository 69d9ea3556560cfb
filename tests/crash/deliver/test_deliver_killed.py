"""Push delivery while workers are killed and frozen, receivers go away, and partitions move between workers.

Windows: batch sent, answer not read, worker killed; answer read, position not committed, worker killed; worker frozen
past its session and continued, its batch arriving late.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from logferry.gateway.delivery.config import load
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.subscriptions import PushSubscription, StoredSubscription
from logferry.gateway.tls import kafka_options
from logferry.gateway.topics.compacted_store import CompactedStore
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.delivery import Deliver, PushReceiver, Received, deliver, receiver, send, subscribe
from tests.support.gateway import Gateway

_TAKE_OVER_S = 60
SEED = int(os.environ.get("LOGFERRY_SEED", random.randrange(10**6)))


async def test_workers_killed_and_frozen_under_load(
    kafka: KafkaCluster, workers: Gateway, topic_name: str, tmp_path: Path
) -> None:
    """Every chunk once, in order, with the same bytes under each token; a late worker's batch is known by its epoch."""
    rng = random.Random(SEED)
    print(f"LOGFERRY_SEED={SEED}")
    topic = await workers.make_topic(topic_name, 4)

    async def after(got: Received) -> web.StreamResponse | int | None:
        """A receiver that lies now and then: the batch was taken."""
        return rng.choice([None] * 8 + [500, 503])

    async with receiver(PushReceiver(after=after)) as got, receiver() as other:
        with deliver(kafka, tmp_path, "shared", workers=2) as running:
            await subscribe(workers, topic_name, topic, got.url, max_bytes=1024)
            await subscribe(workers, topic_name + "-source", topic, other.url, max_bytes=1024, order="source")
            writing = asyncio.gather(*(send(workers, topic_name, f"web{n}", range(1, 121)) for n in range(8)))
            for step in range(6):
                seen = len(got.seen)
                await got.until(lambda seen=seen: len(got.seen) > seen + 3 or writing.done(), "deliveries")  # type: ignore[misc]
                await _fault(running, step % 2, rng)
            written = [one for some in await writing for one in some]
            for watched in (got, other):
                await watched.until(lambda watched=watched: len(watched.rows) >= len(written), "all", 120)  # type: ignore[misc]
            assert got.problems(written) == []
            assert other.problems(written, order="source") == []
    epochs = {(one.token.rpartition("/")[0], one.epoch) for one in got.seen}
    assert len(epochs) > len({place for place, _ in epochs}), "no partition was taken over"


async def _fault(running: Deliver, number: int, rng: random.Random) -> None:
    """Kills a worker and starts it again, or freezes it until another one has its partitions."""
    worker = running.workers[number]
    pid = worker.child.pid
    assert pid is not None
    if rng.random() < 0.5:
        worker.child.send(signal.SIGKILL)
        worker.child.wait_for_end(10)
        worker.child.restart()
        return

    async def epochs(of: int) -> dict[str, int]:
        """A unit that a worker takes over is a new one of it, or has a higher epoch."""
        units = await running.units(of)
        return {f"{u['subscription']} {u['topic']} {u['partition']} {u['shard']}": u["epoch"] for u in units}

    async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(_TAKE_OVER_S):
                while not await holds():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            seen = [f"worker {n}: {await epochs(n)}\n{running.log(n)[-6000:]}" for n in (0, 1) if n != frozen]
            raise AssertionError("\n".join([f"no {what}", *seen])) from None

    async def has_news() -> bool:
        mine, its = await epochs(number), await epochs(1 - number)
        return any(epoch >= its.get(unit, 0) for unit, epoch in mine.items())

    async def has_more() -> bool:
        return any(epoch > before.get(unit, 0) for unit, epoch in (await epochs(1 - number)).items())

    # It was perhaps started a moment ago, and the other worker has all: nothing would be taken over.
    frozen: int | None = None
    await until(has_news, f"partition of worker {number}")
    before = await epochs(1 - number)
    os.kill(pid, signal.SIGSTOP)
    frozen = number
    try:
        await until(has_more, f"take-over by worker {1 - number}")
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_slow_receiver_harms_no_other(
    kafka: KafkaCluster, workers: Gateway, topic_name: str, tmp_path: Path
) -> None:
    """A hundred subscriptions to one topic, one of which hangs and one of which is always away."""
    topic = await workers.make_topic(topic_name)
    hangs = asyncio.Event()

    async def behave(got: Received) -> int | None:
        if got.headers["X-Logferry-Subscription"].endswith("-0"):
            await hangs.wait()
        return 500 if got.headers["X-Logferry-Subscription"].endswith("-1") else None

    takers = [PushReceiver() for _ in range(100)]
    async with receiver(PushReceiver(behave)) as got:

        async def route(one: Received) -> int | None:
            answer = await behave(one)
            if answer is None:
                number = one.headers["X-Logferry-Subscription"].rpartition("-")[2]
                takers[int(number)].taken.setdefault((one.replay, one.token), one)
            return answer

        got.behave = route
        with deliver(kafka, tmp_path, topic_name) as running:
            written = await send(workers, topic_name, "a", range(1, 51))
            await subscribe_directly(running, [f"{topic_name}-{n}" for n in range(100)], topic, got.url)

            def missing() -> list[int]:
                return [n for n, one in enumerate(takers[2:], 2) if len(one.rows) < len(written)]

            try:
                await got.until(lambda: not missing(), "98 subscriptions", 120)
            except AssertionError as error:
                names = {f"{topic_name}-{n}" for n in missing()}
                units = [unit for unit in await running.units() if unit["subscription"] in names]
                raise AssertionError(f"{error}; {len(names)} are not done: {units[:3]}") from None
            assert [one.problems(written) for one in takers[2:]] == [[]] * 98
            hangs.set()
            await got.until(lambda: len(takers[0].rows) >= len(written), "the one that hung", 60)
        assert takers[1].rows == []


async def subscribe_directly(running: Deliver, names: list[str], topic: str, url: str) -> None:
    """Into the store of a prefix that has no gateway."""
    config = load(running.file)
    client = KafkaClient(kafka_options(config.kafka), "test")
    await client.start()
    try:
        store = CompactedStore(client, config.subscriptions_topic, config.accept_weak_kafka, StoredSubscription.decode)
        await store.create()
        definition = PushSubscription(topics=[topic], url=url, start="earliest", max_wait_ms=20, timeout_s=300)
        for name in names:
            await store.put(name, StoredSubscription(id=name, created_ms=1, definition=definition))
    finally:
        await client.close()
