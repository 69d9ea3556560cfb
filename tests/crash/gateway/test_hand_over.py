"""Workers that are asked to stop hand their lanes over: a pause, and at most one more try of a request."""

from __future__ import annotations

import asyncio
import itertools
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import aiohttp
import pytest
from logferry.gateway.contract.names import lane_of
from logferry.ops.stack.stack import Stack

from tests.support.checker import read_back, violations
from tests.support.clients import Load

LANES = 8
# So many that some are in every lane.
SOURCES = 40


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=3, lanes=LANES) as stack:
        yield stack


async def test_each_worker_in_turn_is_stopped_and_comes_back(stack: Stack, topic_name: str) -> None:
    """Callers of every worker, the stopping one too. Printed: the pauses of sources whose lane was the stopped one's.

    A lane that moves away and back while a chunk is under way costs that one a third try, and a slow machine some more.
    """
    pauses: list[float] = []
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{stack.urls()[0]}/v1/topics/{topic_name}", json={"partitions": 4}) as response:
            assert response.status == 201, await response.text()
        async with Load(topic_name, stack.urls(), seed=7, sources=SOURCES) as load:
            for number, url in enumerate(stack.urls()):
                await load.acknowledged(300)
                async with session.get(url + "/readyz") as response:
                    moving = {int(lane) for lane in (await response.json())["lanes"]}
                worker, started = stack.child(f"gateway-{number}"), time.monotonic()
                worker.send(signal.SIGTERM)
                assert await asyncio.to_thread(worker.wait_for_end, 30)
                await load.acknowledged(1000)
                await asyncio.to_thread(stack.wait_ready)
                await load.acknowledged(300)
                pauses += _pauses_s(load, started, moving)
    stored = await read_back(stack.cluster().bootstrap, f"dc1.{topic_name}")
    assert violations(load.history, stored) == []
    tries = Counter(load.history.attempts.values())
    median, most = statistics.median(pauses), max(pauses)
    print(f"chunks by tries: {dict(tries)}; pauses of {len(pauses)} sources: median {median:.2f} s, up to {most:.2f} s")
    assert max(tries) <= 5


def _pauses_s(load: Load, since: float, lanes: set[int]) -> list[float]:
    """The longest pause of each source of the lanes."""
    times: dict[str, list[float]] = defaultdict(list)
    for source, at in load.acknowledgements:
        if at > since - 1 and lane_of(source, LANES) in lanes:
            times[source].append(at)
    return [max(after - before for before, after in itertools.pairwise(series)) for series in times.values()]
