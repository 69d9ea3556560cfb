"""Drops the rows before a cut-off, as a batch of the ledger.

Rows are dropped by whole segments or days. The time of a row is its event time, but never more than a day before or
after it was recorded: a host with a wrong clock writes events of 1970 or 2099, and its rows are as old as their
recording. Without an event time the latter counts, as it does for quarantined lines.

One commit of the main table removes the rows. The quarantined lines become inactive in the same instant (see
`tables.active_filter`), and the segments that ended by then are DROPPED. These, and later ones that lose events of a
clock that was ahead, count the rows that stay.

Files whose bounds say that all of their rows are old are removed unread; Spark reads the others, so it is not started
where there are none. Rows before the cut-off that arrive later are loaded, and dropped by the next such batch. Any
loader that finds the batch planned executes it. Crash windows: as with a reload.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, NamedTuple

from deltalake import DeltaTable
from logferry.loaders.batches.rewrite_rows import Rewriter, Session
from logferry.loaders.batches.row_counts import rows_by_segment, start_of_segment, table_segments, table_sources
from logferry.loaders.errors import LedgerBroken
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.segment_states import AddedRows, SegmentRules, drop_before
from logferry.loaders.planning.source_facts import shared_topics
from logferry.loaders.storage.commit import CommittedBatch, DataFiles, commit_files, committed_batch
from logferry.loaders.storage.files import open_table, storage_errors
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.rewrite import SQL_TIME, Rule
from logferry.loaders.storage.side_tables import (
    add_sources,
    complete_sources,
    put_segments,
    read_segments,
    segment_length,
    segments_before,
)

_DAY: Final = timedelta(days=1)


class OldRows(NamedTuple):
    """The rows, quarantined lines and segments before a cut-off."""

    rows: int
    quarantined: int
    segments: int

    def __bool__(self) -> bool:
        return any(self)


def count_old(session: Session, paths: TablePaths, last: int, before: datetime) -> OldRows:
    """Counts what is older, as of batch ``last``, after which no batch is planned. Raises LoadError."""
    rows = quarantined = segments = 0
    if (table := open_table(paths.main)) is not None:
        rows = Rewriter(session, paths.main, last, _rule(before, has_events=_has_events(table))).count(table)
    if (beside := open_table(paths.quarantine)) is not None:
        quarantined = Rewriter(session, paths.quarantine, last, _lines(before, last)).count(beside)
    if (length := segment_length(paths.segments)) is not None:
        rules = SegmentRules(length)
        staying = _staying(session, paths.main, table, before, rules)
        changed = drop_before(read_segments(paths.segments, last), before, last, before, rules, staying)
        segments = sum(rules.end_of(start) <= before for start in changed)
    return OldRows(rows, quarantined, segments)


def drop_rows(session: Session, paths: TablePaths, entry: LedgerEntry, run: str) -> CommittedBatch:
    """Executes the entry. Safe to call again. Raises Overtaken, LoadError."""
    before = entry.cutoff
    if before is None:
        raise LedgerBroken(f"{paths.ledger}: batch {entry.batch} is a drop without a cut-off")
    nothing = DataFiles(paths.main)
    if committed_batch(paths.quarantine, entry.batch, run) is None:
        rewriter = Rewriter(session, paths.quarantine, entry.batch, _lines(before, entry.batch))
        commit_files(nothing, paths.quarantine, entry.batch, run, changes=rewriter.actions)
    length = segment_length(paths.segments)
    if length is not None or shared_topics(r.topic for r in entry.ranges):
        # The facts of sources stay, although rows are dropped: these are not owed.
        complete_sources(paths, entry.batch, run, lambda *given: table_sources(session(), *given))
        add_sources(paths.sources, entry.batch, run, {})
    if length is not None:
        rules = SegmentRules(length)
        segments = segments_before(paths, entry.batch, run, rules, lambda *given: table_segments(session(), *given))
        staying = _staying(session, paths.main, open_table(paths.main), before, rules)
        changed = drop_before(segments, before, entry.batch, datetime.now(UTC), rules, staying)
        put_segments(paths.segments, entry.batch, run, changed.values())
    if last_batch(open_table(paths.latest)) == entry.batch - 1 >= 0:
        # The latest state keeps what it has.
        commit_files(DataFiles(paths.latest), paths.latest, entry.batch, run)
    table = open_table(paths.main)
    rewriter = Rewriter(session, paths.main, entry.batch, _rule(before, has_events=_has_events(table)))
    return commit_files(nothing, paths.main, entry.batch, run, changes=rewriter.actions)


def _has_events(table: DeltaTable | None) -> bool:
    return table is not None and any(field.name == "event_time" for field in table.schema().fields)


def _staying(
    session: Session, path: Location, table: DeltaTable | None, before: datetime, rules: SegmentRules
) -> dict[datetime, AddedRows | None]:
    """The rows that stay, by segment: those of events before the cut-off that were recorded too late to be dropped, and
    all others of later segments that lose events, recorded long before."""
    if table is None or not _has_events(table):
        return {}
    is_early, is_gone = (f"event_time < {_micros(before)}", f"recorded < {_micros(before - _DAY)}")
    with storage_errors(f"{path} cannot be read"):
        early, late = (f"event_time {sign} '{before:{SQL_TIME}}'" for sign in ("<", ">="))
        young = f"{early} AND recorded >= '{before + _DAY:{SQL_TIME}}'"
        ahead = f"{late} AND recorded < '{before - _DAY:{SQL_TIME}}'"
        if not any(table.file_uris(file_pruning_predicate=where) for where in (young, ahead)):
            return {}
    stored = session().read.format("delta").option("versionAsOf", table.version()).load(path.for_spark)
    counted = partial(rows_by_segment, rules=rules)
    found: dict[datetime, AddedRows | None] = {
        **counted(stored.where(f"{is_early} AND recorded >= {_micros(before + _DAY)}"))
    }
    if lose := list(counted(stored.where(f"NOT {is_early} AND {is_gone}"))):
        # By their bounds, most files are passed over.
        first, end = _micros(min(lose)), _micros(rules.end_of(max(lose)))
        near = stored.where(f"event_time >= {first} AND event_time < {end} AND NOT {is_gone}")
        starts = [int(start.timestamp()) * 1_000_000 for start in lose]
        stay = counted(near.where(start_of_segment(rules).isin(starts)))
        found |= {start: stay.get(start) for start in lose}
    return found


def _micros(moment: datetime) -> str:
    """In Spark's SQL."""
    return f"timestamp_micros({(moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)})"


def _lines(before: datetime, batch: int) -> Rule:
    """Of the quarantine, whose lines have no event time."""
    return _rule(before, has_events=False)._replace(resolved_by=batch)


def _rule(before: datetime, *, has_events: bool) -> Rule:
    """Files are skipped, or removed as a whole, by their column bounds, which never exclude a row of the file."""
    # The SQL is never null, so that its opposite is true for all other rows.
    long_ago, early, late = (
        f"recorded IS NOT NULL AND recorded < '{before + i * _DAY:{SQL_TIME}}'" for i in (-1, 0, 1)
    )
    if not has_events:
        return Rule(early, f"recorded < {_micros(before)}", others=f"NOT ({early})")
    # For rows without an event time, the time of recording counts.
    old = f"coalesce(event_time, recorded) < {_micros(before)} AND recorded < {_micros(before + _DAY)}"
    event = f"event_time IS NOT NULL AND event_time < '{before:{SQL_TIME}}'"
    files = f"({long_ago}) OR ({event} AND {late}) OR (event_time IS NULL AND {early})"
    return Rule(files, f"{old} OR recorded < {_micros(before - _DAY)}", others=f"NOT ({files})")
