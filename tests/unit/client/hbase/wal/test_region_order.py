"""The order between logs, held against a small HBase that moves, splits and merges regions while it is read.

`TinyHBase` gives sequence ids and marks as HBase does: a region that is opened begins just above the last sequence id
of itself, or of its parents, and its server's log has a mark with it. Whatever is written when, and however the reading
is cut, the reader has to write each region in order, and children behind their parents.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logferry.client.hbase.wal.entries import LogEntry, RegionEvent
from logferry.client.hbase.wal.region_order import BEGIN, MissingIds, Place, RegionOrder

LoggedEntry = tuple[LogEntry, RegionEvent | None]
SEEDS = st.integers(0, 1 << 32)


@dataclass
class Region:
    name: str
    server: str
    start: int
    end: int
    made: int
    last: int = 1
    parents: tuple[str, ...] = ()

    @property
    def full_name(self) -> bytes:
        start = f"{self.start:04d}" if self.start else ""
        return f"orders,{start},{self.made}.{self.name}.".encode()


class TinyHBase:
    """``logs``: what each server has written. ``parents``: of each region."""

    def __init__(self, chance: Random, servers: int = 3, regions: int = 4) -> None:
        self.chance = chance
        self._time = self._numbers = 0
        self.logs: dict[str, list[LoggedEntry]] = {}
        self._servers: list[str] = []
        self.parents: dict[str, tuple[str, ...]] = {}
        for _ in range(servers):
            self._add_server()
        self._regions: list[Region] = []
        for number in range(regions):
            start = number * 1000
            region = Region(self._name("r"), chance.choice(self._servers), start, start + 1000, self._now())
            self._open(region)
            self._regions.append(region)

    def step(self) -> None:
        does = (self._move, self._split, self._merge, self._crash, self._flush)
        self.chance.choices((self._write, *does), (30, 3, 1, 1, 1, 3))[0]()

    def _now(self) -> int:
        self._time += 1
        return self._time

    def _name(self, kind: str) -> str:
        self._numbers += 1
        return f"{kind}{self._numbers}"

    def _add_server(self) -> None:
        name = self._name("server")
        self._servers.append(name)
        self.logs[name] = []

    def _log(self, region: Region, event: RegionEvent | None = None) -> None:
        region.last += 1
        at_ms = 5000 * self._now() + self.chance.randrange(-2000, 2000)
        entry = LogEntry(region.name, "orders", region.last, at_ms, 1, memoryview(b""), 0)
        self.logs[region.server].append((entry, event))

    def _open(self, region: Region) -> None:
        self.parents[region.name] = region.parents
        opened = region.last + 1
        region.last = opened
        self._log(region, RegionEvent(False, opened, region.full_name))

    def _close(self, region: Region) -> None:
        self._log(region, RegionEvent(True, region.last, region.full_name))

    def _write(self) -> None:
        self._log(self.chance.choice(self._regions))

    def _flush(self) -> None:
        region = self.chance.choice(self._regions)
        region.last += self.chance.randrange(3)  # ids that are in no log
        self._log(region)

    def _move(self) -> None:
        region = self.chance.choice(self._regions)
        self._close(region)
        region.server = self.chance.choice(self._servers)
        self._open(region)

    def _split(self) -> None:
        parent = self.chance.choice(self._regions)
        if parent.end - parent.start < 2:
            return
        self._close(parent)
        self._regions.remove(parent)
        middle, made = self.chance.randrange(parent.start + 1, parent.end), self._now()
        for start, end in ((parent.start, middle), (middle, parent.end)):
            server = self.chance.choice(self._servers)
            child = Region(self._name("r"), server, start, end, made, parent.last, (parent.name,))
            self._open(child)
            self._regions.append(child)

    def _merge(self) -> None:
        self._regions.sort(key=lambda one: one.start)
        if len(self._regions) < 3:
            return
        at = self.chance.randrange(len(self._regions) - 1)
        first, second = self._regions[at : at + 2]
        for parent in (first, second):
            self._close(parent)
            self._regions.remove(parent)
        names, last = (first.name, second.name), max(first.last, second.last)
        server = self.chance.choice(self._servers)
        child = Region(self._name("r"), server, first.start, second.end, self._now(), last, names)
        self._open(child)
        self._regions.append(child)

    def _crash(self) -> None:
        """No marks: the log ends, and the regions are opened elsewhere."""
        dead = self.chance.choice(self._servers)
        self._servers.remove(dead)
        self._add_server()
        for region in self._regions:
            if region.server == dead:
                region.server = self.chance.choice(self._servers)
                self._open(region)


class TinyTail:
    """Reads it as `LogTail` does, and notes what is written. HBase continues between any two of its steps."""

    def __init__(self, hbase: TinyHBase, chance: Random, pace: int) -> None:
        self.hbase, self._chance, self._pace = hbase, chance, pace
        self.order = RegionOrder()
        self._indexed: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self.written: list[LogEntry] = []
        self.circles = 0

    def _live(self) -> None:
        """As much in a round, however many logs there are."""
        if self._chance.random() < 3 / len(self.hbase.logs):
            for _ in range(self._chance.randrange(self._pace + 1)):
                self.hbase.step()

    def round(self) -> None:
        self.order.begin_round()
        listed = list(self.hbase.logs)
        for log in listed:
            self._live()
            end = len(self.hbase.logs[log])
            for at in range(self._indexed.get(log, 0), end):
                self.order.note(log, Place(1, at), *self.hbase.logs[log][at])
            self._indexed[log] = end
        is_whole = self._chance.random() < 0.9  # or a file could not be read
        assert self.order.end_round(is_whole) == [], "nothing is missing"
        blocked = []
        progress = False
        self._chance.shuffle(listed)
        for log in listed:
            self._live()
            at, most = self._next.get(log, 0), self._chance.randrange(1, 40)
            while at < self._indexed[log] and most:
                entry, _ = self.hbase.logs[log][at]
                if not self.order.is_due(log, entry.region, Place(1, at)):
                    blocked.append((log, entry.region, Place(1, at)))
                    break
                self.written.append(entry)
                at, most, progress = at + 1, most - 1, True
            self._next[log] = at
            self.order.passed(log, Place(1, at))
        if not progress and not self._pace and self.order.give_way(blocked):
            self.circles += 1

    def finish(self) -> None:
        self._pace = 0
        for _ in range(10_000):
            if all(self._next.get(log, 0) == len(entries) for log, entries in self.hbase.logs.items()):
                return
            self.round()
        raise AssertionError("the tail does not end")


def check(tail: TinyTail) -> None:
    wanted = sum(map(len, tail.hbase.logs.values()))
    assert len(tail.written) == wanted, "something is missing"
    last: dict[str, int] = {}
    ends = {entry.region: at for at, entry in enumerate(tail.written)}
    seen: set[str] = set()
    for at, entry in enumerate(tail.written):
        assert last.get(entry.region, 0) < entry.sequence_id, f"{entry} comes after {last[entry.region]}"
        last[entry.region] = entry.sequence_id
        if entry.region not in seen:
            seen.add(entry.region)
            for parent in tail.hbase.parents[entry.region]:
                assert ends[parent] < at, f"{entry.region} comes before its parent {parent} has ended"


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.sampled_from([0, 1, 3, 10]), st.integers(0, 400))
def test_each_region_is_written_in_order_and_behind_its_parents(seed: int, pace: int, before: int) -> None:
    chance = Random(seed)
    tail = TinyTail(TinyHBase(chance), chance, pace)
    for _ in range(before):
        tail.hbase.step()
    for _ in range(30):
        tail.round()
    tail.finish()
    check(tail)


def test_what_is_over_is_forgotten() -> None:
    chance = Random(7)
    tail = TinyTail(TinyHBase(chance), chance, 3)
    for _ in range(300):
        tail.round()
    tail.finish()
    for log in list(tail.hbase.logs)[:-3]:
        tail.order.drop_log(log)
    held = sum(len(runs) for runs in tail.order._by_region.values())
    assert held < 60, held


def test_an_entry_waits_for_a_round_that_began_after_it_was_met() -> None:
    order = RegionOrder()
    entry = LogEntry("r", "orders", 9, 0, 1, memoryview(b""), 0)
    place = Place(1, 0)
    order.begin_round()
    order.note("b", place, entry, RegionEvent(False, 9, b""))
    order.end_round()
    assert not order.is_due("b", "r", place)
    order.begin_round()
    order.note("a", place, entry._replace(sequence_id=8), None)  # was there before, and is seen only now
    order.end_round()
    assert not order.is_due("b", "r", place)
    assert not order.is_due("a", "r", place)
    order.begin_round()
    order.end_round()
    assert order.is_due("a", "r", place)
    assert not order.is_due("b", "r", place)
    order.passed("a", Place(1, 1))
    assert order.is_due("b", "r", place)


def test_what_continues_the_region_needs_no_other_log() -> None:
    order = RegionOrder({"known-of-old": 5})
    entry = LogEntry("new", "orders", 3, 0, 1, memoryview(b""), 0)
    notes = (
        (entry, RegionEvent(False, 2, b"")),
        (entry._replace(sequence_id=4), RegionEvent(True, 3, b"")),
        (entry._replace(region="known-of-old", sequence_id=7), RegionEvent(False, 6, b"")),
        (entry._replace(region="daughter", sequence_id=7), RegionEvent(False, 6, b"")),
        (entry._replace(region="unmarked"), None),
    )
    order.begin_round()
    order.note("b", Place(1, 0), entry._replace(sequence_id=6), RegionEvent(False, 5, b""))
    for at, note in enumerate(notes):
        order.note("a", Place(1, at), *note)
    order.end_round(is_whole=False)
    due = [order.is_due("a", one.region, Place(1, at)) for at, (one, _) in enumerate(notes)]
    assert due == [True, True, False, False, False]
    order.passed("a", Place(1, len(notes)))
    assert order.is_due("b", "new", Place(1, 0))


def test_ids_that_are_in_no_log_are_missed_when_the_region_is_opened_again() -> None:
    order = RegionOrder({"r": 5, "other": 3})
    entry = LogEntry("r", "orders", 9, 0, 1, memoryview(b""), 0)
    order.begin_round()
    order.note("b", Place(1, 0), entry, RegionEvent(False, 8, b""))
    assert order.end_round() == []
    order.begin_round()
    assert order.end_round() == [MissingIds("r", 5, 8)]
    assert order.last_ids() == {"r": 9, "other": 3}
    order.begin_round()
    assert order.end_round() == []


def test_a_region_that_cannot_be_a_parent_is_not_waited_for_in_a_circle() -> None:
    """Two regions that are taken for each other's parents: one gives way."""
    order = RegionOrder()
    for _ in range(2):
        order.begin_round()
        for log, region, first in (("a", "r", 5), ("b", "s", 5)):
            if order.round == 1:
                entry = LogEntry(region, "orders", first, 0, 1, memoryview(b""), 0)
                order.note(log, Place(1, 0), entry, RegionEvent(False, first + 1, b""))
        order.end_round()
    blocked = [("a", "r", Place(1, 0)), ("b", "s", Place(1, 0))]
    assert not any(order.is_due(*one) for one in blocked)
    assert order.give_way(blocked) is not None
    assert any(order.is_due(*one) for one in blocked)


@pytest.mark.parametrize("place", [BEGIN, Place(3, 9)])
def test_an_entry_that_was_not_met_is_not_due(place: Place) -> None:
    assert not RegionOrder().is_due("a", "r", place)
