"""How fast the client may go: so many bytes, or so much time of a processor, a second. Pure."""

from __future__ import annotations


class Pace:
    """An allowance that grows with time and may be overdrawn once; then it is waited for until it is made up for.

    So the average is kept whatever a single request costs, and a pause earns no more than a second's worth.
    """

    def __init__(self, a_second: float, now: float) -> None:
        self._a_second = a_second
        self._left = a_second
        self._at = now

    def is_open(self, now: float) -> bool:
        self._left = min(self._left + (now - self._at) * self._a_second, self._a_second)
        self._at = now
        return self._left > 0

    def spend(self, amount: float) -> None:
        self._left -= amount
