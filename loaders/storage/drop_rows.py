"""Retention: drops rows before a cut-off, by whole segments or days, as a batch of the ledger. Without Spark or Kafka.

The time of a row is its event time, but never more than a day before it was recorded: a host with a dead clock
writes events of 1970, and its rows are as old as their recording. Without an event time the latter counts, as it does
for quarantined lines.

One commit of the main table removes the rows. The quarantined lines become inactive in the same instant (see
`tables.active_filter`), and the segments that ended by then are DROPPED; those count the rows that stay.

Rows before the cut-off that arrive later are loaded, and dropped by the next such batch. Any loader that finds the
batch planned executes it. Crash windows: as with a reload.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from logferry.loaders.errors import LedgerBroken
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.segment_states import AddedRows, SegmentRules, drop_before, segment_start
from logferry.loaders.planning.source_facts import shared_topics
from logferry.loaders.storage.commit import CommittedBatch, DataFiles, commit_files, committed_batch
from logferry.loaders.storage.ledger import open_table, storage_errors
from logferry.loaders.storage.rewrite import Rewriter, Rule
from logferry.loaders.storage.side_tables import (
    add_sources,
    known_before,
    put_segments,
    read_segments,
    rows_by_segment,
    segment_length,
    segments_before,
)
from logferry.loaders.storage.tables import count_rows, partition_columns

_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SQL: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


class OldRows(NamedTuple):
    """The rows, quarantined lines and segments before a cut-off."""

    rows: int
    quarantined: int
    segments: int

    def __bool__(self) -> bool:
        return any(self)


def cutoff(now: datetime, keep: timedelta, window_s: int | None, *, by_days: bool) -> datetime:
    """The cut-off: at least ``keep`` ago, and the start of a segment or day.

    ``window_s``: of the table's segments, None without; days count without, and where it is partitioned by days.
    """
    at = now - keep
    if by_days or window_s is None:
        at = _EPOCH + (at - _EPOCH) // _DAY * _DAY
    return at if window_s is None else segment_start(at, SegmentRules(window_s))


def cutoff_of(paths: TablePaths, now: datetime, keep: timedelta) -> datetime:
    """Raises StorageUnavailable, ForeignTable."""
    by_days = any(name in ("event_date", "recorded_date") for name in partition_columns(paths.main))
    return cutoff(now, keep, segment_length(paths.segments), by_days=by_days)


def newest_recorded(path: Path) -> datetime | None:
    """When a gateway recorded the newest row, by the files' bounds; None: unknown. Raises StorageUnavailable."""
    if (table := open_table(path)) is None:
        return None
    with storage_errors(f"{path} cannot be read"):
        files = pa.table(table.get_add_actions(flatten=True))
    return pc.max(files["max.recorded"]).as_py() if "max.recorded" in files.column_names else None


def count_old(paths: TablePaths, last: int, before: datetime) -> OldRows:
    """Counts what is older, as of batch ``last``. Raises StorageUnavailable."""
    rows = segments = 0
    if (table := open_table(paths.main)) is not None:
        rows = Rewriter(paths.main, last, _rule(before, has_events=_has_events(table))).count(table)
    quarantined = count_rows(paths.quarantine, ds.field("recorded") < _at(before), active_as_of=last)
    if (length := segment_length(paths.segments)) is not None:
        have = read_segments(paths.segments, last)
        rules = SegmentRules(length)
        segments = len(drop_before(have, before, last, before, rules, _staying(table, before, rules)))
    return OldRows(rows, quarantined, segments)


def drop_rows(paths: TablePaths, entry: LedgerEntry, run: str) -> CommittedBatch:
    """Executes the entry. Safe to call again. Raises Overtaken, StorageUnavailable."""
    before = entry.cutoff
    if before is None:
        raise LedgerBroken(f"{paths.ledger}: batch {entry.batch} is a drop without a cut-off")
    nothing = DataFiles(paths.main, (), 0)
    if committed_batch(paths.quarantine, entry.batch, run) is None:
        # Quarantined lines have no event time.
        rule = _rule(before, has_events=False)._replace(resolved_by=entry.batch)
        rewriter = Rewriter(paths.quarantine, entry.batch, rule)
        commit_files(nothing, paths.quarantine, entry.batch, run, changes=rewriter.actions)
    length = segment_length(paths.segments)
    if length is not None or shared_topics(r.topic for r in entry.ranges):
        # The facts of sources stay, although rows are dropped: these are not owed.
        known_before(paths, entry.batch, run)
        add_sources(paths.sources, entry.batch, run, {})
    if length is not None:
        rules = SegmentRules(length)
        segments = segments_before(paths, entry.batch, run, rules)
        staying = _staying(open_table(paths.main), before, rules)
        changed = drop_before(segments, before, entry.batch, datetime.now(UTC), rules, staying)
        put_segments(paths.segments, entry.batch, run, changed.values())
    table = open_table(paths.main)
    rewriter = Rewriter(paths.main, entry.batch, _rule(before, has_events=_has_events(table)))
    parted = partition_columns(paths.main)
    return commit_files(nothing, paths.main, entry.batch, run, parted, changes=rewriter.actions)


def _at(moment: datetime) -> Any:
    return pa.scalar(moment, pa.timestamp("us", "UTC"))


def _has_events(table: DeltaTable | None) -> bool:
    return table is not None and any(field.name == "event_time" for field in table.schema().fields)


def _staying(table: DeltaTable | None, before: datetime, rules: SegmentRules) -> dict[datetime, AddedRows]:
    """By segment, the rows of events before the cut-off that were recorded too late to be dropped."""
    if table is None or not _has_events(table):
        return {}
    young = (ds.field("event_time") < _at(before)) & (ds.field("recorded") >= _at(before + _DAY))
    with storage_errors(f"{table.table_uri} cannot be read"):
        scanner = table.to_pyarrow_dataset().scanner(columns=["event_time", "text"], filter=young, batch_readahead=2)
        return rows_by_segment(scanner.to_batches(), rules)


def _rule(before: datetime, *, has_events: bool) -> Rule:
    """Files are skipped, or removed as a whole, by their column bounds, which never exclude a row of the file."""
    # For rows without an event time, the time of recording counts.
    columns = ("event_time", "recorded") if has_events else ("recorded",)
    old = pc.coalesce(*map(ds.field, columns)) < _at(before)
    # The SQL is never null, so that its opposite is true for all other rows.
    early, late = (f"recorded IS NOT NULL AND recorded < '{at:{_SQL}}'" for at in (before, before + _DAY))
    files = early
    if has_events:
        old = old & (ds.field("recorded") < _at(before + _DAY))
        event = f"event_time IS NOT NULL AND event_time < '{before:{_SQL}}'"
        files = f"({event} AND {late}) OR (event_time IS NULL AND {early})"
    return Rule(old, columns, files, f"NOT ({files})")
