"""The mirror killed between every two steps of a transaction, and the proof that the comparison would notice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from logferry.ops.stack.stack import Stack

from tests.crash.mirror.broken_mirror import RIVAL, STEPS
from tests.support.checker import read_back, violations
from tests.support.clients import Load
from tests.support.faults import wait_all_lanes, wait_shared_lanes
from tests.support.mirror import (
    Mirror,
    differences,
    differences_in_the_end,
    make_topic,
    pairs_by_history,
    read_log,
    true_pairs,
)

# Of each of two rivals, before they have fought enough.
_FENCES = 10


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2")) as stack:
        yield stack


async def test_killed_between_every_two_steps(stack: Stack, tmp_path: Path) -> None:
    topic = await make_topic(stack, "steps")
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    mirror = Mirror(stack, tmp_path, "steps")
    async with Load("steps", stack.urls("dc1"), seed=21, sources=32) as load:
        for step in STEPS:
            dying = mirror.start(step)
            assert await asyncio.to_thread(dying.child.wait_for_end, 60), f"it did not die when it had {step}"
            assert dying.child.exit_status == -signal.SIGKILL
    whole = mirror.start()
    try:
        assert await differences_in_the_end((there, topic), (here, topic)) == []
        assert violations(load.history, await read_back(here, topic)) == []
        original, copy = await read_log(there, topic), await read_log(here, topic)
        history = await pairs_by_history(here, mirror.pairs)
        assert {number: history[topic, number] for number in original} == true_pairs(original, copy)
    finally:
        whole.child.stop(10)


@pytest.mark.long
async def test_two_workers_that_fight_for_every_lane_do_no_harm(stack: Stack, tmp_path: Path) -> None:
    """Each fences the other one in turn, in the middle of what it does; what gets through is exact."""
    topic = await make_topic(stack, "fought")
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    mirror = Mirror(stack, tmp_path, "fought", workers=2)
    workers = [mirror.start(RIVAL, number) for number in range(2)]
    try:
        async with Load("fought", stack.urls("dc1"), seed=25, sources=32) as load:
            async with asyncio.timeout(120):
                while min(fences := [await fenced(worker.url) for worker in workers]) < _FENCES:
                    await load.acknowledged(50)
        print(f"fenced {fences} times")
        assert await differences_in_the_end((there, topic), (here, topic)) == []
        assert violations(load.history, await read_back(here, topic)) == []
        original, copy = await read_log(there, topic), await read_log(here, topic)
        history = await pairs_by_history(here, mirror.pairs)
        assert {number: history[topic, number] for number in original} == true_pairs(original, copy)
    finally:
        for worker in workers:
            worker.child.stop(10)


async def fenced(url: str) -> int:
    """How often another one took a lane from this worker."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    except aiohttp.ClientError:
        return 0
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("logferry_mirror_lane_fences_total{")))


@pytest.mark.long
async def test_without_the_fence_a_frozen_worker_does_damage(stack: Stack, tmp_path: Path) -> None:
    """A worker is frozen in the middle of its transactions; unfenced, it commits them after another continued."""
    topic = await make_topic(stack, "unfenced")
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    mirror = Mirror(stack, tmp_path, "unfenced", workers=2)
    workers = [mirror.start("no-fence", number) for number in range(2)]
    found: list[str] = []
    try:
        async with Load("unfenced", stack.urls("dc1"), seed=22, sources=32) as load:
            for _ in range(8):
                await wait_shared_lanes([workers[1].url])
                await load.acknowledged(400)
                workers[0].child.send(signal.SIGSTOP)
                await wait_all_lanes([workers[1].url])
                await load.acknowledged(400)
                workers[0].child.send(signal.SIGCONT)
                await load.acknowledged(400)
                original, copy = await read_log(there, topic), await read_log(here, topic)
                # The copy may be behind, but it must be a beginning of the original.
                so_far = {number: records[: len(copy.get(number, []))] for number, records in original.items()}
                found = differences(so_far, copy)
                if found:
                    break
    finally:
        for worker in workers:
            worker.child.send(signal.SIGCONT)
            worker.child.stop(10)
    assert found, "a mirror without its fence did no damage: the comparison would not notice"


@pytest.mark.long
async def test_a_history_that_is_wrong_by_one_is_noticed(stack: Stack, tmp_path: Path) -> None:
    topic = await make_topic(stack, "wrong-pairs")
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    mirror = Mirror(stack, tmp_path, "wrong-pairs")
    worker = mirror.start("history-off-by-one")
    try:
        async with Load("wrong-pairs", stack.urls("dc1"), seed=23, sources=8) as load:
            await load.acknowledged(100)
        assert await differences_in_the_end((there, topic), (here, topic)) == []
        original, copy = await read_log(there, topic), await read_log(here, topic)
        history = await pairs_by_history(here, mirror.pairs)
        assert {number: history[topic, number] for number in original} != true_pairs(original, copy)
    finally:
        worker.child.stop(10)


@pytest.mark.long
async def test_a_progress_that_is_committed_after_its_records_is_noticed(stack: Stack, tmp_path: Path) -> None:
    """Killed in between, the next worker brings the same records once more."""
    topic = await make_topic(stack, "late-progress")
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    mirror = Mirror(stack, tmp_path, "late-progress")
    async with Load("late-progress", stack.urls("dc1"), seed=24, sources=16) as load:
        dying = mirror.start("checkpoint-late")
        assert await asyncio.to_thread(dying.child.wait_for_end, 60)
        assert dying.child.exit_status == -signal.SIGKILL
        await load.acknowledged(100)
    whole = mirror.start()
    try:
        assert await differences_in_the_end((there, topic), (here, topic), 20) != []
        assert any("doubled" in violation for violation in violations(load.history, await read_back(here, topic)))
    finally:
        whole.child.stop(10)
