"""Frames on their way to a reader: how long it is waited for, and when it counts as gone."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from logferry.gateway.reading.formats import KEEP_ALIVE, Encoding, Frame

_LOOK_S: Final = 0.5
_KEEP_ALIVE_S: Final = 10.0


class Gone(Exception):
    """The reader cannot be written to any more; the text says why."""


class Reader(Protocol):
    """The connection to a reader."""

    def is_gone(self) -> bool: ...

    async def send(self, data: bytes) -> None:
        """Returns when there is room for more. May raise ConnectionError when the reader is gone."""

    def cut(self) -> None:
        """Drops the connection and what was not sent."""


class Outlet:
    """Writes to one reader, one write at a time. Every call raises `Gone`, and the connection is cut then."""

    def __init__(self, reader: Reader, encoding: Encoding, stall_s: float) -> None:
        self._reader, self._encoding, self._stall_s = reader, encoding, stall_s
        self._wrote_at = 0.0

    async def tell(self, frames: list[Frame]) -> None:
        if frames:
            await self.write(b"".join(map(self._encoding.frame, frames)))

    async def keep_alive(self) -> None:
        """To be called now and then while there is nothing to say."""
        self._check()
        if asyncio.get_running_loop().time() - self._wrote_at >= _KEEP_ALIVE_S:
            await self.tell([KEEP_ALIVE])

    async def write(self, data: bytes) -> None:
        """Returns when the reader has taken so much that there is room for more."""
        self._check()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._stall_s
        sending = asyncio.ensure_future(self._reader.send(data))
        try:
            while not (await asyncio.wait({sending}, timeout=_LOOK_S))[0]:
                self._check()
                if loop.time() > deadline:
                    raise self._gone(f"it took nothing for {self._stall_s:g} s")
            sending.result()
        except ConnectionError as error:
            raise self._gone(str(error)) from None
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        self._wrote_at = loop.time()

    def cut(self) -> None:
        self._reader.cut()

    def _check(self) -> None:
        if self._reader.is_gone():
            raise self._gone("the connection broke off")

    def _gone(self, why: str) -> Gone:
        self._reader.cut()
        return Gone(why)
