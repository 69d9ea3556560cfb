"""The view of the newest rows: whatever loaders commit meanwhile, each row is in it once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from logferry.loaders.batches.execute import Loader
from logferry.loaders.errors import LoaderConfigError, TopicChanged
from logferry.loaders.location import Location
from logferry.loaders.planning.plan import TopicPartition
from logferry.loaders.query.realtime_view import Instant, pin, realtime
from logferry.loaders.runs import table_run
from logferry.loaders.runs.table_run import LoadEvent, load_table
from logferry.loaders.storage import tables
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import existing_table
from pyspark.sql import DataFrame, SparkSession

from tests.support.loader import Topic, chunks_of
from tests.support.table_loads import job
from tests.support.table_rows import Record, Row, committed_records, truth

pytestmark = [
    pytest.mark.spark,
    # PySpark's own, of the check of a parser.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
]

Start = Callable[..., Loader]
Whole = Callable[[DataFrame], list[dict[str, Any]]]

ACCESS = b'1.2.3.4 - - [21/Nov/2026:10:00:0%d +0100] "GET /%d HTTP/1.1" 200 17 "-" "curl"\n'


@pytest.fixture
def whole(tmp_path: Path) -> Whole:
    """Every column of every row, by way of Parquet files: nothing of PySpark touches the bytes."""
    numbers = itertools.count()

    def read(frame: DataFrame) -> list[dict[str, Any]]:
        folder = tmp_path / f"shown-{next(numbers)}"
        frame.write.parquet(str(folder))
        found: list[dict[str, Any]] = pq.read_table(folder).to_pylist()
        return sorted(found, key=lambda row: (row["topic"], row["source_id"], row["seqno"], row["line"]))

    return read


def ends(instant: Instant) -> dict[TopicPartition, int]:
    """The records of the view are those before these offsets."""
    return {r.key: r.end for r in instant.tail}


def rows(found: list[dict[str, Any]]) -> list[Row]:
    return [Row(*(row[name] for name in Row._fields)) for row in found]


@pytest.mark.long
async def test_loads_between_any_two_looks_move_no_row(
    spark: SparkSession, loader: Start, topic: Topic, table: Location, whole: Whole, monkeypatch: pytest.MonkeyPatch
):
    """One batch is committed while the view is made, one before it is evaluated."""
    await topic.create(2)
    loads = loader()
    await topic.write(chunks_of("a", b"1\n2\n") + chunks_of("b", b"3\n"), partitions=2)
    list(load_table(loads, job(table, topic.name)))
    await topic.write(chunks_of("a", b"4\n5\n", start=9), partitions=2)
    await topic.write(chunks_of("b", b"aborted\n", start=8), partitions=2, commit=False)
    meanwhile: list[LoadEvent] = []

    def slow(path: Path) -> DeltaTable | None:
        """Another batch is in the table by the time that this one is open."""
        opened = open_table(Location.of(path))
        monkeypatch.setattr(tables, "open_table", open_table)  # the load opens tables, too
        if not meanwhile:
            meanwhile.extend(load_table(loads, job(table, topic.name)))
        return opened

    monkeypatch.setattr(tables, "open_table", slow)
    instant = pin(spark, table)
    assert len(meanwhile) == 2
    frame = instant.frame(spark)
    await topic.write(chunks_of("b", b"6\n", start=9), partitions=2)
    list(load_table(loads, job(table, topic.name)))
    existing_table(table).optimize.compact()
    records = await committed_records(topic.bootstrap, [topic.name])
    found = rows(whole(frame))
    assert [row.text for row in found] == ["1", "2", "4", "5", "3"]
    assert found == truth(records, ends(instant))
    assert instant.snapshot.entry.batch == 0
    assert frame.schema == spark.read.format("delta").load(str(table)).schema
    assert rows(whole(realtime(spark, table))) == truth(records, ends(pin(spark, table)))


async def test_the_tail_is_what_will_be_loaded_in_every_column(
    spark: SparkSession, loader: Start, topic: Topic, table: Location, whole: Whole
):
    """New partitions, a new topic of the pattern, lines that do not parse, columns of an earlier parser."""
    await topic.create()
    pattern = topic.name.replace("dc1.", "*.")
    await topic.write(chunks_of("a", b'{"id": 1}\n'))
    earlier = job(table, pattern, parser={"format": "json", "columns": {"id": "bigint"}})
    list(load_table(loader(), earlier))
    parsed = job(table, pattern, parser={"format": "access"})
    await topic.write(chunks_of("a", ACCESS % (0, 0), start=10))
    list(load_table(loader(), parsed))
    other = Topic(topic.bootstrap, topic.name.replace("dc1.", "dc2."))
    await other.create()
    await topic.grow(2)
    await topic.write(chunks_of("b", ACCESS % (1, 1) + b"no access\n", b"\xff\n", start=10), partitions=2)
    await other.write(chunks_of("c", ACCESS % (2, 2)))
    before = whole(realtime(spark, table))
    list(load_table(loader(), parsed))
    after = whole(spark.read.format("delta").load(str(table)))
    assert len(after) == 4
    assert before == after


@pytest.mark.long
async def test_dates_that_the_table_is_partitioned_by(
    spark: SparkSession, loader: Start, topic: Topic, table: Location, whole: Whole
):
    await topic.create()
    dated = job(table, topic.name, parser={"format": "access"}, partition_by=["event_date"])
    await topic.write(chunks_of("a", ACCESS % (0, 0)))
    list(load_table(loader(), dated))
    await topic.write(chunks_of("a", ACCESS % (1, 1), start=1000))
    before = whole(realtime(spark, table))
    list(load_table(loader(), dated))
    assert before == whole(spark.read.format("delta").load(str(table)))
    assert len(before) == 2


@pytest.mark.long
async def test_a_chunk_that_came_by_two_data_centres_is_there_once(
    spark: SparkSession, loader: Start, topic: Topic, table: Location, whole: Whole
):
    """One copy in the table and one behind it; both behind it."""
    other = Topic(topic.bootstrap, topic.name.replace("dc1.", "dc2."))
    await topic.create()
    await other.create()
    both = job(table, topic.name.replace("dc1.", "*."))
    await topic.write(chunks_of("s", b"1\n"))
    list(load_table(loader(), both))
    await topic.write(chunks_of("s", b"2\n", start=2))
    await other.write(chunks_of("s", b"1\n", b"2\n", b"3\n"))
    before = whole(realtime(spark, table))
    list(load_table(loader(), both))
    assert [(row["text"], row["topic"]) for row in before] == [("1", topic.name), ("2", topic.name), ("3", other.name)]
    assert before == whole(spark.read.format("delta").load(str(table)))


@pytest.mark.long
async def test_a_copy_counts_as_one_for_the_configured_time(
    spark: SparkSession, loader: Start, topic: Topic, table: Location, whole: Whole
):
    """``duplicate_window_days`` of the job, which the ledger notes: here it is over at once, and both copies stay."""
    other, loads = Topic(topic.bootstrap, topic.name.replace("dc1.", "dc2.")), loader()
    object.__setattr__(loads, "duplicate_window", timedelta(0))
    await topic.create()
    await other.create()
    both = job(table, topic.name.replace("dc1.", "*."))
    await topic.write(chunks_of("s", b"1\n"))
    list(load_table(loads, both))
    await other.write(chunks_of("s", b"1\n"))
    before = whole(realtime(spark, table))
    list(load_table(loads, both))
    assert [(row["text"], row["topic"]) for row in before] == [("1", topic.name), ("1", other.name)]
    assert before == whole(spark.read.format("delta").load(str(table)))


async def test_before_the_first_batch_all_is_tail(
    spark: SparkSession, loader: Start, topic: Topic, table: Location, whole: Whole, monkeypatch: pytest.MonkeyPatch
):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(table_run, "do_batch", dies)
        with pytest.raises(KeyboardInterrupt):
            list(load_table(loader(), job(table, topic.name)))
    await topic.write(chunks_of("b", b"2\n"))
    assert [row.text for row in rows(whole(realtime(spark, table)))] == ["1", "2"]


async def test_a_view_that_cannot_be_exact_is_refused(
    spark: SparkSession, loader: Start, topic: Topic, table: Location
):
    with pytest.raises(LoaderConfigError, match="is not a table"):
        realtime(spark, table)
    foreign = table.with_name("foreign")
    write_deltalake(str(foreign), pa.table({"text": ["x"]}))
    with pytest.raises(LoaderConfigError, match="it was not created by logferry load"):
        realtime(spark, foreign)
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    list(load_table(loader(), job(table, topic.name)))
    newer = tables.snapshot_of(table)
    older = replace(newer, entry=newer.entry._replace(origin=None))
    with pytest.raises(LoaderConfigError, match="name its Kafka and its topics"):
        tables.origin_of(older, None, None)
    assert tables.origin_of(older, topic.bootstrap, [topic.name]) == newer.entry.origin
    await topic.delete()
    await topic.create()
    with pytest.raises(TopicChanged, match="recreated"):
        realtime(spark, table)
    assert open_table(table) is not None


# ---- during a live load --------------------------------------------------------------------------------------


async def live(
    spark: SparkSession, loader: Start, topic: Topic, table: Location, whole: Whole, queries: int
) -> tuple[list[tuple[Instant, list[Row]]], list[Record]]:
    """Writers, aborted transactions among theirs, loaders in small batches, and queries, all at once.

    The writers keep pace with the loader: what is behind the table, and with it what a query takes, does not grow.
    """
    await topic.create(3)
    other = Topic(topic.bootstrap, f"{topic.name}-later")
    await topic.write(chunks_of("s0", b"first\n"), partitions=3)
    list(load_table(loader(), job(table, f"{topic.name}*")))
    over, loaded, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    shown: list[tuple[Instant, list[Row]]] = []

    async def write() -> None:
        for round_ in itertools.count(1):
            for part in range(3):
                text = b"%d a\n%d b\n" % (part, round_)
                sent = [c for s in range(5) for c in chunks_of(f"s{s}", text, start=1000 * round_ + 100 * part)]
                await topic.write(sent, partitions=3, commit=(round_ + part) % 4 > 0)
            if round_ == 4:
                await other.create()
            if round_ >= 4:
                await other.write(chunks_of("later", b"%d\n" % round_, start=100 * round_))
            await loaded.wait()
            loaded.clear()
            if over.is_set():
                return

    def load_on() -> None:
        try:
            while not over.is_set():
                list(load_table(loader("live"), job(table, f"{topic.name}*", max_records=12)))
                loop.call_soon_threadsafe(loaded.set)
        finally:
            over.set()
            loop.call_soon_threadsafe(loaded.set)

    def query() -> None:
        try:
            while len(shown) < queries and not over.is_set():
                instant = pin(spark, table)
                shown.append((instant, rows(whole(instant.frame(spark)))))
        finally:
            over.set()

    await asyncio.gather(write(), asyncio.to_thread(load_on), asyncio.to_thread(query))
    return shown, await committed_records(topic.bootstrap, [topic.name, other.name])


def check_shown(shown: list[tuple[Instant, list[Row]]], records: list[Record]) -> None:
    for instant, found in shown:
        want = truth(records, ends(instant))
        missing, more = sorted(set(want) - set(found)), sorted(set(found) - set(want))
        doubled = len(found) - len(set(found))
        said = f"at version {instant.snapshot.version}, batch {instant.snapshot.entry.batch}, behind it {instant.tail}"
        wrong = [*missing, *more, doubled] if missing or more or doubled else []
        assert wrong == [], f"{said}: missing {missing}, too much {more}, {doubled} doubled"


@pytest.mark.long
async def test_queries_during_a_live_load(
    spark: SparkSession, loader: Start, topic: Topic, table: Location, whole: Whole
):
    shown, records = await live(spark, loader, topic, table, whole, 3)
    check_shown(shown, records)
    assert len(shown) == 3


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_hundred_queries_during_a_live_load(
    spark: SparkSession, loader: Start, topic: Topic, table: Location, whole: Whole
):
    shown, records = await live(spark, loader, topic, table, whole, 100)
    check_shown(shown, records)
    assert len(shown) == 100
    assert len({instant.snapshot.version for instant, _ in shown}) > 25, "the load did not continue"
    assert sum(any(r.size for r in instant.tail) for instant, _ in shown) > 25, "there was nothing behind the table"
