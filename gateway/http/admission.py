"""Admission: what a worker takes of requests, in bytes in flight.

The size of bodies and the bytes in flight of this process; anything over is rejected early:

* The bytes that were received count, not those that a Content-Length declares: idle connections take no room.
* A body that cannot fit beside those that wait for Kafka is refused by its Content-Length, before it takes memory.
* Where a body that arrives lacks room, the slowest body that still arrives is refused. Of several tokens it is one of
  the token that has most.
* Tokens share the room by the rule of `FairShare`: one of them always leaves some to others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from logferry.gateway.config import Limits
from logferry.gateway.errors import Problem
from logferry.gateway.http.request import validated
from logferry.gateway.limits import FairShare
from logferry.gateway.metrics import IN_FLIGHT
from pydantic import BaseModel

# The name of the request's token; absent where no tokens are configured.
TOKEN: Final = web.RequestKey("logferry.token", str)
_LEAST_S: Final = 0.05
# Of calls that say little, and of those that list partitions.
SMALL_BODY_BYTES: Final = 4096
LISTS_BYTES: Final = 1 << 20
# The work for so many bytes takes less than a few ms, whatever they are.
_INLINE_BYTES: Final = 1 << 14
_Model = TypeVar("_Model", bound=BaseModel)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


async def computed(
    size_bytes: int, function: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
) -> _Result:
    """The result of work on so many bytes, in a thread where they are many: nothing holds the event loop."""
    if size_bytes <= _INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


@dataclass(slots=True, eq=False)
class Reservation:
    """The room of one request. ``body``: once it was read. ``arrival``: the clock of the body while it arrives."""

    token: str | None
    began_s: float
    body: bytes | None = None
    size_bytes: int = 0
    arrival: asyncio.Timeout | None = None
    is_evicted: bool = False

    def bytes_per_s(self, now_s: float) -> float:
        return self.size_bytes / max(now_s - self.began_s, _LEAST_S)


_RESERVATION: Final = web.RequestKey("logferry.reservation", Reservation)


class Admission:
    """Counts the bytes in flight of this process, and of each token."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._room = FairShare(limits.process_bytes)
        self._arriving: set[Reservation] = set()
        self._arrived_bytes = 0
        IN_FLIGHT.set_function(lambda: self.in_flight_bytes)

    @property
    def in_flight_bytes(self) -> int:
        return self._room.used

    def reserve(self, request: web.BaseRequest) -> Reservation:
        """Takes room for the request's body as it arrives, to be given back by `release` once it is answered.

        Raises Problem ``overloaded`` or ``too-large``.
        """
        limit = self._limits.request_bytes
        size = request.content_length or 0
        if size > limit:
            detail = f"the body has {size} bytes; the limit of a request is {limit}"
            raise Problem("too-large", detail, limit_bytes=limit)
        if self._arrived_bytes + size > self._limits.process_bytes:
            raise self._overloaded()
        token: str | None = None
        before: Reservation | None = None
        if len(request):  # a look-up of what is missing raises and costs a microsecond
            token, before = request.get(TOKEN), request.get(_RESERVATION)
        reservation = Reservation(token, self._clock(), None if before is None else before.body)
        if reservation.body is not None:
            self._grow(reservation, len(reservation.body))
        request[_RESERVATION] = reservation
        return reservation

    def reserve_read(self, request: web.BaseRequest) -> Reservation | None:
        """As `reserve`, for a request that waits: only a body that was read takes room."""
        before: Reservation | None = request.get(_RESERVATION)
        return None if before is None or before.body is None else self.reserve(request)

    @contextmanager
    def reserved(self, request: web.BaseRequest) -> Iterator[None]:
        """Room for the request's body until it is answered. Raises as `reserve`."""
        reservation = self.reserve(request)
        try:
            yield
        finally:
            self.release(reservation)

    def release(self, reservation: Reservation | None) -> None:
        if reservation is None:
            return
        if reservation in self._arriving:
            self._arriving.remove(reservation)
        else:
            self._arrived_bytes -= reservation.size_bytes
        self._room.give(reservation.token, reservation.size_bytes)
        reservation.size_bytes = 0

    async def read(self, request: web.BaseRequest, limit: int = SMALL_BODY_BYTES) -> bytes:
        """The whole body of at most ``limit`` bytes, for what needs no room any more once it is read.

        Raises as `reserve` and `body` do.
        """
        size = request.content_length
        if size is not None and size > limit:
            raise Problem("too-large", f"the body has {size} bytes; this call takes {limit}", limit_bytes=limit)
        reservation = self.reserve(request)
        try:
            return await self.body(request, limit)
        finally:
            self.release(reservation)

    async def document(self, request: web.BaseRequest, model: type[_Model], limit: int = SMALL_BODY_BYTES) -> _Model:
        """The JSON body as the model. Raises as `read` and `validated` do."""
        body = await self.read(request, limit)
        return await computed(len(body), validated, model, body)

    async def body(self, request: web.BaseRequest, limit: int | None = None) -> bytes:
        """The whole body, also when asked again, of a request with a reservation.

        Raises Problem when it is too large, too slow, broken off, or finds no room.
        """
        reservation = request[_RESERVATION]
        data = reservation.body
        if data is None:
            data = reservation.body = await self._read(request, limit or self._limits.request_bytes)
        if limit is not None and len(data) > limit:
            raise Problem("too-large", f"the body is over {limit} bytes", limit_bytes=limit)
        return data

    async def _read(self, request: web.BaseRequest, limit: int) -> bytes:
        content, reservation = request.content, request[_RESERVATION]
        if content.is_eof() and content.exception() is None:
            # It came with the head: no need to wait, nor for a clock that watches the wait.
            data = content.read_nowait()
            self._grow(reservation, len(data))
            return data
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s) as reservation.arrival:
                self._arriving.add(reservation)
                while part := await _part(request):
                    size += len(part)
                    if size > limit:
                        raise Problem("too-large", f"the body is over {limit} bytes", limit_bytes=limit)
                    self._grow(reservation, len(part))
                    parts.append(part)
        except TimeoutError:
            if reservation.is_evicted:
                raise self._overloaded() from None
            detail = f"the body did not arrive within {self._limits.body_timeout_s:g} s; {size} bytes arrived"
            raise Problem("timeout", detail) from None
        except HttpProcessingError as error:
            raise Problem("bad-request", f"body: {error.message}") from None
        finally:
            if reservation in self._arriving:
                self._arriving.remove(reservation)
                self._arrived_bytes += reservation.size_bytes
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _grow(self, reservation: Reservation, size: int) -> None:
        """Counts bytes that were received; evicts bodies that arrive more slowly until there is room for them.

        Raises Problem ``overloaded`` where this one is the slowest.
        """
        while reservation.is_evicted or size > self._room.room(reservation.token, reservation.size_bytes):
            slowest = None if reservation.is_evicted else self._slowest(reservation, size)
            if slowest is None or slowest is reservation:
                raise self._overloaded()
            slowest.is_evicted = True
            self.release(slowest)
            if slowest.arrival is not None:
                slowest.arrival.reschedule(asyncio.get_running_loop().time())
        reservation.size_bytes += size
        self._room.take(reservation.token, size)
        if reservation not in self._arriving:
            self._arrived_bytes += size

    def _slowest(self, reservation: Reservation, size: int) -> Reservation | None:
        """Of the bodies that arrive and take room: of the same token, or of the one that has most of a full worker."""
        arriving = [other for other in self._arriving if other.size_bytes or other is reservation]
        if not arriving:
            return None
        token = reservation.token
        if size > self._room.free:
            token = max((other.token for other in arriving), key=self._room.of_token)
        now_s = self._clock()
        own = reservation.bytes_per_s(now_s) + size / max(now_s - reservation.began_s, _LEAST_S)
        rates = {other: own if other is reservation else other.bytes_per_s(now_s) for other in arriving}
        return min((other for other in arriving if other.token == token), key=rates.__getitem__, default=None)

    def _overloaded(self) -> Problem:
        detail = f"{self.in_flight_bytes} bytes of requests wait for Kafka in this worker; try again later"
        return Problem("overloaded", detail)


async def _part(request: web.BaseRequest) -> bytes:
    """What has arrived of a body; empty: its end.

    As it came, so that it is put together only once. Not with transfer encoding: chunks of one byte would take fifty
    times their memory.
    """
    if request.content_length is None:
        return await request.content.readany()
    part, _ = await request.content.readchunk()
    return part
