"""The mirror under faults: the copy is the original, record by record, and the history tells the truth."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import aiohttp
import pytest
from logferry.ops.stack.stack import Stack

from tests.support.checker import read_back, violations
from tests.support.clients import Load
from tests.support.faults import wait_all_lanes
from tests.support.mirror import differences, differences_in_the_end, make_topic, pairs_by_history, read_log, true_pairs
from tests.support.raw_load import RawLoad

_PARTITIONS = 6
_WIDE = 64
PAIRS = "logferry.mirror.dc2.pairs"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2"), workers=2, mirrors=2) as stack:
        yield stack


async def mirrored_records(stack: Stack, topic: str) -> int:
    """How many offsets of the topic are committed in dc2, by its gateway."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{stack.urls('dc2')[0]}/v1/topics/{topic}") as answer:
            if answer.status != 200:
                return 0
            return sum(int(offsets["next"]) for offsets in (await answer.json())["offsets"])


async def mirrored_more(stack: Stack, topic: str, more: int) -> None:
    """Waits until so many more are there: the faults meet a mirror that is at work."""
    wanted = await mirrored_records(stack, topic) + more
    async with asyncio.timeout(120):
        while await mirrored_records(stack, topic) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def what_is_wrong(stack: Stack, topic: str, load: Load | None = None) -> list[str]:
    here, there = stack.cluster("dc2").bootstrap, stack.cluster("dc1").bootstrap
    found = await differences_in_the_end((there, topic), (here, topic))
    if not found:
        if load is not None:
            found += violations(load.history, await read_back(here, topic))
        original, copy = await read_log(there, topic), await read_log(here, topic)
        history = await pairs_by_history(here, PAIRS)
        told = {number: history.get((topic, number), {}) for number in original}
        if told != true_pairs(original, copy):
            found.append("the history of pairs is not what the logs say")
    return found


async def test_workers_killed_and_frozen_under_load(stack: Stack) -> None:
    """Topics of one partition and of 64 through the gateway, and one that strangers write: see `RawLoad`."""
    topic, narrow = await make_topic(stack, "killed", _WIDE), await make_topic(stack, "narrow", 1)
    raw = await make_topic(stack, "raw", 3)
    async with (
        Load("killed", stack.urls("dc1"), seed=11, sources=24) as load,
        Load("narrow", stack.urls("dc1"), seed=14, sources=8) as narrow_load,
        RawLoad(stack.cluster("dc1").bootstrap, raw, 3, pause_s=0.8) as strangers,
    ):
        for name in ("mirror-0", "mirror-1", "mirror-0"):
            await mirrored_more(stack, topic, 300)
            stack.kill(f"dc2/{name}")
        await mirrored_more(stack, topic, 300)
        stack.kill("dc2/mirror-1", signal.SIGSTOP)
        await wait_all_lanes(stack.urls("dc2", "mirror")[:1])
        await mirrored_more(stack, topic, 300)
        stack.kill("dc2/mirror-1", signal.SIGCONT)
        await mirrored_more(stack, topic, 300)
    assert await what_is_wrong(stack, topic, load) == []
    assert await what_is_wrong(stack, narrow, narrow_load) == []
    assert await what_is_wrong(stack, raw) == []
    assert strangers.aborted >= 2
    assert max(map(len, (await read_log(stack.cluster("dc2").bootstrap, raw)).values())) > 20_000


async def test_each_cluster_restarted_under_load(stack: Stack) -> None:
    topic = await make_topic(stack, "restarted", _PARTITIONS)
    async with Load("restarted", stack.urls("dc1"), seed=12, sources=32) as load:
        for dc in ("dc2", "dc1"):
            await mirrored_more(stack, topic, 300)
            await asyncio.to_thread(stack.restart, f"{dc}/kafka-1")
        await mirrored_more(stack, topic, 300)
    assert await what_is_wrong(stack, topic, load) == []


async def test_the_checker_finds_one_record_too_few_and_one_too_many(stack: Stack) -> None:
    topic = await make_topic(stack, "checked", _PARTITIONS)
    async with Load("checked", stack.urls("dc1"), seed=13, sources=4) as load:
        await load.acknowledged(50)
    assert await what_is_wrong(stack, topic, load) == []
    log = await read_log(stack.cluster("dc2").bootstrap, topic)
    number = next(number for number, records in log.items() if len(records) > 2)
    fewer = {**log, number: log[number][:1] + log[number][2:]}
    twice = {**log, number: log[number][:2] + log[number][1:]}
    swapped = {**log, number: [log[number][1], log[number][0], *log[number][2:]]}
    for damaged in (fewer, twice, swapped):
        assert differences(log, damaged) != []
