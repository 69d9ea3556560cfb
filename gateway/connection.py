"""The connection to the reader of a stream: writing to it, and noticing that nobody is there any more.

A reader that closes, or is killed, is noticed at once. One whose machine or network is gone says nothing: the kernel
asks after it while the stream is idle, and otherwise counts what it sends again without an answer. Neither touches a
reader that is only slow: its machine answers. One that had long stopped taking anything before its network went is
asked after ever more rarely; it is missed when the time for a reader that takes nothing is over.
"""

from __future__ import annotations

import socket
from typing import Final

from aiohttp import web

_IDLE_S: Final = 4
_PROBE_S: Final = 1
_PROBES: Final = 4
# Sent again after 0.2, 0.4, 0.8 … s: silence for about six seconds.
_UNANSWERED: Final = 5
_INFO_BYTES: Final = 8
_RETRANSMITS, _WINDOW_PROBES = 2, 3


class HttpReader:
    """A reader at the other end of a streamed answer."""

    def __init__(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        self._request, self._response = request, response
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
        await self._response.write(data)

    def cut(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.abort()


def is_silent(tcp_info: bytes) -> bool:
    """Whether the other machine has left what was sent without an answer, by the head of the kernel's tcp_info."""
    return max(tcp_info[_RETRANSMITS], tcp_info[_WINDOW_PROBES]) >= _UNANSWERED
