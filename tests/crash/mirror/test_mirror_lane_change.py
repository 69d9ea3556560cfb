"""The number of a mirror's lanes is changed under load, and the command is killed: the copy is the original, and the
history tells the truth and is found from each checkpoint."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.ops.stack.stack import Stack

from tests.crash.mirror.test_mirror_crash import mirrored_more, what_is_wrong
from tests.support.clients import Load
from tests.support.mirror import make_topic, read_log, true_pairs

_CHANGER = Path(__file__).parents[1] / "gateway" / "lane_changer.py"
_WITHIN_S = 300
_KILLED = -signal.SIGKILL
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2"), workers=1, mirrors=2) as stack:
        yield stack


async def change(stack: Stack, to: int, step: str | None = None) -> tuple[int, str]:
    """The exit status of the command, and what it wrote. ``step``: it is killed behind it."""
    program = ["-m", "logferry.ops.cli.main", "lanes"] if step is None else [str(_CHANGER), step]
    config = str(Path(stack.data) / "dc2" / "mirror.toml")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, "--mirror", "--config", config, "--to", str(to)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(_WITHIN_S):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def served(stack: Stack, lanes: int) -> None:
    """Until both workers know the number, and each lane serves."""
    async with asyncio.timeout(_WITHIN_S), aiohttp.ClientSession() as session:
        while True:
            serving, totals = list[int](), set[int]()
            for url in stack.urls("dc2", "mirror"):
                async with session.get(f"{url}/v1/status") as response:
                    status = await response.json()
                totals.add(status["lanes_total"])
                serving += [lane["lane"] for lane in status["lanes"] if lane["state"] == "serving"]
            if totals == {lanes} and sorted(serving) == list(range(lanes)):
                return
            await asyncio.sleep(0.1)


async def wrong_translations(stack: Stack, topic: str) -> list[str]:
    """Of some records of each partition, by the pointers of the history."""
    here, there = stack.cluster("dc2").bootstrap, stack.cluster("dc1").bootstrap
    pairs = true_pairs(await read_log(there, topic), await read_log(here, topic))
    kafka = KafkaClient({"bootstrap_servers": here}, "tests")
    await kafka.start()
    try:
        translation, found, choice = OffsetTranslation(kafka, "logferry", "dc2"), list[str](), random.Random(7)
        for number, known in pairs.items():
            for original in [min(known), *choice.sample(sorted(known), min(50, len(known)))]:
                told = await translation.to_here((topic, number), original)
                if told != known[original]:
                    found.append(f"{number}: {original} is {known[original]}, not {told}")
        return found
    finally:
        await kafka.close()


async def test_killed_before_and_after_its_commit(stack: Stack) -> None:
    topic = await make_topic(stack, "lanes", 16)
    async with Load("lanes", stack.urls("dc1"), seed=21, sources=24) as load:
        await mirrored_more(stack, topic, 200)
        status, said = await change(stack, 7, "write")
        assert status == _KILLED, said
        await mirrored_more(stack, topic, 200)
        await served(stack, 4)
        status, said = await change(stack, 7, "commit")
        assert status == _KILLED, said
        await mirrored_more(stack, topic, 200)
        await served(stack, 7)
        stack.kill("dc2/mirror-0")
        await mirrored_more(stack, topic, 200)
        status, said = await change(stack, 3)
        assert status == 0, said
        await mirrored_more(stack, topic, 200)
        await served(stack, 3)
    assert await what_is_wrong(stack, topic, load) == []
    assert await wrong_translations(stack, topic) == []


async def test_without_its_fence_records_would_be_doubled(stack: Stack) -> None:
    """The guard is what keeps it exact."""
    topic = await make_topic(stack, "unfenced", 16)
    async with Load("unfenced", stack.urls("dc1"), seed=22, sources=24):
        await mirrored_more(stack, topic, 200)
        status, said = await change(stack, 5, "no-fence")
        assert status == 0, said
        await mirrored_more(stack, topic, 200)
    assert await what_is_wrong(stack, topic) != []
