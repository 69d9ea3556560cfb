"""Limits of rates, for the gateway's quotas and the mirror's links, and limits that several tokens share. Pure.

A token bucket fills at its rate up to some seconds' worth. The clock is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

_INSTANT_S: Final = 0.001
BURST_S: Final = 1.0
_SHARE: Final = 4


@dataclass(slots=True)
class TokenBucket:
    """Fills at ``rate`` a second, up to the worth of ``burst_s``. ``level`` at ``at_s``; below zero is debt."""

    rate: float
    level: float
    at_s: float
    burst_s: float = BURST_S

    def wait_s(self, now_s: float) -> float:
        """Seconds until it is above zero; 0: now."""
        self.level = min(self.rate * self.burst_s, self.level + (now_s - self.at_s) * self.rate)
        self.at_s = now_s
        return 0.0 if self.level > 0 else max(-self.level / self.rate, _INSTANT_S)

    def take(self, amount: float) -> None:
        self.level -= amount


class ReadLimit(Protocol):
    """The rate of what one caller reads."""

    def wait_s(self) -> float:
        """Seconds until there is something left of it; 0: now."""

    def hold(self, wanted: int, least: int) -> int:
        """Sets bytes aside that a read may find: those wanted, or less. Raises Problem ``quota`` where none is left."""

    def settle(self, held: int, size_bytes: int) -> None:
        """Gives back what was set aside, and charges what was read."""


class FairShare:
    """What is used of ``limit``, as a whole and by each token, so that none of them takes all of it.

    The rule: what a token holds is at most `_SHARE` times what is free (Choudhury and Hahne, "Dynamic queue length
    thresholds", 1998). One token alone leaves a fifth to others, each further one a fifth of what is left: whoever
    comes always finds room. The only thing that a token holds may take all that is free. Callers without a token are
    not told apart.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._of_token: dict[str | None, int] = {}

    @property
    def free(self) -> int:
        return self.limit - self.used

    def of_token(self, token: str | None) -> int:
        return self._of_token.get(token, 0)

    def room(self, token: str | None, own: int = 0) -> float:
        """The most that the token may take; ``own``: of what it has, the part of the one that asks."""
        used = self.of_token(token)
        if token is None or used == own:
            return self.free
        return min(self.free, (_SHARE * self.free - used) / (1 + _SHARE))

    def take(self, token: str | None, amount: int) -> None:
        self.used += amount
        self._of_token[token] = self.of_token(token) + amount

    def give(self, token: str | None, amount: int) -> None:
        self.used -= amount
        left = self.of_token(token) - amount
        if left:
            self._of_token[token] = left
        else:
            self._of_token.pop(token, None)
