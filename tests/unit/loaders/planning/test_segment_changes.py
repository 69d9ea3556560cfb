"""What a batch that drops or replaces rows makes of the segments. Without Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from logferry.loaders.planning.segment_states import (
    ACTIVE,
    DROPPED,
    READY,
    AddedRows,
    RecountedRows,
    Segment,
    SegmentRules,
    WatermarkCheck,
    add_rows,
    check_segments,
    drop_before,
    replace_rows,
)
from logferry.loaders.planning.source_facts import LowWatermark

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
RULES = SegmentRules()


def window(hours: int, state: str, rows: int = 2, **more: Any) -> Segment:
    start = NOON + hours * HOUR
    facts = Segment(start, 1, state, rows, 10 * rows, start, start + HOUR / 2, 0, NOON, NOON, None, 3)
    return facts._replace(**more)


def test_a_dropped_segment_stays_dropped():
    was = {NOON: window(0, READY), NOON + HOUR: window(1, ACTIVE), NOON + 2 * HOUR: window(2, READY)}
    gone = drop_before(was, NOON + 2 * HOUR, 9, NOON, RULES, {})
    assert {start: (s.state, s.rows, s.version, s.batch) for start, s in gone.items()} == {
        NOON: (DROPPED, 0, 1, 9),
        NOON + HOUR: (DROPPED, 0, 1, 9),
    }
    assert drop_before({**was, **gone}, NOON + 2 * HOUR, 10, NOON, RULES, {}) == {}
    late = add_rows(gone, {NOON: AddedRows(1, 5, NOON, NOON)}, 10, NOON)[NOON]
    assert (late.state, late.version, late.rows, late.late_rows, late.reason) == (DROPPED, 1, 1, 1, gone[NOON].reason)
    seen = check_segments(
        {NOON: late}, WatermarkCheck(NOON + 30 * HOUR, LowWatermark(NOON + 3 * HOUR, None)), 11, RULES
    )
    assert NOON not in seen
    again = drop_before({NOON: late}, NOON + HOUR, 12, NOON, RULES, {})
    assert set(again) == {NOON}
    more = add_rows(again, {NOON: AddedRows(2, 9, NOON, NOON)}, 13, NOON)[NOON]
    assert (more.rows, more.late_rows) == (2, 3), "late rows stay counted when they are dropped"


def test_segments_whose_rows_are_replaced():
    was = {NOON: window(0, READY), NOON + HOUR: window(1, READY), NOON + 2 * HOUR: window(2, ACTIVE)}
    same, other = AddedRows(2, 20, NOON, NOON + HOUR / 2), AddedRows(3, 30, NOON, NOON)
    found = replace_rows(
        was,
        {
            NOON: RecountedRows(same, is_changed=False),
            NOON + HOUR: RecountedRows(other, is_changed=True),
            NOON + 2 * HOUR: RecountedRows(None, is_changed=True),
            NOON + 3 * HOUR: RecountedRows(other, is_changed=True),
            NOON + 4 * HOUR: RecountedRows(None, is_changed=False),
        },
        9,
        NOON + 9 * HOUR,
    )
    assert {(start - NOON) // HOUR: (s.state, s.version, s.rows, s.late_rows) for start, s in found.items()} == {
        1: (ACTIVE, 2, 3, 1),
        2: (ACTIVE, 1, 0, 0),
        3: (ACTIVE, 1, 3, 0),
    }
    assert (found[NOON + 2 * HOUR].first, found[NOON + 2 * HOUR].last) == (None, None)
    closed = {NOON: window(0, READY, rows=9)}
    counted = replace_rows(closed, {NOON: RecountedRows(same, is_changed=False)}, 9, NOON)
    assert (counted[NOON].rows, counted[NOON].version) == (2, 2), "its count was wrong: it is another version"
    dropped = {NOON: window(0, DROPPED, rows=0)}
    back = replace_rows(dropped, {NOON: RecountedRows(same, is_changed=True)}, 9, NOON)[NOON]
    assert (back.state, back.version, back.rows, back.late_rows) == (DROPPED, 1, 2, 0), "a reload brings none late"
