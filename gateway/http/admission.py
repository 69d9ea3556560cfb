"""Admission: what a worker takes of requests, in bytes in flight (`Admission`) and by rate (`Quotas`).

The size of bodies and the bytes in flight of this process; anything over is rejected early:

* The bytes that were received count, not those that a Content-Length declares: idle connections take no room.
* A body that cannot fit beside those that wait for Kafka is refused by its Content-Length, before it takes memory.
* Where a body that arrives lacks room, the slowest body that still arrives is refused. Of several tokens it is one of
  the token that has most.
* Tokens share the room by the rule of `FairShare`: one of them always leaves some to others.

Quotas of bytes and chunks per second, by token and by topic: a bucket fills at its rate up to a second's worth.
A request is accepted while all its buckets are above zero, and is charged to each, into debt if necessary: so a request
larger than the burst passes too, and the next one waits until the debt is paid. Over any period the accepted amount is
at most the rate's worth, one burst and one request. Rejected requests are not charged. A session or a heartbeat counts
as one chunk of its state's size. The workers of a data centre divide each quota: see `shared_limits`.
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
from logferry.gateway.access.rights import Patterns, entry_of
from logferry.gateway.config import Config, Limits
from logferry.gateway.errors import Problem
from logferry.gateway.http.request import validated
from logferry.gateway.http.shared_limits import RateLimit, Scope, SharedLimits
from logferry.gateway.limits import FairShare
from logferry.gateway.metrics import IN_FLIGHT, THROTTLED, THROTTLED_SECONDS
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
                while part := await content.readany():
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


@dataclass(slots=True)
class Throttled:
    """The writes of one token or topic rejected since the worker started. ``last_s``: by the clock."""

    count: int = 0
    wait_s: float = 0.0
    last_s: float = 0.0


class Quotas:
    """The meters of this process. `is_active` is false where the configuration has no quota at all. ``shared``: what
    the workers tell each other of them."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.shared = SharedLimits(clock)
        self._throttled: dict[tuple[Scope, str], Throttled] = {}
        self.replace(config)

    def replace(self, config: Config) -> None:
        """The quotas of this configuration from now on, with full buckets."""
        self._config = config
        self.shared.clear()
        self._patterns = [(Patterns([quota.topic], config.known_dcs), quota) for quota in config.quotas]
        limited = [token for token in config.tokens if token.bytes_per_s or token.chunks_per_s]
        self._tokens: dict[str | None, RateLimit] = {
            t.name: self._meter("token", t.name, t.bytes_per_s, t.chunks_per_s) for t in limited
        }
        self._topics: dict[str, RateLimit | None] = {}
        self.is_active = bool(self._patterns or self._tokens)

    def take(self, token: str | None, topic: str, size_bytes: int = 0, chunks: int = 0) -> None:
        """Charges a write to an existing topic; without an amount it only checks the buckets.

        Raises Problem ``quota``, and then nothing is charged.
        """
        now_s = self._clock()
        meters = [meter for meter in (self._tokens.get(entry_of(token)), self._of_topic(topic)) if meter is not None]
        for meter in meters:
            wait_s, limit = meter.wait(now_s)
            if wait_s > 0:
                seen = self._throttled.setdefault((meter.scope, meter.name), Throttled())
                seen.count, seen.wait_s, seen.last_s = seen.count + 1, seen.wait_s + wait_s, now_s
                THROTTLED.labels(meter.scope, meter.name).inc()
                THROTTLED_SECONDS.labels(meter.scope, meter.name).inc(wait_s)
                detail = f"the {meter.scope} {meter.name} is over its quota of {limit} a second"
                raise Problem("quota", detail, retry_after_s=wait_s)
        for meter in meters:
            meter.take(size_bytes, chunks)

    def throttled(self) -> list[tuple[Scope, str, int, float, float]]:
        """Scope, name, number of rejections, the sum of their waits, and the seconds since the last one."""
        now_s = self._clock()
        found = sorted(self._throttled.items())
        return [(scope, name, seen.count, seen.wait_s, now_s - seen.last_s) for (scope, name), seen in found]

    def _of_topic(self, topic: str) -> RateLimit | None:
        if topic not in self._topics:
            quota = next((quota for patterns, quota in self._patterns if patterns.match(topic)), None)
            meter = None if quota is None else self._meter("topic", topic, quota.bytes_per_s, quota.chunks_per_s)
            self._topics[topic] = meter
        return self._topics[topic]

    def _meter(self, scope: Scope, name: str, bytes_per_s: float | None, chunks_per_s: float | None) -> RateLimit:
        rates = {"bytes": bytes_per_s, "chunks": chunks_per_s}
        given = {unit: self.shared.make(scope, name, unit, rate) for unit, rate in rates.items() if rate is not None}
        return RateLimit(scope, name, given)
