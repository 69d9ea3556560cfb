"""Moves a table to another data centre: its positions are translated, exactly, and the job goes on there.

Said before it is done. It is a batch of the ledger like any other (kind ``move``), without rows: loaders of the old
place that run meanwhile either come before it, then nothing is moved, or are told that the offsets are others' now.

A planned batch is finished first, in the old place. Where Kafka there does not answer, it is finished in the new one:
its ranges are translated, and what the ledger promised is read out of the copies. Rows say by their columns ``dc``,
``partition`` and ``offset`` where they were read.

Crash windows: before the entry nothing is moved, and a planned batch may be finished; after the entry whoever loads
next, in the new place, commits it and goes on. Safe to call again at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
from deltalake.exceptions import DeltaError
from logferry.loaders.agreeing import Agreed
from logferry.loaders.batches.create_tables import read_state
from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.batches.mirror_offsets import Books
from logferry.loaders.config import TableJob
from logferry.loaders.errors import (
    CannotMove,
    ConfigError,
    KafkaAway,
    LedgerBroken,
    MirrorBehind,
    StorageAway,
    TopicChanged,
)
from logferry.loaders.planning.move_plan import Told, Translated, home_of, noted, original_of, told_at_home, translated
from logferry.loaders.planning.plan import Range, TopicPartition, TopicView
from logferry.loaders.planning.reset_plan import FORGET, Target, reset
from logferry.loaders.spark.kafka_offsets import kafka_topics
from logferry.loaders.storage.ledger import (
    LOAD,
    MOVE,
    RELOAD,
    Ledger,
    LedgerEntry,
    Original,
    TablePaths,
    new_entry,
    open_table,
)
from logferry.loaders.storage.rewrite import rows_of

_LOOK_AGAIN_S: Final = 0.2
_ASKED_S: Final = 10.0
# A mirror at work is behind by less.
_GRACE_S: Final = 2.0


@dataclass(frozen=True)
class Moving:
    """A table on its way. ``loader``: of the new place. ``prefix``: the mirrors'."""

    loader: Loader
    job: TableJob
    prefix: str
    books: Books

    @property
    def paths(self) -> TablePaths:
        return TablePaths.of(self.job.path)

    @property
    def dc(self) -> str:
        return self.loader.dc


def move_table(
    loader: Loader, job: TableJob, prefix: str, targets: Sequence[Target], wait_s: float, agreed: Agreed
) -> list[BatchDone] | None:
    """The batches that it took, none where the table is there already; None: it was not agreed to, nothing is changed.

    ``targets``: topics that are not translated, but begin somewhere in the new place, or are given up. ``wait_s``: for
    the mirror. Raises CannotMove, MirrorBehind, ConfigError and what a load raises; then the table stays where it is.
    """
    with _books(loader, prefix) as books:
        return _move(Moving(loader, job, prefix, books), targets, wait_s, agreed)


def _move(moving: Moving, targets: Sequence[Target], wait_s: float, agreed: Agreed) -> list[BatchDone] | None:
    paths, dc = moving.paths, moving.dc
    state = read_state(paths)
    standing = state.planned or state.committed
    if standing is None:
        raise ConfigError(f"{paths.main} holds no batch: there is nothing to move, load it in {dc}")
    if standing.dc == dc:
        if standing.kind == MOVE and state.planned is not None:
            return [do_batch(moving.loader, paths, standing)]
        return []
    found, originals = _translated(moving, standing, targets, wait_s)
    if not agreed(found.moves):
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
        originals=[at for at in originals if home_of(at.topic) != dc],
    )
    stands = Ledger(paths.ledger).put(entry)
    if stands.run != moving.loader.run:
        raise LedgerBroken(
            f"{paths.main}: another loader wrote batch {entry.batch} meanwhile; nothing was moved, call again"
        )
    return [*done, do_batch(moving.loader, paths, stands)]


# ---- where the positions are -----------------------------------------------------------------------------------


def _translated(
    moving: Moving, entry: LedgerEntry, targets: Sequence[Target], wait_s: float
) -> tuple[Translated, list[Original]]:
    """The positions after the entry, in the new place, and what they were translated by. Raises CannotMove,
    MirrorBehind, ConfigError.
    """
    until = time.monotonic() + max(wait_s, _GRACE_S)
    given_up = {target.topic for target in targets if target.to == FORGET}
    if strange := given_up - {r.topic for r in entry.ranges}:
        raise ConfigError(f"{', '.join(sorted(strange))}: the table has no positions of it")
    views = moving.loader.kafka.views({*(t.topic for t in targets), *(r.topic for r in entry.ranges)})
    chosen = reset((), views, [target for target in targets if target.to != FORGET])
    given = {r.key: r for r in chosen.ranges}
    asked = [r for r in entry.ranges if r.topic not in given_up and r.key not in given]
    originals = _originals(moving, entry, asked)
    while True:
        told = _told(moving, asked, originals, views)
        found = translated(entry.ranges, told, views, given, given_up, moving.dc)
        if found.refused:
            raise CannotMove(
                f"{moving.paths.main} cannot be moved to {moving.dc}: {'; '.join(found.refused)}. Topics can be given "
                f"up by --reset TOPIC=forget, or begin in {moving.dc} by --reset TOPIC=earliest or =latest"
            )
        if not found.behind:
            return found, originals
        if time.monotonic() >= until:
            raise MirrorBehind(
                f"{moving.paths.main} cannot be moved to {moving.dc} yet: the mirror there is behind the table. "
                f"{'; '.join(found.behind)}. Call again, or with --wait SECONDS; if the rest never comes, "
                "--reset TOPIC:PARTITION=latest begins behind what is there"
            )
        time.sleep(_LOOK_AGAIN_S)
        views = moving.loader.kafka.views(views)


def _originals(moving: Moving, entry: LedgerEntry, positions: Sequence[Range]) -> list[Original]:
    """Of the positions in the entry's data centre: noted, or asked for there; of some at offset 0 there is none.

    Raises CannotMove.
    """
    known = noted(Ledger(moving.paths.ledger).entries(), entry.dc)
    found = {r.key: original_of(r, entry.dc, known) for r in positions}
    have = [original for original in found.values() if original is not None]
    lacking = [r for r in positions if found[r.key] is None]
    if lacking and entry.origin is not None:
        books = Books(entry.origin.bootstrap_servers, moving.prefix, entry.dc)
        try:
            have += books.originals(lacking, _ASKED_S)
        finally:
            books.close()
    told = {original.key for original in have}
    if unknown := sorted({r.topic for r in lacking if r.key not in told and r.end > 0}):
        raise CannotMove(
            f"{moving.paths.main}: how far {', '.join(unknown)} is loaded is known by offsets of {entry.dc} alone, and "
            f"the mirror there does not tell which records these are: bring the Kafka of {entry.dc} back, or give such "
            "topics up by --reset TOPIC=forget"
        )
    return have


def _told(
    moving: Moving, positions: Sequence[Range], originals: Sequence[Original], views: Mapping[str, TopicView]
) -> dict[TopicPartition, Told]:
    """Where the positions are in the new place. Raises KafkaAway."""
    # Before offset 0 there is nothing, in whatever data centre.
    told = {r.key: Told(0) for r in positions if r.end == 0}
    copied: dict[TopicPartition, Original] = {}
    for at in originals:
        if home_of(at.topic) == moving.dc:
            told[at.key] = told_at_home(at, views.get(at.topic))
        elif at.topic in views:
            copied[at.key] = at
    for key, here in moving.books.here(copied.values()).items():
        at, why = copied[key], here.why
        if here.behind:
            why = f"it has brought all up to {here.reached} of {home_of(at.topic)}, the table is at {at.offset}"
        told[key] = Told(here.offset, here.topic_id, here.behind, why)
    return told


# ---- a planned batch -------------------------------------------------------------------------------------------


def _finish(moving: Moving, planned: LedgerEntry) -> BatchDone:
    """Where it was planned, or else in the new place. Raises what a load raises, CannotMove, MirrorBehind."""
    paths, origin = moving.paths, planned.origin
    if not planned.reads:
        return do_batch(replace(moving.loader, dc=planned.dc), paths, planned)
    if origin is None:
        # An older loader noted no addresses.
        raise CannotMove(f"{paths.main}: batch {planned.batch} is planned: load once in {planned.dc}, then move")
    try:
        with kafka_topics(moving.loader.spark, origin.bootstrap_servers) as kafka:
            return do_batch(replace(moving.loader, kafka=kafka, dc=planned.dc), paths, planned)
    except (KafkaAway, TopicChanged) as error:
        if planned.kind == RELOAD:
            # What it was to replace stays as it is.
            given_up = {r.topic for r in planned.reload}
            return do_batch(replace(moving.loader, dc=planned.dc), paths, planned, given_up)
        if planned.kind != LOAD:
            raise
        try:
            there = _reads_there(moving, planned)
        except (CannotMove, MirrorBehind) as why:
            raise type(why)(f"{error}; and in {moving.dc}: {why}") from None
        return do_batch(moving.loader, paths, planned._replace(dc=moving.dc, ranges=there))


def _reads_there(moving: Moving, entry: LedgerEntry) -> tuple[Range, ...]:
    """The ranges of the entry as those of the new place; others rest. Raises CannotMove, MirrorBehind, KafkaAway."""
    starts = [r._replace(end=r.start) for r in entry.reads]
    views = moving.loader.kafka.views(r.topic for r in entry.reads)
    ends: list[Translated] = []
    for positions in (starts, entry.reads):
        told = _told(moving, positions, _originals(moving, entry, positions), views)
        found = translated(positions, told, views, {}, (), moving.dc)
        if found.refused:
            raise CannotMove("; ".join(found.refused))
        if found.behind:
            raise MirrorBehind("; ".join(found.behind))
        ends.append(found)
    return tuple(a._replace(end=b.end) for a, b in zip(ends[0].ranges, ends[1].ranges, strict=True))


def _read_there(moving: Moving, entry: LedgerEntry) -> tuple[Range, ...]:
    """What the entry, of the old place, was finished by in the new one; nothing where it was finished at home.

    The rows tell, whoever wrote them: a move that died after that has left nothing else.
    """
    if entry.kind != LOAD or not entry.reads:
        return ()
    try:
        ranges = [r for r in _reads_there(moving, entry) if r.size]
    except (CannotMove, MirrorBehind):
        return ()
    for path in (moving.paths.main, moving.paths.quarantine):
        table = open_table(path)
        try:
            if (
                table is not None
                and table.to_pyarrow_dataset().head(1, columns=["offset"], filter=rows_of(ranges, moving.dc)).num_rows
            ):
                return tuple(ranges)
        except (DeltaError, pa.ArrowException, OSError) as error:
            raise StorageAway(f"{path} cannot be read: {error}") from error
    return ()


@contextmanager
def _books(loader: Loader, prefix: str) -> Iterator[Books]:
    """Of the new place."""
    books = loader.books or Books(loader.kafka.bootstrap_servers, prefix, loader.dc)
    try:
        yield books
    finally:
        if books is not loader.books:
            books.close()
