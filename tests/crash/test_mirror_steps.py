"""The mirror killed between every two steps of a transaction, and the proof that the comparison would notice."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from logferry.ops.children import Child
from logferry.ops.gateways import Worker, configuration
from logferry.ops.ports import free_block
from logferry.ops.stack import Stack

from tests.checker import read_back, violations
from tests.crash.broken_mirror import STEPS
from tests.load import Load
from tests.mirrored import differences, differences_in_the_end, pairs_by_history, read_log, true_pairs

_BROKEN_MIRROR = Path(__file__).with_name("broken_mirror.py")
_PARTITIONS = 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2")) as stack:
        yield stack


class Mirror:
    """Workers of a mirror from dc1 to dc2, started one by one, whole or broken."""

    def __init__(self, stack: Stack, folder: Path, prefix: str, workers: int = 1) -> None:
        self._folder, self._port = folder, free_block(workers)
        self.pairs = f"{prefix}.mirror.dc2.pairs"
        self._file = folder / "mirror.toml"
        self._file.write_text(
            configuration(
                {
                    "dc": "dc2",
                    "prefix": prefix,
                    "listen": f"127.0.0.1:{self._port}",
                    "workers": workers,
                    "accept_weak_kafka": ["replication", "min-isr"],
                    "remote": [
                        {
                            "dc": "dc1",
                            "topics": [f"{prefix}*"],
                            "kafka": {"bootstrap_servers": stack.cluster("dc1").bootstrap},
                        }
                    ],
                    "kafka": {"bootstrap_servers": stack.cluster("dc2").bootstrap},
                }
            )
        )

    def start(self, broken: str | None = None, number: int = 0) -> Worker:
        log = self._folder / f"mirror-{number}.log"
        worker = Worker(f"mirror-{number}", self._file, number, self._port + number, log, "logferry.mirror")
        if broken is not None:
            command = [sys.executable, str(_BROKEN_MIRROR), broken, "--config", str(self._file)]
            worker.child = Child(f"{broken}-{number}", [*command, "--worker", str(number)], log)
        worker.child.start()
        return worker


async def make_topic(stack: Stack, name: str) -> str:
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{stack.urls('dc1')[0]}/v1/topics/{name}", json={"partitions": _PARTITIONS}) as answer:
            assert answer.status == 201, await answer.text()
    return f"dc1.{name}"


async def test_killed_between_every_two_steps(stack: Stack, tmp_path: Path) -> None:
    topic = await make_topic(stack, "steps")
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    mirror = Mirror(stack, tmp_path, "steps")
    async with Load("steps", stack.urls("dc1"), seed=21, sources=32) as load:
        for step in STEPS:
            dying = mirror.start(step)
            assert await asyncio.to_thread(dying.child.ends_by_itself, 60), f"it did not die when it had {step}"
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
async def test_without_the_fence_a_frozen_worker_does_damage(stack: Stack, tmp_path: Path) -> None:
    """A worker is frozen in the middle of its transactions; unfenced, it commits them after another went on."""
    topic = await make_topic(stack, "unfenced")
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    mirror = Mirror(stack, tmp_path, "unfenced", workers=2)
    workers = [mirror.start("no-fence", number) for number in range(2)]
    found: list[str] = []
    try:
        async with Load("unfenced", stack.urls("dc1"), seed=22, sources=32) as load:
            for _ in range(8):
                await load.acknowledged(400)
                workers[0].child.send(signal.SIGSTOP)
                await asyncio.sleep(7)  # past its session: the group must miss it, which nobody can be asked for
                await load.acknowledged(400)
                workers[0].child.send(signal.SIGCONT)
                await load.acknowledged(400)
                original, copy = await read_log(there, topic), await read_log(here, topic)
                # The copy may be behind, but it must be a beginning of the original.
                so_far = {number: records[: len(copy[number])] for number, records in original.items()}
                found = differences(so_far, copy)
                if found:
                    break
    finally:
        for worker in workers:
            worker.child.send(signal.SIGCONT)
            worker.child.stop(10)
    assert found, "a mirror without its fence did no damage: the comparison would not notice"
