"""Which fetcher asks for which partition: the busy ones and the quiet ones, where there are many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from logferry.gateway.kafka.record_requests import FetchedPartition, FetchResponse
from logferry.gateway.kafka.requests import ClusterMetadata, PartitionMetadata, TopicMetadata
from logferry.gateway.kafka.types import TopicIdPartition
from logferry.mirror import remote
from logferry.mirror.config import Limits, Remote
from logferry.mirror.copy.partition import MirroredPartition
from logferry.mirror.remote import Fetcher, MemoryBudget, RemoteCluster

from tests.unit.mirror.copy.test_batch_rewrite import encoded, record

_ID = b"i" * 16
_TOPIC = TopicMetadata("dc1.t", _ID, False, tuple(PartitionMetadata(number, 1, 0, (1,), (1,)) for number in range(3)))


class Broker:
    """One that answers what the test gives it, on each line."""

    def __init__(self) -> None:
        self.cluster_id = "there"
        self.looks = 0
        self.channels = self
        self.answers: dict[str, asyncio.Queue[FetchResponse]] = {"": asyncio.Queue(), "quiet": asyncio.Queue()}

    async def start(self) -> None: ...

    async def describe(self) -> ClusterMetadata:
        self.looks += 1
        return ClusterMetadata("there", {1: ("127.0.0.1", 1)}, {"dc1.t": _TOPIC}, {})

    async def ask(self, node: int, request: object, line: str) -> FetchResponse:
        assert node == 1
        try:
            async with asyncio.timeout(0.05):
                return await self.answers[line].get()
        except TimeoutError:
            return FetchResponse(0, 7, [])

    def has(self, line: str, number: int, offset: int) -> None:
        raw = memoryview(encoded(offset, [record(offset)]))
        found = FetchedPartition(_ID, number, 0, offset + 1, offset + 1, 0, [], raw, None)
        self.answers[line].put_nowait(FetchResponse(0, 7, [found]))


@contextmanager
def running(link: RemoteCluster) -> Iterator[None]:
    task = asyncio.create_task(link.run())
    try:
        yield
    finally:
        task.cancel()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def numbers(link: RemoteCluster, *, quiet: bool) -> set[int]:
    fetcher: Fetcher | None = link._fetchers.get((1, quiet))
    return set() if fetcher is None else {partition.number for partition in fetcher.partitions.values()}


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> RemoteCluster:
    monkeypatch.setattr(remote, "_REFRESH_S", 0.01)
    monkeypatch.setattr(remote, "_MANY", 3)
    monkeypatch.setattr(remote, "_QUIET_S", 1.0)
    broker: Any = Broker()
    there = Remote.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}})

    async def on_topics(*_: object) -> None: ...

    return RemoteCluster(there, broker, Limits(), MemoryBudget(1 << 20), frozenset(), on_topics)


def follow(link: RemoteCluster, count: int) -> list[MirroredPartition]:
    found = [MirroredPartition("dc1.t", number, "dc1", _ID, b"l" * 16, 1 << 20, None, int) for number in range(count)]
    for partition in found:
        partition.heard_at = time.monotonic()
        link.follow(partition)
    return found


async def test_a_partition_without_news_is_asked_for_with_its_like_until_it_has_some(link: RemoteCluster) -> None:
    broker: Any = link.kafka
    partitions = follow(link, 3)
    with running(link):
        await until(lambda: numbers(link, quiet=False) == {0, 1, 2})
        await until(lambda: numbers(link, quiet=True) == {0, 1, 2})
        assert numbers(link, quiet=False) == set()
        broker.has("quiet", 1, 0)
        await until(lambda: partitions[1].position == 1)
        assert numbers(link, quiet=False) == {1}
        assert numbers(link, quiet=True) == {0, 2}
        # What the older request brings comes too late, and is not taken twice.
        broker.has("quiet", 1, 0)
        broker.has("quiet", 1, 1)
        busy = link._fetchers[1, False]._session
        place = TopicIdPartition(_ID, 1)
        await until(lambda: place in busy.asked and busy.asked[place].offset == 1)
        broker.has("", 1, 1)
        await until(lambda: partitions[1].position == 2)
        await until(lambda: broker.answers["quiet"].empty())
        assert [batch.base for batch in partitions[1].waiting] == [0, 1]
        await until(lambda: numbers(link, quiet=True) == {0, 1, 2})


async def test_of_a_few_partitions_none_is_put_aside(link: RemoteCluster) -> None:
    partitions = follow(link, 2)
    with running(link):
        await until(lambda: numbers(link, quiet=False) == {0, 1})
        for partition in partitions:
            partition.heard_at -= 3600
        looked = link.kafka.looks  # type: ignore[attr-defined]
        await until(lambda: link.kafka.looks > looked + 1)  # type: ignore[attr-defined]
        assert numbers(link, quiet=False) == {0, 1}
        assert not any(partition.is_quiet for partition in partitions)


async def test_a_worker_has_the_part_of_its_partitions_of_a_limit(link: RemoteCluster) -> None:
    """So the workers of a mirror have all of it together, and none of them more."""
    there = link.remote.model_copy(update={"bytes_per_s": 900.0})
    limited = RemoteCluster(there, link.kafka, link.limits, link.budget, frozenset(), link._on_topics)
    assert limited.bucket is not None
    partitions = follow(limited, 1)
    with running(limited):
        await until(lambda: limited.topics and limited.bucket is not None and limited.bucket.rate == 300)
        partitions += follow(limited, 3)[1:]
        assert limited.bucket.rate == 900
        limited.unfollow(partitions[0])
        limited.unfollow(partitions[1])
        assert limited.bucket.rate == 600
