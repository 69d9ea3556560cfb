"""Limits of rates that all workers of a data centre keep together. Pure.

Once in `INTERVAL_S` each worker publishes a `QuotaReport`: of each limit that it used lately, how much it took since
its start, and the rate that it wants. From those of the others it decides its **share** of each limit:

* Whoever wants less than an equal part gets that. What is left goes to the others in equal parts (max-min fairness).
* A share is never below limit/N, with N workers: so a caller that comes is served at once.
* A worker that is over its share wants twice of it next. So one that is alone has the whole limit after log2(N) + 1
  intervals.
* For a worker that was not heard for `SILENT_S`, limit/N is set aside. One that hears nobody has limit/N itself.

A second bucket, of the whole limit, is charged with what all workers took, as far as it was heard. So no pattern of
demand takes more than the limit in the long run, whatever the shares are. The sums are those since a worker's start: a
report that is lost is made up by the next.

The steady sum is the limit. Above it the workers can take, once for each change of demand: what a share exceeds its due
until the next reports arrive. Shares together are at most twice the limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from logferry.gateway.limits import BURST_S, TokenBucket

INTERVAL_S: Final = 1.0
SILENT_S: Final = 3.5
# After its last use a limit is no longer published.
_IDLE_S: Final = 5.0
# For so long after it was exhausted, a limit counts as one that its callers want more of: they wait before they retry.
_SHORT_S: Final = 3.0
_HEADROOM: Final = 1.05
_SMOOTHING: Final = 0.5
_DEBT_S: Final = 2.0
_MOST: Final = 10_000

Scope = Literal["token", "topic"]
# The scope, the name, and the unit: bytes or chunks.
LimitKey = tuple[str, str, str]


class LimitUsage(NamedTuple):
    """Of one limit in one worker. ``taken``: since its start; ``wanted``: a second."""

    taken: float
    wanted: float


@dataclass(frozen=True, slots=True)
class QuotaReport:
    """What one worker publishes. `decode` raises ValueError."""

    usage: dict[LimitKey, LimitUsage]

    def encode(self) -> bytes:
        rows = [[*key, round(usage.taken, 3), round(usage.wanted, 3)] for key, usage in self.usage.items()]
        return json.dumps(rows, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> QuotaReport:
        found: dict[LimitKey, LimitUsage] = {}
        rows: Any = json.loads(data)
        try:
            for scope, name, unit, taken, wanted in rows:
                found[str(scope), str(name), str(unit)] = LimitUsage(float(taken), float(wanted))
        except TypeError as error:
            raise ValueError(f"no report of usage: {error}") from None
        return cls(found)


def fair_part(room: float, own: float, others: Iterable[float]) -> float:
    """What ``own`` gets by max-min fairness, and an equal part of what nobody wants."""
    wanted = sorted((own, *others))
    left, number = room, len(wanted)
    for index, want in enumerate(wanted):
        level = left / (number - index)
        if want > level:
            return min(own, level)
        left -= want
    return own + left / number


class SharedLimit:
    """One limit as one worker keeps it. ``share``: the rate of its own, at most ``limit``."""

    __slots__ = ("_all", "_counted", "_own", "_rate", "_short_s", "_used_s", "_wanted", "limit", "taken")

    def __init__(self, limit: float, share: float, taken: float, now_s: float) -> None:
        self.limit, self.taken = limit, taken
        self._own = TokenBucket(share, share * BURST_S, now_s)
        self._all = TokenBucket(limit, limit * BURST_S, now_s, _DEBT_S)
        self._counted, self._rate, self._wanted = taken, 0.0, 0.0
        self._used_s = self._short_s = float("-inf")

    @property
    def share(self) -> float:
        return self._own.rate

    def wait_s(self, now_s: float) -> float:
        """Seconds until it may be used; 0: now."""
        self._used_s = now_s
        wait_s = max(self._own.wait_s(now_s), self._all.wait_s(now_s))
        if wait_s > 0:
            self._short_s = now_s
        return wait_s

    def take(self, amount: float) -> None:
        self.taken += amount
        self._own.take(amount)
        self._all.take(amount)

    def take_elsewhere(self, amount: float, now_s: float) -> None:
        """Another worker has taken it. What comes at once after a silence does not stop this worker for long."""
        self._all.wait_s(now_s)
        self._all.level = max(self._all.level - amount, min(self._all.level, -_DEBT_S * self.limit))

    def is_idle(self, now_s: float) -> bool:
        return now_s - self._used_s > _IDLE_S

    def usage(self, now_s: float) -> LimitUsage:
        """For the report; called once in each interval."""
        lately, self._counted = self.taken - self._counted, self.taken
        self._rate += _SMOOTHING * (lately / INTERVAL_S - self._rate)
        is_short = now_s - self._short_s <= _SHORT_S
        wanted = 2 * self.share if is_short else _HEADROOM * self._rate
        return LimitUsage(self.taken, min(wanted, self.limit))

    def divide(self, workers: int, silent: int, wanted: float, others: list[float], now_s: float) -> None:
        """Decides the share. ``wanted``: as published now; ``others``: of the workers that were heard."""
        least = self.limit / workers
        # What was published before: the others know of that.
        own, self._wanted = min(wanted, self._wanted), wanted
        part = fair_part(self.limit - silent * least, own, others)
        self.set_share(least if silent == workers - 1 else max(least, part), now_s)

    def set_share(self, share: float, now_s: float) -> None:
        if share != self._own.rate:
            self._own.wait_s(now_s)
            self._own.rate = share


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The limits of one token or one topic, by their units: ``bytes``, ``chunks`` or both."""

    scope: Scope
    name: str
    limits: dict[str, SharedLimit]

    def wait(self, now_s: float) -> tuple[float, str]:
        """The longest wait, and the rate that causes it."""
        return max((limit.wait_s(now_s), f"{limit.limit:g} {unit}") for unit, limit in self.limits.items())

    def take(self, size_bytes: int, chunks: int) -> None:
        for unit, limit in self.limits.items():
            limit.take(size_bytes if unit == "bytes" else chunks)


@dataclass(slots=True)
class _Worker:
    """What was heard of another worker."""

    usage: dict[LimitKey, LimitUsage] = field(default_factory=dict)
    heard_s: float = float("-inf")


class SharedLimits:
    """All limits of this worker, and the reports of the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limits: dict[LimitKey, SharedLimit] = {}
        self._workers: dict[str, _Worker] = {}
        self._others: frozenset[str] = frozenset()
        # Sums never fall, also with other quotas: the others would miss what comes after.
        self._sums: dict[LimitKey, float] = {}

    @property
    def number_of_workers(self) -> int:
        return 1 + len(self._others)

    def make(self, scope: Scope, name: str, unit: str, limit: float) -> SharedLimit:
        """A limit with full buckets, instead of one of the same key."""
        key = (scope, name, unit)
        before = self._limits.get(key)
        taken = 0.0 if before is None else before.taken
        made = SharedLimit(limit, limit / self.number_of_workers, self._sums.pop(key, taken), self._clock())
        self._limits[key] = made
        return made

    def clear(self) -> None:
        """Other quotas are configured."""
        self._sums |= {key: limit.taken for key, limit in self._limits.items() if limit.taken}
        self._limits = {}

    def hear(self, worker: str, report: QuotaReport) -> None:
        """Takes a report over; the same one again, or an older one, does no harm."""
        now_s = self._clock()
        known = self._workers.setdefault(worker, _Worker())
        known.heard_s = now_s
        for key, usage in report.usage.items():
            limit, before = self._limits.get(key), known.usage.get(key)
            # Less than before: the worker was restarted.
            if limit is not None and before is not None and usage.taken > before.taken:
                limit.take_elsewhere(usage.taken - before.taken, now_s)
        # The sums of what it does not publish at the moment stay known.
        known.usage = {key: LimitUsage(usage.taken, 0.0) for key, usage in known.usage.items()} | report.usage

    def report(self, others: Collection[str]) -> QuotaReport:
        """Decides all shares, with these other workers; the result is to be published. Once in each interval."""
        now_s = self._clock()
        is_changed, self._others = self._others != set(others), frozenset(others)
        self._workers = {name: worker for name, worker in self._workers.items() if name in self._others}
        heard = [worker for worker in self._workers.values() if now_s - worker.heard_s <= SILENT_S]
        workers, silent = self.number_of_workers, len(self._others) - len(heard)
        usage: dict[LimitKey, LimitUsage] = {}
        for key, limit in self._limits.items():
            if limit.is_idle(now_s):
                if is_changed or limit.share != limit.limit / workers:
                    limit.set_share(limit.limit / workers, now_s)
                continue
            own = limit.usage(now_s)
            wanted = [found.wanted if (found := worker.usage.get(key)) else 0.0 for worker in heard]
            limit.divide(workers, silent, own.wanted, wanted, now_s)
            if len(usage) < _MOST:
                usage[key] = own
        return QuotaReport(usage)
