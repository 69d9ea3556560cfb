"""The side tables: sources, those that are excluded, the chunks left out, and the segments. Without Spark.

``<path>_sources``: the facts that each batch adds. The facts of all batches are merged on reading, so an unfinished
batch does no harm. Every so often a batch replaces the rows of the earlier ones by the merged facts, so that the cost
of reading stays constant.

``<path>_excluded``: one row per decision of an operator that segment checks do not wait for a source. Of each name the
newest row counts, from the next check on, whatever batch the table holds. A name may hold ``*`` for any text.

``<path>_moved``: the chunks whose copy from another data centre was loaded. A row counts when the table holds its
batch; of several rows for one record, the newest counts. One without another topic (``kept`` is null) revokes the
earlier ones: the chunk was reloaded and is in the table.

``<path>_segments``: one row per change of a segment; rows of a batch that the main table does not hold do not count.
Every so often a batch replaces all rows by the newest ones. Batches before the segments were enabled are counted once,
from the main table. The length of the segments is part of the table's description and cannot change. The result of the
last check is kept in a file beside, for people: no decision depends on it.

Batch n writes them before the main table's commit, with the same transaction version, once whoever writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema, write_deltalake
from deltalake.exceptions import DeltaError
from logferry.loaders.errors import ForeignTable, Overtaken
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.planning.segment_states import AddedRows, Segment, SegmentRules, WatermarkCheck, add_rows
from logferry.loaders.planning.source_facts import KnownSources, SourceFacts, SourceKey, utc_text
from logferry.loaders.storage.commit import commit_rows
from logferry.loaders.storage.files import dataset, open_table, read_text, storage_errors, write_text
from logferry.loaders.storage.ledger import (
    add_columns,
    arrow_schema,
    create_table,
    existing_table,
    last_batch,
    read_rows,
)
from logferry.loaders.storage.snapshots import kept_state, newest_table
from logferry.loaders.storage.tables import active_filter

SNAPSHOT_EVERY: Final = 64
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SOURCES: Final = arrow_schema(
    "batch long, topic string, source_id string, first_seqno long, last_seqno long, recorded time, event time"
)
_EXCLUDED: Final = arrow_schema("at time, source_id string, excluded string, by string")
_YES: Final = "yes"


def read_sources(path: Location, sources: Iterable[str] | None = None) -> dict[SourceKey, SourceFacts]:
    """The facts of the sources with these ids, in any topic; None: of all. Raises StorageUnavailable."""
    rows = _stored_sources(path)
    if sources is not None:
        rows = rows.filter(pc.is_in(rows["source_id"], pa.array(sources, pa.string())))
    rows = _merged_sources(rows)
    times = (pc.cast(rows[name], pa.int64()).to_pylist() for name in ("recorded", "event"))
    columns = (rows[name].to_pylist() for name in ("topic", "source_id", "first_seqno", "last_seqno"))
    return {
        SourceKey(topic, source_id): SourceFacts(
            first, last, moment(recorded), None if event is None else moment(event)
        )
        for topic, source_id, first, last, recorded, event in zip(*columns, *times, strict=True)
    }


def _stored_sources(path: Location) -> pa.Table:
    """The rows of all batches. They are kept as columns: 100 bytes a source, as objects 500."""
    return pa.concat_tables(kept_state(path, lambda: [_SOURCES.empty_table()], _append))


def _append(known: list[pa.Table], rows: pa.Table) -> None:
    known.append(rows.select(_SOURCES.names).cast(_SOURCES))


def _merged_sources(rows: pa.Table) -> pa.Table:
    wanted = [("first_seqno", "min"), ("last_seqno", "max"), ("recorded", "max"), ("event", "max")]
    each = rows.group_by(["topic", "source_id"]).aggregate(wanted)
    return each.rename_columns(["topic", "source_id", *(name for name, _ in wanted)])


def add_sources(path: Location, batch: int, run: str, known: KnownSources, *, all_of_it: bool = False) -> None:
    """Writes the facts of a batch, or (``all_of_it``) all up to it. Safe to call again. Raises StorageUnavailable."""
    if last_batch(newest_table(path)) >= batch:
        return
    keys = sorted(known)
    columns = [[batch] * len(keys), *_columns(keys, SourceKey), *_columns([known[key] for key in keys], SourceFacts)]
    rows = pa.Table.from_arrays(
        [pa.array(*pair) for pair in zip(columns, _SOURCES.types, strict=True)], schema=_SOURCES
    )
    if not all_of_it and batch % SNAPSHOT_EVERY == 0:
        merged, all_of_it = _merged_sources(pa.concat_tables([_stored_sources(path), rows])), True
        rows = merged.append_column("batch", pa.repeat(pa.scalar(batch, pa.int64()), len(merged))).select(
            _SOURCES.names
        )
    commit_rows(rows, path, batch, run, replace=all_of_it)


def _columns(rows: Sequence[tuple[Any, ...]], kind: Any) -> list[list[Any]]:
    return [[row[number] for row in rows] for number in range(len(kind._fields))]


def moment(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


# ---- exclusions ----------------------------------------------------------------------------------


def read_excluded(path: Location) -> list[str]:
    """The names that are excluded now. Raises StorageUnavailable."""
    decisions = sorted(read_rows(path), key=lambda row: row["at"])
    newest = {row["source_id"]: row["excluded"] == _YES for row in decisions}
    return sorted(name for name, is_excluded in newest.items() if is_excluded)


def exclude(path: Location, names: Iterable[str], at: datetime, by: str, *, is_excluded: bool) -> None:
    """Records a decision of the user ``by``, after those before it, also where the clock of an earlier one was ahead.

    Raises StorageUnavailable.
    """
    create_table(path, _EXCLUDED, "logferry excluded sources")
    said = _YES if is_excluded else "no"
    at = max([at, *(row["at"] + timedelta(microseconds=1) for row in read_rows(path))])
    rows = [{"at": at, "source_id": name, "excluded": said, "by": by} for name in names]
    with storage_errors(f"{path} cannot be written"):
        write_deltalake(existing_table(path), pa.Table.from_pylist(rows, schema=_EXCLUDED), mode="append")


LEFT_OUT_SCHEMA: Final = arrow_schema(
    "batch long, topic string, partition int, offset long, source_id string, seqno long, kept string"
)


class LeftOutChunk(NamedTuple):
    """A chunk that was left out. ``kept``: the topic of the copy that was loaded; None: no longer left out."""

    batch: int
    topic: str
    partition: int
    offset: int
    source_id: str
    seqno: int
    kept: str | None

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.partition, self.offset

    def is_in(self, r: Range) -> bool:
        return (self.topic, self.partition) == r.key and r.start <= self.offset < r.end


def left_out_rows(notes: Iterable[LeftOutChunk]) -> Any:
    return pa.Table.from_pylist([note._asdict() for note in notes], schema=LEFT_OUT_SCHEMA)


def read_left_out(path: Location, last: int, ranges: Sequence[Range] = ()) -> list[LeftOutChunk]:
    """The chunks left out of a table with this last batch; of these ranges at least. Raises StorageUnavailable."""
    wanted: list[tuple[str, str, Any]] = [("batch", "<=", last)]
    if ranges:
        wanted += [("topic", ">=", min(r.topic for r in ranges)), ("topic", "<=", max(r.topic for r in ranges))]
        wanted += [("offset", ">=", min(r.start for r in ranges)), ("offset", "<", max(r.end for r in ranges))]
    notes = (LeftOutChunk(**row) for row in read_rows(path, wanted))
    found = {note.place: note for note in sorted(notes, key=lambda note: note.batch)}
    return sorted(note for note in found.values() if note.kept is not None)


def create_side_tables(paths: TablePaths) -> None:
    create_table(paths.sources, _SOURCES, "logferry sources")
    create_table(paths.left_out, LEFT_OUT_SCHEMA, "logferry chunks that came twice")


def left_out_changes(
    before: Iterable[LeftOutChunk], now: Sequence[LeftOutChunk], entry: LedgerEntry
) -> tuple[LeftOutChunk, ...]:
    """The rows that a batch writes. A reload repeats none, and revokes those that no longer apply."""
    if not entry.reload:
        return tuple(now)
    left_out = {note.place: note for note in now}
    known = {note.place: note for note in before if any(note.is_in(r) for r in entry.reload)}
    new = [note for place, note in left_out.items() if place not in known or known[place].kept != note.kept]
    back = [note._replace(batch=entry.batch, kept=None) for place, note in known.items() if place not in left_out]
    return tuple(sorted([*new, *back], key=lambda note: note.place))


# The facts of a table itself, as of exactly a batch.
CountedSources = Callable[[TablePaths, int], KnownSources]


def known_before(
    paths: TablePaths, batch: int, run: str, counted: CountedSources, sources: Iterable[str] | None = None
) -> dict[SourceKey, SourceFacts]:
    """The facts before the batch, as `read_sources`; else as `complete_sources`."""
    complete_sources(paths, batch, run, counted)
    return read_sources(paths.sources, sources)


def complete_sources(paths: TablePaths, batch: int, run: str, counted: CountedSources) -> None:
    """Creates the side tables, unless they exist. What the one of the sources lacks of the time before the batch is
    ``counted`` from the table itself. Raises Overtaken, StorageUnavailable.
    """
    create_side_tables(paths)
    before = batch - 1
    if before >= 0 and last_batch(newest_table(paths.sources)) < before:
        add_sources(paths.sources, before, run, counted(paths, before), all_of_it=True)


def tables_after(paths: TablePaths, batch: int) -> Iterator[tuple[Location, DeltaTable]]:
    """The table as of exactly this batch, and its quarantine, as far as they exist. Raises Overtaken."""
    for path in (paths.main, paths.quarantine):
        table = open_table(path)
        if table is None:
            continue
        if path == paths.main and last_batch(table) != batch:
            raise Overtaken(f"{path} holds batch {last_batch(table)} and not {batch}: another loader has continued")
        yield path, table


def stored_rows(paths: TablePaths, batch: int, columns: list[str], wanted: Any, near: str) -> Iterator[Any]:
    """The ``wanted`` rows of table and quarantine as of exactly this batch. Raises Overtaken, StorageUnavailable.

    ``near``: SQL that holds for all of them: files are passed over by it before pyarrow knows of them, which costs
    half a millisecond for each.
    """
    for path, table in tables_after(paths, batch):
        with storage_errors(f"{path} cannot be read"):
            stored = dataset(path, table, near)
            if path == paths.quarantine:
                wanted = wanted & active_filter(batch)
            have = [name for name in columns if name in stored.schema.names]
            scanner = stored.scanner(columns=have, filter=wanted, batch_readahead=4)
            yield from (rows for rows in scanner.to_batches() if rows.num_rows)


_SEGMENTS: Final = arrow_schema(
    "start time, version long, state string, rows long, bytes long, first time, last time, late_rows long, "
    "passed time, touched time, closed time, batch long, reason string, "
    # Null in the rows of older loaders.
    "sources long, silent_sources long, watermark time"
)
_LOOK: Final = "_last_look.json"

Segments = dict[datetime, Segment]


def create_segments(path: Location, rules: SegmentRules) -> None:
    """Raises ForeignTable when the table has segments of another length."""
    create_table(path, _SEGMENTS, f"logferry segments of {rules.window_s} s")
    have = segment_length(path)
    if have != rules.window_s:
        raise ForeignTable(f"{path} has segments of {have} s, the job {rules.window_s} s: the length cannot be changed")


def segment_length(path: Location) -> int | None:
    """The length of the table's segments in seconds; None: it has none. Raises ForeignTable."""
    table = newest_table(path)
    if table is None:
        return None
    words = (table.metadata().name or "").split()
    if len(words) != 5 or words[:3] != ["logferry", "segments", "of"] or not words[3].isdigit():
        raise ForeignTable(f"{path} is not a table of segments")
    return int(words[3])


def read_segments(path: Location, last: int) -> Segments:
    """The newest row of each segment up to this batch. Raises StorageUnavailable."""
    kept: list[Segment] = kept_state(path, _no_segments, _add_segments)
    rows = sorted(kept, key=lambda one: (one.start, one.batch))
    return {segment.start: segment for segment in rows if segment.batch <= last}


def _no_segments() -> list[Segment]:
    return []


def _add_segments(found: list[Segment], rows: pa.Table) -> None:
    found.extend(Segment(**row) for row in rows.to_pylist())


def put_segments(path: Location, batch: int, run: str, changed: Iterable[Segment]) -> None:
    """What a batch changes. Safe to call again: the first one that is written stands. Raises StorageUnavailable."""
    all_of_it = batch % SNAPSHOT_EVERY == 0
    # The earlier rows count until the main table holds this batch, so they stay beside the new ones.
    kept = read_segments(path, batch - 1).values() if all_of_it else ()
    _commit_segments([*changed, *kept], path, batch, run, replace=all_of_it)


def _commit_segments(rows: Iterable[Segment], path: Location, batch: int, run: str, *, replace: bool) -> None:
    add_columns(path, Schema.from_arrow(_SEGMENTS))
    table = pa.Table.from_pylist([segment._asdict() for segment in rows], schema=_SEGMENTS)
    commit_rows(table, path, batch, run, replace=replace)


def segments_before(
    paths: TablePaths,
    batch: int,
    run: str,
    rules: SegmentRules,
    counted: Callable[[TablePaths, int, SegmentRules], Mapping[datetime, AddedRows]],
) -> Segments:
    """The segments before the batch; ``counted`` from the table where the side table has none. Raises Overtaken."""
    before = batch - 1
    if before >= 0 and last_batch(newest_table(paths.segments)) < before:
        found = add_rows({}, counted(paths, before, rules), before, datetime.now(UTC))
        _commit_segments(found.values(), paths.segments, before, run, replace=True)
    return read_segments(paths.segments, before)


def save_check(path: Location, look: WatermarkCheck) -> None:
    """For `logferry table segments list`; a failure to write it is ignored."""
    low = utc_text(look.low.at) if look.low.at else None
    behind = [
        {
            "source_id": one.source.source_id,
            "topic": one.source.topic,
            "at": utc_text(one.mark) if one.mark else None,
            "seen": utc_text(one.source.last_seen) if one.source.last_seen else None,
            "owes": one.source.owes,
            "far": one.far,
        }
        for one in look.low.behind
    ]
    text = json.dumps({"at": utc_text(look.now), "low": low, "waits": look.low.why(), "behind": behind})
    with suppress(OSError, DeltaError):
        write_text(path / _LOOK, text)


def last_check(path: Location) -> dict[str, Any]:
    """The file of `save_check`: ``at``, ``low``, ``waits``, ``behind``; empty where there is none."""
    try:
        kept = json.loads(read_text(path / _LOOK))
    except (OSError, ValueError, DeltaError):
        return {}
    return kept if isinstance(kept, dict) else {}
