"""A proxy that cuts connections: before the body, during it, and after it but before the answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_KINDS = ("none", "before the body", "during the body", "before the answer")


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
