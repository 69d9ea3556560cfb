"""Which sources may have a request now, and at what pace requests leave. Pure.

With ten thousand files nearly all are quiet. So neither an answer nor a look at the files asks every source: each is in
a queue under the time at which it may have something to do, and whoever changes a source wakes it.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

_T = TypeVar("_T")
NEVER = float("inf")


class TimeQueue(Generic[_T]):
    """Items by the time at which they are due, each at most once; items due at the same time come in their order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _T]] = []
        self._valid: dict[_T, int] = {}  # the number of the item's last entry; the others are stale
        self._numbers = itertools.count()

    def put(self, item: _T, due: float) -> None:
        """Replaces the time of the item. `NEVER` takes it out."""
        if due == NEVER:
            self._valid.pop(item, None)
            return
        number = self._valid[item] = next(self._numbers)
        heapq.heappush(self._heap, (due, number, item))

    def pop(self, now: float) -> _T | None:
        """Takes the item that has been due for longest; None if none is due at ``now``."""
        while self._heap and self._heap[0][0] <= now:
            _, number, item = heapq.heappop(self._heap)
            if self._valid.get(item) == number:
                del self._valid[item]
                return item
        return None


class Throttle:
    """A limit of bytes, or of processor time, a second: an allowance that grows with time.

    It may be overdrawn once; then it is closed until it has recovered. So the average holds whatever a single request
    costs, and a pause earns at most one second's worth.
    """

    def __init__(self, a_second: float, now: float) -> None:
        self._a_second = self._left = a_second
        self._at = now

    def is_open(self, now: float) -> bool:
        self._left = min(self._left + (now - self._at) * self._a_second, self._a_second)
        self._at = now
        return self._left > 0

    def spend(self, amount: float) -> None:
        self._left -= amount
