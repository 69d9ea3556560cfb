"""``logferry table reset``: sets positions of a table by hand, once the operator has agreed to the effect."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from logferry.loaders.batches.create_tables import prepare
from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.commands.job import Confirm, change_table, confirmation
from logferry.loaders.config import TableJob
from logferry.loaders.errors import LedgerBroken, LoaderConfigError
from logferry.loaders.planning.ledger_entry import RELOAD, RESET, TablePaths
from logferry.loaders.planning.reset_plan import ResetTarget, abandoned_topics, plan_reset
from logferry.loaders.runs.report import Reporter
from logferry.loaders.runs.table_run import put_entry, table_state


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    """Exit status 2 when the operator does not agree."""
    targets = [ResetTarget.parse(text) for text in options.to]
    confirm = confirmation(options, reporter.console, "reset")
    return change_table(options, reporter, "reset", lambda loader, job: reset_table(loader, job, targets, confirm))


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
