"""The memory of a worker of `deliver` that sends much to a receiver that takes nothing for a while."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.delivery import PushReceiver, Received, deliver, receiver, subscribe
from tests.support.gateway import Gateway, source_path

pytestmark = pytest.mark.long

MIB: Final = 1 << 20
PARTITIONS: Final = 4
CHUNKS: Final = 240
BATCH: Final = 4 * MIB
BATCHES: Final = 16 * MIB
PAGES: Final = 4 * MIB
# Of each partition: the batch that is being cut, the page that it is cut from, and what is being decoded for it.
OF_A_PARTITION: Final = BATCH + 16 * MIB


def memory_of(pid: int | None, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


async def test_a_worker_takes_no_more_memory_than_its_limits_say(
    kafka: KafkaCluster, workers: Gateway, topic_name: str, tmp_path: Path
) -> None:
    """Twelve batches of each partition are planned ahead where there is room; here there is for a few."""
    topic = await workers.make_topic(topic_name, PARTITIONS)
    for number in range(CHUNKS):
        data = random.Random(number).randbytes(MIB // 2).hex().encode()[:-1] + b"\n"
        await workers.ask("POST", source_path(topic_name, f"web{number}", "/chunks?seqno=1"), data=data)
    taken, may_answer = 0, asyncio.Event()

    async def behave(got: Received) -> int | None:
        nonlocal taken
        await may_answer.wait()
        taken += int(got.headers["X-Logferry-Chunks"])
        return 204  # its body is not kept

    limits = {"batches_bytes": BATCHES, "pages_bytes": PAGES}
    async with receiver(PushReceiver(behave)) as got:
        with deliver(kafka, tmp_path, "shared", limits=limits) as running:
            worker = running.workers[0]
            async with asyncio.timeout(60):
                while not worker.is_ready():  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.05)
            before = memory_of(worker.child.pid, "VmRSS")
            await subscribe(workers, topic_name, topic, got.url, format="text", max_bytes=BATCH)
            async with asyncio.timeout(60), aiohttp.ClientSession() as session:
                used = 0
                while used < BATCHES // 2:
                    async with session.get(f"{worker.url}/v1/status") as answer:
                        used = (await answer.json())["batches_bytes"]["used"]
                    await asyncio.sleep(0.05)
            may_answer.set()
            await got.until(lambda: taken >= CHUNKS, "all", 120)
            grown = memory_of(worker.child.pid, "VmHWM") - before
    assert taken == CHUNKS
    assert grown < BATCHES + PAGES + PARTITIONS * OF_A_PARTITION
