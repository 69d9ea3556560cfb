"""Quotas of bytes and chunks per second, by token and by topic: a bucket fills at its rate up to a second's worth.
A request is accepted while all its buckets are above zero, and is charged to each, into debt if necessary: so a request
larger than the burst passes too, and the next one waits until the debt is paid. Over any period the accepted amount is
at most the rate's worth, one burst and one request. Rejected requests are not charged. A session or a heartbeat counts
as one chunk of its state's size.

A token also has quotas of requests, counted in the worker that its caller reached, of bytes read, and of connections: a
connection counts for the token of its latest request, until it is closed. A read takes what is left at most, and is
charged what it found; a stream waits until there is some. The workers of a data centre divide each quota: see
`shared_limits`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from logferry.gateway.access.rights import Patterns, entry_of
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.shared_limits import RateLimit, Scope, SharedLimits
from logferry.gateway.http.shares import SharedCount, SharedLimit
from logferry.gateway.metrics import THROTTLED, THROTTLED_SECONDS

# After which a caller with too many connections may try it again.
_CLOSED_S: Final = 1.0
# Of what is left of its quota, one read takes such a part at most, so that others at the same time find some.
_READ_SHARE: Final = 4


@dataclass(slots=True)
class Throttled:
    """The writes of one token or topic rejected since the worker started. ``last_s``: by the clock."""

    count: int = 0
    wait_s: float = 0.0
    last_s: float = 0.0


class Connection(Protocol):
    """A connection of a caller. ``counted``: for which token. ``transport`` None: it is closed. ``on_lost``: is called
    once when that happens."""

    counted: SharedCount | None
    transport: asyncio.Transport | None
    on_lost: Callable[[], None] | None


class Quotas:
    """The meters of this process. `is_active` is false where the configuration has no quota at all. ``shared``: what
    the workers tell each other of them."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.shared = SharedLimits(clock, config.workers)
        self._throttled: dict[tuple[Scope, str], Throttled] = {}
        self.replace(config)

    def replace(self, config: Config) -> None:
        """The quotas of this configuration from now on, with full buckets. Open connections stay counted."""
        self._config = config
        self._patterns = [(Patterns([quota.topic], config.known_dcs), quota) for quota in config.quotas]
        self._limited = {token.name: token for token in config.tokens if token.has_quota}
        self._connections = {name: token.connections for name, token in self._limited.items() if token.connections}
        self.shared.clear(self._connections)
        # Made when they are used first: there may be many tokens and topics.
        self._tokens: dict[str, RateLimit] = {}
        self._topics: dict[str, RateLimit | None] = {}
        self._of_requests: dict[str, SharedLimit] = {}
        self._of_reads: dict[str, SharedLimit] = {}
        self.is_active = bool(self._patterns or self._limited)

    def take(self, token: str | None, topic: str, size_bytes: int = 0, chunks: int = 0) -> None:
        """Charges a write to an existing topic; without an amount it only checks the buckets.

        Raises Problem ``quota``, and then nothing is charged.
        """
        now_s = self._clock()
        meters = [meter for meter in (self._of_token(token), self._of_topic(topic)) if meter is not None]
        for meter in meters:
            wait_s, limit = meter.wait(now_s)
            if wait_s > 0:
                raise self._refused(meter.scope, meter.name, limit, wait_s)
        for meter in meters:
            meter.take(size_bytes, chunks)

    def take_request(self, token: str, connection: Connection | None) -> None:
        """Charges a request as its caller sent it to this worker, and counts the connection on which it came.

        Raises Problem ``quota``: nothing is charged then, and a connection too many is closed after the answer.
        """
        name = entry_of(token) or token
        if connection is not None:
            self._count(name, connection)
        found = self._limited.get(name)
        if found is None or found.requests_per_s is None:
            return
        limit = self._of_requests.get(name)
        if limit is None:
            limit = self._of_requests[name] = self.shared.make("token", name, "requests", found.requests_per_s)
        wait_s = limit.wait_s(self._clock())
        if wait_s > 0:
            raise self._refused("token", name, f"{limit.limit:g} requests", wait_s)
        limit.take(1)

    def _count(self, name: str, connection: Connection) -> None:
        counted = connection.counted
        if connection.transport is None:
            # Its end is not told again.
            return
        if counted is not None and counted.key[1] == name and not counted.is_too_many():
            return
        limit = self._connections.get(name)
        count = self.shared.count(name, limit)
        if count is counted or not count.enter(self._clock()):
            self._lost(connection)
            self.shared.drop_unused(count)
            problem = self._refused("token", name, f"{limit} connections", _CLOSED_S, is_rate=False)
            problem.ends_connection = True
            raise problem
        self._lost(connection)
        connection.counted, connection.on_lost = count, lambda: self._lost(connection)

    def _lost(self, connection: Connection) -> None:
        counted, connection.counted = connection.counted, None
        if counted is not None:
            counted.open -= 1
            self.shared.drop_unused(counted)

    def reads(self, token: str | None) -> ReadQuota | None:
        """The quota of what a caller reads; None: it has none."""
        name = entry_of(token)
        found = None if name is None else self._limited.get(name)
        return None if found is None or found.read_bytes_per_s is None else ReadQuota(self, found.name)

    def _read_limit(self, name: str) -> SharedLimit | None:
        """That of the present configuration; None: there is none any more."""
        limit = self._of_reads.get(name)
        if limit is None and (found := self._limited.get(name)) is not None and found.read_bytes_per_s is not None:
            limit = self._of_reads[name] = self.shared.make("token", name, "read bytes", found.read_bytes_per_s)
        return limit

    def _refused(self, scope: Scope, name: str, limit: str, wait_s: float, *, is_rate: bool = True) -> Problem:
        seen = self._throttled.setdefault((scope, name), Throttled())
        seen.count, seen.wait_s, seen.last_s = seen.count + 1, seen.wait_s + wait_s, self._clock()
        THROTTLED.labels(scope, name).inc()
        THROTTLED_SECONDS.labels(scope, name).inc(wait_s)
        detail = f"the {scope} {name} is over its quota of {limit}{' a second' * is_rate}"
        return Problem("quota", detail, retry_after_s=wait_s)

    def warnings(self) -> list[str]:
        return self.shared.warnings() if self.is_active else []

    def throttled(self) -> list[tuple[Scope, str, int, float, float]]:
        """Scope, name, number of rejections, the sum of their waits, and the seconds since the last one."""
        now_s = self._clock()
        found = sorted(self._throttled.items())
        return [(scope, name, seen.count, seen.wait_s, now_s - seen.last_s) for (scope, name), seen in found]

    def _of_token(self, token: str | None) -> RateLimit | None:
        name = entry_of(token)
        if name is None or (found := self._limited.get(name)) is None:
            return None
        if name not in self._tokens:
            self._tokens[name] = self._meter("token", name, found.bytes_per_s, found.chunks_per_s)
        meter = self._tokens[name]
        return meter if meter.limits else None

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


@dataclass(frozen=True, slots=True)
class ReadQuota:
    """Implements `limits.ReadLimit` for one token, with the quotas of the present configuration."""

    quotas: Quotas
    name: str

    def wait_s(self) -> float:
        limit = self.quotas._read_limit(self.name)
        return 0.0 if limit is None else limit.wait_s(self.quotas._clock())

    def hold(self, wanted: int, least: int) -> int:
        limit = self.quotas._read_limit(self.name)
        if limit is None:
            return wanted
        wait_s = limit.wait_s(self.quotas._clock())
        if wait_s > 0:
            raise self.quotas._refused("token", self.name, f"{limit.limit:g} bytes read", wait_s)
        held = min(wanted, max(least, int(limit.room()) // _READ_SHARE))
        limit.hold(held)
        return held

    def settle(self, held: int, size_bytes: int) -> None:
        limit = self.quotas._read_limit(self.name)
        if limit is not None:
            limit.hold(-held)
            limit.take(size_bytes)
