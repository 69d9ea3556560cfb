"""Writes frames to a reader with a stall timeout, and notices when the reader is gone.

A reader that closes, or is killed, is noticed at once. One whose machine or network is gone sends nothing: the kernel
probes it while the stream is idle, and otherwise counts retransmissions without an answer. Neither affects a reader
that is only slow: its machine answers. One that stopped reading long before its network failed is probed ever more
rarely; the stall timeout ends it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from aiohttp import web
from logferry.gateway.reading.formats import KEEP_ALIVE, Encoding, Frame

_IDLE_S: Final = 4
_PROBE_S: Final = 1
_PROBES: Final = 4
# Sent again after 0.2, 0.4, 0.8 … s: silence for about six seconds.
_UNANSWERED: Final = 5
_INFO_BYTES: Final = 8
# Written at once; the copy of several MiB takes many ms.
_PIECE_BYTES: Final = 1 << 17
_RETRANSMITS, _WINDOW_PROBES = 2, 3
_LOOK_S: Final = 0.5
_KEEP_ALIVE_S: Final = 10.0


class ReaderGone(Exception):
    """The reader cannot be written to any more; the text says why."""


def is_silent(tcp_info: bytes) -> bool:
    """Whether the other machine has stopped answering, by the head of the kernel's tcp_info."""
    return max(tcp_info[_RETRANSMITS], tcp_info[_WINDOW_PROBES]) >= _UNANSWERED


class FrameStream:
    """Writes frames to the reader of a streamed HTTP response, one write at a time.

    `send_frames`, `keep_alive` and `write` may raise `ReaderGone`; the connection is cut then.
    """

    def __init__(
        self, request: web.BaseRequest, response: web.StreamResponse, encoding: Encoding, stall_s: float
    ) -> None:
        self.encoding, self._stall_s = encoding, stall_s
        self._request, self._response = request, response
        self._wrote_at = 0.0
        transport = request.transport
        self._socket: socket.socket | None = None if transport is None else transport.get_extra_info("socket")
        if self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)

    def is_gone(self) -> bool:
        transport = self._request.transport
        if transport is None or transport.is_closing() or self._socket is None:
            return True
        return is_silent(self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES))

    async def send(self, data: bytes) -> None:
        """Returns when there is room for more. May raise ConnectionError when the reader is gone."""
        for at in range(0, len(data), _PIECE_BYTES):
            await self._response.write(memoryview(data)[at : at + _PIECE_BYTES])

    def cut(self) -> None:
        """Drops the connection and what was not sent."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()

    async def send_frames(self, frames: list[Frame]) -> None:
        if frames:
            await self.write(b"".join(map(self.encoding.frame, frames)))

    async def keep_alive(self) -> None:
        """Sends a ``keep_alive`` frame after `_KEEP_ALIVE_S` of silence; to be called regularly."""
        self._check()
        if asyncio.get_running_loop().time() - self._wrote_at >= _KEEP_ALIVE_S:
            await self.send_frames([KEEP_ALIVE])

    async def write(self, data: bytes) -> None:
        """Returns when there is room for another write."""
        self._check()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._stall_s
        sending = asyncio.ensure_future(self.send(data))
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

    def _check(self) -> None:
        if self.is_gone():
            raise self._gone("the connection broke off")

    def _gone(self, why: str) -> ReaderGone:
        self.cut()
        return ReaderGone(why)
