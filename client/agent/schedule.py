"""When a source has something to send, and at what pace requests leave. Pure.

With ten thousand files nearly all are quiet. So neither an answer nor a look at the files asks every source: each is in
a queue under the time at which it may have something to do, and whoever changes a source wakes it.

A source that sends nothing reports its position, its size and a watermark every ``interval_s``. The gateway lists a
source from the opening of its session on, so none is needed before the first chunk. A source whose file is gone reports
that it is finished, until the gateway has heard it. One that leaves a data centre reports so there, once.

With ``--once`` there are none. Whether more lines come later nobody knows: ``finished`` may be wrong, and sources that
reported something else and then ended would count as fallen silent together, which holds the loader's segments.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar

from logferry.client.files.chunking import FileBatch
from logferry.client.files.tail import FileTail
from logferry.client.transport.request_window import Slot

_T = TypeVar("_T")
NEVER = float("inf")
_STALE = 64  # entries that may be in a heap besides a quarter of the others


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
        if len(self._heap) > 1.25 * len(self._valid) + _STALE:
            self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

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


class HeartbeatReport(NamedTuple):
    """``size``: of the file in bytes; ``position``: up to here it was sent.

    ``watermark_ms``: what was in the file at that Unix time in milliseconds was sent; None: not known, or not sent.
    """

    position: int
    size: int | None
    watermark_ms: int | None
    finished: bool


class PushJob(NamedTuple):
    """One request of a source of ``topic``. Without batch and beat it opens a session.

    ``url``: the owner, if known. ``direct``: the gateway may redirect; else it forwards. ``dc``: the number of the data
    centre. ``skips``: the data centre has recorded less than lies before the batch, because the rest is in another one.
    ``slot``: the batch in the source's window. ``more``: there may be another request when its body has left. ``at``:
    when it leaves.
    """

    topic: str
    source_id: str
    url: str | None
    direct: bool
    session: int | None
    batch: FileBatch | None
    beat: HeartbeatReport | None = None
    dc: int = 0
    skips: bool = False
    slot: Slot[FileBatch] | None = None
    more: bool = False
    at: float = 0.0


class HeartbeatSchedule:
    """``interval_s``: 0 for no reports at all. ``is_over``: that the source is finished was heard, or need not be.

    ``left``: data centres that it left and that do not know it yet, with its sessions there; the last one first.
    """

    __slots__ = "_interval_s", "_next", "is_over", "last_size", "left"

    def __init__(self, interval_s: float) -> None:
        self.is_over = not interval_s
        self._interval_s = interval_s
        self._next = 0.0
        self.left: tuple[tuple[int, int], ...] = ()
        self.last_size: int | None = None  # of a file that is gone

    def leave(self, dc: int, session: int) -> None:
        """The source moves away from a data centre."""
        self.left = ((dc, session), *(one for one in self.left if one[0] != dc))

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
            (dc, session), *others = self.left
            self.left = tuple(others)
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


class WaitClock:
    """Since when a source has been behind, and has waited for the same thing."""

    __slots__ = "_behind_from", "_waits_for", "_waits_from"

    def __init__(self) -> None:
        self._behind_from: float | None = None
        self._waits_for, self._waits_from = "", 0.0

    def waits(self, is_sent: bool, waits_for: str, now: float) -> tuple[float, str, float]:
        """Seconds behind, what it waits for, and for how many seconds."""
        self._behind_from = None if is_sent else now if self._behind_from is None else self._behind_from
        if waits_for != self._waits_for:
            self._waits_for, self._waits_from = waits_for, now
        behind_s = 0.0 if self._behind_from is None else now - self._behind_from
        return behind_s, waits_for, now - self._waits_from
