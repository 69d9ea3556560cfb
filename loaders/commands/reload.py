"""``logferry load --reload``: says what it will replace, and does it when that is agreed to."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from logferry.loaders.agreeing import agreement
from logferry.loaders.batches.create_tables import TableState, prepare
from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.batches.reload import offsets_of
from logferry.loaders.config import TableJob
from logferry.loaders.errors import EXIT_USAGE, ConfigError, StorageAway, TopicChanged
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.parsing import rows as parse
from logferry.loaders.planning.plan import Range, TopicPartition, unreadable
from logferry.loaders.planning.reload_plan import Target, held, wanted
from logferry.loaders.runs.report import Reporter
from logferry.loaders.runs.table_run import originals_of, table_state
from logferry.loaders.standing import standing
from logferry.loaders.storage.ledger import RELOAD, Ledger, TablePaths, new_entry, open_table
from logferry.loaders.storage.rewrite import rows_of
from rich.markup import escape

_TRIES: Final = 100


class Means(NamedTuple):
    """What a reload will do. ``rows``, ``quarantined``: that stand now, and will be replaced. ``elsewhere``: what of
    these partitions stays as it is, since it was loaded in another data centre.
    """

    ranges: tuple[Range, ...]
    rows: int
    quarantined: int
    elsewhere: tuple[Range, ...] = ()

    @property
    def offsets(self) -> int:
        return sum(r.size for r in self.ranges)


def reload_table(
    loader: Loader, job: TableJob, targets: Sequence[Target], agreed: Callable[[Means], bool]
) -> BatchDone | None:
    """None: it was not agreed to, and nothing is changed. Raises ConfigError, Terminal, Transient.

    What another loader has planned, before or meanwhile, is done first; the ranges stay those that were agreed to.
    """
    paths = TablePaths.of(job.path)
    if job.parser.format not in ("lines", "chunk"):
        parse.check(loader.spark, job.parser)
    with sorted_errors(f"reloading {paths.main}"):
        state = _settled(loader, job, paths)
        ranges, elsewhere = _ranges(loader, paths, state, targets)
        if not agreed(_means(paths, state, loader.dc, ranges)._replace(elsewhere=elsewhere)):
            return None
        for _ in range(_TRIES):
            state = _settled(loader, job, paths)
            reason = unreadable(ranges, loader.kafka.views(r.topic for r in ranges))
            if reason is not None:
                raise TopicChanged(f"{paths.main}: nothing was replaced: {reason}")
            resting = [r._replace(start=r.end) for r in state.committed.ranges] if state.committed else []
            entry = new_entry(
                state.last + 1,
                loader.dc,
                job.parser.name,
                loader.run,
                resting,
                kind=RELOAD,
                settings=job.parser.as_json,
                origin=loader.origin(job.topics),
                originals=originals_of(loader, state, resting),
                reload=ranges,
            )
            if Ledger(paths.ledger).put(entry).run == loader.run:
                return do_batch(loader, paths, entry)
    raise StorageAway(f"{paths.main}: other loaders came first {_TRIES} times; nothing was replaced")


def _settled(loader: Loader, job: TableJob, paths: TablePaths) -> TableState:
    """The table with nothing planned. Raises ConfigError where nothing was ever loaded."""
    state = table_state(loader, paths)
    if state.committed is None and state.planned is None:
        raise ConfigError(f"{paths.main} holds no batch: there is nothing to load again")
    prepare(paths, job.parser, job.partition_by)
    while state.planned is not None:
        do_batch(loader, paths, state.planned)
        state = table_state(loader, paths)
    return state


def _ranges(
    loader: Loader, paths: TablePaths, state: TableState, targets: Sequence[Target]
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """What is loaded again, and what of these partitions was loaded elsewhere."""
    assert state.committed is not None
    have = held(Ledger(paths.ledger).entries(), state.committed)
    spans = {target.span for target in targets if target.span is not None}
    views = loader.kafka.views({key.topic for key in have})
    there = {key: one.position for key, one in have.items() if _is_there(key, views)}
    found = {span: offsets_of(loader.spark, loader.kafka, there, span) for span in spans}
    ranges = wanted(targets, have, state.committed, views, found)
    chosen = sorted({(*r.key, r.topic_id) for r in ranges})
    elsewhere = (Range(*one, *span) for one in chosen for span in have[TopicPartition(*one[:2])].elsewhere)
    return ranges, tuple(r for r in elsewhere if r.size > 0)


def _is_there(key: TopicPartition, views: object) -> bool:
    view = views.get(key.topic) if isinstance(views, dict) else None
    return view is not None and key.partition in view.partitions


def _means(paths: TablePaths, state: TableState, dc: str, ranges: tuple[Range, ...]) -> Means:
    counts = []
    for path in (paths.main, paths.quarantine):
        table = open_table(path)
        if table is None:
            counts.append(0)
            continue
        stored = table.to_pyarrow_dataset()
        chosen = rows_of(ranges, dc)
        if path == paths.quarantine:
            chosen = chosen & standing(stored.schema.names, state.last)
        counts.append(int(stored.count_rows(filter=chosen)))
    rows, quarantined = counts
    return Means(ranges, rows, quarantined)


def reload_tables(
    loader: Loader,
    jobs: Sequence[TableJob],
    targets: Sequence[Target],
    options: argparse.Namespace,
    reporter: Reporter,
) -> int:
    """The command; returns its exit status. Raises LoadError."""
    if len(jobs) != 1:
        raise ConfigError("--reload is of one table: name it by --table, --topics and --bootstrap")
    (job,) = jobs
    console = reporter.console

    def agreed(means: Means) -> bool:
        if not options.json:
            for line in said(means):
                console.print(line, highlight=False, soft_wrap=True)
        return agreement(options, console, "replaced")(())

    done = reload_table(loader, job, targets, agreed)
    if done is None:
        console.print("nothing is replaced")
        return EXIT_USAGE
    report = reporter.begin(job.path)
    report.add(done)
    if not reporter.as_json:
        console.print(
            f"replaced, as batch {done.batch}: {_count(done.rows)} rows, {_count(done.quarantined)} quarantined",
            highlight=False,
        )
    return reporter.finish()


def said(means: Means) -> list[str]:
    """What it will do, in words."""
    lines = [
        f"{escape(r.topic)} {r.partition}: offsets {r.start:,} to {r.end - 1:,} are read again" for r in means.ranges
    ]
    lines += [
        f"{escape(r.topic)} {r.partition}: what is at offsets {r.start:,} to {r.end - 1:,} was loaded in another data "
        "centre, and stays as it is"
        for r in means.elsewhere
    ]
    quarantined = f" and {means.quarantined:,} of its quarantine" if means.quarantined else ""
    lines.append(
        f"{means.rows:,} rows of the table{quarantined} are replaced by what is in these {means.offsets:,} offsets, "
        "in one transaction; positions stay"
    )
    return lines


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


__all__ = ["Means", "reload_table", "reload_tables", "said"]
