"""What is let in: bodies within their limits, bytes in flight within the process's. Everything else is refused early.

The reservation is made before the body is read, by its Content-Length where there is one, so that a burst of
large bodies is refused before it takes memory.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from logferry.gateway.config import Limits
from logferry.gateway.errors import Problem
from logferry.gateway.metrics import IN_FLIGHT

_BODY: Final = "logferry.body"


class Admission:
    """Counts the bytes in flight of this process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.in_flight_bytes = 0
        IN_FLIGHT.set_function(lambda: self.in_flight_bytes)

    def reserve(self, request: web.BaseRequest) -> int:
        """Takes room for the request's body, to be given back by `release` once it is answered.

        Raises Problem ``overloaded`` or ``too-large``.
        """
        limit = self._limits.request_bytes
        size = request.content_length
        if size is None:
            size = limit if request.body_exists else 0
        if size > limit:
            raise Problem("too-large", f"the body has {size} bytes, a request may have {limit}", limit_bytes=limit)
        if self.in_flight_bytes + size > self._limits.process_bytes:
            raise Problem("overloaded", f"{self.in_flight_bytes} bytes of requests wait for Kafka in this worker")
        self.in_flight_bytes += size
        return size

    def reserve_read(self, request: web.BaseRequest) -> int:
        """As `reserve`, for a request that waits: only a body that was read takes room."""
        return self.reserve(request) if _BODY in request else 0

    def release(self, size: int) -> None:
        self.in_flight_bytes -= size

    async def read(self, request: web.BaseRequest) -> bytes:
        """The whole body, for what needs no room any more once it is read. Raises as `reserve` and `body` do."""
        reserved = self.reserve(request)
        try:
            return await self.body(request)
        finally:
            self.release(reserved)

    async def body(self, request: web.BaseRequest) -> bytes:
        """The whole body, also when asked again. Raises Problem when it is too large, too slow or broken off."""
        data: bytes | None = request.get(_BODY)
        if data is None:
            data = request[_BODY] = await self._read(request)
        return data

    async def _read(self, request: web.BaseRequest) -> bytes:
        limit = self._limits.request_bytes
        content = request.content
        if content.is_eof() and content.exception() is None:
            # It came with the head: no need to wait, nor for a clock that watches the wait.
            return content.read_nowait()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while part := await content.readany():
                    size += len(part)
                    if size > limit:
                        raise Problem("too-large", f"the body is over {limit} bytes", limit_bytes=limit)
                    parts.append(part)
        except TimeoutError:
            detail = f"the body did not arrive within {self._limits.body_timeout_s:g} s; {size} bytes came"
            raise Problem("timeout", detail) from None
        except HttpProcessingError as error:
            raise Problem("bad-request", f"body: {error.message}") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)
