"""The newest rows: a table and what of its topics is not loaded yet, as one DataFrame with the table's columns.

The law of this file: *one snapshot decides*. The version of the table is pinned first; which batch was its last one is
that snapshot's own transaction version; where that batch ended is the ledger's entry of it, which never changes. So
what a loader commits meanwhile, be it between any two lines here, moves no row in or out: a row is in the pinned
version, or its offset is at or behind the entry's end and before the last stable offset that was seen. Evaluating the
DataFrame a second time gives the same rows, or an error where the table was vacuumed or the topics were cut since.

Lines that no parser could read are in neither part: they go to the quarantine, or will.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltalake import DeltaTable
from logferry.loaders import parse
from logferry.loaders.errors import ConfigError, LedgerBroken, TopicChanged
from logferry.loaders.jvm import sorted_errors
from logferry.loaders.kafka import kafka_topics
from logferry.loaders.ledger import Ledger, LedgerEntry, Origin, TablePaths, last_batch, open_table
from logferry.loaders.parsing.settings import ParserSettings, settings_of
from logferry.loaders.plan import Range, TopicPartition, TopicView, plan
from logferry.loaders.read import source
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


@dataclass(frozen=True)
class Snapshot:
    """A version of a table, and the ledger's entry of the last batch that this version holds."""

    path: Path
    version: int
    entry: LedgerEntry
    parser: ParserSettings
    dates: tuple[str, ...]


@dataclass(frozen=True)
class Instant:
    """What a view shows: the pinned version, and of each partition the offsets [start, end) behind it."""

    snapshot: Snapshot
    origin: Origin
    tail: tuple[Range, ...]

    @property
    def ends(self) -> Mapping[TopicPartition, int]:
        """Every record before these is in the view, no other one is."""
        return {r.key: r.end for r in self.tail}

    def frame(self, spark: SparkSession) -> DataFrame:
        """The rows, read when the DataFrame is evaluated."""
        at, snapshot = str(self.snapshot.path), self.snapshot
        with sorted_errors(f"reading version {snapshot.version} of {at}"):
            table = spark.read.format("delta").option("versionAsOf", snapshot.version).load(at)
            reads = [r for r in self.tail if r.size]
            if not reads:
                return table
            records = parse.records(source(spark, self.origin.bootstrap_servers, reads), snapshot.entry.dc)
            tail = parse.rows(parse.parsed(records, snapshot.parser), snapshot.parser, snapshot.dates)
            # A table may have columns of an earlier parser: the loader leaves them empty, too.
            columns = [
                (F.col(c.name) if c.name in tail.columns else F.lit(None)).cast(c.dataType).alias(c.name)
                for c in table.schema
            ]
            return table.unionAll(tail.select(*columns))


def realtime(
    spark: SparkSession,
    table: str | Path,
    *,
    bootstrap_servers: str | None = None,
    topics: Sequence[str] | None = None,
) -> DataFrame:
    """The table at ``table`` and the tail that is not loaded yet: every committed row up to now once, none missing.

    It may be called while loaders write. ``bootstrap_servers`` and ``topics`` (patterns too) are those that the last
    batch was loaded with; topics that came since and fit count from their first offset. Raises ConfigError where there
    is no such table or these are not known, TopicChanged where Kafka does not continue the table, LedgerBroken,
    KafkaAway, StorageAway; what is cut off later fails when the DataFrame is evaluated.
    """
    return pin(spark, table, bootstrap_servers=bootstrap_servers, topics=topics).frame(spark)


def pin(
    spark: SparkSession,
    table: str | Path,
    *,
    bootstrap_servers: str | None = None,
    topics: Sequence[str] | None = None,
) -> Instant:
    """The instant that `realtime` would show now, for those who want to know which one, or show it more than once."""
    snapshot = snapshot_of(Path(table))
    origin = origin_of(snapshot, bootstrap_servers, topics)
    with kafka_topics(spark, origin.bootstrap_servers) as kafka:
        names = kafka.names(origin.topics)
        wanted = wanted_topics(snapshot, origin, names, is_chosen=topics is not None)
        return Instant(snapshot, origin, tail_of(snapshot, kafka.views(wanted), wanted))


def snapshot_of(path: Path) -> Snapshot:
    """Pins the newest version. Raises ConfigError, LedgerBroken, StorageAway."""
    paths = TablePaths.of(path)
    table = open_table(paths.main)
    if table is None:
        raise ConfigError(f"{paths.main} is not a table: has it been loaded, and is the path right?")
    return _snapshot(table, paths)


def _snapshot(table: DeltaTable, paths: TablePaths) -> Snapshot:
    """Of the table as it was opened: nothing here looks at a newer one."""
    last, ledger = last_batch(table), Ledger(paths.ledger)
    if last < 0:
        if table.file_uris():
            raise ConfigError(f"{paths.main} holds rows, but no batch of the loader: it is not one of its tables")
        if ledger.last() < 0:
            raise ConfigError(f"{paths.main} is empty, and nothing says from which topics it is to be loaded")
        # Planned and not loaded: its settings count, its positions do not.
        entry = ledger.get(0)._replace(ranges=())
    else:
        entry = ledger.get(last)
    parser = settings_of(entry.parser, entry.settings)
    if parser is None:
        raise LedgerBroken(
            f"{paths.main} was loaded with the parser {entry.parser}, and this program reads such lines in another way"
        )
    dates = tuple(name for name in table.metadata().partition_columns if name in parse.DATES)
    return Snapshot(paths.main, table.version(), entry, parser, dates)


def origin_of(snapshot: Snapshot, bootstrap_servers: str | None, topics: Sequence[str] | None) -> Origin:
    """What was given, else what the ledger says. Raises ConfigError."""
    known = snapshot.entry.origin
    servers = bootstrap_servers or (known.bootstrap_servers if known else None)
    patterns = tuple(topics or (known.topics if known else ()))
    if servers is None or not patterns:
        raise ConfigError(
            f"{snapshot.path} was loaded by a version that did not note from where: name bootstrap_servers and topics"
        )
    return Origin(servers, patterns)


def wanted_topics(snapshot: Snapshot, origin: Origin, names: Iterable[str], *, is_chosen: bool) -> list[str]:
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
