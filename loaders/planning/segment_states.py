"""The states of segments, which are windows of a table's event time. Pure: facts and a clock in, states out.

    ACTIVE      rows are still expected
    IMMUTABLE   closed: the low watermark passed its end, and the wait for late rows is over
    READY       a check that began after the closing confirmed that no source owes rows: jobs may start
    DROPPED     the table's retention dropped its rows; late rows do not change that

The law of this file: no segment becomes READY while a live source may owe rows of it, or while Kafka holds records that
are not loaded. A source that wakes up later brings a new version. So states advance only in a check that found
everything loaded that Kafka had when the check began, by its low watermark (see `source_facts`). A READY segment
states what the check was based on.

The wait for late rows begins when the low watermark passes the end of the segment and restarts with each late row, for
``max_wait_s`` at most. Rows after the closing are loaded, counted as late, and reopen the segment in a new version.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Final, NamedTuple

from logferry.loaders.planning.source_facts import SILENT_SHARE, LowWatermark, utc_text

ACTIVE: Final = "ACTIVE"
IMMUTABLE: Final = "IMMUTABLE"
READY: Final = "READY"
DROPPED: Final = "DROPPED"

# Conditions of a segment: rows change, retention drops it, or a check finds one of the others.
ROWS: Final = "rows were added or replaced"
EXPIRED: Final = "retention dropped the rows"
BEHIND: Final = "the low watermark is before the end"
WAITING: Final = "the low watermark passed the end, late rows are waited for"
WAITED: Final = "the low watermark passed the end, the wait is over"
CONFIRMED: Final = "closed in an earlier check, the low watermark still past the end"

TRANSITIONS: Final[Mapping[tuple[str, str], str]] = {
    (ACTIVE, ROWS): ACTIVE,
    (ACTIVE, BEHIND): ACTIVE,
    (ACTIVE, WAITING): ACTIVE,
    (ACTIVE, WAITED): IMMUTABLE,
    (ACTIVE, EXPIRED): DROPPED,
    (IMMUTABLE, ROWS): ACTIVE,
    (IMMUTABLE, BEHIND): IMMUTABLE,
    (IMMUTABLE, WAITED): IMMUTABLE,
    (IMMUTABLE, CONFIRMED): READY,
    (IMMUTABLE, EXPIRED): DROPPED,
    (READY, ROWS): ACTIVE,
    (READY, EXPIRED): DROPPED,
    (DROPPED, ROWS): DROPPED,
    (DROPPED, EXPIRED): DROPPED,
}
# A check does not change these.
_SETTLED: Final = (READY, DROPPED)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_S: Final = 86_400
# Of how many segments how large a share has rows where silence is not usual.
_LONGER: Final = 7
_FEWEST: Final = 6
_STEADY: Final = 0.75

# Up to so many empty segments between others are listed; a longer silence has none.
GAP_SEGMENTS: Final = 48


class SegmentRules(NamedTuple):
    """Seconds; see `config.SegmentSettings`."""

    window_s: int = 3600
    late_wait_s: float = 3600.0
    max_wait_s: float = 12 * 3600.0
    source_idle_s: float = 900.0
    silent_share: float = SILENT_SHARE

    def start_of(self, event: datetime) -> datetime:
        """The start of the event's segment; segments are counted from 1970 on, in UTC."""
        seconds = int((event - _EPOCH) // timedelta(seconds=self.window_s)) * self.window_s
        return _EPOCH + timedelta(seconds=seconds)

    def end_of(self, start: datetime) -> datetime:
        return start + timedelta(seconds=self.window_s)


class AddedRows(NamedTuple):
    """The rows that a batch adds to a segment. ``bytes``: of the lines' texts."""

    rows: int
    bytes: int
    first: datetime
    last: datetime

    def plus(self, other: AddedRows | None) -> AddedRows:
        if other is None:
            return self
        first, last = min(self.first, other.first), max(self.last, other.last)
        return AddedRows(self.rows + other.rows, self.bytes + other.bytes, first, last)


class Segment(NamedTuple):
    """One segment. ``rows`` to ``last`` count all rows of it in the table, late or not; ``late_rows`` came after a
    closing. ``passed``: when the low watermark was first seen past the end. ``touched``: when the last rows came.
    ``closed``: when it became IMMUTABLE. ``batch``: the ledger's batch of this state. ``reason``: why it is not READY.
    ``sources``, ``silent_sources``, ``watermark``: the basis on which it became READY; None before, and in older rows.
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
    sources: int | None = None
    silent_sources: int | None = None
    watermark: datetime | None = None

    @property
    def name(self) -> str:
        """``2026-11-20T10``, with minutes and seconds only where they are not zero."""
        name = self.start.strftime("%Y-%m-%dT%H:%M:%S")
        return name.removesuffix(":00").removesuffix(":00")


class WatermarkCheck(NamedTuple):
    """The result of a check, with everything loaded that Kafka had when it began. ``now``: when it began."""

    now: datetime
    low: LowWatermark


# ---- rows ------------------------------------------------------------------------------------------------


class RecountedRows(NamedTuple):
    """A segment of which a batch replaces rows. ``rows``: all that the table then holds of it; ``is_changed``: whether
    these are other rows than before."""

    rows: AddedRows | None
    is_changed: bool


def add_rows(
    segments: Mapping[datetime, Segment], added: Mapping[datetime, AddedRows], batch: int, now: datetime
) -> dict[datetime, Segment]:
    """The segments that a batch adds rows to, as they are after it."""
    counted = {start: RecountedRows(rows.plus(_rows_of(segments.get(start))), True) for start, rows in added.items()}
    found = replace_rows(segments, counted, batch, now)
    # Rows stay late when retention has dropped them, and those that come for a dropped segment are.
    late = {s: one.late_rows + (one.state != ACTIVE) * added[s].rows for s, one in segments.items() if s in added}
    return {start: one._replace(late_rows=late.get(start, 0)) for start, one in found.items()}


def _rows_of(segment: Segment | None) -> AddedRows | None:
    if segment is None or segment.first is None or segment.last is None:
        return None
    return AddedRows(segment.rows, segment.bytes, segment.first, segment.last)


def replace_rows(
    segments: Mapping[datetime, Segment], counted: Mapping[datetime, RecountedRows], batch: int, now: datetime
) -> dict[datetime, Segment]:
    """The segments that a batch changes by replacing rows. One that holds the same rows keeps its state and version.

    The rows by which a closed one grows are late.
    """
    found: dict[datetime, Segment] = {}
    for start, (rows, is_changed) in sorted(counted.items()):
        before = segments.get(start)
        if before is None:
            if rows is not None:
                found[start] = Segment(start, 1, ACTIVE, *rows, 0, None, now, None, batch)
            continue
        count, size, first, last = rows or (0, 0, None, None)
        late = max(0, count - before.rows) if before.state in (IMMUTABLE, READY) else 0
        late_rows = min(count, before.late_rows + late)
        after = before._replace(rows=count, bytes=size, first=first, last=last, late_rows=late_rows)
        if is_changed or (before.rows, before.bytes) != (count, size):
            found[start] = _reopened(after, batch, now)
        elif _differs(before, after):
            found[start] = after._replace(batch=batch)
    return found


def _reopened(segment: Segment, batch: int, now: datetime) -> Segment:
    """The segment after its rows changed: a closed one waits again, in a new version."""
    state, is_late = TRANSITIONS[segment.state, ROWS], segment.state != ACTIVE
    return segment._replace(
        version=segment.version + (is_late and state == ACTIVE),
        state=state,
        passed=None if is_late else segment.passed,
        touched=now,
        closed=None,
        batch=batch,
        reason=segment.reason if state == DROPPED else "",
        sources=None,
        silent_sources=None,
        watermark=None,
    )


def drop_before(
    segments: Mapping[datetime, Segment],
    cutoff: datetime,
    batch: int,
    now: datetime,
    rules: SegmentRules,
    staying: Mapping[datetime, AddedRows | None],
) -> dict[datetime, Segment]:
    """The segments that end by the cut-off, unless they are dropped already and hold no more than stays.

    A later one that loses rows is counted again, and keeps its state and version.
    """
    by = f"before {utc_text(cutoff)}, by batch {batch}"
    found: dict[datetime, Segment] = {}
    for start, segment in segments.items():
        is_over = rules.end_of(start) <= cutoff
        rows, size, first, last = staying.get(start) or (0, 0, None, None)
        is_counted = segment.rows == rows and (segment.state == DROPPED or not is_over)
        if is_counted or not (is_over or start in staying):
            continue
        after = segment._replace(rows=rows, bytes=size, first=first, last=last, batch=batch)
        if is_over:
            reason = f"{segment.rows - rows:,} rows, {segment.bytes - size:,} bytes, {by}"
            after = after._replace(state=TRANSITIONS[segment.state, EXPIRED], touched=now, reason=reason)
        found[start] = after
    return found


# ---- checks ----------------------------------------------------------------------------------------------


def check_segments(
    segments: Mapping[datetime, Segment], check: WatermarkCheck, batch: int, rules: SegmentRules
) -> dict[datetime, Segment]:
    """The segments that a check changes, as they are after it, with empty ones between others."""
    found: dict[datetime, Segment] = {}
    for start in _empty(segments, check, rules):
        found[start] = Segment(start, 1, ACTIVE, 0, 0, None, None, 0, None, check.now, None, batch)
    for start, segment in {**segments, **found}.items():
        after = _checked(segment, check, batch, rules)
        if start in found or _differs(segment, after):
            found[start] = after._replace(batch=batch)
    return found


def _checked(segment: Segment, check: WatermarkCheck, batch: int, rules: SegmentRules) -> Segment:
    if segment.state in _SETTLED:
        return segment
    passed = segment.passed or check.now
    # A late row restarts the wait.
    longest = passed + timedelta(seconds=rules.max_wait_s)
    until = min(max(passed, segment.touched) + timedelta(seconds=rules.late_wait_s), longest)
    condition = _condition(segment, check, batch, rules, until)
    after = segment._replace(state=TRANSITIONS[segment.state, condition], reason="")
    if condition == BEHIND:
        passed_before = segment.passed if segment.state == IMMUTABLE else None
        return after._replace(passed=passed_before, reason=check.low.why(rules.end_of(segment.start)))
    if segment.state == IMMUTABLE:
        if after.state == READY:
            low = check.low
            return after._replace(sources=low.sources, silent_sources=low.silent, watermark=low.at)
        return after
    if condition == WAITING:
        return after._replace(passed=passed, reason=f"waits for late rows until {utc_text(until)}")
    return after._replace(passed=passed, closed=check.now)


def _condition(segment: Segment, check: WatermarkCheck, batch: int, rules: SegmentRules, until: datetime) -> str:
    if not check.low.is_past(rules.end_of(segment.start)):
        return BEHIND
    if segment.state == ACTIVE:
        return WAITED if check.now >= until else WAITING
    # The check that closed a segment does not confirm it.
    is_later = segment.batch < batch and segment.closed is not None and check.now > segment.closed
    return CONFIRMED if is_later else WAITED


def usually_has_rows(segments: Mapping[datetime, Segment], now: datetime, rules: SegmentRules) -> bool:
    """Whether `_STEADY` of the segments of a day, or of the last seven longer ones, have rows: those before the newest
    one with rows. Segments before the first known one are not counted; fewer than `_FEWEST`, or hours, show nothing.
    """
    newest = max((start for start, segment in segments.items() if segment.rows and start <= now), default=None)
    if newest is None:
        return False
    step = timedelta(seconds=rules.window_s)
    many = min((newest - min(segments)) // step, max(_DAY_S // rules.window_s, _LONGER))
    before = (segments.get(newest - i * step) for i in range(1, many + 1))
    with_rows = sum(segment is not None and segment.rows > 0 for segment in before)
    is_known = many >= _FEWEST and many * step >= _FEWEST * timedelta(hours=1)
    return is_known and with_rows >= _STEADY * many


def _differs(before: Segment, after: Segment) -> bool:
    """Whether a row is worth writing; the reason alone is not, or each check would write all segments."""
    return before._replace(reason="") != after._replace(reason="")


def _empty(segments: Mapping[datetime, Segment], check: WatermarkCheck, rules: SegmentRules) -> list[datetime]:
    """Segments without rows that ended before the low watermark, after the newest known segment or between others."""
    low = check.low.at
    known = sorted(start for start in segments if start <= check.now)
    if low is None or not known:
        return []
    step = timedelta(seconds=rules.window_s)
    found: list[datetime] = []
    for before, after in pairwise([*known, rules.start_of(low)]):
        between = (after - before) // step - 1
        if 0 < between <= GAP_SEGMENTS:
            found += [before + step * (i + 1) for i in range(between) if before + step * (i + 2) <= low]
    return [start for start in found if start not in segments]
