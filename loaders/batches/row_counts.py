"""Rows counted by Spark's executors: by segment and by source, of a table or of the files of a batch.

The driver receives one row per segment or source, and no line.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import reduce
from typing import Final

from logferry.loaders.jvm_errors import collected, sorted_errors
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import AddedRows, SegmentRules
from logferry.loaders.planning.source_facts import KnownSources, SourceFacts, SourceKey
from logferry.loaders.storage.commit import DataFiles
from logferry.loaders.storage.ledger import table_at
from logferry.loaders.storage.side_tables import moment, tables_after
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

_WRITTEN: Final = "topic string, source_id string, event_time timestamp, text string"


def start_of_segment(rules: SegmentRules) -> Column:
    """The start of a row's segment, in microseconds since 1970."""
    return F.expr(f"unix_micros(event_time) - pmod(unix_micros(event_time), {rules.window_s * 1_000_000}L)")


def rows_by_segment(frame: DataFrame, rules: SegmentRules) -> dict[datetime, AddedRows]:
    """Counts rows by ``event_time`` and ``text``; rows without an event time are in no segment. Raises LoadError."""
    return {moment(start): rows for start, (rows, _) in sums_by_segment(frame, rules, hashed=False).items()}


def sums_by_segment(frame: DataFrame, rules: SegmentRules, *, hashed: bool = True) -> dict[int, tuple[AddedRows, str]]:
    """By start in microseconds, with a hash that is the same for the same rows in any order. Raises LoadError."""
    micros = F.expr("unix_micros(event_time)")
    one = F.xxhash64(F.to_json(F.struct(*frame.columns))).cast("decimal(38,0)") if hashed else F.lit(0)
    found = (
        frame.where("event_time is not null")
        .groupBy(start_of_segment(rules).alias("start"))
        .agg(
            F.count(F.lit(1)).alias("rows"),
            F.coalesce(F.sum(F.octet_length("text")), F.lit(0)).alias("bytes"),
            F.min(micros).alias("first"),
            F.max(micros).alias("last"),
            F.sum(one).cast("string").alias("hash"),
        )
    )
    with sorted_errors("counting the rows of segments"):
        return {
            row["start"]: (AddedRows(row["rows"], row["bytes"], moment(row["first"]), moment(row["last"])), row["hash"])
            for row in collected(found)
        }


def added_by(
    spark: SparkSession, written: DataFiles, rules: SegmentRules
) -> tuple[dict[datetime, AddedRows], dict[SourceKey, datetime]]:
    """The rows that the files of a batch add to each segment, and the newest event of each source. Raises LoadError."""
    if not written.adds:
        return {}, {}
    # In a table that is partitioned by topic, Spark takes it from the names of the folders.
    (folder,) = {name.split("/")[0] for name in written.names}
    rows = spark.read.schema(_WRITTEN).parquet((written.table / folder).for_spark)
    each = rows.groupBy("topic", "source_id", start_of_segment(rules).alias("start")).agg(
        F.count(F.lit(1)).alias("rows"),
        F.coalesce(F.sum(F.octet_length("text")), F.lit(0)).alias("bytes"),
        F.expr("unix_micros(min(event_time))").alias("first"),
        F.expr("unix_micros(max(event_time))").alias("last"),
    )
    with sorted_errors(f"counting rows of {written.table}"):
        counts = collected(each)
    written.check_rows(sum(row["rows"] for row in counts))
    added: dict[datetime, AddedRows] = {}
    newest: dict[SourceKey, datetime] = {}
    for row in counts:
        # A batch that was planned for a parser without event time has none.
        if row["start"] is None:
            continue
        start, key = moment(row["start"]), SourceKey(row["topic"], row["source_id"])
        of_source = AddedRows(row["rows"], row["bytes"], moment(row["first"]), moment(row["last"]))
        added[start] = of_source.plus(added.get(start))
        newest[key] = max(of_source.last, newest.get(key, of_source.last))
    return added, newest


def table_segments(
    spark: SparkSession, paths: TablePaths, batch: int, rules: SegmentRules
) -> Mapping[datetime, AddedRows]:
    """The segments of the table as of exactly this batch. Raises Overtaken, LoadError."""
    version = table_at(paths.main, batch).version()
    return rows_by_segment(_stored(spark, paths.main, version), rules)


def table_sources(spark: SparkSession, paths: TablePaths, batch: int) -> KnownSources:
    """The facts of each source, of table and quarantine as of exactly this batch. Raises Overtaken, LoadError."""
    frames = []
    for path, table in tables_after(paths, batch):
        rows = _stored(spark, path, table.version())
        if path == paths.quarantine:
            rows = rows.where(f"(resolved IS NULL OR resolved > {batch}) AND (since IS NULL OR since <= {batch})")
        event = F.col("event_time") if "event_time" in rows.columns else F.lit(None).cast("timestamp")
        frames.append(rows.select("topic", "source_id", "seqno", "recorded", event.alias("event")))
    if not frames:
        return {}
    rows = reduce(DataFrame.unionAll, frames).where("source_id IS NOT NULL AND seqno IS NOT NULL")
    each = rows.groupBy("topic", "source_id").agg(
        F.min("seqno").alias("first"),
        F.max("seqno").alias("last"),
        F.expr("unix_micros(max(recorded))").alias("recorded"),
        F.expr("unix_micros(max(event))").alias("event"),
    )
    with sorted_errors(f"counting the sources of {paths.main}"):
        found = collected(each)
    return {
        SourceKey(row["topic"], row["source_id"]): SourceFacts(
            row["first"], row["last"], moment(row["recorded"]), None if row["event"] is None else moment(row["event"])
        )
        for row in found
    }


def _stored(spark: SparkSession, path: Location, version: int) -> DataFrame:
    with sorted_errors(f"reading {path}"):
        return spark.read.format("delta").option("versionAsOf", version).load(path.for_spark)
