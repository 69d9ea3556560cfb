"""Segments against a world in which everything is known: which rows each source has written and not yet told.

Sources write lines of event times that mostly rise; they lag, fall silent, die, come back, send heartbeats or none, and
some begin above seqno 0. Those of one rack fall silent together. Several tables are loaded from one topic: from the
original or from a copy that lags, from the first chunk on or created when Kafka has removed some. What must hold is
said without the rules' own words: READY never comes while a live source has rows of that window still to come, while
those that fell silent together have some, of all or of a rack, nor while the original has some that a table may still
get. Counts are those of the rows, every window ends READY once all others are finished, and a version becomes READY
once. Some sources have a clock of 1970, of another month or of a far future, and of some Kafka has lost what was
recorded: they hold up nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from logferry.loaders.planning.plan import TopicPartition
from logferry.loaders.planning.segment_states import (
    ACTIVE,
    IMMUTABLE,
    READY,
    AddedRows,
    Segment,
    SegmentRules,
    WatermarkCheck,
    add_rows,
    check_segments,
    usually_has_rows,
)
from logferry.loaders.planning.source_facts import SourceFacts, SourceKey, SourceView, low_watermark, merged
from logferry.loaders.runs.segment_check import ReportedSource, source_views

RULES = SegmentRules(window_s=3600, late_wait_s=1800, max_wait_s=7200, source_idle_s=900)
IDLE, HOLD = timedelta(seconds=900), timedelta(seconds=7200)
BEGIN = datetime(2026, 11, 20, 8, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
TOPIC = "dc1.a"
PARTITIONS = (0, 1)


@dataclass
class Source:
    """``pending``: events that it has, in order, and has not sent. ``seqno``: of its last chunk, or below its first."""

    name: str
    beats: bool
    partition: int
    seqno: int
    pending: list[datetime] = field(default_factory=list)
    sent: datetime | None = None
    beat: datetime | None = None
    watermark: datetime | None = None
    is_finished: bool = False

    @property
    def key(self) -> SourceKey:
        return SourceKey(TOPIC, self.name)

    def report(self) -> ReportedSource:
        seqno = None if self.sent is None else self.seqno
        known = (self.sent, self.beat, self.watermark, self.is_finished)
        return ReportedSource(seqno, *known, frozenset({self.partition}))

    def heard(self) -> datetime | None:
        return max((at for at in (self.sent, self.beat) if at is not None), default=None)


class Chunk(NamedTuple):
    """One line."""

    source: SourceKey
    seqno: int
    event: datetime
    recorded: datetime


class Table:
    """What a loader has made of the chunks. ``at``: its position in each partition; ``there``: the end that it sees."""

    def __init__(self, world: World, *, is_copy: bool) -> None:
        self.world, self.is_copy = world, is_copy
        self.at = dict(world.kept)
        self.there = dict(world.kept)
        self.known: dict[SourceKey, SourceFacts] = {}
        self.segments: dict[datetime, Segment] = {}
        self.rows: dict[datetime, list[datetime]] = {}
        self.batch = 0
        self.ready: list[tuple[datetime, int]] = []

    def mirror(self, share: float) -> None:
        """What was removed before it was copied never comes."""
        for p in PARTITIONS:
            end = len(self.world.log[p])
            start = max(self.there[p], self.world.kept[p])
            self.there[p] = start + round((end - start) * share) if self.is_copy else end
            self.at[p] = max(self.at[p], self.world.kept[p])

    def load(self, share: float) -> None:
        self.batch += 1
        added: dict[datetime, list[datetime]] = {}
        for p in PARTITIONS:
            many = round((self.there[p] - self.at[p]) * share)
            for chunk in self.world.log[p][self.at[p] : self.at[p] + many]:
                added.setdefault(RULES.start_of(chunk.event), []).append(chunk.event)
                facts = SourceFacts(chunk.seqno, chunk.seqno, chunk.recorded, chunk.event)
                self.known = merged(self.known, {chunk.source: facts})
            self.at[p] += many
        news = {start: AddedRows(len(e), 10 * len(e), min(e), max(e)) for start, e in added.items()}
        for start, events in added.items():
            self.rows.setdefault(start, []).extend(events)
        self.take(add_rows(self.segments, news, self.batch, self.world.now))

    def look(self) -> None:
        """Only what began with everything loaded is a look."""
        if self.at != self.there:
            return
        self.batch += 1
        world = self.world
        reported = {s.key: s.report() for s in world.sources if s.heard() is not None}
        passed = set() if self.is_copy else {TopicPartition(TOPIC, p) for p in PARTITIONS}
        views = [*world.strange, *world.wrong_clocks(), *source_views(self.known, reported, [TOPIC], passed)]
        is_steady = usually_has_rows(self.segments, world.now, RULES)
        silence = (RULES.source_idle_s, RULES.max_wait_s, RULES.silent_share)
        low = low_watermark(views, world.now, *silence, is_steady=is_steady)
        changed = check_segments(self.segments, WatermarkCheck(world.now, low), self.batch, RULES)
        for start, segment in changed.items():
            if segment.state == READY:
                self.check_nobody_owes(start)
                self.ready.append((start, segment.version))
                assert (segment.sources, segment.watermark) == (len(views), low.at)
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
            events = self.rows.get(start, [])
            assert (segment.rows, segment.bytes) == (len(events), 10 * len(events))
            assert (segment.first, segment.last) == (min(events, default=None), max(events, default=None))
        self.segments |= changed

    def check_nobody_owes(self, start: datetime) -> None:
        """A live source that tells in order, and has told nothing of later windows, has no rows of this one left.

        Nor has Kafka any of such a source, alive or not, that are not loaded and may still be.
        """
        end, now = RULES.end_of(start), self.world.now
        waited_for = self.world.silent_together() | self.silent_at_once(end)
        events = {key: facts.event for key, facts in self.known.items() if facts.event is not None}
        for source in self.world.sources:
            heard, event = source.heard(), events.get(source.key)
            if heard is None or source.is_finished or (now - heard >= IDLE and source.name not in waited_for):
                continue
            owed = [at for at in source.pending if RULES.start_of(at) == start]
            told = [mark for mark in (event, source.watermark) if mark is not None]
            assert not owed or max(told) >= end, (source, start)
        for p in PARTITIONS:
            for chunk in self.world.log[p][max(self.at[p], self.world.kept[p]) :]:
                event = events.get(chunk.source)
                is_told = event is not None and event >= end
                assert RULES.start_of(chunk.event) != start or is_told, (chunk, start)

    def silent_at_once(self, end: datetime) -> set[str]:
        """Those heard of in the last 15 minutes before an outage, for a window that ended less than two hours ago.

        None, if the table has no rows in more than a quarter of the hours of the day before it, or in six hours.
        """
        now, last = self.world.now, self.world.reached
        newest = max((start for start in self.rows if start <= now), default=now)
        before = [newest - n * HOUR for n in range(1, 25) if newest - n * HOUR >= min(self.segments)]
        is_usual = len(before) >= 6 and 4 * sum(hour in self.rows for hour in before) >= 3 * len(before)
        if now - last < IDLE or now - end >= HOLD or not is_usual:
            return set()
        self.world.held_at_once += 1
        return {s.name for s in self.world.sources if (at := s.heard()) is not None and last - at < IDLE}


class World:
    """A clock, sources, Kafka and tables. ``kept``: the first chunk of each partition that Kafka still has."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.now = self.reached = BEGIN
        self.sources = [Source(f"s{i}", i % 2 == 0, i // 2 % 2, 5000 if i > 3 else -1) for i in range(6)]
        # The hosts of one rack, and others.
        self.sources += [Source(f"r{i}", True, i % 2, -1) for i in range(4)]
        self.sources += [Source(f"b{i}", True, i % 2, -1) for i in range(3)]
        # What a check sees besides; none of it may matter.
        self.strange = [
            SourceView(TOPIC, "lost", None, BEGIN - timedelta(days=9), is_lost=True),
            SourceView(TOPIC, "beats and lost", None, BEGIN, BEGIN + timedelta(days=99), is_lost=True),
        ]
        self.is_out = self.is_rack_out = False
        self.held_at_once = self.held_racks = 0
        self.log: dict[int, list[Chunk]] = {p: [] for p in PARTITIONS}
        self.kept = dict.fromkeys(PARTITIONS, 0)
        self.tables = [Table(self, is_copy=False), Table(self, is_copy=True)]

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
            source.seqno += 1
            self.log[source.partition].append(Chunk(source.key, source.seqno, event, self.now))
            source.sent = self.now
        del source.pending[:many]

    def say(self, source: Source) -> None:
        if source.beats:
            source.beat = self.now
            source.watermark = min([self.now, *source.pending])

    def remove(self, *, all_of_it: bool = False) -> None:
        """Kafka's retention. It keeps what a table of the original still needs; a copy may miss it."""
        for p in PARTITIONS:
            loaded = min(table.at[p] for table in self.tables if not table.is_copy)
            self.kept[p] = loaded if all_of_it else self.dice.randint(self.kept[p], loaded)

    def wrong_clocks(self) -> list[SourceView]:
        """They write whenever the gateway can be reached, and their lines are of other years."""
        years = {"1970": datetime(1970, 1, 1, 5, tzinfo=UTC), "2090": datetime(2090, 1, 1, tzinfo=UTC)}
        years |= {f"{days:+} days": self.reached + timedelta(days=days) for days in (-30, 30)}
        return [SourceView(TOPIC, name, event, self.reached) for name, event in years.items()]

    def silent_together(self) -> set[str]:
        """Those of which more stopped in the same 15 minutes than were seen later, said one by one. Or at least four,
        a quarter of all of these, less than two hours ago.
        """
        last = {s.name: s.heard() or BEGIN for s in self.sources if s.beat is not None and not s.is_finished}
        found: set[str] = set()
        for first in last.values():
            stopped = {name for name, at in last.items() if first <= at < first + IDLE and self.now - at >= IDLE}
            many = len([at for at in last.values() if at >= first])
            if 2 * len(stopped) > many:
                found |= stopped
            elif 4 <= len(stopped) >= many / 4 and self.now - max(last[name] for name in stopped) < HOLD:
                self.held_racks += 1
                found |= stopped
        return found

    def live_on(self) -> None:
        """A step of all sources and tables."""
        dice = self.dice
        self.now += dice.choice([1, 1, 2, 10, 40]) * MINUTE
        # Nobody reaches the gateway for hours.
        if dice.random() < (0.2 if self.is_out else 0.02):
            self.is_out = not self.is_out
        if dice.random() < (0.1 if self.is_rack_out else 0.02):
            self.is_rack_out = not self.is_rack_out
        if not self.is_out:
            self.reached = self.now
        for source in self.sources:
            if dice.random() < 0.5:
                self.write(source)
            if self.is_out or (self.is_rack_out and source.name.startswith("r")):
                continue
            if dice.random() < 0.4:
                self.send(source)
            if dice.random() < 0.4:
                self.say(source)
        for table in self.tables:
            table.mirror(dice.choice([0.0, 0.3, 1.0]))
            if dice.random() < 0.5:
                table.load(dice.choice([0.5, 1.0]))
            table.look()


def live_to_the_end(seed: int) -> World:
    dice = random.Random(seed)
    world = World(dice)
    for step in range(400):
        world.live_on()
        if dice.random() < 0.05:
            world.remove()
        if step in (150, 300):
            world.tables += [Table(world, is_copy=False), Table(world, is_copy=True)]
    # All is sent, all sources but one for each partition are finished, and Kafka removes all.
    for source in world.sources:
        while source.pending:
            world.send(source)
        source.is_finished = source.name not in ("s0", "s3")
    for table in world.tables:
        if not table.is_copy:
            table.mirror(1.0)
            table.load(1.0)
    world.remove(all_of_it=True)
    world.tables += [Table(world, is_copy=False), Table(world, is_copy=True)]
    for _ in range(30):
        world.now += 20 * MINUTE
        for source in world.sources:
            if not source.is_finished:
                source.pending.append(world.now)
                while source.pending:
                    world.send(source)
                world.say(source)
        for table in world.tables:
            table.mirror(1.0)
            table.load(1.0)
            table.look()
    return world
