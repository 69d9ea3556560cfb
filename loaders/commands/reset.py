"""Carries a reset out: looks, says, and puts it into the ledger when it is agreed to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from logferry.loaders.batches.create_tables import prepare
from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.config import TableJob
from logferry.loaders.errors import ConfigError, LedgerBroken
from logferry.loaders.planning.reset_plan import Move, Target, given_up, reset
from logferry.loaders.runs.table_run import originals_of, table_state
from logferry.loaders.storage.ledger import RELOAD, RESET, Ledger, TablePaths, new_entry


def reset_table(
    loader: Loader, job: TableJob, targets: Sequence[Target], agreed: Callable[[Sequence[Move]], bool]
) -> BatchDone | None:
    """None: it was not agreed to, and nothing is changed. Raises ConfigError, Terminal, Transient.

    When another loader writes a batch meanwhile, nothing is reset, and it says so.
    """
    paths = TablePaths.of(job.path)
    state = table_state(loader, paths)
    if state.committed is None and state.planned is None:
        raise ConfigError(f"{paths.main} holds no batch: there is nothing to reset")
    positions = state.planned.ranges if state.planned else state.committed.ranges if state.committed else ()
    views = loader.kafka.views({*(target.topic for target in targets), *(r.topic for r in positions)})
    wanted = reset(positions, views, targets)
    if not agreed(wanted.moves):
        return None
    prepare(paths, job.parser, job.partition_by)
    if state.planned is not None:
        is_reload = state.planned.kind == RELOAD
        do_batch(loader, paths, state.planned, given_up(state.planned.reads, views, targets, reload=is_reload))
    last = (state.planned.batch if state.planned else state.last) + 1
    entry = new_entry(
        last,
        loader.dc,
        job.parser.name,
        loader.run,
        wanted.ranges,
        kind=RESET,
        settings=job.parser.as_json,
        origin=loader.origin(job.topics),
        originals=originals_of(loader, state, wanted.ranges),
    )
    stands = Ledger(paths.ledger).put(entry)
    if stands.run != loader.run:
        raise LedgerBroken(f"{paths.main}: another loader wrote batch {last} meanwhile; nothing was reset, call again")
    return do_batch(loader, paths, stands)
