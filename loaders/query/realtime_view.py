"""The realtime view: a table and the records of its topics that are not loaded yet, as one DataFrame.

A row is in the pinned version of the table (see `storage.tables`), or its record is in the ranges between that
version's end and the last stable offsets that were fetched after it. A second evaluation of the DataFrame gives the
same rows, or an error where files of the table or records of the topics were removed since.

Lines that the parser cannot read are in neither part: they belong to the quarantine. A chunk that arrived by two data
centres occurs once, as in the table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from logferry.gateway.config import KafkaSettings
from logferry.loaders.batches.records import source
from logferry.loaders.errors import LedgerBroken, LoaderConfigError
from logferry.loaders.jvm_errors import collected, sorted_errors
from logferry.loaders.location import Location
from logferry.loaders.parsing.columns import DATES
from logferry.loaders.parsing.rows import kafka_records, parse_records, table_rows, with_columns_of
from logferry.loaders.parsing.settings import ParserSettings, settings_of
from logferry.loaders.planning.ledger_entry import JobOrigin
from logferry.loaders.planning.plan import Range
from logferry.loaders.spark.kafka_access import jvm_options, kafka_topics
from logferry.loaders.storage.side_tables import moment
from logferry.loaders.storage.tables import TableSnapshot, copied_topics, origin_of, snapshot_of, tail_of, wanted_topics
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


@dataclass(frozen=True)
class Instant:
    """The content of a view: the pinned version, and the offsets [start, end) of each partition after it."""

    snapshot: TableSnapshot
    parser: ParserSettings
    origin: JobOrigin
    kafka: KafkaSettings
    tail: tuple[Range, ...]

    def frame(self, spark: SparkSession) -> DataFrame:
        """The rows, read when the DataFrame is evaluated."""
        at, version = self.snapshot.path.for_spark, self.snapshot.version
        with sorted_errors(f"reading version {version} of {at}"):
            table = spark.read.format("delta").option("versionAsOf", version).load(at)
            reads = [r for r in self.tail if r.size]
            if not reads:
                return table
            records = kafka_records(source(spark, jvm_options(self.kafka), reads), self.snapshot.entry.dc)
            dates = [name for name in self.snapshot.table.metadata().partition_columns if name in DATES]
            tail = table_rows(parse_records(records, self.parser), self.parser, dates)
            if several := copied_topics(self.snapshot, self.tail):
                tail = _without_copies(tail, table, several, timedelta(days=self.origin.duplicate_window_days))
            return table.unionAll(with_columns_of(tail, table.schema))


def realtime(
    spark: SparkSession,
    table: str | Path | Location,
    *,
    bootstrap_servers: str | None = None,
    topics: Sequence[str] | None = None,
    kafka: KafkaSettings | None = None,
) -> DataFrame:
    """The table at ``table`` and the tail that is not loaded yet: every committed row up to now once, none missing.

    It may be called while loaders write. ``bootstrap_servers`` and ``topics`` (also patterns) default to those of the
    last batch; new topics that match count from their first offset. ``kafka``: the connection where Kafka wants TLS or
    SASL, in place of ``bootstrap_servers``. Raises LoaderConfigError where there is no such table, these are unknown or
    a file of the connection cannot be used, TopicChanged where Kafka does not continue the table, LedgerBroken,
    KafkaUnavailable, KafkaRefused, StorageUnavailable; records that are removed later fail the evaluation of the
    DataFrame.
    """
    return pin(spark, table, bootstrap_servers=bootstrap_servers, topics=topics, kafka=kafka).frame(spark)


def pin(
    spark: SparkSession,
    table: str | Path | Location,
    *,
    bootstrap_servers: str | None = None,
    topics: Sequence[str] | None = None,
    kafka: KafkaSettings | None = None,
) -> Instant:
    """The instant of `realtime`, for callers that need its offsets or evaluate it more than once."""
    snapshot = snapshot_of(Location.of(table))
    entry = snapshot.entry
    parser = settings_of(entry.parser, entry.settings)
    if parser is None:
        raise LedgerBroken(
            f"{snapshot.path} was loaded with the parser {entry.parser}, which this version does not have"
        )
    if kafka is not None and bootstrap_servers is not None:
        raise LoaderConfigError("kafka and bootstrap_servers exclude each other: kafka holds the address")
    origin = origin_of(snapshot, kafka.bootstrap_servers if kafka else bootstrap_servers, topics)
    settings = kafka or KafkaSettings(bootstrap_servers=origin.bootstrap_servers)
    with kafka_topics(spark, settings) as cluster:
        wanted = wanted_topics(snapshot, cluster.names(origin.topics), is_chosen=topics is not None)
        return Instant(snapshot, parser, origin, settings, tail_of(snapshot, cluster.views(wanted), wanted))


def _without_copies(tail: DataFrame, table: DataFrame, several: Collection[str], within: timedelta) -> DataFrame:
    """Removes chunks that the table has from another data centre; of two in the tail the first topic's stays."""

    def chunks(rows: DataFrame, prefix: str) -> DataFrame:
        name = F.expr("substring(topic, instr(topic, '.') + 1)").alias("name")
        own = (F.col(c).alias(prefix + c) for c in ("topic", "recorded"))
        return rows.where(F.col("topic").isin(*several)).select(name, "source_id", "seqno", *own).distinct()

    mine, key = chunks(tail, ""), ["name", "source_id", "seqno"]
    stored, beside = chunks(_near(table, mine, within), "other_"), chunks(tail, "other_")
    oldest = F.col("recorded") - F.lit(within)
    is_before = (F.col("topic") != F.col("other_topic")) & (F.col("other_recorded") >= oldest)
    came_before = mine.join(stored, key).where(is_before)
    goes_first = mine.join(beside, key).where(F.col("topic") > F.col("other_topic"))
    of = ["topic", "source_id", "seqno"]
    return tail.join(came_before.select(*of).union(goes_first.select(*of)).distinct(), of, "left_anti")


def _near(table: DataFrame, mine: DataFrame, within: timedelta) -> DataFrame:
    """The rows that may be copies of these chunks. The bounds are constants, so that Delta passes over other files: a
    join alone would read the whole table. It reads the tail once more, now.
    """
    oldest, low, high = F.expr("unix_micros(min(recorded))"), F.min("seqno"), F.max("seqno")
    (found,) = collected(mine.agg(oldest.alias("recorded"), low.alias("low"), high.alias("high")))
    if found["recorded"] is None:
        return table.limit(0)
    since = moment(found["recorded"]) - within
    return table.where(F.col("recorded") >= F.lit(since)).where(F.col("seqno").between(found["low"], found["high"]))
