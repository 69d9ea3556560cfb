"""The library under faults: gateway workers killed and connections cut while its writers write, its readers killed
while they read. What is stored, in Kafka and by the readers, is compared with the answers that the writers got.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from logferry.client.transport.connections import Reply
from logferry.client.transport.source_request import Outcome, SourceRequest
from logferry.ops.stack.processes import Child
from logferry.ops.stack.stack import Stack

from tests.crash.client import library_reader
from tests.support.checker import Stored, digest, read_back, violations
from tests.support.clients import LibraryLoad
from tests.support.faults import CuttingProxy
from tests.support.kafka import make_topic

_PATIENCE_S = 90


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=2) as stack:
        yield stack


def learn_of_proxies(patch: pytest.MonkeyPatch, proxies: list[CuttingProxy]) -> None:
    """A session's answer names the worker itself; its proxy is to be used all the same."""
    answered, urls = SourceRequest.answered, {proxy.target: proxy.url for proxy in proxies}

    def through_its_proxy(request: SourceRequest, reply: Reply) -> Outcome | None:
        found = answered(request, reply)
        return found and found._replace(url=urls.get(found.url or "", found.url))

    patch.setattr(SourceRequest, "answered", through_its_proxy)


@pytest.mark.parametrize(
    "victims", [("gateway-0",), pytest.param(("gateway-0", "gateway-1") * 3, marks=pytest.mark.long)], ids=len
)
async def test_writers_with_workers_killed_and_connections_cut(
    stack: Stack, topic_name: str, monkeypatch: pytest.MonkeyPatch, victims: tuple[str, ...]
) -> None:
    topic = await make_topic(stack.urls()[0], topic_name)
    async with AsyncExitStack() as behind:
        proxies = [
            await behind.enter_async_context(CuttingProxy(url, seed)) for seed, url in enumerate(stack.urls(), start=5)
        ]
        learn_of_proxies(monkeypatch, proxies)
        async with LibraryLoad(topic_name, [proxy.url for proxy in proxies], seed=3) as load:
            for victim in victims:
                await load.acknowledged(1500)
                stack.kill(victim)
                await load.acknowledged(1500)
                await asyncio.to_thread(stack.wait_ready)
            async with asyncio.timeout(_PATIENCE_S):
                while True:
                    if load.abandoned > 3:  # writers that were given up with chunks under way
                        break
                    await asyncio.sleep(0.1)
    for kind in ("before the body", "during the body", "before the answer"):
        assert sum(proxy.cuts[kind] for proxy in proxies) > 10, kind
    stored = await read_back(stack.cluster().bootstrap, topic)
    assert violations(load.history, stored) == []


class Program:
    """A program on the library's reader, and what it stored."""

    def __init__(self, mode: str, folder: Path, topic: str, urls: list[str]) -> None:
        self.mode, self.store = mode, folder / f"{mode}.db"
        command = [sys.executable, library_reader.__file__, mode, str(self.store), topic, *urls]
        self.child = Child(mode, command, folder / f"{mode}.log")
        self._ask("select 1")

    def rows(self) -> list[tuple[int, int, str, int, int, bytes, bytes]]:
        """(partition, offset, source, seqno, line, data, digest of the chunk) in the order of storing."""
        return self._ask("select part, at, source, seqno, line, data, digest from output order by rowid")

    def _ask(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self.store, timeout=30)) as store:
            store.executescript(library_reader.SCHEMA)
            return store.execute(query).fetchall()

    async def stored(self, more: int) -> None:
        """Waits until so many more rows are stored: the faults meet a reader that is under way."""
        wanted = len(self.rows()) + more
        async with asyncio.timeout(_PATIENCE_S):
            while len(self.rows()) < wanted:
                assert self.child.exit_status in (None, -9), self.child.log_tail()
                await asyncio.sleep(0.03)

    async def complete(self, expected: Counter[Any]) -> None:
        """Waits until there are as many rows as there have to be."""
        async with asyncio.timeout(_PATIENCE_S):
            while len(self.rows()) < expected.total():
                assert self.child.exit_status in (None, -9), self.child.log_tail()
                await asyncio.sleep(0.1)


@pytest.mark.long
async def test_readers_killed_while_workers_are_killed(stack: Stack, topic_name: str, tmp_path: Path) -> None:
    """Each program has every chunk, or every line, exactly once, and in the order of its partition."""
    topic = await make_topic(stack.urls()[0], topic_name)
    rng = random.Random(11)
    programs = [Program(mode, tmp_path, topic_name, stack.urls()) for mode in ("chunks", "lines", "consumer")]
    try:
        for program in programs:
            program.child.start()
        async with LibraryLoad(topic_name, stack.urls(), seed=4, threads=2, tasks=2) as load:
            for turn in range(4):
                for program in programs:
                    await program.stored(rng.randint(20, 200))
                    program.child.send(9)
                    program.child.start()
                if turn == 1:
                    stack.kill("gateway-1")
        stored = await read_back(stack.cluster().bootstrap, topic)
        assert violations(load.history, stored) == []
        chunks = Counter((r.partition, r.offset, r.source, r.seqno, r.digest) for r in stored)
        lines = await stored_lines(stack.cluster().bootstrap, topic, stored)
        for program in programs:
            expected = lines if program.mode == "lines" else chunks
            await program.complete(expected)
            rows = program.rows()
            found: Counter[tuple[object, ...]]
            if program.mode == "lines":
                found = Counter((part, at, line, data) for part, at, _, _, line, data, _ in rows)
            else:
                found = Counter((part, at, source, seqno, digest) for part, at, source, seqno, _, _, digest in rows)
            assert found == expected, program.mode
            by_partition: dict[int, list[tuple[int, int]]] = {}
            for part, at, _, _, line, _, _ in rows:
                by_partition.setdefault(part, []).append((at, line))
            for places in by_partition.values():
                assert all(a < b for a, b in itertools.pairwise(places)), program.mode
    finally:
        for program in programs:
            program.child.stop(5)


async def stored_lines(bootstrap: str, topic: str, stored: list[Stored]) -> Counter[tuple[int, int, int, bytes]]:
    """(partition, offset, number, line) of all that Kafka has."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    wanted = {(r.partition, r.offset): r.digest for r in stored}
    found: Counter[tuple[int, int, int, bytes]] = Counter()
    await consumer.start()
    try:
        while wanted:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    assert wanted.pop((record.partition, record.offset)) == digest(record.value)
                    for number, line in enumerate(record.value.split(b"\n")[:-1]):
                        found[record.partition, record.offset, number, line] += 1
    finally:
        await consumer.stop()
    return found
