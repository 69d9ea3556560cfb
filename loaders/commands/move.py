"""``logferry table move``: moves tables to another data centre, one after the other; a failure stops no other.

The positions are translated exactly, so that the load continues there. The effect is printed first. A move is a
batch of the ledger (kind ``move``) without rows. A loader in the old data centre that runs meanwhile either comes
before it, then nothing is moved, or stops because the offsets are others now.

A planned batch is finished first, in the old data centre. Where Kafka there does not answer, it is finished in the new
one: its ranges are translated and read from the copies. The columns ``dc``, ``partition`` and ``offset`` of a row name
the Kafka from which it was read.

Crash windows: before the entry nothing is moved, though a planned batch may be finished; after the entry the next load,
in the new data centre, commits it and continues. Safe to call again at any time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from logferry.loaders import errors
from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.batches.mirror_offsets import MirrorOffsets
from logferry.loaders.commands.load import Confirm, chosen_jobs, confirmation, open_tables
from logferry.loaders.commands.options import job_config
from logferry.loaders.config import TableJob
from logferry.loaders.errors import CannotMove, LoaderConfigError, MirrorBehind
from logferry.loaders.planning import position_plan
from logferry.loaders.planning.ledger_entry import LOAD, MOVE, RELOAD, LedgerEntry, OriginOffset, TablePaths
from logferry.loaders.planning.plan import Range, TopicOffsets, TopicPartition
from logferry.loaders.planning.position_plan import FORGET, PositionAnswer, PositionPlan, ResetTarget, origin_dc
from logferry.loaders.runs.table_run import LoadEvent
from logferry.loaders.runs.table_runner import Reporter
from logferry.loaders.spark.kafka_access import kafka_topics
from logferry.loaders.storage.ledger import Ledger, new_entry
from logferry.loaders.storage.rewrite import rows_of
from logferry.loaders.storage.tables import count_rows, read_state

_RETRY_S: Final = 0.2
_ORIGINALS_S: Final = 10.0
# A running mirror is behind by less.
_GRACE_S: Final = 2.0


def run_move(options: argparse.Namespace, reporter: Reporter) -> int:
    """Exit status 2 when the operator does not agree. The configuration is that of the new data centre."""
    targets = [ResetTarget.parse(text) for text in options.reset or ()]
    settings = job_config(options, options.path, dc=options.to)
    if options.to != settings.dc:
        raise LoaderConfigError(
            f"--to {options.to} needs the configuration of {options.to} with its Kafka; this one has dc = {settings.dc}"
        )
    with open_tables(settings, options.jars, reporter) as tables:
        jobs = chosen_jobs(tables, options.path)
        if targets and len(jobs) != 1:
            raise LoaderConfigError("--reset applies to one table: name it by PATH")
        confirm = confirmation(options, reporter.console, "moved")
        declined: list[TableJob] = []

        def moved(job: TableJob) -> Iterator[LoadEvent]:
            done = move_table(tables.loader, job, settings.prefix, targets, options.wait, confirm)
            if done is None:
                declined.append(job)
                reporter.console.print("nothing was moved")
                return
            yield from done
            said = f"moved to {settings.dc}" if done else f"the table is loaded in {settings.dc} already"
            reporter.console.print(said, highlight=False)

        for job in jobs:
            reporter.table(job.path, moved(job))
        status = reporter.finish()
        return errors.EXIT_USAGE if declined and status == errors.EXIT_DONE else status


@dataclass(frozen=True)
class TableMove:
    """A table that moves. ``loader``: in the new data centre. ``prefix``: the mirrors'."""

    loader: Loader
    job: TableJob
    prefix: str
    offsets: MirrorOffsets

    @property
    def paths(self) -> TablePaths:
        return TablePaths.of(self.job.path)

    @property
    def dc(self) -> str:
        return self.loader.dc


def move_table(
    loader: Loader, job: TableJob, prefix: str, targets: Sequence[ResetTarget], wait_s: float, confirm: Confirm
) -> list[BatchDone] | None:
    """The batches executed, none where the table is there already; None: not agreed to, and nothing changed.

    ``targets``: topics that are not translated, but start at a given position, or are given up. ``wait_s``: for the
    mirror to catch up. Raises CannotMove, MirrorBehind, LoaderConfigError and the errors of a load; then the table
    has not moved.
    """
    with closing(MirrorOffsets(loader.kafka.settings, prefix, loader.dc)) as offsets:
        return _move(TableMove(loader, job, prefix, offsets), targets, wait_s, confirm)


def _move(moving: TableMove, targets: Sequence[ResetTarget], wait_s: float, confirm: Confirm) -> list[BatchDone] | None:
    paths, dc = moving.paths, moving.dc
    state = read_state(paths)
    standing = state.newest
    if standing is None:
        raise LoaderConfigError(f"{paths.main} holds no batch: there is nothing to move; load it in {dc}")
    if standing.dc == dc:
        if standing.kind == MOVE and state.planned is not None:
            return [do_batch(moving.loader, paths, standing)]
        return []
    found, originals = _translated(moving, standing, targets, wait_s)
    if not confirm(found.moves):
        return None
    Ledger(paths.ledger).create()
    done: list[BatchDone] = []
    if state.planned is not None:
        done.append(_finish(moving, state.planned))
    begun = {r.key: r.start for r in _read_there(moving, standing)}
    ranges = [r._replace(start=begun.get(r.key, r.start)) for r in found.ranges]
    entry = new_entry(
        standing.batch + 1,
        dc,
        standing.parser,
        moving.loader.run,
        ranges,
        kind=MOVE,
        settings=standing.settings,
        origin=moving.loader.origin(moving.job.topics),
        originals=[at for at in originals if origin_dc(at.topic) != dc],
    )
    stands = Ledger(paths.ledger).put(entry)
    if stands.run != moving.loader.run:
        raise errors.LedgerBroken(
            f"{paths.main}: another loader wrote batch {entry.batch} meanwhile; nothing was moved, try again"
        )
    return [*done, do_batch(moving.loader, paths, stands)]


# ---- positions -------------------------------------------------------------------------------------------------


def _translated(
    moving: TableMove, entry: LedgerEntry, targets: Sequence[ResetTarget], wait_s: float
) -> tuple[PositionPlan, list[OriginOffset]]:
    """The positions after the entry in the new data centre, and their originals. Raises CannotMove, MirrorBehind,
    LoaderConfigError.
    """
    until = time.monotonic() + max(wait_s, _GRACE_S)
    given_up = {target.topic for target in targets if target.to == FORGET}
    if strange := given_up - {r.topic for r in entry.ranges}:
        raise LoaderConfigError(f"{', '.join(sorted(strange))}: no committed position in this table")
    views = moving.loader.kafka.views({*(t.topic for t in targets), *(r.topic for r in entry.ranges)})
    chosen = position_plan.plan_reset((), views, [target for target in targets if target.to != FORGET])
    given = {r.key: r for r in chosen.ranges}
    asked = [r for r in entry.ranges if r.topic not in given_up and r.key not in given]
    originals = _originals(moving, entry, asked)
    while True:
        told = _told(moving, asked, originals, views)
        found = position_plan.plan_move(entry.ranges, told, views, given, given_up, moving.dc)
        if found.refused:
            raise CannotMove(
                f"{moving.paths.main} cannot be moved to {moving.dc}: {'; '.join(found.refused)}. Give topics up with "
                f"--reset TOPIC=forget, or start them in {moving.dc} with --reset TOPIC=earliest or =latest"
            )
        if not found.behind:
            return found, originals
        if time.monotonic() >= until:
            raise MirrorBehind(
                f"{moving.paths.main} cannot be moved to {moving.dc} yet: the mirror there is behind the table. "
                f"{'; '.join(found.behind)}. Try again, or with --wait SECONDS. If the rest will never "
                "come, start after the present records with --reset TOPIC:PARTITION=latest"
            )
        time.sleep(_RETRY_S)
        views = moving.loader.kafka.views(views)


def _originals(moving: TableMove, entry: LedgerEntry, positions: Sequence[Range]) -> list[OriginOffset]:
    """The originals of positions in the entry's data centre: from the ledger, or from its mirror; none at offset 0.

    Raises CannotMove.
    """
    have, lacking = position_plan.known_originals(positions, entry.dc, Ledger(moving.paths.ledger).entries())
    problem = ""
    if lacking and entry.origin is not None:
        there = moving.loader.kafka_of(entry.dc, entry.origin.bootstrap_servers)
        with closing(MirrorOffsets(there, moving.prefix, entry.dc)) as offsets:
            have += offsets.originals(lacking, _ORIGINALS_S)
            problem = offsets.problem and f" ({offsets.problem}; [other_kafka.{entry.dc}] sets the connection)"
    told = {original.key for original in have}
    if unknown := sorted({r.topic for r in lacking if r.key not in told and r.end > 0}):
        raise CannotMove(
            f"{moving.paths.main}: the positions of {', '.join(unknown)} are known as offsets of {entry.dc} only, and "
            f"the mirror there cannot translate them{problem}: bring the Kafka of {entry.dc} back, or give the topics "
            "up with --reset TOPIC=forget"
        )
    return have


def _told(
    moving: TableMove, positions: Sequence[Range], originals: Sequence[OriginOffset], views: Mapping[str, TopicOffsets]
) -> dict[TopicPartition, PositionAnswer]:
    """The positions in the new data centre. Raises errors.KafkaUnavailable."""
    # No record is before offset 0, in any data centre.
    told = {r.key: PositionAnswer(0) for r in positions if r.end == 0}
    copied: list[OriginOffset] = []
    for at in originals:
        if origin_dc(at.topic) == moving.dc:
            told[at.key] = position_plan.answer_at_origin(at, views.get(at.topic))
        elif at.topic in views:
            copied.append(at)
    return told | moving.offsets.here(copied)


# ---- a planned batch -------------------------------------------------------------------------------------------


def _finish(moving: TableMove, planned: LedgerEntry) -> BatchDone:
    """Finishes the batch where it was planned, else in the new data centre. Raises LoadError."""
    paths, origin = moving.paths, planned.origin
    if not planned.reads:
        return do_batch(replace(moving.loader, dc=planned.dc), paths, planned)
    if origin is None:
        # An older loader did not record addresses.
        raise CannotMove(
            f"{paths.main}: batch {planned.batch} is planned: run logferry load in {planned.dc}, then move"
        )
    try:
        there = moving.loader.kafka_of(planned.dc, origin.bootstrap_servers)
        with kafka_topics(moving.loader.spark, there) as kafka:
            return do_batch(replace(moving.loader, kafka=kafka, dc=planned.dc), paths, planned)
    except (errors.KafkaUnavailable, errors.TopicChanged) as error:
        if planned.kind == RELOAD:
            # The rows that it was to replace stay.
            given_up = {r.topic for r in planned.reload}
            return do_batch(replace(moving.loader, dc=planned.dc), paths, planned, given_up)
        try:
            ranges = _reads_there(moving, planned)
        except (CannotMove, MirrorBehind) as why:
            raise type(why)(f"{error}; and in {moving.dc}: {why}") from None
        return do_batch(moving.loader, paths, planned._replace(dc=moving.dc, ranges=ranges))


def _reads_there(moving: TableMove, entry: LedgerEntry) -> tuple[Range, ...]:
    """The ranges of the entry in the new data centre; those without records rest. Raises LoadError."""
    starts = [r._replace(end=r.start) for r in entry.reads]
    views = moving.loader.kafka.views(r.topic for r in entry.reads)
    plans: list[PositionPlan] = []
    for positions in (starts, entry.reads):
        told = _told(moving, positions, _originals(moving, entry, positions), views)
        plans.append(found := position_plan.plan_move(positions, told, views, {}, (), moving.dc))
        if found.refused or found.behind:
            raise (CannotMove if found.refused else MirrorBehind)("; ".join(found.refused or found.behind))
    return tuple(a._replace(end=b.end) for a, b in zip(plans[0].ranges, plans[1].ranges, strict=True))


def _read_there(moving: TableMove, entry: LedgerEntry) -> list[Range]:
    """The ranges by which an entry of the old data centre was finished in the new one; none if finished at home.

    The rows show it: a move that died after writing them has left nothing else.
    """
    if entry.kind != LOAD or not entry.reads:
        return []
    try:
        ranges = [r for r in _reads_there(moving, entry) if r.size]
    except (CannotMove, MirrorBehind):
        return []
    rows = rows_of(ranges, moving.dc)
    return ranges if any(count_rows(path, rows) for path in (moving.paths.main, moving.paths.quarantine)) else []
