"""Token buckets: a rate with a burst of one second, for the gateway's quotas and the mirror's links. Pure.

A bucket fills at its rate up to `BURST_S` seconds' worth. The clock is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

_INSTANT_S: Final = 0.001
BURST_S: Final = 1.0
Scope = Literal["token", "topic"]


@dataclass(slots=True)
class TokenBucket:
    """Fills at ``rate`` a second. ``level`` at ``at_s``; below zero is debt."""

    rate: float
    level: float
    at_s: float

    def wait_s(self, now_s: float) -> float:
        """Seconds until it is above zero; 0: now."""
        self.level = min(self.rate * BURST_S, self.level + (now_s - self.at_s) * self.rate)
        self.at_s = now_s
        return 0.0 if self.level > 0 else max(-self.level / self.rate, _INSTANT_S)

    def take(self, amount: float) -> None:
        self.level -= amount


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The limits of one token or one topic, by their units: ``bytes``, ``chunks`` or both."""

    scope: Scope
    name: str
    buckets: dict[str, TokenBucket]

    def wait(self, now_s: float) -> tuple[float, str]:
        """The longest wait, and the rate that causes it."""
        return max((bucket.wait_s(now_s), f"{bucket.rate:g} {unit}") for unit, bucket in self.buckets.items())

    def take(self, size_bytes: int, chunks: int) -> None:
        for unit, bucket in self.buckets.items():
            bucket.take(size_bytes if unit == "bytes" else chunks)
