"""The load of one table: from where the table says it stands to what Kafka held at the start, batch by batch.

One batch: plan it, put it into the ledger, read what the ledger says, quarantine, write, see who won. A run that finds
a planned batch does that one first, exactly as it was planned. Whatever dies in between, the next run goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from logferry.loaders.batches.create_tables import TableState, prepare, read_state
from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.batches.requarantine import standing_lines
from logferry.loaders.config import TableJob
from logferry.loaders.errors import LedgerBroken, Overtaken, TopicChanged
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.looking import begin, look
from logferry.loaders.parsing import rows as parse
from logferry.loaders.planning.batch_size import Bound, Sizes, unbounded
from logferry.loaders.planning.move_plan import noted, to_note
from logferry.loaders.planning.plan import Range, Stopped, TopicPartition, plan
from logferry.loaders.runs.notify import announce
from logferry.loaders.spark.kafka_offsets import is_pattern, matches
from logferry.loaders.storage.ledger import LOAD, REQUARANTINE, Ledger, LedgerEntry, Original, TablePaths, new_entry
from logferry.loaders.storage.segment_table import create_segments

# A mirror's word of what it wrote comes with it, or within the blink of an eye.
_NOTES_S: Final = 2.0


@dataclass(frozen=True)
class Backlog:
    """What is to be loaded: offsets, of which control records are a part."""

    records: int


@dataclass(frozen=True)
class Ended:
    """The run ends before everything is loaded, as it was told to."""

    reason: str


@dataclass(frozen=True)
class Waits:
    """Everything is loaded, but something about segments cannot be done now, for this reason."""

    reason: str


LoadEvent = Backlog | BatchDone | Stopped | Ended | Waits


def load_table(
    loader: Loader, job: TableJob, bound: Bound | None = None, sizes: Sizes | None = None
) -> Iterator[LoadEvent]:
    """Loads up to the last stable offsets that Kafka has now, or to the bound; yields what it does when it is done.

    ``sizes``: what earlier loads of this table have shown. A topic that changed is stopped and the others go on, unless
    a batch of the ledger needs it. Raises Terminal, Transient. Safe to call again, and by several loaders at once.
    """
    paths = TablePaths.of(job.path)
    if job.parser.format not in ("lines", "chunk"):
        parse.check(loader.spark, job.parser)
    with sorted_errors(f"loading {paths.main}"):
        yield from _batches(loader, job, paths, bound or unbounded(), sizes or Sizes(job.max_records, job.batch_bytes))


def _batches(loader: Loader, job: TableJob, paths: TablePaths, bound: Bound, sizes: Sizes) -> Iterator[LoadEvent]:
    state = table_state(loader, paths)
    topics = wanted_topics(loader, job, state)
    looking = begin(loader, job, topics) if job.segments else None
    backlog = plan(_positions(state), loader.kafka.views(topics), topics, max_records=sys.maxsize)
    targets = {r.key: r.end for r in backlog.ranges}
    prepare(paths, job.parser, job.partition_by)
    if job.segments is not None:
        create_segments(paths.segments, job.segments.rules)
    yield Backlog(backlog.records)
    stopped: set[str] = set()
    while True:
        if (reason := bound.reached()) is not None:
            yield Ended(reason)
            return
        wanted = [t for t in topics if t not in stopped]
        entry, stops = _next_entry(loader, job, paths, state, wanted, targets, bound.cut(sizes))
        for stop in stops:
            stopped.add(stop.topic)
            yield stop
        if entry is None:
            if looking is None:
                return
            for failed in announce(job, paths, state.last):
                yield Waits(failed)
            if stopped or looking.missing:
                yield Waits(looking.missing or f"none is closed while {', '.join(sorted(stopped))} is stopped")
                return
            try:
                looked = look(job, paths, state.last, loader.run, looking)
            except Overtaken:
                # Who goes on will look, too.
                return
            if looked is None:
                return
            looking = None
            entry = _put(loader, job, paths, state, [r._replace(start=r.end) for r in _positions(state)])
            if entry.run == loader.run and not entry.reads:
                yield do_batch(loader, paths, entry, looked=looked)
                for failed in announce(job, paths, entry.batch):
                    yield Waits(failed)
                return
        done = do_batch(loader, paths, entry)
        if done.records:
            offsets = sum(r.size for r in entry.reads)
            sizes.saw(offsets, done.bytes)
            bound.spent(offsets, done.bytes)
        yield done
        state = table_state(loader, paths)


def requarantine_table(loader: Loader, job: TableJob) -> Iterator[LoadEvent]:
    """Brings the lines of the quarantine into the table that the job's parser can read; the others stay, with what is
    wrong with them now. Raises Terminal, Transient. Safe to call again, and while others load.
    """
    paths = TablePaths.of(job.path)
    with sorted_errors(f"requarantining {paths.quarantine}"):
        while True:
            state = table_state(loader, paths)
            if state.committed is None and state.planned is None:
                return
            prepare(paths, job.parser, job.partition_by)
            entry = state.planned
            if entry is None:
                if job.parser.format == "chunk" or not standing_lines(loader.spark, paths):
                    return
                resting = [r._replace(start=r.end) for r in _positions(state)]
                entry = _put(loader, job, paths, state, resting, kind=REQUARANTINE)
            yield do_batch(loader, paths, entry)
            if entry.kind == REQUARANTINE and entry.parser == job.parser.name:
                return


def wanted_topics(loader: Loader, job: TableJob, state: TableState) -> list[str]:
    """What the patterns mean now, and what they meant when the table was loaded: removed topics are not forgotten."""
    known = {r.topic for r in _positions(state)}
    named = {pattern for pattern in job.topics if not is_pattern(pattern)}
    topics = {*loader.kafka.names(job.topics), *named, *(topic for topic in known if matches(topic, job.topics))}
    if not topics:
        raise TopicChanged(f"no topic of {loader.kafka.bootstrap_servers} matches {', '.join(job.topics)}")
    return sorted(topics)


def _positions(state: TableState) -> tuple[Range, ...]:
    if state.planned is not None and not state.planned.reads:
        # A move or a reset: what is planned on it counts already.
        return state.planned.ranges
    return state.committed.ranges if state.committed else ()


def originals_of(loader: Loader, state: TableState, ranges: Sequence[Range]) -> list[Original]:
    """Where they end in the originals of other data centres' topics: without it, a job could not leave a dead one."""
    known, asked = to_note(ranges, loader.dc, noted([state.committed] if state.committed else [], loader.dc))
    return known if loader.books is None else [*known, *loader.books.originals(asked, _NOTES_S)]


def _next_entry(
    loader: Loader,
    job: TableJob,
    paths: TablePaths,
    state: TableState,
    topics: list[str],
    targets: dict[TopicPartition, int],
    max_offsets: int,
) -> tuple[LedgerEntry | None, tuple[Stopped, ...]]:
    """The batch to do next, as it stands in the ledger; None when the targets are reached."""
    if state.planned is not None:
        return state.planned, ()
    views = loader.kafka.views(topics)
    planned = plan(_positions(state), views, topics, max_offsets, targets)
    if not planned.records:
        return None, planned.stopped
    return _put(loader, job, paths, state, planned.ranges), planned.stopped


def _put(
    loader: Loader, job: TableJob, paths: TablePaths, state: TableState, ranges: Iterable[Range], kind: str = LOAD
) -> LedgerEntry:
    """The next batch as it stands in the ledger: ours, or that of a loader that was faster."""
    parser, ranges = job.parser, list(ranges)
    origin = loader.origin(job.topics)
    entry = new_entry(
        state.last + 1,
        loader.dc,
        parser.name,
        loader.run,
        ranges,
        kind=kind,
        settings=parser.as_json,
        origin=origin,
        originals=originals_of(loader, state, ranges),
    )
    return Ledger(paths.ledger).put(entry)


def table_state(loader: Loader, paths: TablePaths) -> TableState:
    """Where the table stands. Raises LedgerBroken when its offsets are another data centre's."""
    state = read_state(paths)
    # What is planned may be a move; the offsets are the new place's then.
    entry = state.planned or state.committed
    if entry is not None and entry.dc != loader.dc:
        raise LedgerBroken(
            f"{paths.ledger} holds offsets of {entry.dc}, this is {loader.dc}: offsets differ between data centres, "
            f"and no row may be loaded twice; the job is loaded there, or moved here by --move-to {loader.dc}"
        )
    return state
