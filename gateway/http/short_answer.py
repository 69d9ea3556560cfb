"""The answer to a write: 200 with a small JSON document, written to the connection in one piece.

`web.Response` keeps headers that may still change, and has bodies of any kind; that was a sixth of the worker's time
for a small request (see ops/docs/decisions/0001-hot-path-of-a-write.md).
"""

from __future__ import annotations

from typing import Final

from aiohttp import web
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11

_CLOSES: Final = "Connection: close\r\n"
_STAYS: Final = "Connection: keep-alive\r\n"  # must be said to HTTP/1.0 alone


class ShortAnswer(web.StreamResponse):
    """``body``: the encoded document; ``date``: of the header, to be set before it is written."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.body, self.date = document.encode(), ""
        self._request: web.BaseRequest | None = None
        self._stays: bool | None = None

    @property
    def keep_alive(self) -> bool | None:
        return self._stays

    def force_close(self) -> None:
        self._stays = False

    async def prepare(self, request: web.BaseRequest) -> None:
        self._request = request
        if self._stays is None:
            self._stays = request.keep_alive

    async def write_eof(self, data: bytes = b"") -> None:
        """Raises ConnectionError where the caller has gone."""
        request, self._request = self._request, None
        if request is None:
            return
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the caller closed the connection")
        connection = ("" if request.version >= HttpVersion11 else _STAYS) if self._stays else _CLOSES
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(self.body)}\r\n"
            f"Date: {self.date}\r\nServer: {SERVER_SOFTWARE}\r\n{connection}\r\n"
        )
        transport.write(head.encode() + self.body)
        # A caller that sends and does not read waits here.
        await request.writer.drain()
