"""The load of one table: from where the table says it stands to what Kafka held at the start, batch by batch.

One batch: plan it, put it into the ledger, read what the ledger says, quarantine, write, see who won. A run that finds
a planned batch does that one first, exactly as it was planned. Whatever dies in between, the next run goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from logferry.loaders import parse
from logferry.loaders.commit import append_once
from logferry.loaders.config import TableJob
from logferry.loaders.errors import LedgerBroken, TopicChanged
from logferry.loaders.jvm import sorted_errors
from logferry.loaders.kafka import KafkaTopics, is_pattern, matches
from logferry.loaders.ledger import Ledger, LedgerEntry, TablePaths, new_entry
from logferry.loaders.plan import Range, Stopped, TopicPartition, plan, replaced, unreadable
from logferry.loaders.read import Batch, read
from logferry.loaders.tables import TableState, prepare, read_state
from pyspark.sql import SparkSession


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


@dataclass(frozen=True)
class Backlog:
    """What is to be loaded: offsets, of which control records are a part."""

    records: int


LoadEvent = Backlog | BatchDone | Stopped


def load_table(loader: Loader, job: TableJob) -> Iterator[LoadEvent]:
    """Loads up to the last stable offsets that Kafka has now; yields what it does when it is done.

    A topic that changed is stopped and the others go on, unless a batch of the ledger needs it. Raises Terminal,
    Transient. Safe to call again, and by several loaders at once.
    """
    paths = TablePaths.of(job.path)
    with sorted_errors(f"loading {paths.main}"):
        yield from _batches(loader, job, paths)


def _batches(loader: Loader, job: TableJob, paths: TablePaths) -> Iterator[LoadEvent]:
    state = _state(loader, paths)
    topics = wanted_topics(loader, job, state)
    backlog = plan(_positions(state), loader.kafka.views(topics), topics, max_records=sys.maxsize)
    targets = {r.key: r.end for r in backlog.ranges}
    prepare(paths)
    yield Backlog(backlog.records)
    stopped: set[str] = set()
    while True:
        entry, stops = _next_entry(loader, job, paths, state, [t for t in topics if t not in stopped], targets)
        for stop in stops:
            stopped.add(stop.topic)
            yield stop
        if entry is None:
            return
        yield do_batch(loader, paths, entry)
        state = _state(loader, paths)


def wanted_topics(loader: Loader, job: TableJob, state: TableState) -> list[str]:
    """What the patterns mean now, and what they meant when the table was loaded: removed topics are not forgotten."""
    known = {r.topic for r in _positions(state)}
    named = {pattern for pattern in job.topics if not is_pattern(pattern)}
    topics = {*loader.kafka.names(job.topics), *named, *(topic for topic in known if matches(topic, job.topics))}
    if not topics:
        raise TopicChanged(f"no topic of {loader.kafka.bootstrap_servers} matches {', '.join(job.topics)}")
    return sorted(topics)


def _positions(state: TableState) -> tuple[Range, ...]:
    return state.committed.ranges if state.committed else ()


def _next_entry(
    loader: Loader,
    job: TableJob,
    paths: TablePaths,
    state: TableState,
    topics: list[str],
    targets: dict[TopicPartition, int],
) -> tuple[LedgerEntry | None, tuple[Stopped, ...]]:
    """The batch to do next, as it stands in the ledger; None when the targets are reached."""
    if state.planned is not None:
        return state.planned, ()
    views = loader.kafka.views(topics)
    planned = plan(_positions(state), views, topics, job.max_records, targets)
    if not planned.records:
        return None, planned.stopped
    entry = new_entry(state.last + 1, loader.dc, parse.PARSER, loader.run, planned.ranges)
    return Ledger(paths.ledger).put(entry), planned.stopped


def do_batch(loader: Loader, paths: TablePaths, entry: LedgerEntry) -> BatchDone:
    """Loads what the entry says, once. Raises TopicChanged when Kafka cannot give exactly that any more."""
    if entry.parser != parse.PARSER:
        raise LedgerBroken(
            f"batch {entry.batch} of {paths.main} was planned for the parser {entry.parser}, this loader has "
            f"{parse.PARSER}: finish it with the loader that planned it"
        )
    views = loader.kafka.views(r.topic for r in entry.reads)
    _refuse(entry, paths, unreadable(entry.reads, views))
    started = time.monotonic()
    batch = read(loader.spark, loader.kafka.bootstrap_servers, loader.dc, entry.reads)
    try:
        # Read and kept: if the topics were the same before and after, these are their records.
        _refuse(entry, paths, replaced(entry.reads, loader.kafka.ids(r.topic for r in entry.reads)))
        read_s = time.monotonic() - started
        return _write(loader, paths, entry, batch, read_s)
    finally:
        batch.release()


def _write(loader: Loader, paths: TablePaths, entry: LedgerEntry, batch: Batch, read_s: float) -> BatchDone:
    started = time.monotonic()
    quarantined: int | None = 0
    if batch.suspect:
        rows = parse.quarantined(batch.frame)
        quarantined = append_once(rows, paths.quarantine, entry.batch, loader.run).rows
    done = append_once(parse.rows(batch.frame), paths.main, entry.batch, loader.run)
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


def _refuse(entry: LedgerEntry, paths: TablePaths, reason: str | None) -> None:
    if reason is not None:
        raise TopicChanged(f"batch {entry.batch} of {paths.main} is planned and cannot be read: {reason}")


def _state(loader: Loader, paths: TablePaths) -> TableState:
    """Where the table stands. Raises LedgerBroken when its offsets are another data centre's."""
    state = read_state(paths)
    for entry in (state.committed, state.planned):
        if entry is not None and entry.dc != loader.dc:
            raise LedgerBroken(
                f"{paths.ledger} holds offsets of {entry.dc}, this is {loader.dc}: "
                "offsets differ between data centres, and no row may be loaded twice"
            )
    return state
