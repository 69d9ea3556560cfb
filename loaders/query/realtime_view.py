"""The newest rows: a table and what of its topics is not loaded yet, as one DataFrame with the table's columns.

A row is in the pinned version of the table (see `pinned`), or its record is in the ranges between that version's end
and the last stable offsets that were seen after it. Evaluating the DataFrame a second time gives the same rows, or an
error where the table was vacuumed or the topics were cut since.

Lines that no parser could read are in neither part: they go to the quarantine, or will. A chunk that came by two data
centres is there once, as the loader will have it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from logferry.loaders.batches.read import source
from logferry.loaders.errors import LedgerBroken
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.parsing import rows as parse
from logferry.loaders.parsing.settings import ParserSettings, settings_of
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.spark.kafka_offsets import kafka_topics
from logferry.loaders.storage.ledger import Origin
from logferry.loaders.storage.snapshot import (
    Snapshot,
    may_hold_copies,
    origin_of,
    snapshot_of,
    tail_of,
    wanted_topics,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


@dataclass(frozen=True)
class Instant:
    """What a view shows: the pinned version, and of each partition the offsets [start, end) behind it."""

    snapshot: Snapshot
    parser: ParserSettings
    origin: Origin
    tail: tuple[Range, ...]

    @property
    def ends(self) -> Mapping[TopicPartition, int]:
        """Every record before these is in the view, no other one is."""
        return {r.key: r.end for r in self.tail}

    def frame(self, spark: SparkSession) -> DataFrame:
        """The rows, read when the DataFrame is evaluated."""
        at, version = str(self.snapshot.path), self.snapshot.version
        with sorted_errors(f"reading version {version} of {at}"):
            table = spark.read.format("delta").option("versionAsOf", version).load(at)
            reads = [r for r in self.tail if r.size]
            if not reads:
                return table
            records = parse.records(source(spark, self.origin.bootstrap_servers, reads), self.snapshot.entry.dc)
            dates = [name for name in self.snapshot.table.metadata().partition_columns if name in parse.DATES]
            tail = parse.rows(parse.parsed(records, self.parser), self.parser, dates)
            if several := may_hold_copies(self.snapshot, self.tail):
                tail = _without_copies(tail, table, several, timedelta(days=self.origin.moved_days))
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
    entry = snapshot.entry
    parser = settings_of(entry.parser, entry.settings)
    if parser is None:
        raise LedgerBroken(
            f"{snapshot.path} was loaded with the parser {entry.parser}, and this program reads such lines otherwise"
        )
    origin = origin_of(snapshot, bootstrap_servers, topics)
    with kafka_topics(spark, origin.bootstrap_servers) as kafka:
        wanted = wanted_topics(snapshot, kafka.names(origin.topics), is_chosen=topics is not None)
        return Instant(snapshot, parser, origin, tail_of(snapshot, kafka.views(wanted), wanted))


def _without_copies(tail: DataFrame, table: DataFrame, several: Collection[str], within: timedelta) -> DataFrame:
    """Without the chunks that the table has of another data centre; of two in the tail the first topic's stays."""

    def chunks(rows: DataFrame, prefix: str) -> DataFrame:
        name = F.expr("substring(topic, instr(topic, '.') + 1)").alias("name")
        own = (F.col(c).alias(prefix + c) for c in ("topic", "recorded"))
        return rows.where(F.col("topic").isin(*several)).select(name, "source_id", "seqno", *own).distinct()

    mine, key = chunks(tail, ""), ["name", "source_id", "seqno"]
    stored, beside = chunks(table, "other_"), chunks(tail, "other_")
    oldest = F.col("recorded") - F.lit(within)
    came_before = mine.join(stored, key).where(
        (F.col("topic") != F.col("other_topic")) & (F.col("other_recorded") >= oldest)
    )
    goes_first = mine.join(beside, key).where(F.col("topic") > F.col("other_topic"))
    of = ["topic", "source_id", "seqno"]
    return tail.join(came_before.select(*of).union(goes_first.select(*of)).distinct(), of, "left_anti")
