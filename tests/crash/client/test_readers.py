"""Readers that are killed while writers run, gateway workers too: what a reader stored, against what Kafka has.

A reader that commits after it stored its output has every chunk at least once; one that stores its positions beside
its output has every chunk exactly once, in the order of its source.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from logferry.ops.stack.processes import Child
from logferry.ops.stack.stack import Stack

from tests.crash.client import killed_reader
from tests.support.checker import Stored, read_back, violations
from tests.support.clients import Load
from tests.support.kafka import make_topic

_PATIENCE_S = 90
_PROGRAM = Path(killed_reader.__file__)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=2) as stack:
        yield stack


class Readers:
    """Two readers of one consumer with one store."""

    def __init__(self, mode: str, folder: Path, topic: str, urls: list[str]) -> None:
        self.consumer = f"{mode}-{topic}"
        self.store = folder / f"{mode}.db"
        command = [sys.executable, str(_PROGRAM), mode, str(self.store), self.consumer, topic, *urls]
        self.children = [Child(f"{mode}-{n}", command, folder / f"{mode}-{n}.log") for n in range(2)]
        # Here and not in the readers: of two that switch at once, SQLite refuses one without a wait.
        self._ask("pragma journal_mode = wal")

    def rows(self) -> list[tuple[int, int, int, str, int, bytes]]:
        """(reader, partition, offset, source, seqno, digest) in the order in which they were stored."""
        return self._ask("select reader, part, at, source, seqno, digest from output order by rowid")

    def dropped(self) -> int:
        return int(self._ask("select coalesce(sum(chunks), 0) from dropped")[0][0])

    def _ask(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self.store, timeout=30)) as store:
            store.executescript(killed_reader.SCHEMA)
            return store.execute(query).fetchall()

    async def stored(self, more: int) -> None:
        """Waits until so many more chunks are stored: the faults meet readers that are under way."""
        wanted = len(self.rows()) + more
        async with asyncio.timeout(_PATIENCE_S):
            while len(self.rows()) < wanted:
                self.check()
                await asyncio.sleep(0.05)

    async def complete(self, stored: list[Stored]) -> None:
        """Waits until everything that Kafka has was stored."""
        wanted = {(record.partition, record.offset) for record in stored}
        async with asyncio.timeout(_PATIENCE_S):
            while missing := wanted - {(partition, offset) for _, partition, offset, *_ in self.rows()}:
                self.check()
                assert len(missing) <= len(wanted)
                await asyncio.sleep(0.1)

    def check(self) -> None:
        for child in self.children:
            assert child.exit_status in (None, -9), child.log_tail()


def same(readers: Readers, stored: list[Stored]) -> None:
    """What was stored by the readers is what Kafka has, nothing else and with the same bytes."""
    have = {
        (partition, offset): (source, seqno, digest) for _, partition, offset, source, seqno, digest in readers.rows()
    }
    assert have == {(r.partition, r.offset): (r.source, r.seqno, r.digest) for r in stored}


@pytest.mark.timeout(900)
async def test_readers_and_a_worker_killed_under_load(stack: Stack, topic_name: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    topic = await make_topic(stack.urls()[0], topic_name)
    after, beside = (Readers(mode, tmp_path, topic, stack.urls()) for mode in ("after", "beside"))
    try:
        for child in after.children + beside.children:
            child.start()
        async with Load(topic_name, stack.urls(), seed=7) as load:
            for turn in range(8):
                for readers in (after, beside):
                    await readers.stored(rng.randint(50, 300))
                    victim = readers.children[turn % 2]
                    victim.send(9)
                    if turn % 4 == 3:
                        # The other one has it all for a while.
                        await readers.stored(200)
                    victim.start()
                if turn == 4:
                    stack.kill("gateway-1")
            await load.acknowledged(300)
        stored = await read_back(stack.cluster().bootstrap, topic)
        assert violations(load.history, stored) == []
        await after.complete(stored)
        await beside.complete(stored)
        same(after, stored)
        same(beside, stored)
        times = Counter((partition, offset) for _, partition, offset, *_ in beside.rows())
        assert [place for place, count in times.items() if count > 1] == []
        assert beside.dropped() > 0, "nothing came twice, so nothing was shown"
        by_source: dict[str, list[int]] = defaultdict(list)
        for _, _, _, source, seqno, _ in beside.rows():
            by_source[source].append(seqno)
        assert all(a < b for seqnos in by_source.values() for a, b in itertools.pairwise(seqnos))
        assert len({row[0] for row in after.rows()}) >= 4, "not all of the readers took part"
        await kafka_agrees(stack, after, topic)
    finally:
        for child in after.children + beside.children:
            child.stop(5)


async def kafka_agrees(stack: Stack, readers: Readers, topic: str) -> None:
    """Everything is committed, and Kafka's own tools see the positions that the gateway tells."""
    url = f"{stack.urls()[0]}/v1/consumers/{readers.consumer}/offsets"
    async with asyncio.timeout(_PATIENCE_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(url) as answer:
                told = (await answer.json())["positions"]
            if len(told) == 4 and all(position["lag_records"] == 0 for position in told):
                break
            await asyncio.sleep(0.2)
    admin = AIOKafkaAdminClient(bootstrap_servers=stack.cluster().bootstrap)
    await admin.start()
    try:
        seen = await admin.list_consumer_group_offsets(readers.consumer)
        (described,) = await admin.describe_consumer_groups([readers.consumer])
    finally:
        await admin.close()
    assert {(tp.topic, tp.partition, found.offset) for tp, found in seen.items()} == {
        (topic, position["partition"], position["offset"]) for position in told
    }
    assert described.groups[0][2] in ("Stable", "PreparingRebalance", "CompletingRebalance")


async def test_the_brokers_restart_is_survived_by_sessions(stack: Stack, topic_name: str, tmp_path: Path) -> None:
    topic = await make_topic(stack.urls()[0], topic_name)
    beside = Readers("beside", tmp_path, topic, stack.urls())
    try:
        for child in beside.children:
            child.start()
        async with Load(topic_name, stack.urls(), seed=8) as load:
            await beside.stored(200)
            await asyncio.to_thread(stack.restart, "kafka-1")
            await load.acknowledged(300)
            await beside.stored(200)
        stored = await read_back(stack.cluster().bootstrap, topic)
        assert violations(load.history, stored) == []
        await beside.complete(stored)
        same(beside, stored)
        assert len(beside.rows()) == len(stored)
    finally:
        for child in beside.children:
            child.stop(5)
