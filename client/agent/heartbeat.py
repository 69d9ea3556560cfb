"""When a source reports its state to the gateway, and what it reports.

A source that sends nothing reports its position, its size and a watermark every ``interval_s``. The gateway lists a
source from the opening of its session on, so none is needed before the first chunk. A source whose file is gone reports
that it is finished, until the gateway has heard it. One that leaves a data centre reports so there, once.

With ``--once`` there are none. Whether more lines come later nobody knows: ``finished`` may be wrong, and sources that
reported something else and then ended would count as fallen silent together, which holds the loader's segments.

`SourceStatus` is the report to the operator.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import NamedTuple

from logferry.client.files.tail import FileTail


class HeartbeatReport(NamedTuple):
    """``size``: of the file in bytes; ``position``: up to here it was sent.

    ``watermark_ms``: what was in the file at that Unix time in milliseconds was sent; None: not known, or not sent.
    """

    position: int
    size: int | None
    watermark_ms: int | None
    finished: bool


class HeartbeatSchedule:
    """``interval_s``: 0 for no reports at all. ``is_over``: that the source is finished was heard, or need not be.

    ``left``: its sessions in data centres that it left and that do not know it yet.
    """

    def __init__(self, interval_s: float) -> None:
        self.is_over = not interval_s
        self._interval_s = interval_s
        self._next = 0.0
        self.left: dict[int, int] = {}
        self.last_size: int | None = None  # of a file that is gone

    def defer(self, now: float) -> None:
        """The gateway has heard of the source just now. The jitter spreads sources that began at the same time."""
        self._next = now + self._interval_s * random.uniform(0.75, 1.0)

    def answered(self, report: HeartbeatReport, now: float) -> None:
        """A report that failed is not repeated early: the thousand quiet files of a host must not burden a gateway in
        trouble. Only ``finished`` is repeated until it is heard."""
        self.is_over = self.is_over or report.finished
        self.defer(now)

    def due(self) -> float:
        """When a source that has nothing to send reports next; infinite: never."""
        return self._next if self._interval_s else float("inf")

    def report(self, position: int, tail: FileTail | None, now: float, now_ms: int) -> HeartbeatReport | None:
        """What to report now that there is nothing to send; None: nothing yet. ``tail``: None once the file is gone."""
        if tail is None:
            return HeartbeatReport(position, self.last_size, None, True)
        if now < self.due():
            return None
        seen_ms = now_ms - int((now - tail.looked_at) * 1000) - 1
        return HeartbeatReport(position, tail.size, seen_ms if position >= tail.size else None, False)

    def farewell(self, position: int, live: Collection[int]) -> tuple[int, int, HeartbeatReport] | None:
        """For a data centre in ``left`` that answers (``live``), with its session: no more of the source comes there.

        Each is named once.
        """
        while self.left:
            dc, session = self.left.popitem()
            if self._interval_s and position and dc in live:
                return dc, session, HeartbeatReport(position, None, None, True)
        return None


class SourceStatus(NamedTuple):
    """How far a source is. ``behind_s``, ``waits_s``: for how long it has been behind, and has waited for this."""

    source: str
    path: str
    topic: str
    position: int
    size: int
    lag_bytes: int
    behind_s: float
    waits_for: str
    waits_s: float
    error: str


class ProgressClock:
    """Since when a source has been behind, and has waited for the same thing."""

    def __init__(self) -> None:
        self._behind_from: float | None = None
        self._waits = ("", 0.0)

    def waits(self, is_sent: bool, waits_for: str, now: float) -> tuple[float, str, float]:
        """Seconds behind, what it waits for, and for how many seconds."""
        self._behind_from = None if is_sent else now if self._behind_from is None else self._behind_from
        if waits_for != self._waits[0]:
            self._waits = (waits_for, now)
        behind_s = 0.0 if self._behind_from is None else now - self._behind_from
        return behind_s, waits_for, now - self._waits[1]
