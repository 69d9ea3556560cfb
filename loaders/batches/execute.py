"""One batch of the ledger, from its entry to the commit of its rows.

Whatever an entry says is done once, by whichever loader, and can be done again: read what it says, write files that
are no part of the table yet, the quarantine, and the main table's commit last.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from logferry.loaders.batches.create_tables import partition_columns
from logferry.loaders.batches.dedup import Once, batch_facts, create_moved, known_before, once
from logferry.loaders.batches.mirror_offsets import Books
from logferry.loaders.batches.read import Batch, kept, read
from logferry.loaders.batches.reload import give_up, is_given_up, recounted, replace_main, replace_quarantined
from logferry.loaders.batches.requarantine import resolve, resolved_rows
from logferry.loaders.config import GatewayAccess
from logferry.loaders.errors import LedgerBroken, Overtaken, TopicChanged
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.known import put_known
from logferry.loaders.notes import notes_table
from logferry.loaders.parsing import rows as parse
from logferry.loaders.parsing.settings import ParserSettings, settings_of
from logferry.loaders.planning.plan import Range, replaced, unreadable
from logferry.loaders.planning.segment_states import Added, Look, Recounted, Rules, add_rows, look_at, replace_rows
from logferry.loaders.planning.source_facts import several_centres, with_events
from logferry.loaders.spark.kafka_offsets import KafkaTopics
from logferry.loaders.storage.commit import Committed, commit_files, committed, put_rows
from logferry.loaders.storage.data_files import Written, write_files
from logferry.loaders.storage.drop_rows import drop
from logferry.loaders.storage.ledger import (
    DROP,
    KINDS,
    MOVED_DAYS,
    RELOAD,
    REQUARANTINE,
    LedgerEntry,
    Origin,
    TablePaths,
)
from logferry.loaders.storage.segment_table import added_by, put_segments, segments_before, window_s
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F


@dataclass(frozen=True)
class Loader:
    """What every table of a run shares. ``run`` is this run's name, for seeing who won.

    ``moved_within``: how much later the copy of a chunk may come by another data centre and be known as one.
    ``books``: of the mirror that writes here; without them the ledger notes no originals of other centres' topics.
    """

    spark: SparkSession
    kafka: KafkaTopics
    dc: str
    run: str
    moved_within: timedelta = timedelta(days=MOVED_DAYS)
    gateways: Mapping[str, GatewayAccess] = field(default_factory=dict)
    books: Books | None = None

    def origin(self, topics: Sequence[str]) -> Origin:
        """Of a job with these patterns, for the ledger."""
        return Origin(self.kafka.bootstrap_servers, tuple(topics), self.moved_within.days)


GIVE_UP: Final = (
    "this reload can be given up, the rows stay as they are: --reset TOPIC:PARTITION=POSITION with the position that "
    "--state tells"
)


class Looked(NamedTuple):
    """A look at the segments, by these rules."""

    look: Look
    rules: Rules


@dataclass(frozen=True)
class BatchDone:
    """A batch that the table holds now. ``rows``, ``quarantined``: None where only another loader knows.

    ``left_out``: chunks of which the table has the copy that came by another data centre.
    """

    batch: int
    ours: bool
    ranges: tuple[Range, ...]
    records: int
    bytes: int
    rows: int | None
    quarantined: int | None
    seconds: float
    left_out: int = 0


def do_batch(
    loader: Loader, paths: TablePaths, entry: LedgerEntry, given_up: Collection[str] = (), looked: Looked | None = None
) -> BatchDone:
    """Does what the entry says, once. Raises TopicChanged when Kafka cannot give exactly that any more.

    ``given_up``: topics that somebody has decided to do without; a reload is given up as a whole. ``looked``: a look at
    the segments, which goes with a batch that reads nothing.
    """
    if given_up and entry.kind == RELOAD:
        if not give_up(paths, entry.batch, loader.run):
            raise LedgerBroken(f"batch {entry.batch} of {paths.main} cannot be given up: its quarantine is changed")
    elif given_up:
        entry = entry._replace(ranges=tuple(r for r in entry.ranges if r.topic not in given_up))
    try:
        return _do(loader, paths, entry, looked)
    except Overtaken:
        done = committed(paths.main, entry.batch, loader.run)
        if done is None:
            raise
        return _already(entry, done)


def _do(loader: Loader, paths: TablePaths, entry: LedgerEntry, looked: Looked | None) -> BatchDone:
    done = committed(paths.main, entry.batch, loader.run)
    if done is not None:
        return _already(entry, done)
    if entry.kind not in KINDS:
        raise LedgerBroken(f"batch {entry.batch} of {paths.main} is a {entry.kind}, which this loader does not know")
    if entry.kind == DROP:
        dropped, _ = drop(paths, entry, loader.run)
        return BatchDone(entry.batch, dropped.ours, (), 0, 0, 0, 0, 0.0)
    if entry.kind == REQUARANTINE:
        return _requarantine(loader, paths, entry, planned_parser(entry, paths))
    if entry.kind == RELOAD and is_given_up(paths, entry.batch):
        entry = entry._replace(reload=())
    if not entry.reads:
        nothing = _commit(loader, paths, entry, Written(paths.main, (), 0), None, looked)
        return BatchDone(entry.batch, nothing.ours, (), 0, 0, 0, 0, 0.0)
    if entry.dc != loader.dc:
        raise LedgerBroken(f"batch {entry.batch} of {paths.main} is one of {entry.dc}, this is {loader.dc}")
    parser = planned_parser(entry, paths)
    views = loader.kafka.views(r.topic for r in entry.reads)
    _refuse(entry, paths, unreadable(entry.reads, views))
    return _load(loader, paths, entry, parser)


def _already(entry: LedgerEntry, done: Committed) -> BatchDone:
    return BatchDone(entry.batch, done.ours, entry.reads, 0, 0, done.rows, None, 0.0)


def _load(loader: Loader, paths: TablePaths, entry: LedgerEntry, parser: ParserSettings) -> BatchDone:
    started = time.monotonic()
    batch = read(loader.spark, loader.kafka.bootstrap_servers, loader.dc, entry.reads)
    is_watched = several_centres(r.topic for r in entry.ranges) or window_s(paths.segments) is not None
    if is_watched:
        # Its sources are looked at before its rows are written.
        batch = kept(batch, entry.reads)
    try:
        found = _once(loader, paths, entry, batch) if is_watched else Once(batch.frame, {}, ())
        return _write(loader, paths, entry, parser, replace(batch, frame=found.frame), found, started)
    finally:
        batch.release()


def _once(loader: Loader, paths: TablePaths, entry: LedgerEntry, batch: Batch) -> Once:
    """The batch without copies, where its topics are those of several data centres."""
    if several_centres(r.topic for r in entry.ranges):
        create_moved(paths)
        return once(paths, entry, batch.frame, loader.moved_within)
    return Once(batch.frame, batch_facts(batch.frame), ())


def planned_parser(entry: LedgerEntry, paths: TablePaths) -> ParserSettings:
    """The parser that the batch was planned for. Raises LedgerBroken where this program has it no more."""
    parser = settings_of(entry.parser, entry.settings)
    if parser is None:
        raise LedgerBroken(
            f"batch {entry.batch} of {paths.main} was planned for the parser {entry.parser}, this loader reads such "
            "lines in another way: finish it with the loader that planned it"
        )
    return parser


def _write(
    loader: Loader,
    paths: TablePaths,
    entry: LedgerEntry,
    parser: ParserSettings,
    batch: Batch,
    found: Once,
    started: float,
) -> BatchDone:
    """``started``: by the monotonic clock."""
    seen = Observation()
    bad = F.count_if(F.col("reason").isNotNull()).alias("bad")
    parsed = parse.parsed(batch.frame, parser).observe(seen, F.count(F.lit(1)).alias("lines"), bad)
    written = _files(parsed, paths, entry, parser)
    counts, aside = batch.counts(), None
    if counts.flawed or seen.get["bad"]:
        aside = _quarantined(batch, paths, entry, parser)
    counted = _recounted(loader, paths, entry, batch, parser) if entry.reload else {}
    # Nothing is read after this: if the topics are still the same, these were their records.
    _refuse(entry, paths, replaced(entry.reads, loader.kafka.ids(r.topic for r in entry.reads)))
    quarantined: int | None = 0
    if entry.reload:
        quarantined = replace_quarantined(aside, paths, entry, loader.run)
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
        left_out=sum(note.kept is not None for note in found.notes),
    )


def _quarantined(batch: Batch, paths: TablePaths, entry: LedgerEntry, parser: ParserSettings) -> Written:
    rows = parse.quarantined(batch.frame, parser)
    if entry.reload:
        rows = rows.withColumn("since", F.lit(entry.batch).cast("long"))
    with sorted_errors(f"writing batch {entry.batch} to {paths.quarantine}"):
        return write_files(rows, paths.quarantine, entry.batch)


def _recounted(
    loader: Loader, paths: TablePaths, entry: LedgerEntry, batch: Batch, parser: ParserSettings
) -> Mapping[datetime, Recounted]:
    """The windows whose rows a reload replaces, where the table has segments."""
    if (length := window_s(paths.segments)) is None:
        return {}
    rows = parse.rows(parse.parsed(batch.frame, parser), parser, _dates(paths))
    return recounted(loader.spark, paths, entry, rows, Rules(length))


def _requarantine(loader: Loader, paths: TablePaths, entry: LedgerEntry, parser: ParserSettings) -> BatchDone:
    """Lines of the quarantine that can be read by now: marked there first, rows of the table last."""
    started = time.monotonic()
    marked = resolve(loader.spark, paths, entry.batch, loader.run, parser)
    written = _files(resolved_rows(loader.spark, paths, entry.batch, parser), paths, entry, parser)
    if marked is not None and written.rows != marked:
        raise LedgerBroken(
            f"batch {entry.batch} of {paths.main}: {marked} lines of the quarantine can be read, "
            f"but they make {written.rows} rows"
        )
    done = _commit(loader, paths, entry, written)
    took = time.monotonic() - started
    return BatchDone(entry.batch, done.ours, (), 0, 0, done.rows, -(done.rows or 0), took)


def _files(parsed: DataFrame, paths: TablePaths, entry: LedgerEntry, parser: ParserSettings) -> Written:
    rows = parse.rows(parsed, parser, _dates(paths))
    with sorted_errors(f"writing batch {entry.batch} to {paths.main}"):
        return write_files(rows, paths.main, entry.batch, partition_columns(paths.main))


def _dates(paths: TablePaths) -> list[str]:
    return [name for name in partition_columns(paths.main) if name in parse.DATES]


def _commit(
    loader: Loader,
    paths: TablePaths,
    entry: LedgerEntry,
    written: Written,
    found: Once | None = None,
    looked: Looked | None = None,
    counted: Mapping[datetime, Recounted] | None = None,
) -> Committed:
    """What goes with the rows first: what is known of sources, what was left out, segments. The rows last."""
    facts = found.facts if found else {}
    length = window_s(paths.segments)
    if length is not None:
        added, newest = added_by(written, Rules(length))
        facts = with_events(facts, newest)
        keep_segments(paths, entry, loader.run, {} if entry.reload else added, length, looked, counted or {})
    if length is not None or several_centres(r.topic for r in entry.ranges):
        create_moved(paths)
        # Where nobody has kept what is known, the batch's own part would pass for all of it.
        known_before(paths, entry.batch, loader.run)
        put_known(paths.sources, entry.batch, loader.run, facts)
    if found and found.notes:
        put_rows(notes_table(found.notes), paths.moved, entry.batch, loader.run)
    partition_by = partition_columns(paths.main)
    if entry.reload:
        return replace_main(written, paths, entry, loader.run, partition_by)
    return commit_files(written, paths.main, entry.batch, loader.run, partition_by)


def keep_segments(
    paths: TablePaths,
    entry: LedgerEntry,
    run: str,
    added: Mapping[datetime, Added],
    length: int,
    looked: Looked | None,
    counted: Mapping[datetime, Recounted],
) -> None:
    """Writes what the batch, or the look that it is for, changes of the segments. Safe to call again."""
    before = segments_before(paths, entry.batch, run, Rules(length))
    now = datetime.now(UTC)
    changed = add_rows(before, added, entry.batch, now) | replace_rows(before, counted, entry.batch, now)
    if looked is not None:
        changed |= look_at({**before, **changed}, looked.look, entry.batch, looked.rules)
    put_segments(paths.segments, entry.batch, run, changed.values())


def _refuse(entry: LedgerEntry, paths: TablePaths, reason: str | None) -> None:
    if reason is not None:
        way_on = f"; {GIVE_UP}" if entry.kind == RELOAD else ""
        raise TopicChanged(f"batch {entry.batch} of {paths.main} is planned and cannot be read: {reason}{way_on}")
