"""The state of a table, the active rows of its quarantine, and a pinned version for readers. Without Spark.

Two tables cannot change in one commit. So a row of the quarantine names the batch that activates it (``since``) and the
one that deactivates it (``resolved``): the main table's commit of that batch is the instant in which it takes effect.

The law of snapshots: *one snapshot decides*. The version of the table is pinned first; the snapshot's own transaction
version is its last batch; the ledger's entry of that batch, which never changes, has its offsets. So a commit between
any two lines there moves no row: it is in the pinned version, or its offset is at or after the entry's end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable, Schema
from logferry.loaders.errors import ForeignTable, LedgerBroken, LoaderConfigError, TopicChanged
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import DUPLICATE_WINDOW_DAYS, JobOrigin, LedgerEntry, TablePaths
from logferry.loaders.planning.plan import Range, TopicOffsets, plan
from logferry.loaders.planning.source_facts import shared_topics
from logferry.loaders.storage.files import dataset, open_table, storage_errors
from logferry.loaders.storage.ledger import Ledger, arrow_schema, check_features, existing_table, last_batch
from logferry.loaders.storage.snapshots import newest_table

# Where a line is quarantined, ``line`` and ``newline`` are set; where a whole record is, ``key`` and ``headers``.
# ``parser`` could not read the line. ``since`` is the batch that added the row in a reload, ``resolved`` the batch that
# moved its line into the table or dropped it: between the two the row is active.
_QUARANTINE: Final = pa.schema(
    [
        *arrow_schema("topic string, source_id string, seqno long, line int, prev long, dc string, partition int"),
        *arrow_schema("offset long, created time, recorded time"),
        pa.field("attributes", pa.map_(pa.string(), pa.string())),
        *arrow_schema("bytes binary, newline boolean, reason string, key binary"),
        pa.field("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        *arrow_schema("parser string, resolved long, since long"),
    ]
)
QUARANTINE: Final = Schema.from_arrow(_QUARANTINE)
QUARANTINE_COLUMNS: Final = tuple(_QUARANTINE.names)


class TableState(NamedTuple):
    """The batches of a table. ``planned``: the batch after ``last``, if its entry is written and its rows are not."""

    last: int
    committed: LedgerEntry | None
    planned: LedgerEntry | None

    @property
    def newest(self) -> LedgerEntry | None:
        """The newest entry of the ledger; None: no batch was ever planned."""
        return self.planned or self.committed


def read_state(paths: TablePaths) -> TableState:
    """The state in storage. Raises LedgerBroken, ForeignTable, UnsupportedFeature, StorageUnavailable.

    Other loaders may write meanwhile, so the tables are read in the reverse order of writing: the quarantine and the
    ledger are never seen in a newer state than the table.
    """
    quarantine = newest_table(paths.quarantine)
    check_features(paths.quarantine, quarantine)
    sorted_out = last_batch(quarantine)
    ledger = Ledger(paths.ledger)
    entered = ledger.last()
    main = newest_table(paths.main)
    check_features(paths.main, main)
    last = last_batch(main)
    if last < 0 and main is not None and main.file_uris():
        raise ForeignTable(f"{paths.main} contains rows but no batch ledger entry; it was not created by logferry load")
    if last >= 0 and quarantine is None and newest_table(paths.quarantine) is None:
        raise LedgerBroken(f"{paths.quarantine} is missing, though {paths.main} holds batch {last}")
    committed = ledger.get(last) if last >= 0 else None
    if entered > last + 1:
        raise LedgerBroken(
            f"{paths.ledger} has batch {entered}, {paths.main} only {last}: the table was restored or recreated"
        )
    if sorted_out > entered:
        raise LedgerBroken(f"{paths.quarantine} holds batch {sorted_out}, which is not in {paths.ledger}")
    return TableState(last, committed, ledger.get(entered) if entered > last else None)


def partition_columns(path: Location) -> list[str]:
    table = newest_table(path)
    return list(table.metadata().partition_columns) if table is not None else []


def stored_schema(path: Location) -> str:
    """The columns of a table as the JSON of Delta and Spark. Raises StorageUnavailable."""
    return str(existing_table(path).schema().to_json())


@dataclass(frozen=True)
class TableSnapshot:
    """``table`` stays at its version. ``entry``: the ledger's, of the last batch that this version holds."""

    path: Location
    table: DeltaTable
    entry: LedgerEntry

    @property
    def version(self) -> int:
        return int(self.table.version())


def snapshot_of(path: Location) -> TableSnapshot:
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


def copied_topics(snapshot: TableSnapshot, tail: Sequence[Range]) -> set[str]:
    """Topics that several data centres have, if the tail has records of one: a chunk may occur a second time."""
    several = shared_topics({r.topic for r in (*snapshot.entry.ranges, *tail)})
    return several if any(r.size and r.topic in several for r in tail) else set()


def active_filter(last: int) -> Any:
    """A filter of pyarrow for the rows of a quarantine that are active as of batch ``last``."""
    resolved, since = ds.field("resolved"), ds.field("since")
    return (resolved.is_null() | (resolved > last)) & (since.is_null() | (since <= last))


def count_rows(path: Location, selected: Any, active_as_of: int | None = None) -> int:
    """The rows that a filter selects; of a quarantine those active as of a batch. Raises StorageUnavailable."""
    table = open_table(path)
    if table is None:
        return 0
    with storage_errors(f"{path} cannot be read"):
        if active_as_of is not None:
            selected = selected & active_filter(active_as_of)
        return int(dataset(path, table).count_rows(filter=selected))
