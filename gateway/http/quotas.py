"""Quotas: bytes and chunks per second, by token and by topic.

The rule: a bucket fills at its rate up to `BURST_S` seconds' worth. A request is accepted while all its buckets are
above zero, and is charged to each, into debt if necessary: so a request larger than the burst passes too, and the next
one waits until the debt is paid. Over any period the accepted amount is at most the rate's worth, one burst and one
request. Rejected requests are not charged. A session or a heartbeat counts as one chunk of its state's size.

Each worker process counts for itself: a gateway of n workers accepts up to n times as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Patterns
from logferry.gateway.limits import BURST_S, RateLimit, Scope, TokenBucket
from logferry.gateway.metrics import THROTTLED, THROTTLED_SECONDS


@dataclass(slots=True)
class Throttled:
    """The writes of one token or topic rejected since the worker started. ``last_s``: by the clock."""

    count: int = 0
    wait_s: float = 0.0
    last_s: float = 0.0


class Quotas:
    """The meters of this process. `is_active` is false where the configuration has no quota at all."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._throttled: dict[tuple[Scope, str], Throttled] = {}
        self.replace(config)

    def replace(self, config: Config) -> None:
        """The quotas of this configuration from now on, with full buckets."""
        self._config = config
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
        meters = [meter for meter in (self._tokens.get(token), self._of_topic(topic)) if meter is not None]
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
        now_s, rates = self._clock(), {"bytes": bytes_per_s, "chunks": chunks_per_s}
        given = {unit: TokenBucket(rate, rate * BURST_S, now_s) for unit, rate in rates.items() if rate is not None}
        return RateLimit(scope, name, given)
