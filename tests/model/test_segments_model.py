"""The rules of segments: against the world of `segments_world`, and one by one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logferry.loaders.planning.segment_states import (
    ACTIVE,
    IMMUTABLE,
    READY,
    AddedRows,
    Segment,
    WatermarkCheck,
    add_rows,
    check_segments,
    usually_has_rows,
)
from logferry.loaders.planning.source_facts import LowWatermark, SourceView, low_watermark, without

from tests.model.segments_world import BEGIN, HOUR, MINUTE, RULES, live_to_the_end


@pytest.mark.parametrize("seed", range(30))
def test_a_stream_of_late_silent_and_dying_sources(seed: int):
    world = live_to_the_end(seed)
    for table in world.tables:
        # The newest hours are on their way.
        old = {start: s for start, s in table.segments.items() if world.now - start > 4 * HOUR}
        assert {segment.state for segment in old.values()} == {READY}
        assert table.rows.keys() <= table.segments.keys()
        assert len(table.ready) == len(set(table.ready)), "each version became READY once"
        assert all((start, segment.version) in table.ready for start, segment in old.items())
        starts = sorted(table.segments)
        assert starts == [starts[0] + i * HOUR for i in range(len(starts))], "silent hours are segments, too"
    assert any(segment.late_rows for segment in world.tables[0].segments.values()), "late rows came"


def test_the_world_has_what_the_rules_are_for():
    """Chunks that a copy never gets, tables that begin late, and outages that all sources share, or those of a rack."""
    worlds = [live_to_the_end(seed) for seed in range(5)]
    rows = [[sum(map(len, table.rows.values())) for table in world.tables] for world in worlds]
    assert any(copy < original for original, copy, *_ in rows)
    assert all(late < original for original, _, *both in rows for late in both)
    assert any(world.held_at_once for world in worlds)
    assert any(world.held_racks for world in worlds)


# ---- the rules one by one -----------------------------------------------------------------------------------

START = BEGIN
END = BEGIN + timedelta(hours=1)
HOLD_S = 12 * 3600.0


def at(minutes: float) -> datetime:
    return BEGIN + minutes * MINUTE


def segment(**changes: object) -> Segment:
    plain = Segment(START, 1, ACTIVE, 5, 50, at(1), at(59), 0, None, at(59), None, 7)
    return plain._replace(**changes)  # type: ignore[arg-type]


def looked(before: Segment, now: datetime, low: LowWatermark, batch: int = 9) -> Segment:
    return check_segments({START: before}, WatermarkCheck(now, low), batch, RULES).get(START, before)


def test_the_whole_way():
    past = LowWatermark(at(61), None)
    waiting = looked(segment(), at(61), past)
    assert (waiting.state, waiting.passed) == (ACTIVE, at(61))
    assert looked(waiting, at(90), past) == waiting, "not yet, and no row for that"
    closed = looked(waiting, at(91), past, batch=10)
    assert (closed.state, closed.closed) == (IMMUTABLE, at(91))
    assert check_segments({START: closed}, WatermarkCheck(at(91), past), 10, RULES) == {}, "not in the same look"
    ready = looked(closed, at(92), past, batch=11)
    assert (ready.state, ready.version, ready.batch) == (READY, 1, 11)
    late = add_rows({START: ready}, {START: AddedRows(2, 20, at(3), at(4))}, 12, at(200))[START]
    assert (late.state, late.version, late.rows, late.late_rows, late.first) == (ACTIVE, 2, 7, 2, at(1))


def test_a_late_row_begins_the_wait_again_but_not_for_ever():
    past = LowWatermark(at(300), None)
    now = looked(segment(), at(61), past)
    for minute in range(70, 61 + 120, 20):
        now = add_rows({START: now}, {START: AddedRows(1, 10, at(5), at(5))}, 8, at(minute))[START]
        now = looked(now, at(minute + 19), past)
        assert now.state == (ACTIVE if minute + 19 < 61 + 120 else IMMUTABLE), minute
    assert (now.state, now.version, now.late_rows) == (IMMUTABLE, 1, 0)


def test_a_source_that_owes_again_stops_the_wait_and_the_readiness():
    behind = LowWatermark(at(30), SourceView("dc1.a", "web7", at(30), at(50)))
    waiting = looked(segment(), at(61), LowWatermark(at(61), None))
    waits = looked(waiting, at(200), behind)
    assert waits.passed is None
    assert waits.reason == "waits for web7 in dc1.a, at 2026-11-20T08:30:00Z, last seen at 2026-11-20T08:50:00Z"
    closed = segment(state=IMMUTABLE, passed=at(61), closed=at(91))
    assert looked(closed, at(100), behind).state == IMMUTABLE


VIEWS: dict[str, tuple[list[SourceView], datetime | None]] = {
    "none": ([], at(100)),
    "one that writes": ([SourceView("t", "s", at(30), at(95))], at(30)),
    "one that is silent": ([SourceView("t", "s", at(30), at(80))], at(100)),
    "silent, but it beats": ([SourceView("t", "s", at(30), at(40), beat=at(99))], at(30)),
    "it beats, and has told all": ([SourceView("t", "s", at(30), at(40), beat=at(99), watermark=at(99))], at(99)),
    "it has told all, but not all is loaded": (
        [SourceView("t", "s", at(30), at(40), beat=at(99), watermark=at(99), owes=True)],
        at(30),
    ),
    "dead, but not all is loaded": ([SourceView("t", "s", at(30), at(31), owes=True)], at(30)),
    "clock ahead, by a heartbeat": ([SourceView("t", "s", at(30), at(95), at(95), at(900))], at(95)),
    "clock a month ahead, by a heartbeat": (
        [SourceView("t", "s", at(30), at(95), at(95), at(95) + timedelta(days=30))],
        at(95),
    ),
    "clock a month behind, by a heartbeat": (
        [SourceView("t", "s", None, None, at(99), at(99) - timedelta(days=30))],
        at(100),
    ),
    "all fell silent": ([SourceView("t", "s", at(30), at(40), beat=at(80), watermark=at(80))], at(80)),
    "all but one fell silent": (
        [SourceView("t", f"s{n}", at(30), at(40), beat=at(80)) for n in range(2)]
        + [SourceView("t", "r", at(95), at(95), beat=at(95))],
        at(30),
    ),
    "as many fell silent as are alive": (
        [SourceView("t", "s", at(30), at(40), beat=at(80)), SourceView("t", "r", at(95), at(95), beat=at(95))],
        at(95),
    ),
    "one by one": (
        [SourceView("t", f"s{n}", at(n), at(n), beat=at(20 * n)) for n in range(4)]
        + [SourceView("t", "r", at(95), at(95), beat=at(95))],
        at(95),
    ),
    "all are silent, without heartbeats": ([SourceView("t", f"s{n}", at(30), at(80)) for n in range(9)], at(100)),
    "a clock of 1970": ([SourceView("t", "s", datetime(1970, 1, 2, tzinfo=UTC), at(99))], at(100)),
    "a clock of 1970, but it owes": (
        [SourceView("t", "s", datetime(1970, 1, 2, tzinfo=UTC), at(99), owes=True)],
        datetime(1970, 1, 2, tzinfo=UTC),
    ),
    "its records are lost": ([SourceView("t", "s", None, at(99), is_lost=True)], at(100)),
    "finished": ([SourceView("t", "s", at(30), at(99), finished=True)], at(100)),
    "a clock that is ahead": ([SourceView("t", "s", at(900), at(95))], at(95)),
    "nothing known yet": ([SourceView("t", "s", None, None, beat=at(99))], None),
    "several": ([SourceView("t", "s", at(30), at(95)), SourceView("t", "r", at(20), at(95))], at(20)),
}


@pytest.mark.parametrize("case", VIEWS)
def test_the_low_watermark(case: str):
    views, want = VIEWS[case]
    assert low_watermark(views, at(100), RULES.source_idle_s).at == want


def rack(many: int, others: int, silent_since: float = 80) -> list[SourceView]:
    """So many sources with heartbeats fell silent at that minute, with lines since minute 30; the others live."""
    silent = [SourceView("t", f"a{n}", at(30), at(40), beat=at(silent_since)) for n in range(many)]
    return silent + [SourceView("t", f"b{n}", at(95), at(95), beat=at(99)) for n in range(others)]


@pytest.mark.parametrize(
    ("many", "others", "share", "is_held"),
    [
        (10, 10, 0.25, True),
        (5, 15, 0.25, True),
        (4, 16, 0.25, False),
        (4, 16, 0.2, True),
        (3, 7, 0.25, False),
        (4, 4, 0.25, True),
        (10, 10, 1.0, False),
        (11, 10, 1.0, True),
    ],
)
def test_a_share_that_falls_silent_together(many: int, others: int, share: float, is_held: bool):
    """A rack of ten among twenty holds its hours; three hosts of ten that were switched off do not."""
    low = low_watermark(rack(many, others), at(100), 900, HOLD_S, share)
    assert (low.at, low.together) == ((at(30), many) if is_held else (at(95), 0))


def test_a_share_is_held_for_the_longest_wait():
    """A few retired hosts delay hours for a while, most of the sources until an operator decides."""
    views, last = rack(10, 10), at(80) + timedelta(seconds=HOLD_S - 1)
    live = [view._replace(beat=last, event=last, recorded=last) for view in views[10:]]
    low = low_watermark([*views[:10], *live], last, 900, HOLD_S)
    assert (low.at, low.together) == (at(30), 10)
    assert low.why() == (
        "waits for a0 in t, at 2026-11-20T08:30:00Z, last seen at 2026-11-20T09:20:00Z: "
        "10 of 20 sources fell silent together; held for 43,200 s at most"
    )
    low = low_watermark([*views[:10], *live], last + timedelta(seconds=1), 900, HOLD_S)
    assert (low.at, low.together, low.silent) == (last, 0, 10)
    assert low_watermark(rack(11, 10), at(30 * 24 * 60), 900, HOLD_S).at == at(30)
    slowly = [view._replace(beat=at(8 * n), recorded=at(8 * n)) for n, view in enumerate(rack(10, 10))]
    assert low_watermark(slowly, at(100), 900, HOLD_S).together == 0, "one by one"
    assert low_watermark(without(views, ["a*"]), at(100), 900, HOLD_S).at == at(95)


def test_sources_that_are_silent_at_once():
    """After an hour of silence of all: those count that stopped in the same quarter of an hour as the last one."""
    views = [SourceView("t", "s", at(30), at(31)), SourceView("t", "r", at(39), at(40))]
    views += [SourceView("t", "early", at(10), at(20)), SourceView("t", "done", at(10), at(40), finished=True)]
    views.append(SourceView("t", "lost", None, at(41), is_lost=True))
    idle, hold = RULES.source_idle_s, 3600.0
    low = low_watermark(views, at(89), idle, hold, is_steady=True)
    assert (low.at, low.together) == (at(30), 2)
    assert low.why().endswith("2 of 5 sources fell silent together; held for 3,600 s at most")
    assert low_watermark(views, at(99), idle).at == at(99), "silence is usual here"
    live = SourceView("t", "live", at(98), at(98))
    assert low_watermark([*views, live], at(99), idle, hold, is_steady=True).at == at(98), "not all"
    low = low_watermark(views, at(54), idle, hold, is_steady=True)
    assert low.at == at(39), "not yet: the one that stopped first is silent alone"


def test_each_hour_of_an_outage_waits_the_longest_wait():
    """The later hours become READY at some time, but not as soon as the first hours have waited."""
    views = [SourceView("t", f"s{n}", at(30), at(31)) for n in range(3)]
    for minutes in (120, 600, 60 * 24 * 9):
        low = low_watermark(views, at(minutes), RULES.source_idle_s, 3600, is_steady=True)
        assert (low.at, low.silent, low.together) == (at(minutes - 60), 3, 3)
        assert not low.is_past(at(minutes - 59))


def rows_in(window_s: int, *share: int) -> dict[datetime, Segment]:
    """Segments of this length up to START, the newest last, with rows where it says 1."""
    starts = [START - timedelta(seconds=n * window_s) for n in reversed(range(len(share)))]
    return {start: segment(start=start, rows=rows) for start, rows in zip(starts, share, strict=True)}


@pytest.mark.parametrize(
    ("window_s", "share", "is_enough"),
    [
        (3600, [1] * 25, True),
        (900, [1] * 97, True),
        (3600, [1] * 24 + [0, 1], True),
        (3600, [*([1, 1, 1, 0] * 6), 1], True),
        (3600, [*([1, 1, 0] * 8), 1], False),
        (3600, [*[0] * 23, 1], False),
        (3600, [1] * 7, True),
        (3600, [1] * 6, False),
        (10, [1] * 2160, False),
        (10, [1] * 2161, True),
        (7200, [1] * 13, True),
        (86400, [1] * 8, True),
        (86400, [*[0] * 30, *[1, 1, 1, 1, 0, 0, 1], 1], False),
        (86400, [*[0] * 30, *[1, 1, 1, 1, 1, 1, 0], 1], True),
        (7 * 86400, [1] * 8, True),
        (3600, [0] * 25, False),
        (3600, [], False),
    ],
)
def test_a_table_that_usually_has_rows(window_s: int, share: list[int], is_enough: bool):
    """Three quarters of a day's segments before the newest one with rows, or of the last seven; six hours at least."""
    rules = RULES._replace(window_s=window_s)
    rows = rows_in(window_s, *share)
    # A clock that is ahead, and segments without rows since.
    rows[START + 90 * HOUR] = segment(start=START + 90 * HOUR)
    rows[START + 3 * HOUR] = segment(start=START + 3 * HOUR, rows=0)
    assert usually_has_rows(rows, START + 5 * HOUR, rules) is is_enough


def test_an_outage_of_weeks_is_no_wrong_clock():
    views = [SourceView("t", f"s{n}", at(30), at(40), beat=at(50)) for n in range(3)]
    low = low_watermark(views, at(30 * 24 * 60), RULES.source_idle_s)
    assert (low.at, low.sources, low.silent, low.together) == (at(30), 3, 3, 3)
    assert low.why() == (
        "waits for s0 in t, at 2026-11-20T08:30:00Z, last seen at 2026-11-20T08:50:00Z: "
        "3 of 3 sources fell silent together"
    )
    assert without(views, ["s0", "s1"]) == views[2:]
    assert without(views, ["s*"]) == []
    assert without(views, ["s", "*0x", "S0", "s.*"]) == views


def test_a_source_that_is_far_behind_holds_up_old_segments():
    """It loads what is older than a week: today's hours do not wait, those after its newest event do."""
    old = START - timedelta(days=30)
    back = SourceView("t", "back", old, at(99))
    low = low_watermark([back, SourceView("t", "s", at(99), at(99))], at(100), RULES.source_idle_s)
    assert low.is_past(END)
    assert low.is_past(old)
    assert not low.is_past(old + timedelta(hours=1))
    assert not low.is_past(old + timedelta(days=7))
    assert low.why(old + timedelta(hours=1)).startswith("waits for back in t, at 2026-10-21T08:00:00Z")
    assert low.why(END) == ""


def test_ready_says_what_it_was_based_on():
    views = [SourceView("t", "s", at(80), at(99)), SourceView("t", "silent", at(10), at(10))]
    low = low_watermark(views, at(100), RULES.source_idle_s)
    closed = segment(state=IMMUTABLE, passed=at(61), closed=at(91))
    ready = looked(closed, at(100), low)
    assert (ready.state, ready.sources, ready.silent_sources, ready.watermark) == (READY, 2, 1, at(80))
    late = add_rows({START: ready}, {START: AddedRows(1, 10, at(3), at(4))}, 12, at(200))[START]
    assert (late.sources, late.silent_sources, late.watermark) == (None, None, None)


def test_a_silent_hour_long_ago_is_a_segment():
    """A new table loads many hours of an old topic at once."""
    hours = [START + n * HOUR for n in range(200) if n != 3]
    rows = {start: segment(start=start) for start in hours}
    now = START + 200 * HOUR
    changed = check_segments(rows, WatermarkCheck(now, LowWatermark(now, None)), 9, RULES)
    assert changed[START + 3 * HOUR].rows == 0


def test_a_long_silence_is_not_filled():
    old = segment(start=datetime(2005, 12, 4, 4, tzinfo=UTC))
    changed = check_segments({old.start: old}, WatermarkCheck(at(0), LowWatermark(at(0), None)), 9, RULES)
    assert changed.keys() == {old.start}


@settings(max_examples=200)
@given(st.integers(-(10**12), 10**12), st.sampled_from([60, 900, 3600, 86400]))
def test_windows(micros: int, window_s: int):
    rules = RULES._replace(window_s=window_s)
    event = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
    start = rules.start_of(event)
    assert start <= event < rules.end_of(start)
    assert int(start.timestamp()) % window_s == 0
