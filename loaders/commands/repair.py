"""``logferry table reset``, ``reload`` and ``requarantine``: repairs of tables, each by a batch of the ledger.

``reset`` sets positions by hand, ``reload`` reads ranges again and replaces their rows, both once the operator has
agreed to the effect. ``requarantine`` parses the quarantined lines again and moves those that fit into the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.batches.replace_rows import offsets_of
from logferry.loaders.batches.rewrite_rows import Rewriter
from logferry.loaders.commands.load import Confirm, ConfirmAny, change_table, chosen_jobs, open_tables, run_until_signal
from logferry.loaders.commands.options import job_config
from logferry.loaders.config import TableJob
from logferry.loaders.errors import LedgerBroken, LoaderConfigError, StorageUnavailable, TopicChanged
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.location import Location
from logferry.loaders.parsing.rows import check_parser
from logferry.loaders.planning.ledger_entry import RELOAD, RESET, TablePaths
from logferry.loaders.planning.plan import Range, TopicPartition, unreadable
from logferry.loaders.planning.position_plan import ResetTarget, abandoned_topics, plan_reset
from logferry.loaders.planning.reload_plan import ReloadTarget, held_offsets, ranges_to_reload
from logferry.loaders.runs.table_run import prepare, put_entry, requarantine_table, table_state
from logferry.loaders.runs.table_runner import Reporter
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import Ledger
from logferry.loaders.storage.rewrite import of_ranges
from logferry.loaders.storage.tables import TableState

_TRIES: Final = 100


def run_requarantine(options: argparse.Namespace, reporter: Reporter) -> int:
    with open_tables(job_config(options, options.path), options.jars, reporter) as tables:
        jobs = chosen_jobs(tables, options.path)
        return run_until_signal(tables, lambda: tables.each(requarantine_table, jobs))


def run_reset(options: argparse.Namespace, reporter: Reporter) -> int:
    """Exit status 2 when the operator does not agree."""
    targets = [ResetTarget.parse(text) for text in options.to]
    return change_table(
        options, reporter, "reset", lambda loader, job, confirm: reset_table(loader, job, targets, confirm)
    )


def reset_table(loader: Loader, job: TableJob, targets: Sequence[ResetTarget], confirm: Confirm) -> BatchDone | None:
    """None: not agreed to, and nothing changed. Raises LoaderConfigError, Terminal, Transient.

    Raises LedgerBroken, and resets nothing, when another loader writes a batch meanwhile.
    """
    paths = TablePaths.of(job.path)
    state = table_state(loader, paths)
    if state.newest is None:
        raise LoaderConfigError(f"{paths.main} holds no batch: there is nothing to reset")
    positions = state.newest.ranges
    views = loader.kafka.views({*(target.topic for target in targets), *(r.topic for r in positions)})
    wanted = plan_reset(positions, views, targets)
    if not confirm(wanted.moves):
        return None
    prepare(paths, job.parser, job.partition_by)
    if state.planned is not None:
        is_reload = state.planned.kind == RELOAD
        do_batch(loader, paths, state.planned, abandoned_topics(state.planned.reads, views, targets, reload=is_reload))
        state = state._replace(last=state.planned.batch)
    entry = put_entry(loader, job, paths, state, wanted.ranges, RESET)
    if entry.run != loader.run:
        raise LedgerBroken(
            f"{paths.main}: another loader wrote batch {entry.batch} meanwhile; nothing was reset, try again"
        )
    return do_batch(loader, paths, entry)


class ReloadPreview(NamedTuple):
    """The effect of a reload. ``rows``, ``quarantined``: to be replaced. ``elsewhere``: offsets of these partitions
    that stay as they are, because they were loaded in another data centre.
    """

    ranges: tuple[Range, ...]
    rows: int
    quarantined: int
    elsewhere: tuple[Range, ...] = ()

    def lines(self) -> list[str]:
        """The effect, in words."""
        effects = [(r, "will be read again") for r in self.ranges]
        effects += [(r, "were loaded in another data centre and stay unchanged") for r in self.elsewhere]
        lines = [f"{r.topic} {r.partition}: offsets {r.start:,} to {r.end - 1:,} {effect}" for r, effect in effects]
        quarantined = f" and {self.quarantined:,} of its quarantine" if self.quarantined else ""
        lines.append(
            f"{self.rows:,} rows of the table{quarantined} will be replaced by the records of these "
            f"{sum(r.size for r in self.ranges):,} offsets in one transaction; positions stay unchanged"
        )
        return lines


def run_reload(options: argparse.Namespace, reporter: Reporter) -> int:
    """Exit status 2 when the operator does not agree."""
    targets = [ReloadTarget.parse(text) for text in options.ranges]

    def change(loader: Loader, job: TableJob, confirm: ConfirmAny) -> BatchDone | None:
        return reload_table(loader, job, targets, lambda preview: confirm(preview.lines()))

    return change_table(options, reporter, "replaced", change)


def reload_table(
    loader: Loader, job: TableJob, targets: Sequence[ReloadTarget], confirm: Callable[[ReloadPreview], bool]
) -> BatchDone | None:
    """None: not agreed to, and nothing was replaced. Raises LoaderConfigError, Terminal, Transient.

    A batch that another loader plans, before or meanwhile, is executed first; the ranges stay those agreed to.
    """
    paths = TablePaths.of(job.path)
    if job.parser.format not in ("lines", "chunk"):
        check_parser(loader.spark, job.parser)
    with sorted_errors(f"reloading {paths.main}"):
        state = _settled(loader, job, paths)
        ranges, elsewhere = _ranges(loader, paths, state, targets)
        rows, quarantined = (_count(loader, path, ranges) for path in (paths.main, paths.quarantine))
        if not confirm(ReloadPreview(ranges, rows, quarantined, elsewhere)):
            return None
        for _ in range(_TRIES):
            state = _settled(loader, job, paths)
            reason = unreadable(ranges, loader.kafka.views(r.topic for r in ranges))
            if reason is not None:
                raise TopicChanged(f"{paths.main}: nothing was replaced: {reason}")
            resting = [r.at_rest for r in state.committed.ranges] if state.committed else []
            entry = put_entry(loader, job, paths, state, resting, RELOAD, ranges)
            if entry.run == loader.run:
                return do_batch(loader, paths, entry)
    raise StorageUnavailable(f"{paths.main}: other loaders were faster {_TRIES} times; nothing was replaced. Try again")


def _count(loader: Loader, path: Location, ranges: Sequence[Range]) -> int:
    """The rows to be replaced; of a quarantine those that no batch has resolved."""
    table = open_table(path)
    resolved_by = None if table is None or "resolved" not in {f.name for f in table.schema().fields} else 0
    rule = of_ranges(ranges, loader.dc, resolved_by)
    return 0 if table is None else Rewriter(lambda: loader.spark, path, 0, rule).count(table)


def _settled(loader: Loader, job: TableJob, paths: TablePaths) -> TableState:
    """The state without a planned batch. Raises LoaderConfigError where nothing was ever loaded."""
    state = table_state(loader, paths)
    if state.newest is None:
        raise LoaderConfigError(f"{paths.main} holds no batch: there is nothing to reload")
    prepare(paths, job.parser, job.partition_by)
    while state.planned is not None:
        do_batch(loader, paths, state.planned)
        state = table_state(loader, paths)
    return state


def _ranges(
    loader: Loader, paths: TablePaths, state: TableState, targets: Sequence[ReloadTarget]
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """The ranges to reload, and those of their partitions that were loaded elsewhere."""
    assert state.committed is not None
    have = held_offsets(Ledger(paths.ledger).entries(), state.committed)
    spans = {target.span for target in targets if target.span is not None}
    views = loader.kafka.views({key.topic for key in have})
    held = {key: one.position for key, one in have.items() if key.topic in views}
    there = {key: position for key, position in held.items() if key.partition in views[key.topic].partitions}
    found = {span: offsets_of(loader.spark, loader.kafka, there, span) for span in spans}
    ranges = ranges_to_reload(targets, have, state.committed, views, found)
    chosen = sorted({(*r.key, r.topic_id) for r in ranges})
    elsewhere = (Range(*one, *span) for one in chosen for span in have[TopicPartition(*one[:2])].elsewhere)
    return ranges, tuple(r for r in elsewhere if r.size > 0)
