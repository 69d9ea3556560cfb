"""The memory of request bodies: what was received counts, the slowest goes first, and tokens share."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request
from logferry.gateway.config import MIB, Limits
from logferry.gateway.errors import Problem
from logferry.gateway.http import admission as admission_module
from logferry.gateway.http.admission import TOKEN, Admission

LIMITS = Limits(request_bytes=16 * MIB, process_bytes=32 * MIB)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Upload:
    """One request whose body arrives piece by piece."""

    def __init__(self, admission: Admission, token: str | None, declared: int) -> None:
        self.payload = StreamReader(Mock(_reading_paused=False), 1 << 30, loop=asyncio.get_running_loop())
        headers = {"Content-Length": str(declared)}
        self.request: web.BaseRequest = make_mocked_request("POST", "/", headers=headers, payload=self.payload)
        if token is not None:
            self.request[TOKEN] = token
        self._admission = admission
        self.answer = asyncio.create_task(self._handle())
        self.answered = asyncio.Event()

    async def _handle(self) -> int | str:
        """As a handler does that waits for Kafka once the body is there."""
        try:
            reservation = self._admission.reserve(self.request)
        except Problem as problem:
            return problem.kind
        try:
            size = len(await self._admission.body(self.request))
            await self.answered.wait()
        except Problem as problem:
            return problem.kind
        else:
            return size
        finally:
            self._admission.release(reservation)

    async def send(self, size: int, *, ends: bool = False) -> None:
        if size:
            self.payload.feed_data(bytes(size))
        if ends:
            self.payload.feed_eof()
        for _ in range(5):
            await asyncio.sleep(0)


async def uploads(admission: Admission, *wanted: tuple[str | None, int]) -> list[Upload]:
    found = [Upload(admission, token, declared) for token, declared in wanted]
    await asyncio.sleep(0)
    return found


async def test_connections_that_declare_much_and_send_nothing_take_no_room() -> None:
    admission = Admission(LIMITS)
    idle = await uploads(admission, *[(None, 16 * MIB)] * 100)
    assert admission.in_flight_bytes == 0
    (honest,) = await uploads(admission, (None, 10 * MIB))
    await honest.send(10 * MIB, ends=True)
    honest.answered.set()
    assert await honest.answer == 10 * MIB
    for upload in idle:
        upload.answer.cancel()
    await asyncio.gather(*(upload.answer for upload in idle), return_exceptions=True)
    assert admission.in_flight_bytes == 0


async def test_the_slowest_body_makes_room() -> None:
    clock = Clock()
    admission = Admission(LIMITS, clock)
    slow, fast = await uploads(admission, (None, 16 * MIB), (None, 16 * MIB))
    await slow.send(12 * MIB)
    await fast.send(15 * MIB)
    clock.now_s += 10
    (late,) = await uploads(admission, (None, 12 * MIB))
    clock.now_s += 1
    await late.send(12 * MIB, ends=True)
    assert await slow.answer == "overloaded"
    await fast.send(MIB, ends=True)
    for upload in (fast, late):
        upload.answered.set()
    assert (await fast.answer, await late.answer) == (16 * MIB, 12 * MIB)
    assert admission.in_flight_bytes == 0


async def test_the_slowest_is_refused_itself() -> None:
    clock = Clock()
    admission = Admission(LIMITS, clock)
    slow, *fast = await uploads(admission, *[(None, 16 * MIB)] * 3)
    clock.now_s += 10
    await fast[0].send(16 * MIB)
    await fast[1].send(15 * MIB)
    await slow.send(2 * MIB)
    assert await slow.answer == "overloaded"
    for upload in fast:
        upload.answer.cancel()


async def test_what_waits_for_kafka_is_not_evicted() -> None:
    admission = Admission(LIMITS)
    waiting = await uploads(admission, (None, 16 * MIB), (None, 15 * MIB))
    for upload, size in zip(waiting, (16 * MIB, 15 * MIB), strict=True):
        await upload.send(size, ends=True)
    small, large = await uploads(admission, (None, MIB), (None, MIB + 1))
    assert await large.answer == "overloaded"
    await small.send(MIB, ends=True)
    for upload in (*waiting, small):
        upload.answered.set()
    assert [await upload.answer for upload in (*waiting, small)] == [16 * MIB, 15 * MIB, MIB]


async def test_one_token_leaves_room_for_others() -> None:
    admission = Admission(LIMITS)
    greedy = await uploads(admission, *[("greedy", MIB)] * 40)
    for upload in greedy:
        await upload.send(MIB, ends=True)
    refused = [upload for upload in greedy if upload.answer.done()]
    assert {await upload.answer for upload in refused} == {"overloaded"}
    assert 20 * MIB < admission.in_flight_bytes < 27 * MIB
    (other,) = await uploads(admission, ("other", 4 * MIB))
    await other.send(4 * MIB, ends=True)
    for upload in (*greedy, other):
        upload.answered.set()
    assert await other.answer == 4 * MIB


async def test_the_only_request_of_a_token_may_take_all_that_is_free() -> None:
    admission = Admission(Limits(request_bytes=16 * MIB, process_bytes=16 * MIB))
    (alone,) = await uploads(admission, ("one", 16 * MIB))
    await alone.send(16 * MIB, ends=True)
    alone.answered.set()
    assert await alone.answer == 16 * MIB


async def test_a_full_worker_evicts_the_token_that_has_most() -> None:
    clock = Clock()
    admission = Admission(LIMITS, clock)
    greedy = await uploads(admission, *[("greedy", 16 * MIB)] * 2)
    modest, late = await uploads(admission, ("modest", 16 * MIB), ("late", 16 * MIB))
    for upload, size in ((greedy[0], 11 * MIB), (greedy[1], 9 * MIB), (modest, 5 * MIB)):
        await upload.send(size)
    await late.send(12 * MIB)
    assert await greedy[1].answer == "overloaded"
    assert not modest.answer.done()
    assert not late.answer.done()
    left: list[Any] = [greedy[0].answer, modest.answer, late.answer]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert admission.in_flight_bytes == 0


@pytest.mark.parametrize("size", [16 * MIB + 1, 1 << 40])
async def test_a_body_over_the_limit_is_refused_by_its_length(size: int) -> None:
    (upload,) = await uploads(Admission(LIMITS), (None, size))
    assert await upload.answer == "too-large"


@pytest.mark.parametrize("encoding", ["length", "chunked"])
async def test_a_body_is_put_together_once_and_one_of_tiny_chunks_takes_no_memory_for_each(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In transfer encoding the caller cuts the chunks: single bytes are put together as soon as they are there."""
    chunks = [b"%d" % (number % 10) for number in range(500)]
    read: list[bytes] = []
    part_of = admission_module._part

    async def part(request: web.BaseRequest) -> bytes:
        read.append(await part_of(request))
        return read[-1]

    monkeypatch.setattr(admission_module, "_part", part)
    payload = StreamReader(Mock(_reading_paused=False), 1 << 30, loop=asyncio.get_running_loop())
    headers = {"Content-Length": "500"} if encoding == "length" else {"Transfer-Encoding": "chunked"}
    admission = Admission(LIMITS)
    request: web.BaseRequest = make_mocked_request("POST", "/", headers=headers, payload=payload)
    admission.reserve(request)
    body = asyncio.create_task(admission.body(request))
    await asyncio.sleep(0)
    for chunk in chunks:
        if encoding == "chunked":
            payload.begin_http_chunk_receiving()
        payload.feed_data(chunk)
        if encoding == "chunked":
            payload.end_http_chunk_receiving()
    payload.feed_eof()
    assert await body == b"".join(chunks)
    if encoding == "chunked":
        assert read == [b"".join(chunks), b""]
    else:
        assert [*map(id, read[:-1])] == [*map(id, chunks)]
