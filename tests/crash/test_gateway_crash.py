"""The gateway under faults: real workers, a real broker, load from 16 sources, and the checker on what is stored.

Each fault is injected while chunks are being acknowledged; afterwards every chunk must stand once or not at all, as
it was answered, in the order of its source.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from logferry.ops.stack import Stack

from tests.checker import read_back, violations
from tests.faults import CuttingProxy
from tests.load import ALL_KINDS, Load

_SESSION_S = 6.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=2, gateway_settings={"session_timeout_ms": 6000}) as stack:
        yield stack


async def make_topic(stack: Stack, name: str) -> str:
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{stack.urls()[0]}/v1/topics/{name}", json={"partitions": 4}) as response:
            assert response.status in (200, 201), await response.text()
    return f"dc1.{name}"


async def assert_exact(stack: Stack, load: Load, topic: str) -> None:
    stored = await read_back(stack.cluster().bootstrap, topic)
    assert load.history.acknowledged() > 100, "the load did not get under way"
    assert violations(load.history, stored) == []


async def test_a_worker_killed_under_load(stack: Stack, topic_name: str) -> None:
    topic = await make_topic(stack, topic_name)
    async with Load(topic_name, stack.urls(), seed=1, kinds=ALL_KINDS) as load:
        for victim in ("gateway-0", "gateway-1"):
            await load.acknowledged(300)
            stack.kill(victim)
            await load.acknowledged(300)
            await asyncio.to_thread(stack.wait_ready)
    await assert_exact(stack, load, topic)


async def test_a_frozen_worker_that_wakes_is_fenced(stack: Stack, topic_name: str) -> None:
    """SIGSTOP past its session: its lanes move. On waking it is asked for all it knows, and must not commit."""
    topic = await make_topic(stack, topic_name)
    frozen_url = stack.urls()[0]
    log = Path(stack.data) / "logs" / "dc1-gateway-0.log"
    seen = len(log.read_text())
    async with Load(topic_name, stack.urls(), seed=2, kinds=ALL_KINDS) as load:
        await load.acknowledged(300)
        stack.kill("gateway-0", signal.SIGSTOP)
        await asyncio.sleep(_SESSION_S)
        await load.acknowledged(300)
        stack.kill("gateway-0", signal.SIGCONT)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            source = f"{frozen_url}/v1/topics/{topic_name}/sources/host-3%2Faccess.log"
            for ask in (session.get(source), session.post(f"{source}/session")):
                async with ask as response:
                    assert response.status in (200, 500, 503)
        await load.acknowledged(300)
        await asyncio.to_thread(stack.wait_ready)
        await load.acknowledged(300)
    await assert_exact(stack, load, topic)
    woke = log.read_text()[seen:]
    assert "lane_lost" in woke or "lane_failed" in woke or '"gone": [0' in woke or "lanes_assigned" in woke


async def test_an_idle_worker_that_slept_tells_no_old_news(stack: Stack, topic_name: str) -> None:
    """Frozen with nothing to do, it hears of no fence: on waking it is asked for a chunk, a look-up and a session."""
    topic = await make_topic(stack, topic_name)
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
            assert (written["written"], written["recorded_seqno"]) == (1, 3)
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


async def test_connections_cut_at_every_point(stack: Stack, topic_name: str) -> None:
    topic = await make_topic(stack, topic_name)
    first, second = stack.urls()
    async with CuttingProxy(first, seed=3) as one, CuttingProxy(second, seed=4) as two:
        async with Load(topic_name, [one.url, two.url], seed=3, kinds=ALL_KINDS) as load:
            await load.acknowledged(2500)
    cuts = one.cuts + two.cuts
    assert all(cuts[kind] > 10 for kind in ("before the body", "during the body", "before the answer")), cuts
    await assert_exact(stack, load, topic)


async def test_the_broker_killed_and_restarted(stack: Stack, topic_name: str) -> None:
    topic = await make_topic(stack, topic_name)
    async with Load(topic_name, stack.urls(), seed=5, kinds=ALL_KINDS) as load:
        for _ in range(2):
            await load.acknowledged(300)
            await asyncio.to_thread(stack.restart, "kafka-1")
            await load.acknowledged(300)
    await assert_exact(stack, load, topic)
