"""In which order the entries of several logs are written, so that each region's sequence ids rise. Pure.

A region is open on one server at a time, and its sequence ids rise through all of them. What it wrote before it was
opened at a server is on disk then, in logs of other servers. A *run* is a stretch of a region's entries in one log: it
begins with the mark that the region was opened, or with the first entry that is met.

* Every log is *indexed* first, to its present end: which regions have runs in it, from where to where. The files are
  listed and indexed in rounds.
* A run is *settled* when a round that began after the run was met has indexed all logs. All that the region wrote
  before the run is indexed then, and so are all entries of its parents. A run whose mark continues the sequence ids
  that were met of the region, or begins a new region, is settled at once, also while a log cannot be read.
* An entry is *due* when its run is settled and everything in earlier runs of its region is *passed*: written, or left
  out. The run of a daughter or of a merged region also waits for its parents' runs, so that the changes of a row
  stay in order. Which regions are its parents is no fact of the logs, but a guess from sequence ids, first rows and
  times: it holds the parents, and sometimes others.

A log waits at an entry that is not due, and so does everything behind it. Logs never wait for each other in a circle,
since an entry waits for those that HBase wrote earlier; `RegionOrder.give_way` ends a circle that a wrong guess made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from logferry.client.hbase.wal.entries import LogEntry, RegionEvent


class Place(NamedTuple):
    """In a log. ``number``: of the file. ``at``: the byte."""

    number: int
    at: int


BEGIN = Place(0, 0)
# With this sequence id, HBase opens a region that is not made of others.
_NEW = 2
# HBase refuses region servers whose clocks are further off (hbase.master.maxclockskew).
_MOST_SKEW_MS = 30_000
_BEHIND_ALL = Place(1 << 63, 0)


@dataclass(eq=False)
class RegionRun:
    """``opened``: the sequence id of the mark; None: no mark was met. ``start``, ``region_id``: the first row of the
    region, and when it was made, where a mark names them. ``last_change``: the sequence id of the last entry that is no
    mark. ``first_time``, ``last_time``: by the server's clock, in
    milliseconds. ``waits``: the runs to be passed before.
    """

    region: str
    table: str
    log: str
    first_id: int
    last_id: int
    first: Place
    last: Place
    met_in: int
    first_time: int
    last_time: int
    last_change: int = 0
    opened: int | None = None
    start: bytes | None = None
    region_id: int | None = None
    is_closed: bool = False
    is_settled: bool = False
    waits: list[RegionRun] = field(default_factory=list)


class MissingIds(NamedTuple):
    """A region was opened with the sequence id ``before``, and what was met of it until then ends with ``after``. Where
    that is not lower, HBase has given sequence ids a second time: those of edits that it never acknowledged, and lost.
    """

    region: str
    after: int
    before: int


class RegionOrder:
    """The runs of all logs. ``round``: the number of the present one. ``last_ids``: of each region, of an earlier
    process.
    """

    def __init__(self, last_ids: Mapping[str, int] | None = None) -> None:
        self.round = 0
        self._before = dict(last_ids or {})
        # Of runs that are forgotten, so passed: the last id, and that of the last change with its log.
        self._last_ids: dict[str, int] = {}
        self._last_changes: dict[str, tuple[int, str]] = {}
        self._by_region: dict[str, list[RegionRun]] = {}
        self._open: dict[tuple[str, str], RegionRun] = {}
        self._unsettled: list[RegionRun] = []
        self._passed: dict[str, Place] = {}

    # ---- the index --------------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Before the files are listed."""
        self.round += 1

    def end_round(self, is_whole: bool = True) -> list[MissingIds]:
        """``is_whole``: all logs that were listed in this round are indexed to their ends. HBase opens a region with
        the sequence id behind the last one in a log: what is missing between was in a file that was never met.
        """
        missing, unsettled = [], []
        for run in self._unsettled:
            earlier = [one for one in self._by_region[run.region] if one.first_id < run.first_id]
            known = max([self._last_ids.get(run.region, 0), *(one.last_id for one in earlier)])
            is_proven = run.opened is not None and (run.opened <= _NEW or known >= run.opened - 1)
            if not is_proven and not (is_whole and run.met_in < self.round):
                unsettled.append(run)
                continue
            before = earlier if known else self._parents(run)
            run.waits = [one for one in before if not self._is_passed(one)]
            run.is_settled = True
            missing += self._given_twice(run, earlier)
            known = max(known, self._before.get(run.region, 0))
            if run.opened is not None and 0 < known < run.opened - 1:
                missing.append(MissingIds(run.region, known, run.opened))
        self._unsettled = unsettled
        self._forget()
        return missing

    def _given_twice(self, run: RegionRun, earlier: list[RegionRun]) -> list[MissingIds]:
        """A server that dies may leave edits in its log that are there on some DataNodes alone: HDFS then drops them.
        In one log, entries are written a second time where its file broke.
        """
        changes = [(one.last_change, one.log) for one in earlier]
        if run.region in self._last_changes:
            changes.append(self._last_changes[run.region])
        last = max((change for change, log in changes if log != run.log), default=0)
        return [MissingIds(run.region, last, run.opened)] if run.opened is not None and last >= run.opened else []

    def last_ids(self) -> dict[str, int]:
        """Of each region that was met, also by the earlier process."""
        found = dict(self._before)
        for region in self._last_ids.keys() | self._by_region.keys():
            lasts = [one.last_id for one in self._by_region.get(region, ())]
            found[region] = max([found.get(region, 0), self._last_ids.get(region, 0), *lasts])
        return found

    def note(self, log: str, place: Place, entry: LogEntry, event: RegionEvent | None, is_change: bool = True) -> None:
        """An entry of a table that is wanted. ``is_change``: it is no mark."""
        run = self._open.get((log, entry.region))
        if run is None or (event is not None and not event.is_close):
            run = RegionRun(
                entry.region,
                entry.table,
                log,
                entry.sequence_id,
                entry.sequence_id,
                place,
                place,
                self.round,
                entry.write_time,
                entry.write_time,
            )
            self._open[log, entry.region] = run
            self._by_region.setdefault(entry.region, []).append(run)
            self._unsettled.append(run)
        run.last = place
        run.last_id = max(run.last_id, entry.sequence_id)
        if is_change:
            run.last_change = max(run.last_change, entry.sequence_id)
        run.last_time = entry.write_time
        run.is_closed = event is not None and event.is_close
        if event is not None:
            if not event.is_close:
                run.opened = event.sequence_id
            run.start, run.region_id = _named(event.name)

    def _parents(self, run: RegionRun) -> list[RegionRun]:
        """Of a region that was not met before; none where no mark begins it."""
        if run.opened is None:
            return []
        lasts = [max(runs, key=lambda one: one.first_id) for runs in self._by_region.values()]
        found = [one for one in lasts if _may_be_parent(one, run)]
        above = [one for one in found if one.last_id == run.opened - 1]
        if above and all(one.start is not None and run.start is not None and one.start < run.start for one in above):
            return above  # a second daughter has one parent
        return found

    # ---- the writing ------------------------------------------------------------------------------------------------

    def is_due(self, log: str, region: str, place: Place) -> bool:
        """Whether an entry that was noted may be written now. The entries of a log are asked for in their order."""
        return not self._waiting(self._run_at(log, region, place))

    def passed(self, log: str, place: Place) -> None:
        """All that is before this place is written or left out; also where a file was lost."""
        self._passed[log] = place

    def give_way(self, blocked: Iterable[tuple[str, str, Place]]) -> RegionRun | None:
        """``blocked``: the log, region and place of each entry that was not due, when nothing else can be written. If
        all of their runs are settled, one no longer waits for a run of another region, the latest one; None: it is no
        circle.
        """
        runs = [self._run_at(*one) for one in blocked]
        settled = [run for run in runs if run is not None and run.is_settled]
        found = [
            (one.last_time - run.first_time, run, one)
            for run in settled
            for one in run.waits
            if one.region != run.region and not self._is_passed(one)
        ]
        if not found or len(settled) < len(runs):
            return None
        _, run, one = max(found, key=lambda each: each[0])
        run.waits.remove(one)
        return run

    def _run_at(self, log: str, region: str, place: Place) -> RegionRun | None:
        runs = [one for one in self._by_region.get(region, ()) if one.log == log and one.first <= place <= one.last]
        return runs[-1] if runs else None

    def _waiting(self, run: RegionRun | None) -> bool:
        if run is None or not run.is_settled:
            return True
        run.waits = [one for one in run.waits if not self._is_passed(one) and self._may_wait(run, one)]
        return bool(run.waits)

    def _may_wait(self, run: RegionRun, one: RegionRun) -> bool:
        """A region that was opened again is no parent."""
        return one.region == run.region or one is max(self._by_region[one.region], key=lambda each: each.first_id)

    def _is_passed(self, run: RegionRun) -> bool:
        passed = self._passed.get(run.log)
        return passed is not None and passed > run.last

    # ---- what is over -----------------------------------------------------------------------------------------------

    def drop_log(self, log: str) -> None:
        """Its server is gone, and all of its files are passed."""
        for key in [key for key in self._open if key[0] == log]:
            del self._open[key]
        self._passed[log] = _BEHIND_ALL
        self._forget()

    def _forget(self) -> None:
        """Runs that are passed and will not grow."""
        for region, runs in list(self._by_region.items()):
            kept = [one for one in runs if self._is_growing(one) or not one.is_settled or not self._is_passed(one)]
            gone = [one for one in runs if one not in kept]
            self._last_ids[region] = max([self._last_ids.get(region, 0), *(one.last_id for one in gone)])
            changes = [(one.last_change, one.log) for one in gone]
            self._last_changes[region] = max([self._last_changes.get(region, (0, "")), *changes])
            if kept:
                self._by_region[region] = kept
            else:
                del self._by_region[region]
        self._open = {key: run for key, run in self._open.items() if run in self._by_region.get(run.region, ())}

    def _is_growing(self, run: RegionRun) -> bool:
        return not run.is_closed and self._open.get((run.log, run.region)) is run


def _may_be_parent(one: RegionRun, run: RegionRun) -> bool:
    """Of two parents, the one with the higher sequence ids ends just before, and both begin at the same row or behind.
    Of daughters, the parent ends just before, and begins at the same row or before. What no mark names is possible.
    """
    before = (run.opened or 0) - 1
    if one.table != run.table or one.region == run.region or one.last_id > before:
        return False
    if one.last_time > run.first_time + _MOST_SKEW_MS:
        return False
    if one.region_id is not None and run.region_id is not None and one.region_id >= run.region_id:
        return False
    is_behind = one.start is None or run.start is None or one.start >= run.start
    return one.last_id == before or (one.is_closed and is_behind)


def _named(name: bytes) -> tuple[bytes | None, int | None]:
    """First row and id of a region, from TABLE,START,ID.ENCODED."""
    head, _, last = name.rpartition(b",")
    _, comma, start = head.partition(b",")
    number = last.partition(b".")[0]
    return (start, int(number)) if comma and number.isdigit() else (None, None)
