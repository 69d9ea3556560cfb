"""A worker that is asked to stop hands its lanes over: a pause, and at most one more try of a request."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import aiohttp
import pytest
from logferry.ops.stack import Stack

from tests.checker import read_back, violations
from tests.load import Load


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=3) as stack:
        yield stack


async def test_a_stopping_worker_hands_its_lanes_over(stack: Stack, topic_name: str) -> None:
    """A request needs at most one more try for each of the two hand-overs: when the worker goes, and is back."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{stack.urls()[0]}/v1/topics/{topic_name}", json={"partitions": 4}) as response:
            assert response.status == 201, await response.text()
    async with Load(topic_name, stack.urls()[1:], seed=7) as load:
        await load.acknowledged(300)
        started = time.monotonic()
        stack.kill("gateway-0", signal.SIGTERM)
        await load.acknowledged(1000)
        await asyncio.to_thread(stack.wait_ready)
        await load.acknowledged(300)
    assert max(load.history.attempts.values()) <= 3
    stored = await read_back(stack.cluster().bootstrap, f"dc1.{topic_name}")
    assert violations(load.history, stored) == []
    tries = Counter(load.history.attempts.values())
    print(f"chunks by tries: {dict(tries)}; longest pause of a source: {_longest_pause_s(load, started):.2f} s")


def _longest_pause_s(load: Load, since: float) -> float:
    times: dict[str, list[float]] = defaultdict(list)
    for source, at in load.acknowledgements:
        if at > since - 1:
            times[source].append(at)
    return max(after - before for series in times.values() for before, after in itertools.pairwise(series))
