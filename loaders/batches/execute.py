"""One batch of the ledger, from its entry to the commit of its rows.

An entry takes effect once, whichever loader executes it, and may be executed again: read its ranges, write files that
are not part of the table yet, the quarantine, and the main table's commit last. `_EXECUTE` has a function per kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, NamedTuple

import pyarrow.dataset as ds
from logferry.gateway.config import KafkaSettings
from logferry.loaders.batches.dedup import Deduplicated, batch_facts, without_copies
from logferry.loaders.batches.drop_rows import drop_rows
from logferry.loaders.batches.latest_state import merge_latest
from logferry.loaders.batches.mirror_offsets import MirrorOffsets
from logferry.loaders.batches.records import BatchRecords, kept_on_disk, read, write_files
from logferry.loaders.batches.replace_rows import (
    abandon_reload,
    is_abandoned,
    recount_segments,
    replace_main,
    replace_quarantined,
    resolve,
    resolved_rows,
)
from logferry.loaders.batches.row_counts import added_by, table_segments, table_sources
from logferry.loaders.config import GatewayAccess
from logferry.loaders.errors import LedgerBroken, Overtaken, TopicChanged
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.parsing.columns import DATES
from logferry.loaders.parsing.rows import as_stored, parse_records, quarantined_rows, table_rows
from logferry.loaders.parsing.settings import ParserSettings, settings_of
from logferry.loaders.planning.ledger_entry import (
    DROP,
    DUPLICATE_WINDOW_DAYS,
    LEDGER_BATCHES,
    LOAD,
    MOVE,
    RELOAD,
    REQUARANTINE,
    RESET,
    JobOrigin,
    LedgerEntry,
    TablePaths,
)
from logferry.loaders.planning.plan import Range, replaced, unreadable
from logferry.loaders.planning.segment_states import (
    RecountedRows,
    SegmentRules,
    WatermarkCheck,
    add_rows,
    check_segments,
    replace_rows,
)
from logferry.loaders.planning.source_facts import shared_topics, with_events
from logferry.loaders.spark.kafka_access import KafkaTopics
from logferry.loaders.storage.commit import CommittedBatch, DataFiles, commit_files, commit_rows, committed_batch
from logferry.loaders.storage.side_tables import (
    add_sources,
    complete_sources,
    left_out_rows,
    put_segments,
    segment_length,
    segments_before,
)
from logferry.loaders.storage.tables import QUARANTINE_COLUMNS, count_rows, partition_columns, stored_schema
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F


@dataclass
class GatewayClock:
    """The time of the gateways, by which segments close: a loader's own clock may be wrong.

    ``ahead``: how far they are ahead of the host; zero where none is configured, or none sent its time.
    """

    ahead: timedelta = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


@dataclass(frozen=True)
class Loader:
    """What all tables of a run share. ``run``: the name of this run, by which a commit shows who made it.

    ``duplicate_window``: copies of a chunk from two data centres are recognised if recorded within this time.
    ``mirror_offsets``: of the mirror that writes here; without it, the ledger has no original offsets of its topics.
    ``ledger_batches``: how many entries of a ledger are kept singly.
    ``registered``: by name in the catalog, why a table could not be registered (None: it is), and when that was tried,
    by the monotonic clock.
    """

    spark: SparkSession
    kafka: KafkaTopics
    dc: str
    run: str
    duplicate_window: timedelta = timedelta(days=DUPLICATE_WINDOW_DAYS)
    gateways: Mapping[str, GatewayAccess] = field(default_factory=dict)
    mirror_offsets: MirrorOffsets | None = None
    clock: GatewayClock = field(default_factory=GatewayClock)
    other_kafka: Mapping[str, KafkaSettings] = field(default_factory=dict)
    ledger_batches: int = LEDGER_BATCHES
    registered: dict[str, tuple[str | None, float]] = field(default_factory=dict)

    def origin(self, topics: Sequence[str]) -> JobOrigin:
        """The origin of a job with these patterns, for the ledger."""
        return JobOrigin(self.kafka.bootstrap_servers, tuple(topics), self.duplicate_window.days)

    def kafka_of(self, dc: str, bootstrap_servers: str) -> KafkaSettings:
        """The connection to another data centre: as configured, else as here, with this address from the ledger."""
        here = self.kafka.settings.model_copy(update={"bootstrap_servers": bootstrap_servers})
        return self.other_kafka.get(dc, here)


class CheckResult(NamedTuple):
    """A finished segment check and its rules."""

    check: WatermarkCheck
    rules: SegmentRules


@dataclass(frozen=True)
class BatchDone:
    """A batch that the table holds. ``rows``, ``quarantined``: None where only another loader knows.

    ``left_out``: chunks of which the table has the copy from another data centre.
    """

    batch: int
    ours: bool
    ranges: tuple[Range, ...] = ()
    records: int = 0
    bytes: int = 0
    rows: int | None = 0
    quarantined: int | None = 0
    seconds: float = 0.0
    left_out: int = 0


def do_batch(
    loader: Loader,
    paths: TablePaths,
    entry: LedgerEntry,
    abandoned: Collection[str] = (),
    result: CheckResult | None = None,
) -> BatchDone:
    """Executes the entry, once. Raises TopicChanged when Kafka no longer has exactly its ranges.

    ``abandoned``: topics that the operator decided to do without; a reload is abandoned as a whole. ``result``: of a
    segment check, which goes with a batch that reads nothing.
    """
    if abandoned and entry.kind == RELOAD:
        if not abandon_reload(paths, entry.batch, loader.run):
            raise LedgerBroken(f"batch {entry.batch} of {paths.main} cannot be abandoned: its quarantine is changed")
    elif abandoned:
        entry = entry._replace(ranges=tuple(r for r in entry.ranges if r.topic not in abandoned))
    done = committed_batch(paths.main, entry.batch, loader.run)
    if done is None:
        execute = _EXECUTE.get(entry.kind)
        if execute is None:
            raise LedgerBroken(f"batch {entry.batch} of {paths.main} has kind {entry.kind}, unknown to this loader")
        try:
            return execute(loader, paths, entry, result)
        except Overtaken:
            done = committed_batch(paths.main, entry.batch, loader.run)
            if done is None:
                raise
    return BatchDone(entry.batch, done.ours, entry.reads, rows=done.rows, quarantined=None)


def _without_rows(loader: Loader, paths: TablePaths, entry: LedgerEntry, result: CheckResult | None) -> BatchDone:
    """Positions, or a segment check."""
    return BatchDone(entry.batch, _commit(loader, paths, entry, DataFiles(paths.main), None, result).ours)


def _reload(loader: Loader, paths: TablePaths, entry: LedgerEntry, result: CheckResult | None) -> BatchDone:
    if is_abandoned(paths, entry.batch):
        entry = entry._replace(reload=())
    return _load(loader, paths, entry, result)


def _load(loader: Loader, paths: TablePaths, entry: LedgerEntry, result: CheckResult | None) -> BatchDone:
    if not entry.reads:
        return _without_rows(loader, paths, entry, result)
    if entry.dc != loader.dc:
        raise LedgerBroken(f"batch {entry.batch} of {paths.main} holds offsets of {entry.dc}, this is {loader.dc}")
    parser = planned_parser(entry, paths)
    _check_readable(entry, paths, unreadable(entry.reads, loader.kafka.views(r.topic for r in entry.reads)))
    started = time.monotonic()
    batch = read(loader.spark, loader.kafka.options(), loader.dc, entry.reads)
    shared = shared_topics(r.topic for r in entry.ranges)
    needs_sources = shared or segment_length(paths.segments) is not None
    if needs_sources:
        # They are read before the rows are written.
        batch = kept_on_disk(batch, entry.reads)
    try:
        if shared:
            found = without_copies(paths, entry, batch.frame, loader.duplicate_window)
        else:
            found = Deduplicated(batch.frame, batch_facts(batch.frame) if needs_sources else {}, ())
        return _write(loader, paths, entry, parser, replace(batch, frame=found.frame), found, started)
    finally:
        batch.release()


def planned_parser(entry: LedgerEntry, paths: TablePaths) -> ParserSettings:
    """The parser that the batch was planned for. Raises LedgerBroken where this version no longer has it."""
    parser = settings_of(entry.parser, entry.settings)
    if parser is None:
        raise LedgerBroken(
            f"batch {entry.batch} of {paths.main} was planned for the parser {entry.parser}, which this version does "
            "not have: finish it with the version that planned it"
        )
    return parser


def _write(
    loader: Loader,
    paths: TablePaths,
    entry: LedgerEntry,
    parser: ParserSettings,
    batch: BatchRecords,
    found: Deduplicated,
    started: float,
) -> BatchDone:
    """``started``: by the monotonic clock."""
    seen = Observation()
    bad = F.count_if(F.col("reason").isNotNull()).alias("bad")
    parsed = parse_records(batch.frame, parser).observe(seen, F.count(F.lit(1)).alias("lines"), bad)
    written = _files(parsed, paths, entry, parser)
    counts = batch.counts()
    written.check_rows(seen.get["lines"] - seen.get["bad"])
    expected = seen.get["bad"] + counts.flawed
    aside = _quarantined(batch, paths, entry, parser) if expected else None
    counted: Mapping[datetime, RecountedRows] = {}
    if entry.reload and (length := segment_length(paths.segments)) is not None:
        rows = table_rows(parse_records(batch.frame, parser), parser, _dates(paths))
        counted = recount_segments(loader.spark, paths, entry, rows, SegmentRules(length))
    # Nothing is read after this: if the topic ids are unchanged, these were their records.
    _check_readable(entry, paths, replaced(entry.reads, loader.kafka.ids(r.topic for r in entry.reads)))
    if aside is not None:
        aside.check_rows(expected)
    quarantined: int | None = 0
    if entry.reload:
        quarantined = replace_quarantined(loader.spark, aside, paths, entry, loader.run)
    elif aside is not None:
        quarantined = commit_files(aside, paths.quarantine, entry.batch, loader.run).rows
    done = _commit(loader, paths, entry, written, found, counted=counted)
    return BatchDone(
        batch=entry.batch,
        ours=done.ours,
        ranges=entry.reads,
        records=counts.records,
        bytes=counts.bytes,
        rows=done.rows,
        quarantined=quarantined,
        seconds=time.monotonic() - started,
        left_out=sum(chunk.kept is not None for chunk in found.left_out),
    )


def _quarantined(batch: BatchRecords, paths: TablePaths, entry: LedgerEntry, parser: ParserSettings) -> DataFiles:
    rows = quarantined_rows(batch.frame, QUARANTINE_COLUMNS, parser)
    if entry.reload:
        rows = rows.withColumn("since", F.lit(entry.batch).cast("long"))
    with sorted_errors(f"writing batch {entry.batch} to {paths.quarantine}"):
        return write_files(rows, paths.quarantine, entry.batch)


def _requarantine(loader: Loader, paths: TablePaths, entry: LedgerEntry, _: CheckResult | None) -> BatchDone:
    """Quarantined lines that the parser can read by now: marked there first, rows of the table last."""
    started, parser = time.monotonic(), planned_parser(entry, paths)
    resolve(loader.spark, paths, entry.batch, loader.run, parser)
    # Counted without Spark; another loader may have marked them.
    marked = count_rows(paths.quarantine, ds.field("resolved") == entry.batch)
    written = _files(resolved_rows(loader.spark, paths, entry.batch, parser), paths, entry, parser)
    if written.rows != marked:
        raise LedgerBroken(
            f"batch {entry.batch} of {paths.main}: {marked} lines of the quarantine can be read, "
            f"but they make {written.rows} rows"
        )
    done = _commit(loader, paths, entry, written)
    moved, took = done.rows, time.monotonic() - started
    return BatchDone(entry.batch, done.ours, rows=moved, quarantined=-(moved or 0), seconds=took)


def _files(parsed: DataFrame, paths: TablePaths, entry: LedgerEntry, parser: ParserSettings) -> DataFiles:
    rows = as_stored(table_rows(parsed, parser, _dates(paths)), stored_schema(paths.main))
    with sorted_errors(f"writing batch {entry.batch} to {paths.main}"):
        return write_files(rows, paths.main, entry.batch, partition_columns(paths.main))


def _dates(paths: TablePaths) -> list[str]:
    return [name for name in partition_columns(paths.main) if name in DATES]


def _commit(
    loader: Loader,
    paths: TablePaths,
    entry: LedgerEntry,
    written: DataFiles,
    found: Deduplicated | None = None,
    result: CheckResult | None = None,
    counted: Mapping[datetime, RecountedRows] | None = None,
) -> CommittedBatch:
    """The side tables first: segments, sources, chunks left out, the latest state. The rows last."""
    facts = found.facts if found else {}
    length = segment_length(paths.segments)
    if length is not None:
        added, newest = added_by(loader.spark, written, SegmentRules(length))
        facts = with_events(facts, newest)
        counting = partial(table_segments, loader.spark)
        before = segments_before(paths, entry.batch, loader.run, SegmentRules(length), counting)
        now = loader.clock.now()
        changed = add_rows(before, {} if entry.reload else added, entry.batch, now)
        changed |= replace_rows(before, counted or {}, entry.batch, now)
        if result is not None:
            changed |= check_segments({**before, **changed}, result.check, entry.batch, result.rules)
        put_segments(paths.segments, entry.batch, loader.run, changed.values())
    if length is not None or shared_topics(r.topic for r in entry.ranges):
        # Without the sources of earlier batches, this batch's part would pass for all of them.
        complete_sources(paths, entry.batch, loader.run, partial(table_sources, loader.spark))
        add_sources(paths.sources, entry.batch, loader.run, facts)
    if found and found.left_out:
        commit_rows(left_out_rows(found.left_out), paths.left_out, entry.batch, loader.run)
    _merge_latest(loader, paths, entry, written)
    if entry.reload:
        return replace_main(loader.spark, written, paths, entry, loader.run)
    return commit_files(written, paths.main, entry.batch, loader.run, after=entry.batch - 1)


def _merge_latest(loader: Loader, paths: TablePaths, entry: LedgerEntry, written: DataFiles) -> None:
    parser = settings_of(entry.parser, entry.settings)
    if parser is not None and parser.latest:
        merge_latest(loader.spark, written, paths, entry, parser, loader.run)


def _check_readable(entry: LedgerEntry, paths: TablePaths, reason: str | None) -> None:
    if reason is not None:
        how_to_abandon = (
            "; to abandon this reload and keep the rows as they are: `logferry table reset --to "
            "TOPIC:PARTITION=POSITION` with the position that `logferry table state` prints"
        )
        advice = how_to_abandon if entry.kind == RELOAD else ""
        raise TopicChanged(f"batch {entry.batch} of {paths.main} is planned but cannot be read: {reason}{advice}")


_Execute = Callable[[Loader, TablePaths, LedgerEntry, CheckResult | None], BatchDone]
_EXECUTE: Final[Mapping[str, _Execute]] = {
    LOAD: _load,
    REQUARANTINE: _requarantine,
    RESET: _without_rows,
    MOVE: _without_rows,
    RELOAD: _reload,
    DROP: lambda loader, paths, entry, _: BatchDone(
        entry.batch, drop_rows(lambda: loader.spark, paths, entry, loader.run).ours
    ),
}
