"""Readers and writers in a process that was forked from their own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from logferry.client import AsyncReader, AsyncWriter, Closed, Reader, Writer

from tests.support.fake_gateway import FakeGateway, Served


def raises_closed(call: Callable[[], object]) -> bool:
    """In a child of this process. Nothing may be waited for there."""
    end, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
        except Closed as error:
            os.write(pipe, b"told" if "forked" in str(error) else b"another reason")
        finally:
            os._exit(0)
    os.close(pipe)
    with os.fdopen(end, "rb") as told:
        found = told.read()
    os.waitpid(child, 0)
    return found == b"told"


def test_a_forked_process_cannot_use_it() -> None:
    reader = Reader("http://127.0.0.1:9", "dc1.t", max_chunks=0)
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: reader.open(0.1),
        "read": lambda: reader.read(0.1),
        "lines": lambda: next(reader.lines(), None),
        "position": lambda: reader.position,
        "cursors": lambda: reader.cursors(0.1),
        "translate": lambda: reader.translate("dc1.t", 0, 1, "dc1", "dc2", 0.1),
        "is_over": lambda: reader.is_over,
        "commit": lambda: reader.commit(0.1),
    }
    assert [name for name, call in calls.items() if not raises_closed(call)] == []
    assert not raises_closed(reader.close), "it closes nothing of the parent, and says nothing"
    reader.close()


def test_a_forked_process_cannot_enter_a_writer_that_its_parent_uses() -> None:
    writer = Writer("http://127.0.0.1:9", "t", "s")

    def enter() -> None:
        signal.alarm(30)
        with writer:
            pass

    with writer._lock:  # as one of its threads may
        assert raises_closed(enter)
    writer.close()


async def gather(reader: AsyncReader) -> list[object]:
    return [line async for line in reader.lines()]


async def entered(face: Any) -> None:
    async with face:
        pass


async def test_a_forked_process_cannot_use_an_asyncio_reader() -> None:
    reader = AsyncReader("http://127.0.0.1:9", "dc1.t", max_chunks=0)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "open": lambda: reader.open(0.1),
        "with": lambda: entered(reader),
        "read": lambda: reader.read(0.1),
        "lines": lambda: gather(reader),
        "cursors": lambda: reader.cursors(0.1),
        "translate": lambda: reader.translate("dc1.t", 0, 1, "dc1", "dc2", 0.1),
        "commit": lambda: reader.commit(0.1),
    }
    at_once: dict[str, Callable[[], object]] = {
        "position": lambda: reader.position,
        "is_over": lambda: reader.is_over,
    }
    assert [name for name, call in calls.items() if not raises_closed(in_a_loop(call))] == []
    assert [name for name, call in at_once.items() if not raises_closed(call)] == []
    assert not raises_closed(lambda: asyncio.run(reader.close()))
    assert await reader.read(0.1) is None, "in its own process it works"
    await reader.close()


def in_a_loop(call: Callable[[], Awaitable[Any]]) -> Callable[[], None]:
    """Without the check some calls would wait without end."""

    async def limited() -> None:
        await asyncio.wait_for(call(), 30.0)

    return lambda: asyncio.run(limited())


async def test_a_forked_process_cannot_use_an_asyncio_writer() -> None:
    gateway = FakeGateway()
    gateway.prev_always = False
    with Served(gateway) as served:
        async with AsyncWriter(served.url, "t", "s") as writer:
            await writer.write(b"parent\n")
            await writer.flush()
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "open": lambda: writer.open(0.1),
                "with": lambda: entered(writer),
                "write": lambda: writer.write(b"child\n", timeout_s=0.1),
                "flush": lambda: writer.flush(0.1),
                "close": lambda: writer.close(0.1),
            }
            assert [name for name, call in calls.items() if not raises_closed(in_a_loop(call))] == []
            assert raises_closed(lambda: writer.recorded_seqno)
            await writer.write(b"parent again\n")
    assert gateway.sources["s"].content() == b"parent\nparent again\n"


async def test_a_forked_process_does_not_close_the_connections_of_its_parent() -> None:
    """Its event loop shares the parent's epoll instance: what it unregisters there, the parent never hears again."""
    gateway = FakeGateway()
    gateway.prev_always = False
    with Served(gateway) as served:
        async with AsyncWriter(served.url, "t", "s") as writer:
            await writer.write(b"parent\n")
            await writer.flush()
            assert raises_closed(in_a_loop(lambda: writer.close(0.1)))
            assert raises_closed(in_a_loop(lambda: entered(writer)))
            for number in range(5):
                await writer.write(b"%d" % number)
                await writer.flush(30.0)
    assert gateway.sources["s"].content() == b"parent\n01234"
