"""The clock by which a worker stamps and judges what is durable: that of Kafka's brokers, which delete by it.

* `BrokerClock.now_ms` is the time that the cluster answered last, and the time since then by the boot clock of this
  host, which nobody sets. So records, sessions and heartbeats get the right time, whatever the host's own clock says.
* The host's clock is a second witness. Where the two differ by more than `STOP_S`, or Kafka's is not known, nobody
  knows which one is wrong: nothing expires, and `stop` says why.
* A cluster whose time jumps by more than `STOP_S` is followed only if the host's clock agrees: the host was
  paused. Else the new controller has a wrong clock, or the old one had. A worker that starts later believes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

# Clocks that are kept by NTP differ by less than a second.
WARN_S: Final = 5.0
STOP_S: Final = 300.0
# An answer is worth so long: a boot clock drifts by less than a second a day.
_WORTH_S: Final = 3600.0
_boot_s: Final = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


class BrokerClock:
    """The time of the brokers, and how far the clock of this host is from it. ``boot_s``: for `answered`."""

    def __init__(self, wall_s: Callable[[], float] = time.time, boot_s: Callable[[], float] = _boot_s) -> None:
        self._wall_s, self.boot_s = wall_s, boot_s
        # The brokers' time less the boot clock, when it was taken last, and what is wrong with the last answer.
        self._offset_s: float | None = None
        self._answered_s = 0.0
        self._problem: str | None = "Kafka has not said its time yet"

    def now_ms(self) -> int:
        """Unix time in ms: the brokers' if it was ever known, else this host's."""
        known = self._wall_s() if self._offset_s is None else self._offset_s + self.boot_s()
        return int(known * 1000)

    def answered(self, broker_ms: int, asked_s: float) -> None:
        """Takes the time that a broker said after ``asked_s`` of `boot_s`."""
        now_s = self.boot_s()
        offset_s = broker_ms / 1000 - (asked_s + now_s) / 2
        is_alone = abs(self._wall_s() - now_s - offset_s) > STOP_S
        if self._offset_s is not None and is_alone and abs(offset_s - self._offset_s) > STOP_S:
            self._problem = (
                f"Kafka's time jumped by {_text(offset_s - self._offset_s)}: compare the controllers' clocks"
            )
            return
        self._offset_s, self._answered_s, self._problem = offset_s, now_s, None

    def failed(self, why: str) -> None:
        """No broker said its time."""
        if self._offset_s is None or self.boot_s() - self._answered_s > _WORTH_S:
            self._problem = why

    @property
    def ahead_s(self) -> float | None:
        """How far this host's clock is ahead of the brokers' (negative: behind); None: not known."""
        return None if self._offset_s is None else self._wall_s() - self.boot_s() - self._offset_s

    @property
    def stop(self) -> str | None:
        """Why nothing may expire now; None: it may."""
        if self._problem is None and (differs := self._differs(STOP_S)):
            return f"{differs}: correct the wrong one"
        return self._problem

    @property
    def warning(self) -> str | None:
        """What an operator must know of the clocks; None: they agree."""
        if self.stop is not None:
            return f"no source expires: {self.stop}"
        differs = self._differs(WARN_S)
        return f"{differs}; synchronise the clocks" if differs else None

    def _differs(self, limit_s: float) -> str | None:
        ahead_s = self.ahead_s
        if ahead_s is None or abs(ahead_s) <= limit_s:
            return None
        return f"this host's clock is {_text(ahead_s)} {'ahead of' if ahead_s > 0 else 'behind'} Kafka's"


def _text(seconds: float) -> str:
    size = abs(seconds)
    return f"{size / 86_400:.1f} days" if size >= 86_400 else f"{size:.0f} s"
