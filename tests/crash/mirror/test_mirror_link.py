"""The link between two data centres is cut, hangs or is slow: it reports why, resumes by itself, and is exact."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import ServiceWorker, Setting, configuration, free_ports

from tests.support.mirror import differences, differences_in_the_end, pairs_by_history, read_log, true_pairs
from tests.support.raw_load import RawLoad
from tests.support.relay import Relay, relayed

_PARTITIONS = 3
# So that an answer comes soon, however slow the link.
_SMALL = {"partition_bytes": 65_536, "fetch_bytes": 65_536}


class Link(NamedTuple):
    """From ``there`` through the relay, whose address is ``far``, to ``here``."""

    there: KafkaCluster
    here: KafkaCluster
    relay: Relay
    far: str


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    folder = tmp_path_factory.mktemp("kafka")
    with relayed("there", folder / "there") as (there, relay, far), KafkaCluster("here", folder / "here") as here:
        yield Link(there, here, relay, far)


@asynccontextmanager
async def mirroring(
    link: Link, folder: Path, prefix: str, *remotes: Setting, **settings: Setting
) -> AsyncIterator[str]:
    """The URL of the one worker of a mirror; its remotes come through the relay."""
    port, file = free_ports(1)[0], folder / "mirror.toml"
    named = [{**entry, "kafka": {"bootstrap_servers": link.far}} for entry in remotes if isinstance(entry, dict)]
    text = configuration(
        {
            "dc": "here",
            "prefix": prefix,
            "listen": f"127.0.0.1:{port}",
            "accept_weak_kafka": ["replication", "min-isr"],
            "remote": named,
            "kafka": {"bootstrap_servers": link.here.bootstrap},
            **settings,
        }
    )
    file.write_text(text)
    worker = ServiceWorker("mirror-0", file, 0, port, folder / "mirror.log", "logferry.mirror")
    worker.child.start()
    try:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(worker.is_ready):
                assert worker.child.running, worker.child.log_tail()
                await asyncio.sleep(0.05)
        yield worker.url
    finally:
        await asyncio.to_thread(worker.child.stop, 15)


async def make_topic(link: Link, name: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=link.there.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(name, _PARTITIONS, 1)])
    await admin.close()


async def status(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/status") as answer:
        return dict(await answer.json())


async def wait_of(url: str, dc: str, *, lasts: bool) -> dict[str, Any]:
    """The last wait of a link as soon as there is one that lasts, or that is over."""
    async with asyncio.timeout(60):
        while True:
            for found in (await status(url))["links"]:
                wait = found["last_wait"]
                if found["dc"] == dc and wait is not None and (wait["ended_ms"] is None) == lasts:
                    return dict(wait)
            await asyncio.sleep(0.05)


async def records(url: str) -> int:
    """How many the worker has brought since it was started."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("logferry_mirror_records_total{")))


async def moved(url: str, more: int) -> None:
    """Waits until so many more records are here."""
    wanted = await records(url) + more
    async with asyncio.timeout(120):
        while await records(url) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def is_exact(link: Link, topic: str, pairs: str) -> bool:
    """The copy becomes the original, and the history is what both say."""
    assert await differences_in_the_end((link.there.bootstrap, topic), (link.here.bootstrap, topic), 120) == []
    original, copy = await read_log(link.there.bootstrap, topic), await read_log(link.here.bootstrap, topic)
    history = await pairs_by_history(link.here.bootstrap, pairs)
    return {number: history[topic, number] for number in original} == true_pairs(original, copy)


async def cut_and_mended(link: Link, folder: Path, name: str, away_s: float) -> None:
    topic = f"there.{name}"
    await make_topic(link, topic)
    remote = {"dc": "there", "topics": [name]}
    async with mirroring(link, folder, name, remote) as url:
        async with RawLoad(link.there.bootstrap, topic, _PARTITIONS, pause_s=max(0.8, away_s / 15)) as load:
            for fault in (link.relay.go_away, link.relay.hang):
                await moved(url, 10_000)
                fault()
                try:
                    began = time.monotonic()
                    await load.written(8)
                    # The fault lasts this long: its length is what is tested.
                    await asyncio.sleep(max(0.0, began + away_s - time.monotonic()))
                    if fault == link.relay.go_away:
                        wait = await wait_of(url, "there", lasts=True)
                        assert "there" in wait["reason"]
                        assert wait["is_fault"]
                    [found] = (await status(url))["links"]
                    # It is not known what is there by now, and not said to be nothing.
                    assert found["lag_s"] > away_s - 2
                finally:
                    link.relay.come_back()
                began = time.monotonic()
                await moved(url, 10_000)
                print(f"resumes {time.monotonic() - began:.1f} s after the link")
                if fault == link.relay.go_away:
                    over = await wait_of(url, "there", lasts=False)
                    assert over["ended_ms"] - over["since_ms"] >= 500 * away_s
            assert load.aborted > 0
        assert await is_exact(link, topic, f"{name}.mirror.here.pairs")
        [found] = (await status(url))["links"]
        assert (found["lag_records"], found["lag_bytes"], found["lag_s"]) == (0, 0, 0.0)


async def test_cut_for_seconds(link: Link, tmp_path: Path) -> None:
    await cut_and_mended(link, tmp_path, "seconds", 3.0)
    assert link.relay.bytes_per_s is None


@pytest.mark.long
async def test_cut_for_a_minute(link: Link, tmp_path: Path) -> None:
    await cut_and_mended(link, tmp_path, "minute", 60.0)
    assert link.relay.bytes_per_s is None


@pytest.mark.long
async def test_a_slow_link_falls_behind_tells_by_how_much_and_recovers(link: Link, tmp_path: Path) -> None:
    topic = "there.slow"
    await make_topic(link, topic)
    async with mirroring(link, tmp_path, "slow", {"dc": "there", "topics": ["slow"]}, limits=_SMALL) as url:
        async with RawLoad(link.there.bootstrap, topic, _PARTITIONS, pause_s=0.2) as load:
            await moved(url, 10_000)
            link.relay.bytes_per_s = 150_000
            try:
                await load.written(30)
                async with asyncio.timeout(60):
                    while True:
                        [found] = (await status(url))["links"]
                        if found["lag_records"] > 50_000 and found["lag_bytes"] and found["lag_s"]:
                            break
                        await asyncio.sleep(0.05)
                behind = differences(
                    await read_log(link.there.bootstrap, topic), await read_log(link.here.bootstrap, topic)
                )
                assert behind != [], "it was to fall behind"
            finally:
                link.relay.bytes_per_s = None
        assert await is_exact(link, topic, "slow.mirror.here.pairs")


@pytest.mark.long
async def test_the_limit_of_a_link_holds_on_average_and_others_continue(link: Link, tmp_path: Path) -> None:
    """Two links: one may take 400 kB/s, the other one as much as it can. 4 MB wait in each."""
    limit, window_s = 400_000, 4.0
    for dc in ("held", "free"):
        await make_topic(link, f"{dc}.limited")
        async with AIOKafkaProducer(bootstrap_servers=link.there.bootstrap, linger_ms=20) as producer:
            sent = [await producer.send(f"{dc}.limited", bytes(8_000), partition=n % _PARTITIONS) for n in range(500)]
            await asyncio.gather(*sent)
    throttled: Setting = {"dc": "held", "topics": ["limited"], "bytes_per_s": limit}
    unlimited: Setting = {"dc": "free", "topics": ["limited"]}
    async with mirroring(link, tmp_path, "limited", throttled, unlimited, limits=_SMALL) as url:

        async def of(dc: str) -> dict[str, Any]:
            return next(found for found in (await status(url))["links"] if found["dc"] == dc)

        async with asyncio.timeout(60):
            while (await of("free"))["moved_records"] < 500:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        held = await of("held")
        # While the other one brought everything; what was saved up at the start, a second's worth, is gone by then.
        assert held["moved_records"] < 500
        async with asyncio.timeout(30):
            while (first := (await of("held"))["fetched_bytes"]) < 1.3 * limit:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        began = time.monotonic()
        await asyncio.sleep(window_s)  # what is measured: the bytes of a window
        taken, passed_s = (await of("held"))["fetched_bytes"] - first, time.monotonic() - began
        print(f"{taken / passed_s / 1000:.0f} kB/s of {limit / 1000:.0f}")
        # A fetch more or less at either end of the window.
        assert abs(taken - limit * passed_s) < 0.1 * limit * passed_s + 3 * 65_536
        wait = (await of("held"))["last_wait"]
        assert "bytes_per_s" in wait["reason"]
        assert not wait["is_fault"]
        assert (await of("free"))["lag_records"] == 0
        there, here = link.there.bootstrap, link.here.bootstrap
        assert await differences_in_the_end((there, "held.limited"), (here, "held.limited")) == []
