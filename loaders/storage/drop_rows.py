"""Old rows out of a table, by whole windows or days: a batch of the ledger, which names the time before which they
were.

A row's time is its event's, or where it has none, when it was recorded; a line of the quarantine's is when it was
recorded. What is older than the cut-off goes in one commit of the main table, the lines of the quarantine in that same
instant (see `standing`), and the windows that ended by then are DROPPED.

Rows that come late for such a time are loaded, and dropped by the next batch of this kind. Any loader that finds such a
batch planned does it; it takes neither Spark nor Kafka. Crash windows: as with a reload.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from logferry.loaders.batches.create_tables import partition_columns
from logferry.loaders.batches.dedup import create_moved, known_before
from logferry.loaders.batches.reload import resolved_by
from logferry.loaders.errors import LedgerBroken, StorageAway
from logferry.loaders.known import put_known
from logferry.loaders.planning.segment_states import Rules, drop_before, window_of
from logferry.loaders.planning.source_facts import several_centres
from logferry.loaders.standing import standing
from logferry.loaders.storage.commit import Committed, committed
from logferry.loaders.storage.data_files import Written
from logferry.loaders.storage.ledger import LedgerEntry, TablePaths, open_table
from logferry.loaders.storage.rewrite import Rewriter, Rule, StoredFile, commit_rewritten
from logferry.loaders.storage.segment_table import put_segments, read_segments, segments_before, window_s

_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Old(NamedTuple):
    """What a cut-off finds."""

    rows: int
    quarantined: int
    windows: int

    def __bool__(self) -> bool:
        return any(self)


def cutoff(now: datetime, keep: timedelta, window_s: int | None, *, by_days: bool) -> datetime:
    """The time before which rows go: never less than ``keep`` ago, and where a window begins. Pure.

    ``window_s``: of the table's segments, if it has some; days otherwise, and where the table is partitioned by days.
    """
    at = now - keep
    if by_days or window_s is None:
        at = _EPOCH + (at - _EPOCH) // _DAY * _DAY
    return at if window_s is None else window_of(at, Rules(window_s))


def cutoff_of(paths: TablePaths, now: datetime, keep: timedelta) -> datetime:
    """Raises StorageAway, ForeignTable."""
    by_days = any(name in ("event_date", "recorded_date") for name in partition_columns(paths.main))
    return cutoff(now, keep, window_s(paths.segments), by_days=by_days)


def old(paths: TablePaths, last: int, before: datetime) -> Old:
    """What is older than that, as of batch ``last``. Raises StorageAway."""
    counts: list[int] = []
    for path in (paths.main, paths.quarantine):
        table = open_table(path)
        if table is None:
            counts.append(0)
            continue
        if path == paths.main:
            counts.append(Rewriter(path, last, _rule(before, has_events=_has_events(table))).count(table))
            continue
        try:
            stored = table.to_pyarrow_dataset()
            meant = (ds.field("recorded") < _at(before)) & standing(stored.schema.names, last)
            counts.append(int(stored.count_rows(filter=meant)))
        except (DeltaError, pa.ArrowException, OSError) as error:
            raise StorageAway(f"{path} cannot be read: {error}") from error
    windows = 0
    if (length := window_s(paths.segments)) is not None:
        segments = read_segments(paths.segments, last)
        windows = len(drop_before(segments, before, last, before, Rules(length)))
    return Old(counts[0], counts[1], windows)


def drop(paths: TablePaths, entry: LedgerEntry, run: str) -> tuple[Committed, int | None]:
    """Does what the entry says. Safe to call again. Returns who committed it, and how many rows went, if it was us.

    Raises Overtaken, StorageAway.
    """
    before = entry.cutoff
    if before is None:
        raise LedgerBroken(f"{paths.ledger}: batch {entry.batch} drops rows, but does not say which")
    nothing = Written(paths.main, (), 0)
    if committed(paths.quarantine, entry.batch, run) is None:
        # Its rows have no time but that of recording.
        rule = _rule(before, has_events=False)._replace(holds_only=_never, changed=resolved_by(entry.batch))
        rewriter = Rewriter(paths.quarantine, entry.batch, rule)
        commit_rewritten(nothing, rewriter, paths.quarantine, entry.batch, run)
    length = window_s(paths.segments)
    if length is not None or several_centres(r.topic for r in entry.ranges):
        create_moved(paths)
        # What is known of sources stays, whatever is left of their rows: they owe nothing of what was dropped.
        known_before(paths, entry.batch, run)
        put_known(paths.sources, entry.batch, run, {})
    if length is not None:
        rules = Rules(length)
        segments = segments_before(paths, entry.batch, run, rules)
        changed = drop_before(segments, before, entry.batch, datetime.now(UTC), rules)
        put_segments(paths.segments, entry.batch, run, changed.values())
    table = open_table(paths.main)
    rewriter = Rewriter(paths.main, entry.batch, _rule(before, has_events=_has_events(table)))
    done = commit_rewritten(nothing, rewriter, paths.main, entry.batch, run, partition_columns(paths.main))
    return done, rewriter.taken if done.ours else None


def is_old(columns: Sequence[str], before: datetime) -> Any:
    """A filter of pyarrow: rows from before that time."""
    if "event_time" not in columns:
        return ds.field("recorded") < _at(before)
    return pc.coalesce(ds.field("event_time"), ds.field("recorded")) < _at(before)


def _at(moment: datetime) -> Any:
    return pa.scalar(moment, pa.timestamp("us", "UTC"))


def _has_events(table: DeltaTable | None) -> bool:
    return table is not None and any(field.name == "event_time" for field in table.schema().fields)


def _rule(before: datetime, *, has_events: bool) -> Rule:
    """Files are passed over, or go as a whole, by their bounds, which are never narrower than what is in them."""
    columns = ("event_time", "recorded") if has_events else ("recorded",)

    def may_hold(file: StoredFile) -> bool:
        if not has_events:
            return _low(file, "recorded") < before
        # Some rows may have no time of an event, then that of recording counts.
        return min(_low(file, name) for name in columns) < before

    def holds_only(file: StoredFile) -> bool:
        if file.rows < 0:
            return False
        if not has_events:
            return _high(file, "recorded") < before
        return file.nulls.get("event_time", 1) == 0 and _high(file, "event_time") < before

    return Rule(may_hold, is_old(columns, before), columns, holds_only)


def _low(file: StoredFile, column: str) -> datetime:
    return _utc(file.low[column]) if column in file.low else datetime.min.replace(tzinfo=UTC)


def _high(file: StoredFile, column: str) -> datetime:
    return _utc(file.high[column]) if column in file.high else datetime.max.replace(tzinfo=UTC)


def _utc(at: datetime) -> datetime:
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _never(_: StoredFile) -> bool:
    return False


__all__ = ["Old", "cutoff", "cutoff_of", "drop", "is_old", "old"]
