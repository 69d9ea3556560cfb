"""In which state each window of event time is, and why. Pure: facts and a clock in, states out.

    ACTIVE      rows are still to be expected
    IMMUTABLE   closed: the low watermark is past its end, and a sliding wait went by without rows
    READY       and a look that began after the closing found that nobody owes rows: jobs may begin
    DROPPED     its rows were dropped by the table's retention; it stays so, whatever comes late

The law of this file: READY is never said while a live source may owe rows of the window, or while Kafka holds something
that is not loaded. So a state changes only in a look that found everything loaded that Kafka had when it began, and the
low watermark is the minimum over all live sources: how far each has told all that happened. Of a source that was heard
of, by a chunk or a heartbeat, less than ``idle_s`` ago that is its newest event, or its heartbeat's watermark where all
that was recorded of it is loaded. A source that is silent for longer, or finished, holds up nothing; one of which a
gateway has recorded more than is loaded holds up everything.

The wait begins when the watermark passes the end, again with each row that comes late, and lasts ``wait_most_s`` at
most, however many come. Rows that come after the closing go into the table, are counted as late, and the window gets a
new version, which goes the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Final, NamedTuple

ACTIVE: Final = "ACTIVE"
IMMUTABLE: Final = "IMMUTABLE"
READY: Final = "READY"
DROPPED: Final = "DROPPED"
STATES: Final = (ACTIVE, IMMUTABLE, READY, DROPPED)

# So many windows in which nothing happened are segments all the same; a longer silence is none.
GAP_WINDOWS: Final = 48


class Rules(NamedTuple):
    """Seconds. ``window_s``: for ever. ``idle_s``: after so long without a sign a source is not waited for."""

    window_s: int = 3600
    wait_s: float = 3600.0
    wait_most_s: float = 12 * 3600.0
    idle_s: float = 900.0


class Added(NamedTuple):
    """What a batch brings into one window. ``bytes``: of the lines' texts."""

    rows: int
    bytes: int
    first: datetime
    last: datetime


class Segment(NamedTuple):
    """One window. ``rows`` to ``last``: of all that the table holds of it, late or not; ``late_rows``: those that came
    after a closing. ``passed``: when the low watermark was first seen past the end; ``touched``: when rows came last;
    ``closed``: when it became IMMUTABLE; ``batch``: of the ledger, that says so. ``reason``: why it is not READY.
    """

    start: datetime
    version: int
    state: str
    rows: int
    bytes: int
    first: datetime | None
    last: datetime | None
    late_rows: int
    passed: datetime | None
    touched: datetime
    closed: datetime | None
    batch: int
    reason: str = ""


class SourceView(NamedTuple):
    """One source as a look sees it.

    ``event``: its newest event in the table; ``recorded``: when its last loaded chunk was. ``beat`` and ``watermark``:
    of its heartbeat. ``owes``: more is recorded of it than is loaded.
    """

    topic: str
    source_id: str
    event: datetime | None
    recorded: datetime | None
    beat: datetime | None = None
    watermark: datetime | None = None
    finished: bool = False
    owes: bool = False

    @property
    def mark(self) -> datetime | None:
        """It has told all that happened before; None: nothing is known. A clock that is ahead is not believed."""
        marks = []
        if self.event is not None:
            marks.append(self.event if self.recorded is None else min(self.event, self.recorded))
        if self.watermark is not None and not self.owes:
            marks.append(self.watermark)
        return max(marks, default=None)

    @property
    def heard(self) -> datetime | None:
        return max((at for at in (self.recorded, self.beat) if at is not None), default=None)


class Low(NamedTuple):
    """The low watermark: ``at`` None: of one source nothing is known. ``waits_for``: which source it is, None: no live
    source is behind ``at``, which is the time of the look."""

    at: datetime | None
    waits_for: SourceView | None

    def is_past(self, end: datetime) -> bool:
        return self.at is not None and self.at >= end

    def why(self) -> str:
        if self.waits_for is None:
            return ""
        source = f"waits for {self.waits_for.source_id} in {self.waits_for.topic}"
        at = "of which no event is known" if self.at is None else f"at {said(self.at)}"
        if self.waits_for.owes:
            return f"{source}, {at}: more is recorded than loaded"
        heard = self.waits_for.heard
        return f"{source}, {at}" + (f", heard of at {said(heard)}" if heard is not None else "")


class Look(NamedTuple):
    """What a look found, when everything was loaded that Kafka had when it began. ``now``: when it began."""

    now: datetime
    low: Low


def low_watermark(sources: Iterable[SourceView], now: datetime, rules: Rules) -> Low:
    """The minimum over the sources that owe something, or may."""
    found = Low(now, None)
    for source in sources:
        if not source.owes:
            if source.finished or source.heard is None:
                continue
            if (now - source.heard).total_seconds() >= rules.idle_s:
                continue
        mark = source.mark
        if mark is None:
            return Low(None, source)
        if found.at is None or mark < found.at:
            found = Low(mark, source)
    return found


def window_of(event: datetime, rules: Rules) -> datetime:
    """The start of the window; windows are counted from 1970 on, in UTC."""
    seconds = int((event - _EPOCH) // timedelta(seconds=rules.window_s)) * rules.window_s
    return _EPOCH + timedelta(seconds=seconds)


def end_of(start: datetime, rules: Rules) -> datetime:
    return start + timedelta(seconds=rules.window_s)


def add_rows(
    segments: Mapping[datetime, Segment], added: Mapping[datetime, Added], batch: int, now: datetime
) -> dict[datetime, Segment]:
    """The windows that a batch brings rows of, as they are with it. No state changes, but a closed one opens anew."""
    return {start: _with(segments.get(start), start, rows, batch, now) for start, rows in added.items()}


def _with(before: Segment | None, start: datetime, added: Added, batch: int, now: datetime) -> Segment:
    if before is None:
        return Segment(start, 1, ACTIVE, *added, 0, None, now, None, batch)
    is_late = before.state != ACTIVE
    is_dropped = before.state == DROPPED
    return before._replace(
        version=before.version + (is_late and not is_dropped),
        state=DROPPED if is_dropped else ACTIVE,
        rows=before.rows + added.rows,
        bytes=before.bytes + added.bytes,
        first=added.first if before.first is None else min(before.first, added.first),
        last=added.last if before.last is None else max(before.last, added.last),
        late_rows=before.late_rows + is_late * added.rows,
        passed=None if is_late else before.passed,
        touched=now,
        closed=None,
        batch=batch,
        reason=before.reason if is_dropped else "",
    )


class Recounted(NamedTuple):
    """A window some of whose rows were replaced. ``rows``: all that the table holds of it then; ``is_changed``: whether
    it holds other rows than before."""

    rows: Added | None
    is_changed: bool


def replace_rows(
    segments: Mapping[datetime, Segment], counted: Mapping[datetime, Recounted], batch: int, now: datetime
) -> dict[datetime, Segment]:
    """The windows whose rows a batch replaces, where that changes something of them; a closed one opens anew.

    A window that holds just the rows that it held keeps its state and its version. Late are those by which a closed one
    has grown.
    """
    found: dict[datetime, Segment] = {}
    for start, window in sorted(counted.items()):
        before, rows = segments.get(start), window.rows or _NO_ROWS
        if before is None:
            if window.rows is not None:
                found[start] = Segment(start, 1, ACTIVE, *window.rows, 0, None, now, None, batch)
            continue
        is_new = window.is_changed or (before.rows, before.bytes) != (rows.rows, rows.bytes)
        is_late = before.state != ACTIVE and before.state != DROPPED
        after = before._replace(
            rows=rows.rows,
            bytes=rows.bytes,
            first=window.rows.first if window.rows else None,
            last=window.rows.last if window.rows else None,
            late_rows=min(rows.rows, before.late_rows + is_late * max(0, rows.rows - before.rows)),
        )
        if is_new and before.state != DROPPED:
            after = after._replace(
                version=before.version + is_late,
                state=ACTIVE,
                passed=None if is_late else before.passed,
                touched=now,
                closed=None,
                reason="",
            )
        if is_new or _differs(before, after):
            found[start] = after._replace(batch=batch)
    return found


def drop_before(
    segments: Mapping[datetime, Segment], cutoff: datetime, batch: int, now: datetime, rules: Rules
) -> dict[datetime, Segment]:
    """The windows that ended by then, where they are not dropped and empty already."""
    said_so = f"before {said(cutoff)}, by batch {batch}"
    return {
        start: segment._replace(
            state=DROPPED,
            rows=0,
            bytes=0,
            first=None,
            last=None,
            touched=now,
            batch=batch,
            reason=f"{segment.rows:,} rows, {segment.bytes:,} bytes, {said_so}",
        )
        for start, segment in segments.items()
        if end_of(start, rules) <= cutoff and (segment.state != DROPPED or segment.rows)
    }


def look_at(segments: Mapping[datetime, Segment], look: Look, batch: int, rules: Rules) -> dict[datetime, Segment]:
    """The windows that a look changes, as they are after it; those without rows, too, where others are around them."""
    found: dict[datetime, Segment] = {}
    for start in _silent(segments, look, rules):
        found[start] = Segment(start, 1, ACTIVE, 0, 0, None, None, 0, None, look.now, None, batch)
    for start, segment in {**segments, **found}.items():
        after = _looked_at(segment, look, batch, rules)
        if start in found or _differs(segment, after):
            found[start] = after._replace(batch=batch)
    return found


def _looked_at(segment: Segment, look: Look, batch: int, rules: Rules) -> Segment:
    if segment.state in (READY, DROPPED):
        return segment
    is_past = look.low.is_past(end_of(segment.start, rules))
    if segment.state == IMMUTABLE:
        # The closing itself may have been in this very look: then the next one decides.
        if is_past and segment.batch < batch and segment.closed is not None and look.now > segment.closed:
            return segment._replace(state=READY, reason="")
        return segment._replace(reason=look.low.why() if not is_past else "")
    if not is_past:
        return segment._replace(passed=None, reason=look.low.why())
    passed = segment.passed or look.now
    quiet_s = (look.now - max(passed, segment.touched)).total_seconds()
    if quiet_s >= rules.wait_s or (look.now - passed).total_seconds() >= rules.wait_most_s:
        return segment._replace(state=IMMUTABLE, passed=passed, closed=look.now, reason="")
    until = min(
        max(passed, segment.touched) + timedelta(seconds=rules.wait_s), passed + timedelta(seconds=rules.wait_most_s)
    )
    return segment._replace(passed=passed, reason=f"waits for late rows until {said(until)}")


def _differs(before: Segment, after: Segment) -> bool:
    """Whether it is worth a row: the reason alone is not, or each look would write all windows."""
    return before._replace(reason="") != after._replace(reason="")


def _silent(segments: Mapping[datetime, Segment], look: Look, rules: Rules) -> list[datetime]:
    """Windows without rows that ended before the low watermark, behind the newest one that is known, or in between."""
    low = look.low.at
    known = sorted(start for start in segments if start <= look.now)
    if low is None or not known:
        return []
    step = timedelta(seconds=rules.window_s)
    found: list[datetime] = []
    # The newest ones only: older gaps were filled by earlier looks, or were longer than is filled.
    ends = [*known[-GAP_WINDOWS:], window_of(low, rules)]
    for before, after in pairwise(ends):
        between = (after - before) // step - 1
        if 0 < between <= GAP_WINDOWS:
            found += [before + step * (i + 1) for i in range(between) if before + step * (i + 2) <= low]
    return [start for start in found if start not in segments]


def reasons(segments: Iterable[Segment], look: Look, rules: Rules) -> dict[datetime, str]:
    """Why each window is not READY, as of this look."""
    return {s.start: _looked_at(s, look, s.batch, rules).reason for s in segments if s.state not in (READY, DROPPED)}


def said(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NO_ROWS: Final = Added(0, 0, _EPOCH, _EPOCH)
