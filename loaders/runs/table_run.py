"""The load of one table: from its stored positions to Kafka's offsets at the start, batch by batch.

One batch: plan it, put it into the ledger, read the ranges of its entry, quarantine, write, see whose commit counts. A
run that finds a planned batch executes it first, exactly as planned. A run that dies is resumed by the next one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import pyarrow.dataset as ds
from deltalake import Schema
from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.config import TableJob
from logferry.loaders.errors import ForeignTable, LedgerBroken, Overtaken, TopicChanged, Transient
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.location import Location
from logferry.loaders.parsing.columns import DATES
from logferry.loaders.parsing.rows import check_parser, row_schema
from logferry.loaders.parsing.settings import LINES, ParserSettings
from logferry.loaders.planning.column_changes import column_changes, column_types
from logferry.loaders.planning.ledger_entry import LOAD, REQUARANTINE, LedgerEntry, OriginOffset, TablePaths
from logferry.loaders.planning.plan import BatchSizer, Range, StoppedTopic, plan
from logferry.loaders.planning.position_plan import known_originals, origin_dc
from logferry.loaders.runs.segment_check import SegmentCheck, begin_check, finish_check, notify_ready
from logferry.loaders.spark.catalog import register_table
from logferry.loaders.spark.kafka_access import is_pattern, matches
from logferry.loaders.storage.commit import INDEXED
from logferry.loaders.storage.files import is_empty, open_table, storage_errors
from logferry.loaders.storage.ledger import Ledger, add_columns, create_table, existing_table, new_entry
from logferry.loaders.storage.ledger_summary import MERGE_EVERY, merge_entries, merge_notes
from logferry.loaders.storage.side_tables import create_segments
from logferry.loaders.storage.tables import QUARANTINE, TableState, count_rows, read_state
from logferry.loaders.storage.wider_types import widen_columns

# A mirror records what it wrote with the records themselves, or within milliseconds.
_ORIGINALS_S: Final = 2.0
# A name that the catalog did not take is tried again after this time.
_CATALOG_S: Final = 60.0


class Backlog(NamedTuple):
    """The offsets to load, control records included, in all and by partition."""

    records: int
    ranges: Sequence[Range] = ()


class RunEnded(NamedTuple):
    """The run reached a limit or a signal before everything was loaded."""

    reason: str


class SegmentNotice(NamedTuple):
    """Everything is loaded, but the segment check or a notification failed, for this reason."""

    reason: str


class CatalogNotice(NamedTuple):
    """The table is loaded, but the catalog does not have its name, for this reason; the next load tries again."""

    reason: str


LoadEvent = CatalogNotice | Backlog | BatchDone | StoppedTopic | RunEnded | SegmentNotice


def load_table(loader: Loader, job: TableJob, sizes: BatchSizer | None = None) -> Iterator[LoadEvent]:
    """Loads up to Kafka's last stable offsets of now, or to the limits; yields each step when it is done.

    ``sizes``: with the limits, and as measured in earlier loads of this table. A topic that changed is stopped; the
    others continue, unless a planned batch needs it. Raises Terminal, Transient. Safe to call again, and by several
    loaders at once.
    """
    paths = TablePaths.of(job.path)
    if job.parser.format not in ("lines", "chunk"):
        check_parser(loader.spark, job.parser)
    sizes = sizes or BatchSizer(job.max_records, job.batch_bytes)
    with sorted_errors(f"loading {paths.main}"):
        state = table_state(loader, paths)
        topics = wanted_topics(loader, job, state)
        check = begin_check(loader, topics) if job.segments else None
        backlog = plan(_positions(state), loader.kafka.views(topics), topics, max_records=sys.maxsize)
        targets = {r.key: r.end for r in backlog.ranges}
        prepare(paths, job.parser, job.partition_by)
        if job.segments is not None:
            create_segments(paths.segments, job.segments.rules)
        yield from _registered(loader, job)
        yield Backlog(backlog.records, backlog.ranges)
        stopped: set[str] = set()
        while True:
            if (reason := sizes.reached()) is not None:
                yield RunEnded(reason)
                return
            entry = state.planned
            if entry is None:
                wanted = [t for t in topics if t not in stopped]
                planned = plan(_positions(state), loader.kafka.views(wanted), wanted, sizes.next_offsets(), targets)
                if planned.records:
                    entry = put_entry(loader, job, paths, state, planned.ranges)
                for stop in planned.stopped:
                    stopped.add(stop.topic)
                    yield stop
            if entry is None and check is not None:
                entry, check = (yield from _checked(loader, job, paths, state, check, stopped)), None
            if entry is None:
                return
            done = do_batch(loader, paths, entry)
            if done.records:
                sizes.saw(sum(r.size for r in entry.reads), done.bytes)
            yield done
            tidy(paths, entry.batch, loader.ledger_batches)
            state = table_state(loader, paths)


def _registered(loader: Loader, job: TableJob) -> Iterator[CatalogNotice]:
    """Once a run, and a minute after a failure. Raises ForeignTable where the name stands for something else."""
    name = job.register_as
    if name is None:
        return
    reason, tried = loader.registered.get(name, ("", -_CATALOG_S))
    # A client of a metastore that is down tries for half a minute.
    if reason is not None and time.monotonic() - tried >= _CATALOG_S:
        reason = register_table(loader.spark, name, job.path)
        loader.registered[name] = reason, time.monotonic()
    if reason is not None:
        yield CatalogNotice(reason)


def _checked(
    loader: Loader, job: TableJob, paths: TablePaths, state: TableState, check: SegmentCheck, stopped: Collection[str]
) -> Generator[LoadEvent, None, LedgerEntry | None]:
    """Finishes the check, once everything is loaded. Where another loader continues, it will check, too.

    Returns the entry of one that was faster: it may be a reset, after which not everything is loaded.
    """
    yield from map(SegmentNotice, notify_ready(job, paths, state.last))
    if stopped or check.missing:
        yield SegmentNotice(check.missing or f"no segment closes while {', '.join(sorted(stopped))} is stopped")
        return None
    try:
        result = finish_check(loader, job, paths, state.last, check, _positions(state))
    except Overtaken:
        return None
    if result is None:
        return None
    entry = put_entry(loader, job, paths, state, [r.at_rest for r in _positions(state)])
    if entry.run != loader.run or entry.reads:
        return entry
    yield do_batch(loader, paths, entry, result=result)
    yield from map(SegmentNotice, notify_ready(job, paths, entry.batch))
    return None


def tidy(paths: TablePaths, batch: int, keep: int) -> None:
    """Keeps the side tables of a batch small. Where that fails, a later batch makes up for it."""
    if batch % MERGE_EVERY == 0:
        with suppress(Transient):
            merge_entries(paths.ledger, keep)
            merge_notes(paths.left_out)


def requarantine_table(loader: Loader, job: TableJob) -> Iterator[LoadEvent]:
    """Moves the quarantined lines that the job's parser can read into the table; the others stay, with their present
    reason. Raises Terminal, Transient. Safe to call again, and while others load.
    """
    paths = TablePaths.of(job.path)
    with sorted_errors(f"requarantining {paths.quarantine}"):
        while True:
            state = table_state(loader, paths)
            if state.newest is None:
                return
            prepare(paths, job.parser, job.partition_by)
            entry = state.planned
            if entry is None:
                lines = ds.field("resolved").is_null() & ds.field("line").is_valid()
                if job.parser.format == "chunk" or not count_rows(paths.quarantine, lines):
                    return
                entry = put_entry(loader, job, paths, state, [r.at_rest for r in _positions(state)], REQUARANTINE)
            yield do_batch(loader, paths, entry)
            if entry.kind == REQUARANTINE and entry.parser == job.parser.name:
                return


def wanted_topics(loader: Loader, job: TableJob, state: TableState) -> list[str]:
    """The topics that match now, and those that matched when the table was loaded: a removed topic is reported."""
    known = {r.topic for r in _positions(state)}
    named = {pattern for pattern in job.topics if not is_pattern(pattern)}
    topics = {*loader.kafka.names(job.topics), *named, *(topic for topic in known if matches(topic, job.topics))}
    if not topics:
        raise TopicChanged(f"no topic of {loader.kafka.bootstrap_servers} matches {', '.join(job.topics)}")
    return sorted(topics)


def _positions(state: TableState) -> tuple[Range, ...]:
    if state.planned is not None and not state.planned.reads:
        # A move or a reset: its positions apply already.
        return state.planned.ranges
    return state.committed.ranges if state.committed else ()


def _originals_of(loader: Loader, state: TableState, ranges: Sequence[Range]) -> list[OriginOffset]:
    """Where the ranges end in the originals of other data centres' topics. A move away from a dead one needs them."""
    away = [r for r in ranges if origin_dc(r.topic) != loader.dc]
    known, asked = known_originals(away, loader.dc, [state.committed] if state.committed else [])
    return known if loader.mirror_offsets is None else [*known, *loader.mirror_offsets.originals(asked, _ORIGINALS_S)]


def put_entry(
    loader: Loader,
    job: TableJob,
    paths: TablePaths,
    state: TableState,
    ranges: Sequence[Range],
    kind: str = LOAD,
    reload: Sequence[Range] = (),
) -> LedgerEntry:
    """The batch after ``state.last`` as the ledger has it: ours, or that of a loader that was faster."""
    entry = new_entry(
        state.last + 1,
        loader.dc,
        job.parser.name,
        loader.run,
        ranges,
        kind=kind,
        settings=job.parser.as_json,
        origin=loader.origin(job.topics),
        originals=_originals_of(loader, state, ranges),
        reload=reload,
    )
    return Ledger(paths.ledger).put(entry)


def table_state(loader: Loader, paths: TablePaths) -> TableState:
    """The state of the table. Raises LedgerBroken when its offsets belong to another data centre."""
    state = read_state(paths)
    # A planned batch may be a move: its offsets are those of the new data centre.
    entry = state.newest
    if entry is not None and entry.dc != loader.dc:
        raise LedgerBroken(
            f"{paths.ledger} holds offsets of {entry.dc}, this is {loader.dc}: offsets differ between data centres, "
            f"and no row may be loaded twice. Load the table in {entry.dc}, or move it here: `logferry table move --to "
            f"{loader.dc}`"
        )
    return state


def prepare(paths: TablePaths, parser: ParserSettings = LINES, partition_by: Sequence[str] = ()) -> None:
    """Creates the tables that are missing. Several loaders may do so at once.

    A table gets the parser's new columns and wider types; one that has columns with other types is refused. So are a
    table with rows that no ledger accounts for, a ledger or quarantine that was removed or does not match, and other
    columns. A load never starts over at the earliest offsets of a topic that it has loaded from.
    """
    with storage_errors(f"{paths.main} cannot be read"):
        is_foreign = open_table(paths.main) is None and not is_empty(paths.main)
    if is_foreign:
        raise ForeignTable(f"{paths.main} is not empty, and not a Delta table")
    read_state(paths)
    Ledger(paths.ledger).create()
    _create(paths.quarantine, QUARANTINE, "logferry quarantine", (), {"parser", "resolved", "since"})
    dates = [name for name in partition_by if name in DATES]
    own = set(parser.kinds) | {"fields", "rescued", "event_time"}
    _create(paths.main, Schema.from_json(row_schema(parser, dates).json()), "logferry rows", partition_by, own)


def _create(path: Location, schema: Schema, name: str, partition_by: Sequence[str], addable: set[str]) -> None:
    """Creates the table unless it exists, and checks its columns in either case; adds those of ``addable``."""
    # Statistics of the text would cost time and skip no file.
    names = {field.name for field in schema.fields} - set(partition_by)
    indexed = [column for column in INDEXED if column in names]
    configuration: dict[str, str | None] = {"delta.dataSkippingStatsColumns": ",".join(indexed)}
    create_table(path, schema, name, configuration, partition_by)
    made = existing_table(path)
    have, want = column_types(made.schema().to_json()), column_types(schema.to_json())
    changes = column_changes(have, want)
    wrong = [*changes.refused, *(name for name in changes.wider if name not in addable)]
    wrong += [name for name in want if name not in have and name not in addable]
    if wrong:
        raise ForeignTable(f"{path} has other columns than the job: {', '.join(sorted(wrong))}")
    parted = list(made.metadata().partition_columns)
    if parted != list(partition_by):
        said = [", ".join(columns) or "nothing" for columns in (parted, list(partition_by))]
        raise ForeignTable(
            f"{path} is partitioned by {said[0]}, the job by {said[1]}: the partitioning cannot be changed"
        )
    if changes.wider:
        widen_columns(path, schema)
    add_columns(path, schema)
