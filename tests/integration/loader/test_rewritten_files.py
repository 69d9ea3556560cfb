"""Files rewritten by Spark: rows removed, files merged and clustered, rows counted; against plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from logferry.loaders.batches.merge_files import spark_merge
from logferry.loaders.batches.rewrite_rows import MEANT, Rewriter, with_ranges
from logferry.loaders.batches.row_counts import added_by, rows_by_segment, table_sources
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.jvm_errors import collected
from logferry.loaders.location import Location
from logferry.loaders.planning.plan import Range
from logferry.loaders.planning.segment_states import AddedRows, SegmentRules
from logferry.loaders.planning.source_facts import SourceKey
from logferry.loaders.storage.commit import DataFiles, commit_files, new_files
from logferry.loaders.storage.files import list_files, open_table
from logferry.loaders.storage.ledger import existing_table, last_batch
from logferry.loaders.storage.merge import CLUSTERED, Merge
from logferry.loaders.storage.rewrite import of_ranges
from logferry.loaders.storage.side_tables import create_segments, read_segments
from pyspark.sql import SparkSession

from tests.support.loaded_table import HOUR, MAIN, NOON, LoadedTable, T

pytestmark = pytest.mark.spark
Session = Callable[[], SparkSession]
Table = Callable[..., LoadedTable]


@pytest.fixture
def session(spark: SparkSession) -> Session:
    return lambda: spark


def rows(path: Location) -> pa.Table:
    return existing_table(path).to_pyarrow_table().sort_by("offset")


def replace(session: Session, path: Location, batch: int, ranges: list[Range], dc: str = "dc1") -> None:
    rewriter = Rewriter(session, path, batch, of_ranges(ranges, dc))
    commit_files(DataFiles(path), path, batch, "run", changes=rewriter.actions)


# ---- rows out of files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parted", [[], ["topic", "dc"]])
def test_rows_go_and_the_others_stay_as_they_are(session: Session, tmp_path: Path, parted: list[str]):
    logs = LoadedTable(tmp_path / "a b+ü", parted or None, segments=False)
    for _ in range(3):
        logs.load(NOON, None, NOON)
    path = logs.paths.main
    whole, untouched = rows(path), set(existing_table(path).file_uris())
    replace(session, path, 3, [Range(T, 0, "id", 1, 2), Range(T, 0, "id", 3, 6)])
    assert rows(path).equals(whole.take([0, 2, 6, 7, 8]))
    assert len(untouched & set(existing_table(path).file_uris())) == 1
    # Those that were loaded in another data centre have other offsets, as do other topics and partitions.
    for dc, topic, partition in (("dc2", T, 0), ("dc1", T, 1), ("dc1", "dc1.other", 0)):
        batch = last_batch(open_table(path)) + 1
        replace(session, path, batch, [Range(topic, partition, "id", 0, 9)], dc)
        assert logs.offsets == [0, 2, 6, 7, 8]
    assert not [file for file in list_files(path) if file.name.startswith("_view")]


@pytest.mark.long
def test_a_removal_repeats_after_a_commit_in_between(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """delta-rs lets a removal pass whose file a compaction has replaced meanwhile: its rows would be doubled."""
    logs = LoadedTable(tmp_path, segments=False)
    for _ in range(3):
        logs.load(NOON, NOON)
    path, times = logs.paths.main, []
    looked = Rewriter.actions

    def merged_after_the_look(self: Rewriter, table: DeltaTable) -> Any:
        actions = looked(self, table)
        times.append(table.version())
        if len(times) == 1:
            Merge().run(path)
        elif len(times) == 2:
            write_deltalake(str(path), pa.Table.from_pylist([], schema=MAIN), mode="append")
        return actions

    monkeypatch.setattr(Rewriter, "actions", merged_after_the_look)
    replace(session, path, 3, [Range(T, 0, "id", 0, 3)])
    assert len(times) == 3
    assert existing_table(path).version() == times[-1] + 1, "what goes and what comes are one commit"
    assert logs.offsets == [3, 4, 5]
    assert last_batch(open_table(path)) == 3
    folders = {file.name.split("/")[0] for file in list_files(path) if file.name.startswith("batch-")}
    assert len(folders) == 2, "of the files that are still there, none is written twice"


def test_rows_that_a_listing_hides_are_missed(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logs = LoadedTable(tmp_path, segments=False)
    logs.load(NOON, NOON)
    monkeypatch.setattr("logferry.loaders.batches.rewrite_rows.new_files", lambda path, *_: DataFiles(path))
    with pytest.raises(StorageUnavailable, match="1 rows were written, but its files hold 0"):
        replace(session, logs.paths.main, 1, [Range(T, 0, "id", 0, 1)])
    assert logs.offsets == [0, 1]


def test_the_rows_of_ranges_are_those_of_a_plain_search(spark: SparkSession):
    dice = random.Random(7)
    ranges = [
        Range(f"dc1.{topic}", partition, "id", low, low + dice.randrange(1, 3))
        for topic in "ab"
        for partition in (0, 1)
        for low in (0, 4)
    ]
    ranges += [Range("dc1.a", partition, "id", 0, 9) for partition in range(2, 10_000)]
    found = [
        {"topic": topic, "partition": partition, "offset": offset, "dc": dc}
        for topic in (None, "dc1.a", "dc1.b")
        for partition in (None, 0, 1, 9_999, 10_000)
        for offset in (None, *range(8))
        for dc in (None, "dc1", "dc2")
    ]
    schema = "topic string, partition int, offset bigint, dc string"
    frame = spark.createDataFrame(
        pa.Table.from_pylist(
            found,
            schema=pa.schema(
                [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("dc", pa.string())]
            ),
        ),
        schema,
    )
    marked = collected(with_ranges(frame, ranges, "dc1"))
    assert len(marked) == len(found)

    def is_meant(row: dict[str, Any]) -> bool:
        places = (r for r in ranges if (row["topic"], row["partition"]) == r.key and row["offset"] is not None)
        return row["dc"] == "dc1" and any(r.start <= row["offset"] < r.end for r in places)

    assert [row[MEANT] for row in marked] == [is_meant(row) for row in marked]
    assert 10 < sum(row[MEANT] for row in marked) < 40


# ---- merges ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parted", [[], ["topic"]])
def test_files_are_merged_and_rows_sorted_by_source_and_time(session: Session, tmp_path: Path, parted: list[str]):
    logs = LoadedTable(tmp_path, parted or None, segments=False)
    for number in range(6):
        logs.load(NOON + number * HOUR, None, NOON - number * HOUR)
    path = logs.paths.main
    before = rows(path)
    assert spark_merge(session, 128).run(path) == (6, 1)
    assert rows(path).equals(before)
    logs.load(NOON)
    before = rows(path)
    cluster = spark_merge(session, 128, cluster=True)
    assert cluster.run(path) == (2, 1)
    assert rows(path).equals(before)
    (uri,) = existing_table(path).file_uris()
    assert CLUSTERED in uri
    sources = existing_table(path).to_pyarrow_table()["source_id"].to_pylist()
    assert sources == sorted(sources)
    version = existing_table(path).version()
    assert cluster.run(path) == (1, 1)
    assert existing_table(path).version() == version, "nothing is left to do"
    assert last_batch(open_table(path)) == 6


# ---- counts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [60, 3600, 86_400, 604_800])
def test_counts_are_those_of_plain_python(length: int, spark: SparkSession):
    rules, dice = SegmentRules(window_s=length), random.Random(length)
    times = [NOON + timedelta(microseconds=dice.randrange(-(10**16), 10**15)) for _ in range(200)]
    texts = ["ä" * (i % 9) for i in range(len(times))]
    table = pa.table({"event_time": pa.array([*times, None], pa.timestamp("us", "UTC")), "text": [*texts, "x"]})
    want: dict[datetime, AddedRows] = {}
    for i, at in enumerate(times):
        start = rules.start_of(at)
        want[start] = AddedRows(1, 2 * (i % 9), at, at).plus(want.get(start))
    frame = spark.createDataFrame(table, "event_time timestamp, text string")
    assert rows_by_segment(frame, rules) == want


@pytest.mark.parametrize("parted", [[], ["topic"]])
def test_the_files_of_a_batch_are_counted(parted: list[str], spark: SparkSession, tmp_path: Path):
    place = Location.of(tmp_path)
    table = pa.table(
        {
            "topic": ["dc1.a", "dc1.a", "dc1.b"],
            "source_id": ["a", "a", "b"],
            "event_time": pa.array([NOON, NOON + HOUR, None], pa.timestamp("us", "UTC")),
            "text": ["x", "yz", "?"],
        }
    )
    writer = spark.createDataFrame(table).write
    (writer.partitionBy(*parted) if parted else writer).parquet(str(tmp_path / "batch-1"))
    written = new_files(place, "batch-1", parted)
    added, newest = added_by(spark, written, SegmentRules())
    assert {start: (one.rows, one.bytes) for start, one in added.items()} == {NOON: (1, 1), NOON + HOUR: (1, 2)}
    assert newest == {SourceKey("dc1.a", "a"): NOON + HOUR}
    with pytest.raises(StorageUnavailable, match="its files hold 4"):
        added_by(spark, written._replace(rows=4), SegmentRules())
    assert added_by(spark, DataFiles(place), SegmentRules()) == ({}, {})


def test_sources_of_a_table_are_those_of_its_rows_and_its_active_lines(spark: SparkSession, tmp_path: Path):
    logs = LoadedTable(tmp_path, segments=False)
    logs.load(NOON, None, NOON - HOUR, NOON + HOUR, bad=[NOON])
    found = table_sources(spark, logs.paths, 0)
    assert {key.source_id: (one.first_seqno, one.last_seqno) for key, one in found.items()} == {
        "web0": (0, 3),
        "web1": (1, 1),
        "web2": (2, 2),
    }
    assert found[SourceKey(T, "web0")].event == NOON + HOUR
    assert found[SourceKey(T, "web1")].event is None
    create_segments(logs.paths.segments, SegmentRules())
    assert read_segments(logs.paths.segments, 0) == {}
