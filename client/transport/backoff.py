"""Retry delays, the deadlines of callers, and the warning that a program waits for a gateway."""

from __future__ import annotations

import random
import time

from logferry.client.events import log_event

RETRY_S = (0.1, 10.0)  # first and longest pause
TROUBLE_AFTER_S = 5.0  # so long a request may fail before it is logged
TROUBLE_EVERY_S = 60.0


class TroubleLog:
    """Logs that nothing worked for `TROUBLE_AFTER_S`, and again every `TROUBLE_EVERY_S`: a wrong URL is no secret.

    ``what``: who waits, for the log. Call it without a lock that a handler of `logging` may need.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = None
        self._next = 0.0

    def worked(self) -> None:
        self._since, self._next = None, 0.0

    def failed(self, began: float, why: object) -> None:
        """A request that ``began`` then, in monotonic time, is to be repeated."""
        now = time.monotonic()
        self._since = began if self._since is None else self._since
        if now - self._since >= TROUBLE_AFTER_S and now >= self._next:
            self._next = now + TROUBLE_EVERY_S
            log_event("gateway-silent", who=self._what, for_s=round(now - self._since), why=why)


def pause_s(failures: int, bounds: tuple[float, float], asked_s: float = 0.0) -> float:
    """Exponential with jitter, between half and the whole of the step, so that clients do not retry together.

    ``asked_s``: by a gateway; the pause is that or up to a fifth longer, if it is longer than its own.
    """
    first, longest = bounds
    own_s = min(first * 2.0 ** min(failures - 1, 30), longest) * random.uniform(0.5, 1.0)
    return max(own_s, asked_s * random.uniform(1.0, 1.2))


def deadline_of(timeout_s: float | None) -> float | None:
    """The monotonic time at which the caller's patience ends; None: never."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def left_s(deadline: float | None) -> float | None:
    """Seconds until the deadline, 0 once it has passed; None: there is none."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
