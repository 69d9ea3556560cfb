"""A relay of TCP connections on the event loop, whose link can be cut, refused, silent, slow, or lose its answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Literal

Mode = Literal["", "link refused", "link silent", "link slow", "answers lost"]
_SLOW_BYTES_PER_S: Final = 20_000
_PIECE: Final = 65_536


class Relay:
    """Accepts at ``host:port`` and carries to ``127.0.0.1:target``. Modes nest: the newest one counts until it ends."""

    def __init__(self, host: str, port: int, target: int) -> None:
        self._host, self._port, self._target = host, port, target
        self._modes: list[Mode] = []
        self._changed = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self._host, self._port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._modes.append("link refused")
        self._change()
        self.cut()

    def cut(self) -> None:
        """Ends every open connection, with a reset where data is under way."""
        for end in list(self._open):
            end.transport.abort()

    async def disturb(self, mode: Mode, seconds: float) -> None:
        """Returns when it is over. A link that is refused ends its connections first."""
        self._modes.append(mode)
        self._change()
        if mode == "link refused":
            self.cut()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._modes.remove(mode)
            self._change()

    @property
    def _mode(self) -> Mode:
        return self._modes[-1] if self._modes else ""

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "link refused":
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._open |= ends
        try:
            with suppress(OSError, asyncio.CancelledError):
                async with asyncio.TaskGroup() as both:
                    for way in ((reader, far_writer, False), (far_reader, writer, True)):
                        both.create_task(self._carry(*way, ends))
        finally:
            self._open -= ends
            for end in ends:
                end.close()

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_answer: bool, ends: set[asyncio.StreamWriter]
    ) -> None:
        with suppress(OSError):
            while data := await source.read(_PIECE):
                while self._mode == "link silent":
                    await self._changed.wait()
                if self._mode == "link slow":
                    await asyncio.sleep(len(data) / _SLOW_BYTES_PER_S)
                if is_answer and self._mode == "answers lost":
                    break  # the request was carried, its answer is not
                sink.write(data)
                await sink.drain()
        for end in ends:
            if is_answer and self._mode == "answers lost":
                end.transport.abort()
            else:
                end.close()
