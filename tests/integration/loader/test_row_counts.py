"""Counts by Spark are those of plain Python, also of files in folders by topic and day."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from logferry.loaders.batches.records import write_files
from logferry.loaders.batches.row_counts import added_by, rows_by_segment
from logferry.loaders.location import Location
from logferry.loaders.planning.segment_states import AddedRows, SegmentRules
from logferry.loaders.planning.source_facts import SourceKey
from logferry.loaders.storage.commit import DataFiles
from logferry.loaders.storage.side_tables import moment
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

SCHEMA = "topic string, source_id string, event_time timestamp, text string"
FAR = 200 * 365 * 24 * 3600


def some_rows(count: int) -> list[tuple[Any, ...]]:
    chance = random.Random(7)
    start = datetime(1970, 1, 1, tzinfo=UTC)

    def at() -> datetime | None:
        kind = chance.random()
        near = timedelta(seconds=chance.randrange(1_790_000_000, 1_790_100_000), microseconds=chance.randrange(10**6))
        far = timedelta(seconds=chance.randrange(-FAR // 4, FAR))
        return None if kind < 0.05 else start + (far if kind < 0.1 else near)

    topics, names = ["dc1.a", "dc2.a", "dc1.b=c%2F"], [f"web{i}:/var/log/ä b" for i in range(9)]
    return [(chance.choice(topics), chance.choice(names), at(), "ä" * chance.randrange(5)) for _ in range(count)]


@pytest.mark.parametrize("length", [60, 3600, 604800])
@pytest.mark.parametrize("parted", [(), ("topic",), ("topic", "event_date")])
def test_counts_are_those_of_plain_python(
    spark: SparkSession, tmp_path: Path, length: int, parted: tuple[str, ...]
) -> None:
    rows, rules = some_rows(400), SegmentRules(window_s=length)
    want: dict[datetime, AddedRows] = {}
    newest: dict[SourceKey, datetime] = {}
    for topic, source, at, text in rows:
        if at is not None:
            start = rules.start_of(at)
            want[start] = AddedRows(1, len(text.encode()), at, at).plus(want.get(start))
            key = SourceKey(topic, source)
            newest[key] = max(newest.get(key, at), at)
    frame = spark.createDataFrame(rows, SCHEMA)
    if "event_date" in parted:
        frame = frame.withColumn("event_date", F.to_date("event_time"))
    written = write_files(frame, Location.of(tmp_path), 1, parted)
    assert written.rows == len(rows)
    assert added_by(spark, written, rules) == (want, newest)
    assert {moment(at): one for at, (one, _) in rows_by_segment(frame, rules).items()} == want


def test_files_without_event_times_add_nothing(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.createDataFrame([("dc1.a", "web1", "x")], "topic string, source_id string, text string")
    written = write_files(frame, Location.of(tmp_path), 1)
    assert written.rows == 1
    assert added_by(spark, written, SegmentRules()) == ({}, {})
    assert added_by(spark, DataFiles(Location.of(tmp_path)), SegmentRules()) == ({}, {})
