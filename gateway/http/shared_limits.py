"""Limits of rates, and of numbers of connections, that all workers of a data centre keep together. Pure.

Once in `shares.INTERVAL_S` each worker publishes a `QuotaReport`: of each limit that it used lately, how much it took
since its start, and the rate that it wants. From those of the others it decides its **share** of each limit:

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

**Connections** are a number, not a rate: the same reports and shares, and no bucket. A worker takes one more while it
has less than its share, and its own with those that the others reported last are less than the limit. So together they
are at most the limit where nothing changes, and never more than the shares: twice the limit, and one for each worker,
since a share need not be whole. Where the reports show too many, those above a worker's share end with their next
request.

A report has room for `_MOST` limits of each scope. Of those beyond it each worker keeps limit/N, and says that some are
missing, so that the others leave it that part. No number of topics displaces the limit of a token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from logferry.gateway.http.shares import LimitKey, LimitUsage, Share, SharedCount, SharedLimit

SILENT_S: Final = 3.5
# A worker that starts is not heard at once.
_UNHEARD_S: Final = 10.0
Scope = Literal["token", "topic"]
# With names of 250 bytes less than a message of Kafka may have.
_MOST: Final[dict[str, int]] = {"token": 2000, "topic": 1000}
_CONNECTIONS: Final = "connections"
# Stands in a report for the limits that it has no room for.
_MORE: Final[LimitKey] = ("", "", "")
_NOTHING: Final = LimitUsage(0.0, 0.0)


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
    """What was heard of another worker: its last report, and all sums that it ever reported."""

    usage: dict[LimitKey, LimitUsage] = field(default_factory=dict)
    taken: dict[LimitKey, float] = field(default_factory=dict)
    heard_s: float = float("-inf")


class SharedLimits:
    """All limits of this worker, and the reports of the others. ``workers``: how many there are at least, until the
    first call of `report` says which."""

    def __init__(self, clock: Callable[[], float], workers: int = 1) -> None:
        self._clock = clock
        self.number_of_workers = workers
        self._limits: dict[LimitKey, SharedLimit] = {}
        self._counts: dict[str, SharedCount] = {}
        # Those that were used lately: only they are divided and published.
        self._awake: dict[LimitKey, SharedLimit | SharedCount] = {}
        self._awake_of: Counter[str] = Counter()
        self._is_full = False
        self._workers: dict[str, _Worker] = {}
        self._others: frozenset[str] = frozenset()
        self._silent_s: float | None = None
        # Sums never fall, also with other quotas: the others would miss what comes after.
        self._sums: dict[LimitKey, float] = {}

    def make(self, scope: Scope, name: str, unit: str, limit: float) -> SharedLimit:
        """A limit with full buckets, instead of one of the same key."""
        key = (scope, name, unit)
        before = self._limits.get(key)
        taken = self._sums.pop(key, 0.0 if before is None else before.taken)
        self._forget(key)
        part = Share(limit, limit / self.number_of_workers)
        made = self._limits[key] = SharedLimit(key, part, taken, self._clock(), self._wake)
        return made

    def count(self, name: str, limit: float | None) -> SharedCount:
        """The connections of a token, with its limit if they are none yet."""
        count = self._counts.get(name)
        if count is None:
            count = SharedCount(("token", name, _CONNECTIONS), self._wake, self._elsewhere)
            self._counts[name] = count
            self._limit(count, limit)
        return count

    def drop_unused(self, count: SharedCount) -> None:
        if not count.open and not count.is_awake:
            self._counts.pop(count.key[1], None)

    def clear(self, connections: Mapping[str, float]) -> None:
        """Other quotas are configured. Those of connections are given: what is open stays counted."""
        self._sums |= {key: limit.taken for key, limit in self._limits.items() if limit.taken}
        for key in self._limits:
            self._forget(key)
        self._limits = {}
        for name, count in self._counts.items():
            self._limit(count, connections.get(name))

    def _limit(self, count: SharedCount, limit: float | None) -> None:
        if limit is None:
            count.part = None
        elif count.part is None or count.part.limit != limit:
            count.part = Share(limit, limit / self.number_of_workers)
            if count.open and not count.is_awake:
                self._wake(count)

    def _wake(self, limit: SharedLimit | SharedCount) -> None:
        """It begins with an equal part, and keeps that while there is no room for it in the reports."""
        if limit.part is not None:
            limit.set_share(limit.part.limit / self.number_of_workers, self._clock())
        scope = limit.key[0]
        if self._awake_of[scope] >= _MOST[scope]:
            self._is_full = True
            return
        self._awake[limit.key] = limit
        self._awake_of[scope] += 1
        limit.is_awake = True

    def _forget(self, key: LimitKey) -> None:
        found = self._awake.pop(key, None)
        if found is not None:
            found.is_awake = False
            self._awake_of[key[0]] -= 1

    def _elsewhere(self, key: LimitKey) -> float:
        """What the workers that are heard reported last."""
        return sum(worker.usage.get(key, _NOTHING).taken for worker in self._heard())

    def _heard(self) -> list[_Worker]:
        least_s = self._clock() - SILENT_S
        return [worker for worker in self._workers.values() if worker.heard_s >= least_s]

    def hear(self, worker: str, report: QuotaReport) -> None:
        """Takes a report over; the same one again, or an older one, does no harm."""
        now_s = self._clock()
        known = self._workers.setdefault(worker, _Worker())
        was_silent = now_s - known.heard_s > SILENT_S
        known.heard_s, known.usage = now_s, report.usage
        for key, usage in report.usage.items():
            limit, before = self._limits.get(key), known.taken.get(key)
            # Less than before: the worker was restarted.
            if limit is not None and before is not None and usage.taken > before:
                limit.take_elsewhere(usage.taken - before, now_s, was_silent=was_silent)
            known.taken[key] = usage.taken

    def report(self, others: Collection[str]) -> QuotaReport:
        """Decides all shares, with these other workers; the result is to be published. Once in each interval."""
        now_s = self._clock()
        self._others = frozenset(others)
        self.number_of_workers = 1 + len(self._others)
        self._workers = {name: worker for name, worker in self._workers.items() if name in self._others}
        heard = self._heard()
        if len(heard) == len(self._others):
            self._silent_s = None
        elif self._silent_s is None:
            self._silent_s = now_s
        usage: dict[LimitKey, LimitUsage] = {}
        for key, limit in list(self._awake.items()):
            if limit.is_idle(now_s) or limit.part is None:
                self._sleep(limit, now_s)
                continue
            usage[key] = own = limit.usage(now_s)
            known = [worker for worker in heard if key in worker.usage or _MORE not in worker.usage]
            wanted = [worker.usage.get(key, _NOTHING).wanted for worker in known]
            mute = len(self._others) - len(known)
            limit.set_share(limit.part.divide(self.number_of_workers, mute, own.wanted, wanted), now_s)
        if self._is_full:
            usage[_MORE] = _NOTHING
        self._is_full = False
        return QuotaReport(usage)

    def _sleep(self, limit: SharedLimit | SharedCount, now_s: float) -> None:
        self._forget(limit.key)
        if limit.part is not None:
            limit.set_share(limit.part.limit / self.number_of_workers, now_s)
        if isinstance(limit, SharedCount):
            self.drop_unused(limit)

    def warnings(self) -> list[str]:
        """That of a worker which does not hear the others, as ``what: remedy``."""
        if self._silent_s is None or self._clock() - self._silent_s < _UNHEARD_S:
            return []
        what = "not all workers hear each other's use of quotas, so each keeps a smaller part of them"
        return [f"{what}: look for quota_usage_failed in their logs"]
