"""The part of a limit that one worker keeps, of a rate or of a number of connections. Pure.

`shared_limits` has the rules of the shares, and the reports by which they are decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from logferry.gateway.limits import BURST_S, TokenBucket

INTERVAL_S: Final = 1.0
# After its last use a limit is no longer published.
_IDLE_S: Final = 5.0
# For so long after it was exhausted, a limit counts as one that its callers want more of: they wait before they retry.
# So it does while it is in debt.
_SHORT_S: Final = 3.0
_HEADROOM: Final = 1.05
_SMOOTHING: Final = 0.5
_DEBT_S: Final = 2.0

# The scope, the name, and the unit: bytes, chunks, requests, read bytes or connections.
LimitKey = tuple[str, str, str]


class LimitUsage(NamedTuple):
    """Of one limit in one worker. ``taken``: since its start; ``wanted``: a second. Of connections both are those that
    are open, and that would be."""

    taken: float
    wanted: float


def fair_part(room: float, own: float, others: Iterable[float]) -> float:
    """What ``own`` gets by max-min fairness, and an equal part of what nobody wants."""
    wanted = (own, *others)
    left, number = room, len(wanted)
    if (unwanted := room - sum(wanted)) >= 0:
        return own + unwanted / number
    for index, want in enumerate(sorted(wanted)):
        level = left / (number - index)
        if want > level:
            return min(own, level)
        left -= want
    return own


class Share:
    """The part of one limit that one worker has: ``value``, at most ``limit``."""

    __slots__ = ("_wanted", "limit", "value")

    def __init__(self, limit: float, value: float) -> None:
        self.limit, self.value, self._wanted = limit, value, 0.0

    def divide(self, workers: int, silent: int, wanted: float, others: list[float]) -> float:
        """Decides the share. ``wanted``: as published now; ``others``: of the workers that were heard."""
        least = self.limit / workers
        # What was published before: the others know of that.
        own, self._wanted = min(wanted, self._wanted), wanted
        part = fair_part(self.limit - silent * least, own, others)
        return least if silent == workers - 1 else max(least, part)


class SharedLimit:
    """One rate as one worker keeps it. ``wake``: is called where it is used and was not lately."""

    __slots__ = (
        *("_all", "_counted", "_own", "_rate", "_short_s", "_used_s", "_wake"),
        *("is_awake", "key", "part", "taken"),
    )

    def __init__(
        self, key: LimitKey, part: Share, taken: float, now_s: float, wake: Callable[[SharedLimit], None]
    ) -> None:
        self.key, self.taken, self.part = key, taken, part
        limit, share = part.limit, part.value
        self._own = TokenBucket(share, share * BURST_S, now_s)
        self._all = TokenBucket(limit, limit * BURST_S, now_s, _DEBT_S)
        self._counted, self._rate = taken, 0.0
        self._used_s = self._short_s = float("-inf")
        self._wake, self.is_awake = wake, False

    @property
    def limit(self) -> float:
        return self.part.limit

    @property
    def share(self) -> float:
        return self.part.value

    def wait_s(self, now_s: float) -> float:
        """Seconds until it may be used; 0: now. A share that is in debt grows: the wait is then what the whole limit
        takes to pay that, or some intervals."""
        self._used_s = now_s
        if not self.is_awake:
            self._wake(self)
        own_s = self._own.wait_s(now_s)
        own_s = min(own_s, max(_SHORT_S, own_s * self.share / self.limit))
        wait_s = max(own_s, self._all.wait_s(now_s))
        if wait_s > 0:
            self._short_s = now_s
        return wait_s

    def room(self) -> float:
        """What may be taken now without debt, as `wait_s` found it."""
        return max(0.0, min(self._own.level, self._all.level))

    def hold(self, amount: float) -> None:
        """Sets so much aside until its holder knows what it takes; less than 0: gives it back."""
        self._own.take(amount)
        self._all.take(amount)

    def take(self, amount: float) -> None:
        self.taken += amount
        self.hold(amount)

    def take_elsewhere(self, amount: float, now_s: float, *, was_silent: bool) -> None:
        """Another worker has taken it. What comes at once after a silence does not stop this worker for long: it was
        taken when there was room for it."""
        self._all.wait_s(now_s)
        least = min(self._all.level, -_DEBT_S * self.limit) if was_silent else -math.inf
        self._all.level = max(self._all.level - amount, least)

    def is_idle(self, now_s: float) -> bool:
        """Not while there is a debt, since who waits for its end does not ask."""
        return now_s - self._used_s > _IDLE_S and self._own.wait_s(now_s) == 0

    def usage(self, now_s: float) -> LimitUsage:
        """For the report; called once in each interval."""
        lately, self._counted = self.taken - self._counted, self.taken
        self._rate += _SMOOTHING * (lately / INTERVAL_S - self._rate)
        is_short = now_s - self._short_s <= _SHORT_S or self._own.wait_s(now_s) > 0
        wanted = 2 * self.share if is_short else _HEADROOM * self._rate
        return LimitUsage(self.taken, min(wanted, self.limit))

    def set_share(self, share: float, now_s: float) -> None:
        if share != self._own.rate:
            self._own.wait_s(now_s)
            self._own.rate = self.part.value = share


class SharedCount:
    """The connections of one token in one worker. ``part`` None: the token has no limit. ``elsewhere``: says how many
    the others reported last."""

    __slots__ = ("_elsewhere", "_short_s", "_used_s", "_wake", "is_awake", "key", "open", "part")

    def __init__(
        self, key: LimitKey, wake: Callable[[SharedCount], None], elsewhere: Callable[[LimitKey], float]
    ) -> None:
        self.key, self.open, self.is_awake = key, 0, False
        self.part: Share | None = None
        self._wake, self._elsewhere = wake, elsewhere
        self._used_s = self._short_s = float("-inf")

    def enter(self, now_s: float) -> bool:
        """Counts one more, if there is room for it."""
        if self.part is not None:
            self._used_s = now_s
            if not self.is_awake:
                self._wake(self)
            if self.open >= self.part.value or self.open + self._elsewhere(self.key) >= self.part.limit:
                self._short_s = now_s
                return False
        self.open += 1
        return True

    def is_too_many(self) -> bool:
        """Whether one of them is to be closed: all workers have more than the limit, and this one than its share."""
        part = self.part
        if part is None or self.open < part.value + 1:
            return False
        return self.open + self._elsewhere(self.key) > part.limit

    def is_idle(self, now_s: float) -> bool:
        return self.part is None or (not self.open and now_s - self._used_s > _IDLE_S)

    def usage(self, now_s: float) -> LimitUsage:
        """For the report."""
        if self.part is None:
            return LimitUsage(self.open, 0.0)
        is_short = now_s - self._short_s <= _SHORT_S
        wanted = max(2 * self.part.value, self.open) if is_short else self.open
        return LimitUsage(self.open, min(wanted, self.part.limit))

    def set_share(self, share: float, _now_s: float) -> None:
        if self.part is not None:
            self.part.value = share
