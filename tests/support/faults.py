"""A proxy that cuts connections: before the body, during it, and after it but before the answer.

What a test waits for around a frozen process: the other workers have its lanes, requests wait in its sockets."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

_KINDS = ("none", "before the body", "during the body", "before the answer")
_PATIENCE_S = 60
_ESTABLISHED = "01"  # in /proc/net/tcp


@dataclass
class CuttingProxy:
    """Stands before one worker. Each connection has a fate, drawn from the seed; ``cuts`` counts what was done."""

    target: str
    seed: int
    cuts: Counter[str] = field(default_factory=Counter)
    url: str = ""

    async def __aenter__(self) -> CuttingProxy:
        self._rng = random.Random(self.seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        parts = urlsplit(self.target)
        try:
            up_reader, up_writer = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError:
            writer.close()
            return
        try:
            await self._requests(reader, writer, up_reader, up_writer)
        except (OSError, asyncio.IncompleteReadError):
            self.cuts["broken by itself"] += 1
        finally:
            writer.close()
            up_writer.close()

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> None:
        """Request after request on one connection, until one meets its fate."""
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_length(head))
            fate = self._rng.choices(_KINDS, (80, 6, 7, 7))[0]
            self.cuts[fate] += 1
            up_writer.write(head)
            if fate == "before the body":
                await up_writer.drain()
                return
            up_writer.write(body[: len(body) // 2] if fate == "during the body" else body)
            await up_writer.drain()
            if fate == "during the body":
                return
            answer = await up_reader.readuntil(b"\r\n\r\n")
            if fate == "before the answer":
                return
            writer.write(answer + await up_reader.readexactly(_length(answer)))
            await writer.drain()


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":", 1)[1])
    return 0


# ---- frozen processes ------------------------------------------------------------------------------------------


async def wait_all_lanes(urls: Iterable[str]) -> None:
    """Returns when these workers, of a gateway or a mirror, have all lanes: their group has missed a frozen one."""
    await _wait_lanes(list(urls), are_all=True)


async def wait_shared_lanes(urls: Iterable[str]) -> None:
    """Returns when these workers have left lanes to others."""
    await _wait_lanes(list(urls), are_all=False)


async def _wait_lanes(urls: list[str], *, are_all: bool) -> None:
    async with asyncio.timeout(_PATIENCE_S), aiohttp.ClientSession() as session:
        while True:
            try:
                found = [await _status(session, url) for url in urls]
            except aiohttp.ClientError:
                found = []  # one of them is starting
            lanes = {lane["lane"] for status in found for lane in status["lanes"]}
            if lanes and (len(lanes) == found[0]["lanes_total"]) == are_all:
                return
            await asyncio.sleep(0.05)


async def _status(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/v1/status") as response:
        return dict(await response.json())


async def wait_unread(url: str, connections: int) -> None:
    """Returns when so many connections hold bytes that the server has not read: a frozen one finds them on waking."""
    async with asyncio.timeout(_PATIENCE_S):
        while _unread(url) < connections:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)


def _unread(url: str) -> int:
    port, count = f":{urlsplit(url).port:04X}", 0
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        count += local.endswith(port) and state == _ESTABLISHED and int(queues.partition(":")[2], 16) > 0
    return count
