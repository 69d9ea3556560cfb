"""The gateway under faults: two nodes with two workers each, three brokers, load from 32 sources, and the checker on
what is stored.

Each fault is injected while chunks are being acknowledged; afterwards every chunk must stand once or not at all, as
it was answered, in the order of its source.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from logferry.ops.stack.stack import Stack

from tests.support.checker import read_back, violations
from tests.support.clients import ALL_KINDS, Load
from tests.support.faults import CuttingProxy, wait_all_lanes, wait_unread
from tests.support.kafka import delete_topic, make_topic, recreate_topic

_SOURCES = 32
_BROKERS = ("kafka-1", "kafka-2", "kafka-3")
_WORKERS = ("gateway-0", "gateway-1", "gateway-2", "gateway-3")
_SECOND_NODE = _WORKERS[2:]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), brokers=3, nodes=2, workers=2) as stack:
        yield stack


async def assert_exact(stack: Stack, load: Load, topic: str) -> None:
    stored = await read_back(stack.cluster().bootstrap, topic)
    assert load.history.acknowledged() > 100, "the load did not get under way"
    assert violations(load.history, stored) == []


async def test_a_worker_and_a_whole_node_killed_under_load(stack: Stack, topic_name: str) -> None:
    topic = await make_topic(stack.urls()[0], topic_name)
    async with Load(topic_name, stack.urls(), seed=1, sources=_SOURCES, kinds=ALL_KINDS) as load:
        for victims in (("gateway-0",), _SECOND_NODE, ("gateway-1",)):
            await load.acknowledged(300)
            for victim in victims:
                stack.kill(victim)
            await load.acknowledged(300)
            await asyncio.to_thread(stack.wait_ready)
    await assert_exact(stack, load, topic)


@pytest.mark.long
async def test_all_workers_restarted_in_turn_while_partitions_are_added(stack: Stack, topic_name: str) -> None:
    """As an upgrade does it. No source moves, whoever serves its lane."""
    topic = await make_topic(stack.urls()[0], topic_name)
    async with Load(topic_name, stack.urls(), seed=6, sources=_SOURCES, kinds=ALL_KINDS) as load:
        async with aiohttp.ClientSession() as session:
            for partitions, worker in enumerate(_WORKERS, start=5):
                await load.acknowledged(200)
                url = stack.urls()[partitions % len(_WORKERS)]
                async with session.put(f"{url}/v1/topics/{topic_name}", json={"partitions": partitions}) as response:
                    assert response.status == 200, await response.text()
                stack.kill(worker, signal.SIGTERM)
                await load.acknowledged(200)
                await asyncio.to_thread(stack.wait_ready)
    await assert_exact(stack, load, topic)


async def test_a_frozen_worker_that_wakes_is_fenced(stack: Stack, topic_name: str) -> None:
    """SIGSTOP past its session: its lanes move. On waking it is asked for all it knows, and must not commit."""
    topic = await make_topic(stack.urls()[0], topic_name)
    frozen_url = stack.urls()[0]
    log = Path(stack.data) / "logs" / "dc1-gateway-0.log"
    seen = len(log.read_text())
    async with Load(topic_name, stack.urls(), seed=2, sources=_SOURCES, kinds=ALL_KINDS) as load:
        await load.acknowledged(300)
        stack.kill("gateway-0", signal.SIGSTOP)
        await wait_all_lanes(url for url in stack.urls() if url != frozen_url)
        await load.acknowledged(300)
        stack.kill("gateway-0", signal.SIGCONT)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            source = f"{frozen_url}/v1/topics/{topic_name}/sources/host-3%2Faccess.log"
            for ask in (session.get(source), session.post(f"{source}/session")):
                async with ask as response:
                    assert response.status in (200, 500, 503)
        await load.acknowledged(300)
        await asyncio.to_thread(stack.wait_ready)
        await load.acknowledged(300)
    await assert_exact(stack, load, topic)
    woke = log.read_text()[seen:]
    assert "lane_revoked" in woke or "lane_failed" in woke or '"gone": [0' in woke or "lanes_assigned" in woke


async def test_a_worker_that_slept_sees_no_gap_where_it_missed_a_chunk(stack: Stack, topic_name: str) -> None:
    """What it finds on waking, before it hears that its lanes have moved, rests on chunks that others recorded."""
    await make_topic(stack.urls()[0], topic_name)
    awake, slept = stack.urls()[1], stack.urls()[0]
    names = [f"s{number}" for number in range(48)]
    async with Asker(topic_name) as asker:
        for name in names:
            await asker.insist(slept, name, "chunks?seqno=1&prev=0")
        stack.kill("gateway-0", signal.SIGSTOP)
        for name in names:
            await asker.insist(awake, name, "chunks?seqno=2&prev=1")
        late = [asyncio.create_task(asker.insist(slept, name, "chunks?seqno=3&prev=2")) for name in names]
        await wait_unread(slept, len(names))
        stack.kill("gateway-0", signal.SIGCONT)
        for written in await asyncio.gather(*late):
            assert written["recorded_seqno"] == 3
    await asyncio.to_thread(stack.wait_ready)


async def test_an_idle_worker_that_slept_tells_no_old_news(stack: Stack, topic_name: str) -> None:
    """Frozen with nothing to do, it hears of no fence: on waking it is asked for a chunk, a look-up and a session."""
    topic = await make_topic(stack.urls()[0], topic_name)
    async with Asker(topic_name) as asker:
        names = [f"s{number}" for number in range(24)]
        for name in names:
            await asker.insist(stack.urls()[0], name, "chunks?seqno=1&prev=0")
        stack.kill("gateway-0", signal.SIGSTOP)
        awake, slept = stack.urls()[1], stack.urls()[0]
        sessions = {name: (await asker.insist(awake, name, "session"))["session"] for name in names}
        for name in names:
            written = await asker.insist(awake, name, f"chunks?seqno=2&prev=1&session={sessions[name]}")
            assert written["recorded_seqno"] == 2
        stack.kill("gateway-0", signal.SIGCONT)
        for name in names:
            duplicate = await asker.insist(slept, name, f"chunks?seqno=1&prev=0&session={sessions[name]}")
            assert (duplicate["written"], duplicate["duplicates"]) == (0, 1)
            written = await asker.insist(slept, name, f"chunks?seqno=3&prev=2&session={sessions[name]}")
            assert written["recorded_seqno"] == 3
            opened = await asker.insist(slept, name, "session")
            assert (opened["recorded_seqno"], opened["session"] > sessions[name]) == (3, True)
    await asyncio.to_thread(stack.wait_ready)
    stored = await read_back(stack.cluster().bootstrap, topic)
    assert sorted((record.source, record.seqno) for record in stored) == sorted(
        (name, seqno) for name in names for seqno in (1, 2, 3)
    )


class Asker:
    """Sends the same again on "retry" and "unknown" and on no answer, to the same worker."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    async def __aenter__(self) -> Asker:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def insist(self, url: str, source: str, rest: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                with suppress(aiohttp.ClientError, TimeoutError):
                    path = f"{url}/v1/topics/{self._topic}/sources/{source}/{rest}"
                    async with self._session.post(path) as response:
                        if response.status not in (429, 500, 503):
                            assert response.status == 200, await response.text()
                            document: dict[str, Any] = await response.json()
                            return document
                await asyncio.sleep(0.1)


@asynccontextmanager
async def cutting(stack: Stack) -> AsyncIterator[list[CuttingProxy]]:
    """A proxy before each worker."""
    async with AsyncExitStack() as behind:
        yield [
            await behind.enter_async_context(CuttingProxy(url, seed)) for seed, url in enumerate(stack.urls(), start=3)
        ]


@pytest.mark.parametrize("chunks", [1000, pytest.param(2500, marks=pytest.mark.long)])
async def test_connections_cut_at_every_point(stack: Stack, topic_name: str, chunks: int) -> None:
    topic = await make_topic(stack.urls()[0], topic_name)
    async with cutting(stack) as proxies:
        urls = [proxy.url for proxy in proxies]
        async with Load(topic_name, urls, seed=3, sources=_SOURCES, kinds=ALL_KINDS) as load:
            await load.acknowledged(chunks)
    for kind in ("before the body", "during the body", "before the answer"):
        assert sum(proxy.cuts[kind] for proxy in proxies) > 10, kind
    await assert_exact(stack, load, topic)


@pytest.mark.parametrize("alone", [_BROKERS[:1], pytest.param(_BROKERS, marks=pytest.mark.long)], ids=len)
async def test_brokers_killed_alone_and_then_all(stack: Stack, topic_name: str, alone: tuple[str, ...]) -> None:
    topic = await make_topic(stack.urls()[0], topic_name)
    async with Load(topic_name, stack.urls(), seed=5, sources=_SOURCES, kinds=ALL_KINDS) as load:
        for brokers in (*((broker,) for broker in alone), _BROKERS):
            await load.acknowledged(300)
            await asyncio.gather(*(asyncio.to_thread(stack.restart, broker) for broker in brokers))
            await load.acknowledged(300)
    await assert_exact(stack, load, topic)


@pytest.mark.long
async def test_the_disk_of_a_broker_is_full(stack: Stack, topic_name: str) -> None:
    """The file system refuses what the broker writes: it gives up, and is started again when there is room."""
    topic = await make_topic(stack.urls()[0], topic_name)
    async with Load(topic_name, stack.urls(), seed=9, sources=_SOURCES, kinds=ALL_KINDS) as load:
        for broker in _BROKERS[:2]:
            await load.acknowledged(300)
            full = stack.pids[f"dc1/{broker}"]
            resource.prlimit(full, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            while stack.pids.get(f"dc1/{broker}") == full:
                await load.acknowledged(50)
            await asyncio.to_thread(stack.cluster().wait_ready)
            await load.acknowledged(300)
    await assert_exact(stack, load, topic)


@pytest.mark.parametrize(
    "absences", [(True, False), pytest.param((True, False, True, False), marks=pytest.mark.long)], ids=len
)
async def test_a_topic_is_deleted_and_recreated_under_load(
    stack: Stack, topic_name: str, absences: tuple[bool, ...]
) -> None:
    """Those who write to another topic through the same lanes do not notice; the new one holds what it acknowledged.

    Answers are cut off, too: what the older one had recorded then comes again, and is no duplicate. ``absences``:
    whether it is away for a while.
    """
    kept_name, gone_name = f"{topic_name}-kept", f"{topic_name}-gone"
    kept, gone = await make_topic(stack.urls()[0], kept_name), await make_topic(stack.urls()[0], gone_name)
    bootstrap, urls = stack.cluster().bootstrap, stack.urls()
    async with (
        cutting(stack) as proxies,
        Load(kept_name, urls, seed=7, sources=_SOURCES, kinds=ALL_KINDS) as load,
        Load(gone_name, [p.url for p in proxies], seed=8, sources=_SOURCES, topic_may_go=True) as removed,
    ):
        for stays_away in absences:
            await removed.acknowledged(200)
            older = await delete_topic(bootstrap, gone)
            removed.history.topic_removed()
            if stays_away:
                await load.acknowledged(300)
            await recreate_topic(bootstrap, gone, urls, 4, older)
            await asyncio.gather(load.acknowledged(200), removed.acknowledged(200))
    await assert_exact(stack, load, kept)
    await assert_exact(stack, removed, gone)
