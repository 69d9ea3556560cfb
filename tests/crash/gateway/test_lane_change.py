"""The number of lanes is changed under load: whatever is killed, every chunk stands once or not at all, as it was
answered, in the order of its source.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from logferry.ops.stack.stack import Stack

from tests.support.checker import read_back, violations
from tests.support.clients import ALL_KINDS, Load
from tests.support.kafka import make_topic

_SOURCES = 24
_CHANGER = Path(__file__).with_name("lane_changer.py")
_WITHIN_S = 300
_KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=2, lanes=4) as stack:
        yield stack


async def started(stack: Stack, to: int, step: str | None = None) -> asyncio.subprocess.Process:
    program = ["-m", "logferry.ops.cli.main", "lanes"] if step is None else [str(_CHANGER), step]
    config = str(Path(stack.data) / "dc1" / "gateway.toml")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *program, "--config", config, "--to", str(to)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def change(stack: Stack, to: int, step: str | None = None) -> tuple[int, str]:
    """The exit status of the command, and what it wrote. ``step``: it is killed behind it."""
    process = await started(stack, to, step)
    async with asyncio.timeout(_WITHIN_S):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def said_up_to(words: bytes, process: asyncio.subprocess.Process) -> bytes:
    """What the command writes, up to the line with these words."""
    assert process.stdout is not None
    said = b""
    while words not in said:
        line = await process.stdout.readline()
        assert line, said
        said += line
    return said


async def lanes_of(stack: Stack) -> set[int]:
    """The numbers of lanes that the workers know."""
    found = set()
    async with aiohttp.ClientSession() as session:
        for url in stack.urls():
            async with session.get(f"{url}/v1/status") as response:
                found.add((await response.json())["lanes_total"])
    return found


async def served(stack: Stack, lanes: int) -> None:
    """Until all workers know the number, and each lane serves."""
    async with asyncio.timeout(_WITHIN_S), aiohttp.ClientSession() as session:
        while True:
            serving = list[int]()
            totals = set[int]()
            for url in stack.urls():
                async with session.get(f"{url}/v1/status") as response:
                    status = await response.json()
                totals.add(status["lanes_total"])
                serving += [lane["lane"] for lane in status["lanes"] if lane["state"] == "serving"]
            if totals == {lanes} and sorted(serving) == list(range(lanes)):
                return
            await asyncio.sleep(0.1)


async def assert_exact(stack: Stack, load: Load, topic: str) -> None:
    stored = await read_back(stack.cluster().bootstrap, topic)
    assert load.history.acknowledged() > 100, "the load did not get under way"
    assert violations(load.history, stored) == []


async def test_killed_before_and_after_its_commit(stack: Stack, topic_name: str) -> None:
    topic = await make_topic(stack.urls()[0], topic_name)
    async with Load(topic_name, stack.urls(), seed=11, sources=_SOURCES, kinds=ALL_KINDS) as load:
        await load.acknowledged(200)
        status, said = await change(stack, 7, "write")
        assert status == _KILLED, said
        await load.acknowledged(200)
        assert await lanes_of(stack) == {4}
        status, said = await change(stack, 7, "commit")
        assert status == _KILLED, said
        await load.acknowledged(200)
        await served(stack, 7)
        status, said = await change(stack, 7)
        assert (status, said) == (0, "there are 7 lanes already\n")
        status, said = await change(stack, 3)
        assert status == 0, said
        await load.acknowledged(200)
        await served(stack, 3)
    await assert_exact(stack, load, topic)


async def test_two_commands_at_the_same_time_change_it_one_after_the_other(stack: Stack, tmp_path: Path) -> None:
    """The second one lets the first one finish, and begins with what that one has made."""
    first = await started(stack, 9, str(tmp_path / "continue"))
    async with asyncio.timeout(_WITHIN_S):
        said = await said_up_to(b"the lanes stop", first)
        second = await started(stack, 10)
        heard = await said_up_to(b"another change", second)
        (tmp_path / "continue").touch()
        said += (await first.communicate())[0]
        heard += (await second.communicate())[0]
    assert first.returncode == 0, said
    assert b"again" not in said
    # The workers open their lanes by the first change meanwhile: the second one begins behind that.
    assert second.returncode == 0, heard
    await served(stack, 10)


@pytest.mark.long
async def test_killed_at_each_step_with_a_worker_or_the_broker(stack: Stack, topic_name: str) -> None:
    """And repeated at once: the second command continues where the first one left the old or the new number."""
    topic = await make_topic(stack.urls()[0], topic_name)
    async with Load(topic_name, stack.urls(), seed=13, sources=_SOURCES, kinds=ALL_KINDS) as load:
        for number, step in enumerate(("prepare", "begin", "fence", "write", "commit")):
            to = (6, 2)[number % 2]
            for victim in ("gateway-0", "kafka-1"):
                await load.acknowledged(200)
                running = asyncio.create_task(change(stack, to + (victim == "kafka-1"), step))
                await asyncio.sleep(number * 0.3)
                if victim == "kafka-1":
                    await asyncio.to_thread(stack.restart, victim)
                else:
                    stack.kill(victim)
                status, said = await running
                assert status in (_KILLED, 1, 3), said
                await asyncio.to_thread(stack.wait_ready)
                assert len(await lanes_of(stack)) == 1
            status, said = await change(stack, to)
            assert status == 0, said
            await load.acknowledged(200)
            await served(stack, to)
    await assert_exact(stack, load, topic)


@pytest.mark.long
async def test_a_worker_that_was_frozen_over_it_records_nothing_by_the_old_number(
    stack: Stack, topic_name: str
) -> None:
    """While it is frozen its lanes move, and then the sources move to other lanes."""
    topic = await make_topic(stack.urls()[0], topic_name)
    async with Load(topic_name, stack.urls(), seed=14, sources=_SOURCES, kinds=ALL_KINDS) as load:
        for to, frozen in ((8, "gateway-1"), (4, "gateway-0")):
            await load.acknowledged(200)
            stack.kill(frozen, signal.SIGSTOP)
            status, said = await change(stack, to)
            assert status == 0, said
            await load.acknowledged(200)
            stack.kill(frozen, signal.SIGCONT)
            await load.acknowledged(300)
            await served(stack, to)
    await assert_exact(stack, load, topic)


async def test_without_its_fence_chunks_would_be_doubled_or_lost(stack: Stack, topic_name: str) -> None:
    """The guard is what keeps it exact: the checker sees when it is off."""
    topic = await make_topic(stack.urls()[0], topic_name)
    async with Load(topic_name, stack.urls(), seed=12, sources=_SOURCES) as load:
        await load.acknowledged(300)
        status, said = await change(stack, 5, "no-fence")
        assert status == 0, said
        assert "5 now" in said
        # Until then the workers write by what they know, for which the number has not changed.
        await served(stack, 5)
        await load.acknowledged(300)
    assert violations(load.history, await read_back(stack.cluster().bootstrap, topic)) != []
