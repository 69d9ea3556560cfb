"""The room of reads is taken before data is fetched, never by a read that waits, and given back however a read ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiokafka.errors import KafkaConnectionError
from logferry.gateway.api import read as read_module
from logferry.gateway.api.read import ReadApi
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.gateway.contract.names import Cursor
from logferry.gateway.errors import Problem
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.kafka.record_batch import FetchedRecords, KafkaRecord
from logferry.gateway.limits import FairShare
from logferry.gateway.reading.page import HeldBytes, ReadRequest

from tests.unit.reading.test_read_limits import CONFIG, call

MIB = 1 << 20
PATH = "/v1/topics/dc1.nginx/partitions/0/chunks"


class FakeKafka:
    """A partition of chunks of 1 KiB. What a fetch brings is held from before it begins until the test lets it go."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.asked: list[tuple[int, int]] = []  # of those under way: the most bytes, how long it may wait
        self.held = asyncio.Event()
        self.let_go = asyncio.Event()
        self.error: Exception | None = None

    async def fetch(self, _topic: str, _partition: int, offset: int, **limits: Any) -> FetchedRecords:
        stop_bytes, wait_ms = limits["stop_bytes"], limits.get("wait_ms", 0)
        is_first = offset == 0
        if not is_first or (offset >= self.chunks and wait_ms):
            self.asked.append((stop_bytes, wait_ms))
            self.held.set()
            await self.let_go.wait()
            if self.error is not None:
                raise self.error
        end = min(self.chunks, offset + max(1, min(stop_bytes // 1024, 100)))
        records = [
            KafkaRecord(at, 1, b"web1", bytes(1024), record_headers(Chunk(at + 1, at, 1, {}, b"")))
            for at in range(offset, end)
        ]
        return FetchedRecords(records, end, self.chunks)


def api_of(kafka: FakeKafka, room: int, config: Config = CONFIG) -> ReadApi:
    fake: Any = kafka
    return ReadApi(config, fake, Mock(), FairShare(room), Mock(), Mock())


async def settled(tasks: list[asyncio.Task[Any]], kafka: FakeKafka) -> None:
    """Until each read is done or in a fetch that the test holds."""
    for task in tasks:
        task.add_done_callback(lambda _: kafka.held.set())
    while len(kafka.asked) + sum(task.done() for task in tasks) < len(tasks):
        await kafka.held.wait()
        kafka.held.clear()


async def test_many_reads_at_once_fetch_no_more_than_there_is_room_for() -> None:
    kafka, room = FakeKafka(chunks=100_000), 64 * MIB
    api = api_of(kafka, room)
    reads = [asyncio.create_task(api.read(call(PATH, offset="0", max_bytes=str(8 * MIB)))) for _ in range(256)]
    await settled(reads, kafka)
    assert sum(most for most, _ in kafka.asked) <= room
    refused = [read for read in reads if read.done() and isinstance(read.exception(), Problem)]
    assert refused
    # Those for which there is room all the same get a page, if a smaller one.
    assert len(kafka.asked) > 5
    kafka.let_go.set()
    await asyncio.gather(*reads, return_exceptions=True)
    assert api.room.used == 0


async def test_a_read_that_waits_for_data_holds_no_room() -> None:
    kafka = FakeKafka(chunks=0)
    api = api_of(kafka, 2 * MIB)
    reads = [asyncio.create_task(api.read(call(PATH, offset="0", wait_ms="30000"))) for _ in range(300)]
    await settled(reads, kafka)
    assert len(kafka.asked) == 300
    assert all(wait_ms > 0 for _, wait_ms in kafka.asked)
    assert api.room.used <= 300
    kafka.chunks = 1
    kafka.let_go.set()
    answers = await asyncio.gather(*reads)
    assert all(answer.headers["X-Next-Offset"] == "1" for answer in answers)
    assert api.room.used == 0


@pytest.mark.parametrize("end", ["cancelled", "error"])
async def test_room_is_given_back_however_a_read_ends(end: str) -> None:
    kafka = FakeKafka(chunks=100_000)
    api = api_of(kafka, 64 * MIB)
    read = asyncio.create_task(api.read(call(PATH, offset="0", max_bytes=str(8 * MIB))))
    await kafka.held.wait()
    assert api.room.used > 7 * MIB
    if end == "cancelled":
        read.cancel()
    else:
        kafka.error = KafkaConnectionError()
        kafka.let_go.set()
    with pytest.raises((asyncio.CancelledError, KafkaConnectionError)):
        await read
    assert api.room.used == 0


async def test_a_page_ends_where_the_room_does() -> None:
    """What was fetched before is answered; the next read continues there."""
    kafka = FakeKafka(chunks=100_000)
    kafka.let_go.set()
    api = api_of(kafka, 2 * MIB)
    api.room.take("other", 2 * MIB - 200_000)
    answer: Any = await api.read(call(PATH, offset="0", max_bytes=str(8 * MIB)))
    assert 0 < int(answer.headers["X-Next-Offset"]) <= 200
    assert api.room.of_token("reader") == 0


# ---- the quota of what is read -----------------------------------------------------------------------------------


def limited(kafka: FakeKafka, bytes_per_s: int) -> tuple[ReadApi, Quotas]:
    """With a quota of its caller, on a clock that stands."""
    tokens = [{"name": "reader", "sha256": "0" * 64, "read": ["*"], "read_bytes_per_s": bytes_per_s}]
    raw = {"dc": "dc1", "kafka": {"bootstrap_servers": "x:1"}, "tokens": tokens}
    quotas = Quotas(Config.model_validate(raw), lambda: 1000.0)
    return replace(api_of(kafka, 64 * MIB), quota_of=quotas.reads), quotas


async def test_reads_at_once_set_aside_no_more_than_the_quota_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "written", writing := AsyncMock())
    kafka = FakeKafka(chunks=100_000)
    api, quotas = limited(kafka, 4 * MIB)
    reads = [asyncio.create_task(api.read(call(PATH, offset="1", max_bytes=str(8 * MIB)))) for _ in range(100)]
    await settled(reads, kafka)
    assert len(kafka.asked) > 10
    assert sum(most for most, _ in kafka.asked) <= 4 * MIB + (64 << 10)
    refused = [read.exception() for read in reads if read.done()]
    assert {type(error) is Problem and error.kind for error in refused} == {"quota"}
    kafka.let_go.set()
    await asyncio.gather(*reads, return_exceptions=True)
    # Only what was found is charged.
    headers = [written.args[2] for written in writing.await_args_list]
    chunks = sum(int(one["X-Next-Offset"]) - 1 for one in headers)
    assert chunks > 100
    limit = quotas._read_limit("reader")
    assert limit is not None
    assert limit.taken == chunks * 1024
    assert limit._own.level == pytest.approx(4 * MIB - limit.taken)


@pytest.mark.parametrize("end", ["cancelled", "error"])
async def test_what_was_set_aside_is_given_back_however_a_read_ends(end: str) -> None:
    kafka = FakeKafka(chunks=100_000)
    api, quotas = limited(kafka, 4 * MIB)
    read = asyncio.create_task(api.read(call(PATH, offset="1", max_bytes=str(8 * MIB))))
    await kafka.held.wait()
    limit = quotas._read_limit("reader")
    assert limit is not None
    assert limit._own.level == 3 * MIB
    if end == "cancelled":
        read.cancel()
    else:
        kafka.error = KafkaConnectionError()
        kafka.let_go.set()
    with pytest.raises((asyncio.CancelledError, KafkaConnectionError)):
        await read
    assert (limit.taken, limit._own.level) == (0, 4 * MIB)


async def test_an_event_stream_waits_for_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module._EventPages, "_read", reading := AsyncMock())
    api, quotas = limited(FakeKafka(chunks=1), MIB)
    quota = quotas.reads("reader")
    assert quota is not None
    quota.settle(0, 2 * MIB)
    held = HeldBytes(api.room, "reader", quota)
    pages = read_module._EventPages(api, call(PATH), held, ReadRequest("dc1.nginx", "dc1", 0), b"")
    waiting = asyncio.create_task(pages.read(Cursor("dc1.nginx", 0, 0)))
    monkeypatch.setattr(read_module, "_PACE_S", 0.01)
    for _ in range(10):
        await asyncio.sleep(0)
    reading.assert_not_called()
    quotas._clock = lambda: 1003.0
    async with asyncio.timeout(60):
        await waiting
    reading.assert_awaited_once()
