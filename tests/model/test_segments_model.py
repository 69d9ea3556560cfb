"""Segments against a world in which everything is known: which rows each source has written and not yet told.

Sources write lines of event times that mostly rise; they lag, fall silent, die, come back, send heartbeats or none. A
loader loads part or all of what is there, and looks. What must hold is said without the rules' own words: READY never
stands while a live source has rows of that window still to come, counts are those of the rows, every window ends READY
once all is told, and a version becomes READY once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logferry.loaders.planning.segment_states import (
    ACTIVE,
    IMMUTABLE,
    READY,
    Added,
    Look,
    Low,
    Rules,
    Segment,
    SourceView,
    add_rows,
    end_of,
    look_at,
    low_watermark,
    reasons,
    window_of,
)

RULES = Rules(window_s=3600, wait_s=1800, wait_most_s=7200, idle_s=900)
BEGIN = datetime(2026, 11, 20, 8, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@dataclass
class Source:
    """``pending``: events that it has, in order, and has not sent. ``unloaded``: what Kafka has of it."""

    name: str
    beats: bool
    pending: list[datetime] = field(default_factory=list)
    unloaded: list[tuple[datetime, datetime]] = field(default_factory=list)
    event: datetime | None = None
    recorded: datetime | None = None
    sent: datetime | None = None
    beat: datetime | None = None
    watermark: datetime | None = None

    def view(self) -> SourceView:
        return SourceView(
            "dc1.a", self.name, self.event, self.recorded, self.beat, self.watermark, False, bool(self.unloaded)
        )

    def heard(self) -> datetime | None:
        return max((at for at in (self.sent, self.beat) if at is not None), default=None)


class World:
    """A clock, sources, and what the loader has made of them."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.now = BEGIN
        self.sources = [Source(f"s{i}", beats=i % 2 == 0) for i in range(4)]
        self.segments: dict[datetime, Segment] = {}
        self.rows: dict[datetime, list[datetime]] = {}
        self.batch = 0
        self.ready: list[tuple[datetime, int]] = []

    def write(self, source: Source) -> None:
        """New events, up to now; they wait with the source until it sends."""
        for _ in range(self.dice.randrange(4)):
            back = self.dice.choice([0, 0, 0, 0, 0, 1, 5, 20, 300])
            source.pending.append(self.now - back * MINUTE)
        source.pending.sort()

    def send(self, source: Source) -> None:
        """All of it or the older half: a source tells in the order of its events, but for what it learned late."""
        many = len(source.pending) if self.dice.random() < 0.7 else len(source.pending) // 2
        for event in source.pending[:many]:
            source.unloaded.append((event, self.now))
            source.sent = self.now
        del source.pending[:many]

    def say(self, source: Source) -> None:
        if source.beats:
            source.beat = self.now
            source.watermark = min([self.now, *source.pending])

    def load(self, share: float) -> None:
        self.batch += 1
        added: dict[datetime, list[datetime]] = {}
        for source in self.sources:
            many = round(len(source.unloaded) * share)
            for event, recorded in source.unloaded[:many]:
                added.setdefault(window_of(event, RULES), []).append(event)
                source.event = event if source.event is None else max(source.event, event)
                source.recorded = recorded
            del source.unloaded[:many]
        news = {start: Added(len(e), 10 * len(e), min(e), max(e)) for start, e in added.items()}
        for start, events in added.items():
            self.rows.setdefault(start, []).extend(events)
        self.take(add_rows(self.segments, news, self.batch, self.now))

    def look(self) -> None:
        """Only what began with everything loaded is a look."""
        if any(source.unloaded for source in self.sources):
            return
        self.batch += 1
        low = low_watermark((source.view() for source in self.sources), self.now, RULES)
        changed = look_at(self.segments, Look(self.now, low), self.batch, RULES)
        for start, segment in changed.items():
            if segment.state == READY:
                self.check_nobody_owes(start)
                self.ready.append((start, segment.version))
        self.take(changed)

    def take(self, changed: dict[datetime, Segment]) -> None:
        for start, segment in changed.items():
            before = self.segments.get(start)
            steps = {(None, ACTIVE), (ACTIVE, ACTIVE), (ACTIVE, IMMUTABLE), (IMMUTABLE, READY)}
            steps |= {(IMMUTABLE, ACTIVE), (READY, ACTIVE)}
            assert (before and before.state, segment.state) in steps
            if before is not None:
                opened = before.state != ACTIVE and segment.state == ACTIVE
                assert segment.version == before.version + opened
        self.segments |= changed
        for start, segment in self.segments.items():
            events = self.rows.get(start, [])
            assert (segment.rows, segment.bytes) == (len(events), 10 * len(events))
            assert (segment.first, segment.last) == (min(events, default=None), max(events, default=None))

    def check_nobody_owes(self, start: datetime) -> None:
        """A live source that tells in order, and has told nothing of later windows, has no rows of this one left."""
        end = end_of(start, RULES)
        for source in self.sources:
            heard = source.heard()
            if heard is None or (self.now - heard).total_seconds() >= RULES.idle_s:
                continue
            owed = [event for event in source.pending if window_of(event, RULES) == start]
            told = [mark for mark in (source.event, source.watermark) if mark is not None]
            assert not owed or max(told) >= end, (source, start)


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_of_late_silent_and_dying_sources(seed: int):
    dice = random.Random(seed)
    world = World(dice)
    for _ in range(400):
        world.now += dice.choice([1, 1, 2, 10, 40]) * MINUTE
        for source in world.sources:
            if dice.random() < 0.5:
                world.write(source)
            if dice.random() < 0.4:
                world.send(source)
            if dice.random() < 0.4:
                world.say(source)
        if dice.random() < 0.5:
            world.load(dice.choice([0.5, 1.0]))
        world.look()
    # All is told; the world falls silent: every window ends READY, in its newest version.
    for source in world.sources:
        world.send(source)
        world.send(source)
        while source.pending:
            world.send(source)
    world.load(1.0)
    for _ in range(30):
        world.now += 20 * MINUTE
        world.look()
    # The newest hours are on their way.
    old = {start: s for start, s in world.segments.items() if (world.now - start).total_seconds() > 4 * 3600}
    assert {segment.state for segment in old.values()} == {READY}
    assert all(start in old for start in world.rows)
    assert len(world.ready) == len(set(world.ready)), "each version became READY once"
    assert all((start, segment.version) in world.ready for start, segment in old.items())
    assert any(segment.late_rows for segment in old.values()), "late rows came"
    starts = sorted(world.segments)
    assert starts == [starts[0] + timedelta(hours=i) for i in range(len(starts))], "silent hours are segments, too"


# ---- the rules one by one -----------------------------------------------------------------------------------

START = BEGIN
END = BEGIN + timedelta(hours=1)


def at(minutes: float) -> datetime:
    return BEGIN + minutes * MINUTE


def segment(**changes: object) -> Segment:
    plain = Segment(START, 1, ACTIVE, 5, 50, at(1), at(59), 0, None, at(59), None, 7)
    return plain._replace(**changes)  # type: ignore[arg-type]


def looked(before: Segment, now: datetime, low: Low, batch: int = 9) -> Segment:
    return look_at({START: before}, Look(now, low), batch, RULES).get(START, before)


def test_the_whole_way():
    past = Low(at(61), None)
    waiting = looked(segment(), at(61), past)
    assert (waiting.state, waiting.passed) == (ACTIVE, at(61))
    assert looked(waiting, at(90), past) == waiting, "not yet, and no row for that"
    closed = looked(waiting, at(91), past, batch=10)
    assert (closed.state, closed.closed) == (IMMUTABLE, at(91))
    assert look_at({START: closed}, Look(at(91), past), 10, RULES) == {}, "not in the same look"
    ready = looked(closed, at(92), past, batch=11)
    assert (ready.state, ready.version, ready.batch) == (READY, 1, 11)
    late = add_rows({START: ready}, {START: Added(2, 20, at(3), at(4))}, 12, at(200))[START]
    assert (late.state, late.version, late.rows, late.late_rows, late.first) == (ACTIVE, 2, 7, 2, at(1))


def test_a_late_row_begins_the_wait_again_but_not_for_ever():
    past = Low(at(300), None)
    now = looked(segment(), at(61), past)
    for minute in range(70, 61 + 120, 20):
        now = add_rows({START: now}, {START: Added(1, 10, at(5), at(5))}, 8, at(minute))[START]
        now = looked(now, at(minute + 19), past)
        assert now.state == (ACTIVE if minute + 19 < 61 + 120 else IMMUTABLE), minute
    assert (now.state, now.version, now.late_rows) == (IMMUTABLE, 1, 0)


def test_a_source_that_owes_again_stops_the_wait_and_the_readiness():
    behind = Low(at(30), SourceView("dc1.a", "web7", at(30), at(50)))
    waiting = looked(segment(), at(61), Low(at(61), None))
    assert looked(waiting, at(200), behind).passed is None
    closed = segment(state=IMMUTABLE, passed=at(61), closed=at(91))
    assert looked(closed, at(100), behind).state == IMMUTABLE
    (reason,) = reasons([closed], Look(at(100), behind), RULES).values()
    assert reason == "waits for web7 in dc1.a, at 2026-11-20T08:30:00Z, heard of at 2026-11-20T08:50:00Z"


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
    "finished": ([SourceView("t", "s", at(30), at(99), finished=True)], at(100)),
    "a clock that is ahead": ([SourceView("t", "s", at(900), at(95))], at(95)),
    "nothing known yet": ([SourceView("t", "s", None, None, beat=at(99))], None),
    "several": ([SourceView("t", "s", at(30), at(95)), SourceView("t", "r", at(20), at(95))], at(20)),
}


@pytest.mark.parametrize("case", VIEWS)
def test_the_low_watermark(case: str):
    views, want = VIEWS[case]
    assert low_watermark(views, at(100), RULES).at == want


def test_a_long_silence_is_not_filled():
    old = segment(start=datetime(2005, 12, 4, 4, tzinfo=UTC))
    changed = look_at({old.start: old}, Look(at(0), Low(at(0), None)), 9, RULES)
    assert changed.keys() == {old.start}


@settings(max_examples=200)
@given(st.integers(-(10**12), 10**12), st.sampled_from([60, 900, 3600, 86400]))
def test_windows(micros: int, window_s: int):
    rules = RULES._replace(window_s=window_s)
    event = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
    start = window_of(event, rules)
    assert start <= event < end_of(start, rules)
    assert int(start.timestamp()) % window_s == 0
