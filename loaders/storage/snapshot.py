"""A version of a table, and where it ends in Kafka. Without Spark.

The law of this file: *one snapshot decides*. The version of the table is pinned first; which batch was its last one is
that snapshot's own transaction version; where that batch ended is the ledger's entry of it, which never changes. So
whatever a loader commits meanwhile, be it between any two lines here, moves no row: it is in the pinned version, or its
offset is at or behind the entry's end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltalake import DeltaTable
from logferry.loaders.errors import ConfigError, TopicChanged
from logferry.loaders.planning.plan import Range, TopicView, plan
from logferry.loaders.planning.source_facts import several_centres
from logferry.loaders.storage.ledger import MOVED_DAYS, Ledger, LedgerEntry, Origin, TablePaths, last_batch, open_table


@dataclass(frozen=True)
class Snapshot:
    """``table`` stays at its version. ``entry``: the ledger's, of the last batch that this version holds."""

    path: Path
    table: DeltaTable
    entry: LedgerEntry

    @property
    def version(self) -> int:
        return int(self.table.version())


def snapshot_of(path: Path) -> Snapshot:
    """Pins the newest version. Raises ConfigError, LedgerBroken, StorageAway."""
    paths = TablePaths.of(path)
    table = open_table(paths.main)
    if table is None:
        raise ConfigError(f"{paths.main} is not a table: has it been loaded, and is the path right?")
    last, ledger = last_batch(table), Ledger(paths.ledger)
    if last >= 0:
        return Snapshot(paths.main, table, ledger.get(last))
    if table.file_uris():
        raise ConfigError(f"{paths.main} holds rows, but no batch of the loader: it is not one of its tables")
    if ledger.last() < 0:
        raise ConfigError(f"{paths.main} is empty, and nothing says from which topics it is to be loaded")
    # Planned and not loaded: its settings count, its positions do not.
    return Snapshot(paths.main, table, ledger.get(0)._replace(ranges=()))


def origin_of(snapshot: Snapshot, bootstrap_servers: str | None, topics: Sequence[str] | None) -> Origin:
    """What was given, else what the ledger says. Raises ConfigError."""
    known = snapshot.entry.origin
    servers = bootstrap_servers or (known.bootstrap_servers if known else None)
    patterns = tuple(topics or (known.topics if known else ()))
    if servers is None or not patterns:
        raise ConfigError(
            f"{snapshot.path} was loaded by a version that did not note from where: name its Kafka and the topics"
        )
    return Origin(servers, patterns, known.moved_days if known else MOVED_DAYS)


def wanted_topics(snapshot: Snapshot, names: Iterable[str], *, is_chosen: bool) -> list[str]:
    """Those that the patterns mean now, and, unless somebody chose, those that the table was ever loaded from."""
    known = () if is_chosen else (r.topic for r in snapshot.entry.ranges)
    return sorted({*names, *known})


def tail_of(snapshot: Snapshot, views: Mapping[str, TopicView], wanted: Sequence[str]) -> tuple[Range, ...]:
    """What is behind the snapshot, of every wanted partition. Pure. Raises TopicChanged."""
    found = plan(snapshot.entry.ranges, views, wanted, max_records=sys.maxsize)
    if found.stopped:
        reasons = "; ".join(stop.reason for stop in found.stopped)
        raise TopicChanged(f"{snapshot.path}: what is not loaded yet cannot be told: {reasons}")
    return tuple(r for r in found.ranges if r.topic in set(wanted))


def may_hold_copies(snapshot: Snapshot, tail: Sequence[Range]) -> set[str]:
    """Topics of several data centres, if the tail has something of one: a chunk of it may be there a second time."""
    several = several_centres({r.topic for r in (*snapshot.entry.ranges, *tail)})
    return several if any(r.size and r.topic in several for r in tail) else set()
