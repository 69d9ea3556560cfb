"""Segments of a real table, run after run, against a model of the state of each segment.

Days pass on a clock of the test's own: sources write late, out of order and very late, fall silent, die with lines that
they never sent, say by heartbeats how far they are, or say nothing. After each run every window's state, version and
counts are those of the model, which this module computes independently; and no window becomes READY while a source that
is alive, and tells in order, has lines of it still to send. One that was silent then, and wakes up with such lines, has
them in a new version.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from logferry.loaders.batches import execute
from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.source_facts import SourceKey
from logferry.loaders.runs import segment_check
from logferry.loaders.runs.segment_check import ReportedSource
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.side_tables import read_segments
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Topic, chunks_of

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
WAIT, WAIT_MOST, IDLE = 40 * MINUTE, 3 * HOUR, 30 * MINUTE
PARSER = {"format": "regex", "pattern": r"(?<at>\S+) (?<what>.*)", "event_time": {"column": "at", "formats": ["iso"]}}
RUNS = 45


@dataclass
class Source:
    """``pending``: lines that it has not sent, by their times. ``told``: the newest that it has."""

    name: str
    beats: bool
    pending: list[datetime] = field(default_factory=list)
    told: datetime | None = None
    sent: datetime | None = None
    beat: datetime | None = None
    watermark: datetime | None = None
    is_dead: bool = False
    seqno: int = 0

    def is_live(self, now: datetime) -> bool:
        heard = [at for at in (self.sent, self.beat) if at is not None]
        return bool(heard) and now - max(heard) < IDLE

    def mark(self) -> datetime:
        """All that happened before has been told, or so it looks."""
        marks = [self.watermark] if self.watermark is not None else []
        if self.told is not None and self.sent is not None:
            marks.append(min(self.told, self.sent))
        return max(marks)


@dataclass
class Window:
    state: str = "ACTIVE"
    version: int = 1
    rows: int = 0
    late: int = 0
    touched: datetime | None = None
    passed: datetime | None = None
    closed: datetime | None = None


def stopped_together(sources: Iterable[Source], now: datetime) -> set[str]:
    """The silent ones with heartbeats of which more stopped in the same half hour than were seen later."""
    last = {s.name: max(at for at in (s.sent, s.beat) if at is not None) for s in sources if s.beat is not None}
    found: set[str] = set()
    for first in last.values():
        stopped = {name for name, at in last.items() if first <= at < first + IDLE and now - at >= IDLE}
        later = [at for at in last.values() if at >= first]
        if len(stopped) > len(later) - len(stopped):
            found |= stopped
    return found


class Model:
    """The rules in other words. A run loads all, and then looks."""

    def __init__(self) -> None:
        self.windows: dict[datetime, Window] = {}

    def run(self, now: datetime, events: Iterable[datetime], sources: Iterable[Source]) -> None:
        by_window: dict[datetime, int] = {}
        for event in events:
            start = event.replace(minute=0, second=0, microsecond=0)
            by_window[start] = by_window.get(start, 0) + 1
        for start, count in by_window.items():
            window = self.windows.setdefault(start, Window())
            if window.state != "ACTIVE":
                window.state, window.version, window.passed = "ACTIVE", window.version + 1, None
                window.late += count
            window.rows += count
            window.touched = now
        sources = list(sources)
        stopped = stopped_together(sources, now)
        low = min((source.mark() for source in sources if source.is_live(now) or source.name in stopped), default=now)
        self._fill_silence(now, low)
        for start, window in self.windows.items():
            self._look(window, is_past=low >= start + HOUR, now=now)

    def _fill_silence(self, now: datetime, low: datetime) -> None:
        """An hour in which nothing happened is a window, too, once it is over for everybody."""
        known = sorted(start for start in self.windows if start <= now)
        hour = known[0] if known else low
        while hour + HOUR <= low:
            self.windows.setdefault(hour, Window(touched=now))
            hour += HOUR

    def _look(self, window: Window, *, is_past: bool, now: datetime) -> None:
        if window.state == "IMMUTABLE" and is_past and window.closed is not None and now > window.closed:
            window.state = "READY"
        if window.state != "ACTIVE":
            return
        if not is_past:
            window.passed = None
            return
        assert window.touched is not None
        window.passed = window.passed or now
        if now - max(window.passed, window.touched) >= WAIT or now - window.passed >= WAIT_MOST:
            window.state, window.closed = "IMMUTABLE", now


class World:
    """The clock, the sources, Kafka."""

    def __init__(self, topic: Topic, dice: random.Random) -> None:
        self.topic, self.dice = topic, dice
        self.now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(days=5)
        self.sources = [Source(f"s{number}", beats=number % 2 == 0) for number in range(5)]

    async def live_on(self, run: int) -> list[datetime]:
        """Some minutes of it; the times of the lines that were sent."""
        self.now += self.dice.choice([5, 10, 10, 20, 45, 70]) * MINUTE
        sent: list[datetime] = []
        for number, source in enumerate(self.sources):
            if source.is_dead:
                continue
            if self.dice.random() < 0.7:
                late = 300 if number == 3 and self.dice.random() < 0.15 else self.dice.choice([0, 0, 1, 4, 20])
                source.pending += [self.now - (late + i) * MINUTE for i in range(self.dice.randrange(3))]
            # One is silent for hours, and wakes up with old lines; one dies with lines in its files.
            source.is_dead = number == 4 and run > RUNS // 3
            if source.is_dead or self.dice.random() < (0.85 if number == 2 else 0.45):
                continue
            sent += await self._send(source)
        return sent

    async def _send(self, source: Source) -> list[datetime]:
        """In the order of the times, all or the older half; and a heartbeat, if it sends any."""
        source.pending.sort()
        many = len(source.pending) if self.dice.random() < 0.7 else len(source.pending) // 2
        going, source.pending = source.pending[:many], source.pending[many:]
        if going:
            self.dice.shuffle(going)
            data = b"".join(f"{at.isoformat()} line of {source.name}\n".encode() for at in going)
            chunks = chunks_of(source.name, data, start=source.seqno)
            await self.topic.write(chunks, recorded_ms=int(self.now.timestamp() * 1000))
            source.seqno, source.sent = chunks[-1].chunk.seqno, self.now
            source.told = max([*going, source.told or going[0]])
        if source.beats:
            source.beat, source.watermark = self.now, min([self.now, *source.pending])
        return going

    def heard(self, *_: object) -> Mapping[SourceKey, ReportedSource]:
        """What a gateway would say of them."""
        known = (s for s in self.sources if s.sent is not None or s.beat is not None)
        return {
            SourceKey(self.topic.name, s.name): ReportedSource(s.seqno or None, s.sent, s.beat, s.watermark, False)
            for s in known
        }

    def owed(self) -> set[datetime]:
        """Hours of which a live source that has told of nothing later has lines left."""
        found = set()
        for source in self.sources:
            for at in source.pending if source.is_live(self.now) else ():
                start = at.replace(minute=0, second=0, microsecond=0)
                if source.mark() < start + HOUR:
                    found.add(start)
        return found


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(1800)
# In the first two, nine times a window that is closed must not become READY yet, since a source woke up with older
# lines; in the third, a source wakes up with lines of a window that is READY.
@pytest.mark.parametrize("seed", [108, 234, 3])
async def test_hour_by_hour(
    seed: int,
    loader: Callable[..., Loader],
    kafka: KafkaCluster,
    topic_name: str,
    warehouse: Location,
    monkeypatch: pytest.MonkeyPatch,
):
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create()
    world, model, table = World(topic, random.Random(seed)), Model(), warehouse / "logs"
    rules = {
        "late_wait_s": WAIT.total_seconds(),
        "max_wait_s": WAIT_MOST.total_seconds(),
        "source_idle_s": IDLE.total_seconds(),
    }
    raw = {"path": table, "topics": [topic.name], "parser": PARSER, "segments": rules}
    job = TableJob.model_validate(raw)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return world.now

    for module in (execute, segment_check):
        monkeypatch.setattr(module, "datetime", Clock)
    monkeypatch.setattr(segment_check, "ask_gateways", world.heard)
    seen: set[str] = set()
    before: set[tuple[datetime, int]] = set()
    for run in range(RUNS):
        events = await world.live_on(run)
        await asyncio.to_thread(lambda: list(load_table(loader(), job)))
        model.run(world.now, events, world.sources)
        found = read_segments(TablePaths.of(table).segments, last_batch(open_table(table)))
        have = {at: (s.state, s.version, s.rows, s.late_rows) for at, s in found.items()}
        want = {at: (w.state, w.version, w.rows, w.late) for at, w in model.windows.items()}
        assert have == want, f"run {run}, {world.now}"
        ready = {(at, segment.version) for at, segment in found.items() if segment.state == "READY"}
        assert not {at for at, _ in ready - before} & world.owed(), f"run {run}, {world.now}"
        before = ready
        seen |= {segment.state for segment in found.values()}
    assert seen == {"ACTIVE", "IMMUTABLE", "READY"}
    assert any(window.late for window in model.windows.values()), "no row came late"
    assert any(not window.rows for window in model.windows.values()), "no hour was silent"
