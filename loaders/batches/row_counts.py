"""Counts of rows by segment and source, made by Spark's executors: what reaches the driver does not grow with rows."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from logferry.loaders.batches.records import folder_of
from logferry.loaders.jvm_errors import collected, sorted_errors
from logferry.loaders.planning.segment_states import AddedRows, SegmentRules
from logferry.loaders.planning.source_facts import SourceKey
from logferry.loaders.storage.commit import DataFiles
from logferry.loaders.storage.side_tables import moment
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

_COUNTED: Final = "topic string, source_id string, event_time timestamp, text string"


def added_by(
    spark: SparkSession, written: DataFiles, rules: SegmentRules
) -> tuple[dict[datetime, AddedRows], dict[SourceKey, datetime]]:
    """The rows that files add to each segment, and the newest event of each source. Raises StorageUnavailable."""
    added: dict[datetime, AddedRows] = {}
    newest: dict[SourceKey, datetime] = {}
    if not written.rows:
        return added, newest
    # A file without event time was written for a parser that has none.
    rows = spark.read.schema(_COUNTED).parquet(folder_of(written).for_spark).where("event_time is not null")
    timed = rows.withColumn("start", _start(rules))
    counted = timed.groupingSets([["start"], ["topic", "source_id"]], "start", "topic", "source_id").agg(*_sums())
    with sorted_errors(f"counting the rows of {written.table}"):
        for row in collected(counted):
            if row["start"] is not None:
                added[moment(row["start"])] = _added(row)
            else:
                newest[SourceKey(row["topic"], row["source_id"])] = moment(row["last"])
    return added, newest


def rows_by_segment(frame: DataFrame, rules: SegmentRules, *, hashed: bool = True) -> dict[int, tuple[AddedRows, str]]:
    """By the start of the segment in microseconds since 1970, with a hash: the same for the same rows in any order."""
    one = F.xxhash64(F.to_json(F.struct(*frame.columns))).cast("decimal(38,0)") if hashed else F.lit(0)
    timed = frame.where("event_time is not null").groupBy(_start(rules).alias("start"))
    found = collected(timed.agg(*_sums(), F.sum(one).cast("string").alias("hash")))
    return {row["start"]: (_added(row), row["hash"]) for row in found}


def _start(rules: SegmentRules) -> Column:
    return F.expr(f"unix_micros(event_time) - pmod(unix_micros(event_time), {rules.window_s * 1_000_000})")


def _sums() -> list[Column]:
    size = F.sum(F.octet_length("text")).alias("bytes")
    micros = F.expr("unix_micros(event_time)")
    return [F.count(F.lit(1)).alias("rows"), size, F.min(micros).alias("first"), F.max(micros).alias("last")]


def _added(row: dict[str, int]) -> AddedRows:
    return AddedRows(row["rows"], row["bytes"], moment(row["first"]), moment(row["last"]))
