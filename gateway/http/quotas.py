"""How much a token may write, and how much is written to a topic: bytes and chunks a second.

The rule: a bucket fills at its rate up to `BURST_S` seconds' worth. A request is taken while every bucket that it
falls under holds something, and takes what it needs from each, into debt if need be: so a request larger than the
burst passes too, and whoever comes next waits until the debt is paid. Over any time, what was taken is at most the
rate's worth, one burst and one request. What is refused is not counted.

Each worker process counts for itself: what a whole gateway takes is up to the workers' number times as much. No
I/O here; the clock is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Patterns
from logferry.gateway.metrics import THROTTLED, THROTTLED_SECONDS

BURST_S: Final = 1.0
_INSTANT_S: Final = 0.001


@dataclass(slots=True)
class Bucket:
    """Fills at ``rate`` a second. ``level`` at ``at_s``; below zero is debt."""

    rate: float
    level: float
    at_s: float

    def wait_s(self, now_s: float) -> float:
        """How long until it holds something; 0: now."""
        self.level = min(self.rate * BURST_S, self.level + (now_s - self.at_s) * self.rate)
        self.at_s = now_s
        return 0.0 if self.level > 0 else max(-self.level / self.rate, _INSTANT_S)

    def take(self, amount: float) -> None:
        self.level -= amount


@dataclass(frozen=True, slots=True)
class Meter:
    """What one token or one topic is limited to. ``scope``: ``token`` or ``topic``."""

    scope: str
    name: str
    size_bytes: Bucket | None
    chunks: Bucket | None

    def wait(self, now_s: float) -> tuple[float, str]:
        """The longer wait of the two, and what is waited for."""
        found = (0.0, "")
        for bucket, unit in ((self.size_bytes, "bytes"), (self.chunks, "chunks")):
            if bucket is not None:
                found = max(found, (bucket.wait_s(now_s), f"{bucket.rate:g} {unit}"))
        return found

    def take(self, size_bytes: int, chunks: int) -> None:
        if self.size_bytes is not None:
            self.size_bytes.take(size_bytes)
        if self.chunks is not None:
            self.chunks.take(chunks)


@dataclass(slots=True)
class Throttled:
    """What was refused in the name of one token or topic since the worker started. ``last_s``: by the clock."""

    count: int = 0
    wait_s: float = 0.0
    last_s: float = 0.0


class Quotas:
    """The meters of this process. `is_active` is false where the configuration has no quota at all."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._throttled: dict[tuple[str, str], Throttled] = {}
        self.replace(config)

    def replace(self, config: Config) -> None:
        """The quotas of this configuration from now on, with full buckets."""
        self._config = config
        self._patterns = [(Patterns([quota.topic], config.known_dcs), quota) for quota in config.quotas]
        limited = [token for token in config.tokens if token.bytes_per_s or token.chunks_per_s]
        self._tokens = {t.name: self._meter("token", t.name, t.bytes_per_s, t.chunks_per_s) for t in limited}
        self._topics: dict[str, Meter | None] = {}
        self.is_active = bool(self._patterns or self._tokens)

    def take(self, token: str | None, topic: str, size_bytes: int = 0, chunks: int = 0) -> None:
        """Counts a write to a topic that exists; of nothing, it only looks whether there is room.

        Raises Problem ``quota``, and then nothing was counted.
        """
        now_s = self._clock()
        meters = [meter for meter in (self._of_token(token), self._of_topic(topic)) if meter is not None]
        for meter in meters:
            wait_s, limit = meter.wait(now_s)
            if wait_s > 0:
                seen = self._throttled.setdefault((meter.scope, meter.name), Throttled())
                seen.count, seen.wait_s, seen.last_s = seen.count + 1, seen.wait_s + wait_s, now_s
                THROTTLED.labels(meter.scope, meter.name).inc()
                THROTTLED_SECONDS.labels(meter.scope, meter.name).inc(wait_s)
                detail = f"the {meter.scope} {meter.name} is over its quota of {limit} a second in this worker"
                raise Problem("quota", detail, retry_after_s=wait_s)
        for meter in meters:
            meter.take(size_bytes, chunks)

    def throttled(self) -> list[tuple[str, str, int, float, float]]:
        """Scope, name, how often, for how long callers were told to wait in all, and how long ago the last time was."""
        now_s = self._clock()
        found = sorted(self._throttled.items())
        return [(scope, name, seen.count, seen.wait_s, now_s - seen.last_s) for (scope, name), seen in found]

    def _of_token(self, token: str | None) -> Meter | None:
        return None if token is None else self._tokens.get(token)

    def _of_topic(self, topic: str) -> Meter | None:
        if topic not in self._topics:
            quota = next((quota for patterns, quota in self._patterns if patterns.match(topic)), None)
            meter = None if quota is None else self._meter("topic", topic, quota.bytes_per_s, quota.chunks_per_s)
            self._topics[topic] = meter
        return self._topics[topic]

    def _meter(self, scope: str, name: str, bytes_per_s: float | None, chunks_per_s: float | None) -> Meter:
        def bucket(rate: float | None) -> Bucket | None:
            return None if rate is None else Bucket(rate, rate * BURST_S, self._clock())

        return Meter(scope, name, bucket(bytes_per_s), bucket(chunks_per_s))
