"""A pinned version of a table, and the offsets in Kafka at which it ends. Without Spark.

The law of this file: *one snapshot decides*. The version of the table is pinned first; the snapshot's own transaction
version is its last batch; the ledger's entry of that batch, which never changes, has its offsets. So a commit between
any two lines here moves no row: it is in the pinned version, or its offset is at or after the entry's end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltalake import DeltaTable
from logferry.loaders.errors import LoaderConfigError, TopicChanged
from logferry.loaders.planning.ledger_entry import DUPLICATE_WINDOW_DAYS, JobOrigin, LedgerEntry, TablePaths
from logferry.loaders.planning.plan import Range, TopicOffsets, plan
from logferry.loaders.planning.source_facts import shared_topics
from logferry.loaders.storage.ledger import Ledger, last_batch, open_table


@dataclass(frozen=True)
class TableSnapshot:
    """``table`` stays at its version. ``entry``: the ledger's, of the last batch that this version holds."""

    path: Path
    table: DeltaTable
    entry: LedgerEntry

    @property
    def version(self) -> int:
        return int(self.table.version())


def snapshot_of(path: Path) -> TableSnapshot:
    """Pins the newest version. Raises LoaderConfigError, LedgerBroken, StorageUnavailable."""
    paths = TablePaths.of(path)
    table = open_table(paths.main)
    if table is None:
        raise LoaderConfigError(f"{paths.main} is not a table: check the path, and whether it was loaded")
    last, ledger = last_batch(table), Ledger(paths.ledger)
    if last >= 0:
        return TableSnapshot(paths.main, table, ledger.get(last))
    if table.file_uris():
        raise LoaderConfigError(
            f"{paths.main} contains rows but no batch ledger entry; it was not created by logferry load"
        )
    if ledger.last() < 0:
        raise LoaderConfigError(f"{paths.main} is empty, and no batch is planned: its topics are unknown")
    # Planned but not loaded: its settings apply, its positions do not.
    return TableSnapshot(paths.main, table, ledger.get(0)._replace(ranges=()))


def origin_of(snapshot: TableSnapshot, bootstrap_servers: str | None, topics: Sequence[str] | None) -> JobOrigin:
    """The given address and topics, else those of the ledger. Raises LoaderConfigError."""
    known = snapshot.entry.origin
    servers = bootstrap_servers or (known.bootstrap_servers if known else None)
    patterns = tuple(topics or (known.topics if known else ()))
    if servers is None or not patterns:
        raise LoaderConfigError(
            f"{snapshot.path} was loaded by a version that did not record its origin: name its Kafka and its topics"
        )
    return JobOrigin(servers, patterns, known.duplicate_window_days if known else DUPLICATE_WINDOW_DAYS)


def wanted_topics(snapshot: TableSnapshot, names: Iterable[str], *, is_chosen: bool) -> list[str]:
    """The topics that match now, and those the table was ever loaded from, unless the caller chose topics."""
    known = () if is_chosen else (r.topic for r in snapshot.entry.ranges)
    return sorted({*names, *known})


def tail_of(snapshot: TableSnapshot, views: Mapping[str, TopicOffsets], wanted: Sequence[str]) -> tuple[Range, ...]:
    """The ranges after the snapshot, of every wanted partition. Raises TopicChanged."""
    found = plan(snapshot.entry.ranges, views, wanted, max_records=sys.maxsize)
    if found.stopped:
        reasons = "; ".join(stop.reason for stop in found.stopped)
        raise TopicChanged(f"{snapshot.path}: the records that are not loaded yet are unknown: {reasons}")
    return tuple(r for r in found.ranges if r.topic in set(wanted))


def may_hold_copies(snapshot: TableSnapshot, tail: Sequence[Range]) -> set[str]:
    """Topics that several data centres have, if the tail has records of one: a chunk may occur a second time."""
    several = shared_topics({r.topic for r in (*snapshot.entry.ranges, *tail)})
    return several if any(r.size and r.topic in several for r in tail) else set()
