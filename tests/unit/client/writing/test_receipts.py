"""The receipt of each chunk: where it is recorded, from the answer to the request that recorded it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from logferry.client import AsyncWriter, ChunkReceipt, Rejected, Unknown, Writer
from logferry.client.writing.send_window import SendJob

from tests.support.fake_gateway import FakeGateway, Served
from tests.support.sender import Sender, opened

PATIENCE_S = 60


def put(sender: Sender, count: int, heard: list[ChunkReceipt]) -> None:
    for _ in range(count):
        sender.window.put(b"x", None, 0, {}, heard.append)


def begun(sender: Sender, count: int) -> Iterator[SendJob]:
    for _ in range(count):
        job = sender.begin()
        assert job is not None
        yield job


def test_each_receipt_has_the_offset_whatever_the_order_of_the_answers() -> None:
    sender, heard = opened(), list[ChunkReceipt]()
    put(sender, 1, heard)
    sender.turn()
    put(sender, 3, heard)
    jobs = list(begun(sender, 3))
    outcomes = [sender.arrive(job) for job in jobs]
    for job, outcome in reversed(list(zip(jobs, outcomes))):
        sender.window.take(job, outcome, sender.now)
    assert sorted(heard) == [ChunkReceipt(seqno, "dc1.t", 0, seqno - 1) for seqno in (1, 2, 3, 4)]


def test_a_chunk_that_was_recorded_before_has_no_offset() -> None:
    sender, heard = opened(), list[ChunkReceipt]()
    sender.write(10)
    sender.drain()
    again = Sender(gateway=sender.gateway)
    again.turn()
    again.window.put(b"chunk 0", 10, 0, {}, heard.append)
    again.window.put(b"more", 11, 0, {}, heard.append)
    again.drain()
    assert heard == [ChunkReceipt(10, "dc1.t", 0, None), ChunkReceipt(11, "dc1.t", 0, 1)]


def test_a_lost_answer_leaves_the_offset_unknown() -> None:
    sender, heard = opened(), list[ChunkReceipt]()
    put(sender, 1, heard)
    sender.turn("cut after")
    assert heard == []
    sender.turn()
    assert heard == [ChunkReceipt(1, "dc1.t", 0, None)], "the second request found a duplicate"


@pytest.mark.parametrize("face", [Writer, AsyncWriter])
async def test_the_future_of_a_chunk(face: Any, gateway: FakeGateway, served: Served) -> None:
    with_plain = face is Writer

    async def called(function: Any, *args: Any) -> Any:
        return await (asyncio.to_thread(function, *args) if with_plain else function(*args))

    writer = face(served.url, "t", "s")
    found = [await called(writer.submit, b"%d" % number) for number in range(50)]
    await called(writer.flush, PATIENCE_S)
    receipts = [one.result(PATIENCE_S) if with_plain else await one for one in found]
    assert receipts == [ChunkReceipt(seqno, "dc1.t", 0, seqno - 1) for seqno in range(1, 51)]
    gateway.largest_chunk_bytes = 10
    small, large = await called(writer.submit, b"small"), await called(writer.submit, b"too large for it")
    with pytest.raises(Rejected):
        await called(writer.close, PATIENCE_S)
    assert (small.result(PATIENCE_S) if with_plain else await small).seqno == 51
    with pytest.raises(Rejected, match="too-large"):
        large.result(PATIENCE_S) if with_plain else await large


@pytest.mark.parametrize("face", [Writer, AsyncWriter])
async def test_a_writer_that_is_closed_keeps_no_promise_open(face: Any, gateway: FakeGateway, served: Served) -> None:
    writer = face(served.url, "t", "s")
    first = writer.submit(b"recorded")
    first = first if face is Writer else await first
    await (asyncio.to_thread(writer.flush, PATIENCE_S) if face is Writer else writer.flush(PATIENCE_S))
    gateway.is_away = True
    lost = writer.submit(b"lost")
    lost = lost if face is Writer else await lost
    with pytest.raises(Unknown):
        await (asyncio.to_thread(writer.close, 0.0) if face is Writer else writer.close(0.0))
    with pytest.raises(Unknown):
        lost.result(PATIENCE_S) if face is Writer else await lost
    assert (first.result(0) if face is Writer else first.result()).seqno == 1
