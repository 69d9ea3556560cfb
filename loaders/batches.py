"""One batch of the ledger, from its entry to the commit of its rows.

Whatever an entry says is done once, by whichever loader, and can be done again: read what it says, write files that
are no part of the table yet, the quarantine, and the main table's commit last.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from logferry.loaders import parse
from logferry.loaders.commit import Committed, append_once, commit_files, committed
from logferry.loaders.errors import LedgerBroken, TopicChanged
from logferry.loaders.files import Written, write_files
from logferry.loaders.jvm import sorted_errors
from logferry.loaders.kafka import KafkaTopics
from logferry.loaders.ledger import REQUARANTINE, LedgerEntry, TablePaths
from logferry.loaders.parsing.settings import ParserSettings, settings_of
from logferry.loaders.plan import Range, replaced, unreadable
from logferry.loaders.read import Batch, read
from logferry.loaders.requarantine import resolve, resolved_rows
from logferry.loaders.tables import partition_columns
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F


@dataclass(frozen=True)
class Loader:
    """What every table of a run shares. ``run`` is this run's name, for seeing who won."""

    spark: SparkSession
    kafka: KafkaTopics
    dc: str
    run: str


@dataclass(frozen=True)
class BatchDone:
    """A batch that the table holds now. ``rows``, ``quarantined``: None where only another loader knows."""

    batch: int
    ours: bool
    ranges: tuple[Range, ...]
    records: int
    bytes: int
    rows: int | None
    quarantined: int | None
    read_s: float
    write_s: float


def do_batch(loader: Loader, paths: TablePaths, entry: LedgerEntry, given_up: Collection[str] = ()) -> BatchDone:
    """Does what the entry says, once. Raises TopicChanged when Kafka cannot give exactly that any more.

    ``given_up``: topics that somebody has decided to do without.
    """
    entry = entry._replace(ranges=tuple(r for r in entry.ranges if r.topic not in given_up))
    done = committed(paths.main, entry.batch, loader.run)
    if done is not None:
        return BatchDone(entry.batch, done.ours, entry.reads, 0, 0, done.rows, None, 0.0, 0.0)
    if entry.kind == REQUARANTINE:
        return _requarantine(loader, paths, entry, planned_parser(entry, paths))
    if not entry.reads:
        nothing = _commit(loader, paths, entry, Written(paths.main, (), 0))
        return BatchDone(entry.batch, nothing.ours, (), 0, 0, 0, 0, 0.0, 0.0)
    parser = planned_parser(entry, paths)
    views = loader.kafka.views(r.topic for r in entry.reads)
    _refuse(entry, paths, unreadable(entry.reads, views))
    started = time.monotonic()
    batch = read(loader.spark, loader.kafka.bootstrap_servers, loader.dc, entry.reads)
    try:
        # Read and kept: if the topics were the same before and after, these are their records.
        _refuse(entry, paths, replaced(entry.reads, loader.kafka.ids(r.topic for r in entry.reads)))
        read_s = time.monotonic() - started
        return _write(loader, paths, entry, parser, batch, read_s)
    finally:
        batch.release()


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
    loader: Loader, paths: TablePaths, entry: LedgerEntry, parser: ParserSettings, batch: Batch, read_s: float
) -> BatchDone:
    started = time.monotonic()
    seen = Observation()
    bad = F.count_if(F.col("reason").isNotNull()).alias("bad")
    parsed = parse.parsed(batch.frame, parser).observe(seen, F.count(F.lit(1)).alias("lines"), bad)
    written = _files(parsed, paths, entry, parser)
    quarantined: int | None = 0
    if batch.flawed or seen.get["bad"]:
        rows = parse.quarantined(batch.frame, parser)
        quarantined = append_once(rows, paths.quarantine, entry.batch, loader.run).rows
    done = _commit(loader, paths, entry, written)
    return BatchDone(
        batch=entry.batch,
        ours=done.ours,
        ranges=entry.reads,
        records=batch.records,
        bytes=batch.bytes,
        rows=done.rows,
        quarantined=quarantined,
        read_s=read_s,
        write_s=time.monotonic() - started,
    )


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
    return BatchDone(entry.batch, done.ours, (), 0, 0, done.rows, -(done.rows or 0), 0.0, took)


def _files(parsed: DataFrame, paths: TablePaths, entry: LedgerEntry, parser: ParserSettings) -> Written:
    partition_by = partition_columns(paths.main)
    dates = [name for name in partition_by if name in parse.DATES]
    with sorted_errors(f"writing batch {entry.batch} to {paths.main}"):
        return write_files(parse.rows(parsed, parser, dates), paths.main, entry.batch, partition_by)


def _commit(loader: Loader, paths: TablePaths, entry: LedgerEntry, written: Written) -> Committed:
    return commit_files(written, paths.main, entry.batch, loader.run, partition_columns(paths.main))


def _refuse(entry: LedgerEntry, paths: TablePaths, reason: str | None) -> None:
    if reason is not None:
        raise TopicChanged(f"batch {entry.batch} of {paths.main} is planned and cannot be read: {reason}")
