"""What stops the load of a topic or of a table: nothing is loaded twice, and no loss stays hidden."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from logferry.loaders.batches import execute
from logferry.loaders.batches.execute import Loader
from logferry.loaders.batches.records import kept_on_disk, read, write_files
from logferry.loaders.errors import ForeignTable, LedgerBroken, StorageUnavailable, TopicChanged
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.location import Location
from logferry.loaders.parsing import rows as parsing_rows
from logferry.loaders.parsing.settings import VERSIONS
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.runs.table_run import load_table, prepare
from logferry.loaders.storage.commit import DataFiles
from logferry.ops.stack.kafka_cluster import KafkaCluster
from pyspark.sql import DataFrame

from tests.support.loader import Topic, check_exact, chunks_of, quarantine, stored
from tests.support.table_loads import done, job, losing_a_file, planned, stops

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]


async def test_a_recreated_topic_stops_and_the_others_continue(
    loader: Start, topic: Topic, kafka: KafkaCluster, table: Location
):
    await topic.create()
    other = Topic(kafka.bootstrap, f"{topic.name}-other")
    await other.create()
    await topic.write(chunks_of("a", b"1\n"))
    done(load_table(loader(), job(table, f"{topic.name}*")))
    await topic.delete()
    (gone,) = stops(load_table(loader(), job(table, f"{topic.name}*")))
    assert "no longer exists" in gone.reason
    await topic.create()
    again = Topic(kafka.bootstrap, topic.name)
    await again.write(chunks_of("a", b"new 1\n", b"new 2\n", b"new 3\n"))
    await other.write(chunks_of("b", b"2\n"))
    (recreated,) = stops(load_table(loader(), job(table, f"{topic.name}*")))
    assert "recreated" in recreated.reason
    check_exact(table, [*topic.committed, *other.committed])


@pytest.mark.parametrize("target", ["main", "quarantine"])
async def test_a_file_lost_between_writing_and_listing_is_not_committed(
    target: str, loader: Start, topic: Topic, table: Location
):
    """One of the files of a batch is gone when the folder is listed, as with a stale listing of a network folder."""
    await topic.create(2)
    await topic.write(chunks_of("a", b"1\n\xff\n2\n") + chunks_of("b", b"3\n\xff\n"), partitions=2)
    with losing_a_file(getattr(TablePaths.of(table), target)):
        with pytest.raises(StorageUnavailable, match="the listing of their folder may be stale"):
            done(load_table(loader(), job(table, topic.name)))
    assert stored(table) == []
    done(load_table(loader("again"), job(table, topic.name)))
    check_exact(table, topic.committed)


@pytest.mark.parametrize("settings", [{}, {"format": "chunk"}], ids=str)
async def test_a_lost_file_of_records_that_no_gateway_wrote_is_not_committed(
    settings: dict[str, Any], loader: Start, topic: Topic, table: Location
):
    """The batch has no line that cannot be read, so that the quarantine has whole records alone."""
    await topic.create()
    await topic.write(chunks_of("a", b"1\n2\n"))
    for value in (b"x\ny\n", b"z", None):
        await topic.write_raw(value, b"stranger", [])
    work = job(table, topic.name, parser=settings)
    with losing_a_file(TablePaths.of(table).quarantine):
        with pytest.raises(StorageUnavailable, match="3 rows were written, but its files hold 0"):
            done(load_table(loader(), work))
    (batch,) = done(load_table(loader("again"), work))
    assert (batch.quarantined, [row["bytes"] for row in quarantine(table)]) == (3, [b"x\ny\n", b"z", None])


async def test_a_planned_batch_of_a_recreated_topic_is_refused(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    planned(loader("dies"), table, 1000, topic.name)
    await topic.delete()
    await topic.create()
    await Topic(topic.bootstrap, topic.name).write(chunks_of("a", b"new 1\n", b"new 2\n"))
    with pytest.raises(TopicChanged, match="recreated"):
        done(load_table(loader(), job(table, topic.name)))
    assert stored(table) == []


async def test_a_topic_that_is_recreated_while_it_is_read_is_detected(
    loader: Start, topic: Topic, table: Location, monkeypatch: pytest.MonkeyPatch
):
    """What was read may be either topic's: nothing of it is written."""
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    await topic.write(chunks_of("b", b"\xff\n"))
    rounds: list[Path] = []

    def recreate_afterwards(rows: DataFrame, path: Path, *more: Any) -> DataFiles:
        """The rows are the old topic's, the lines of the quarantine the new one's."""
        written = write_files(rows, Location.of(path), *more)
        if not rounds:
            change = threading.Thread(target=asyncio.run, args=(recreate(),))
            change.start()
            change.join()
        rounds.append(path)
        return written

    async def recreate() -> None:
        await topic.delete()
        await topic.create()
        for number in range(3):
            await topic.write(chunks_of("c", b"\xfe\n", start=number * 10))

    monkeypatch.setattr(execute, "write_files", recreate_afterwards)
    with pytest.raises(TopicChanged, match="recreated while it was read"):
        done(load_table(loader(), job(table, topic.name)))
    paths = TablePaths.of(table)
    assert rounds == [paths.main, paths.quarantine]
    assert stored(paths.main) == []
    assert stored(paths.quarantine) == []


async def test_records_removed_before_they_were_loaded_stop_the_topic(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    done(load_table(loader(), job(table, topic.name)))
    await topic.write(chunks_of("b", b"2\n", b"3\n"))
    await topic.remove_before(0, 3)
    (stop,) = stops(load_table(loader(), job(table, topic.name)))
    assert "records 2 to 2 of partition 0 were removed" in stop.reason
    check_exact(table, topic.committed[:1])


async def test_records_removed_after_the_plan_are_not_left_out(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n", b"2\n"))
    planned(loader("dies"), table, 1000, topic.name)
    await topic.remove_before(0, 1)
    with pytest.raises(TopicChanged, match="were removed"):
        done(load_table(loader(), job(table, topic.name)))
    assert stored(table) == []


async def test_reading_itself_fails_when_records_are_gone(loader: Start, topic: Topic, tmp_path: Path):
    """Removed between the plan of the offsets and the read."""
    await topic.create()
    await topic.write(chunks_of("a", b"1\n", b"2\n", b"3\n"))
    loads = loader()
    topic_id = loads.kafka.ids([topic.name])[topic.name]
    await topic.remove_before(0, 2)
    batch = read(loads.spark, loads.kafka.options(), "dc1", [Range(topic.name, 0, topic_id, 0, 3)])
    with pytest.raises(TopicChanged, match="reading some"):
        kept_on_disk(batch, [Range("some", 0, topic_id, 0, 3)])
    with pytest.raises(TopicChanged, match="writing some"), sorted_errors("writing some"):
        write_files(parsing_rows.table_rows(parsing_rows.parse_records(batch.frame)), Location.of(tmp_path), 0)


async def test_a_topic_that_never_existed(loader: Start, table: Location):
    with pytest.raises(TopicChanged, match="no topic"):
        done(load_table(loader(), job(table, "dc9.nothing*")))
    (stop,) = stops(load_table(loader(), job(table, "dc9.nothing")))
    assert stop.reason == "dc9.nothing does not exist"


async def test_a_ledger_of_another_data_centre(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    done(load_table(loader(dc="dc1"), job(table, topic.name)))
    await topic.write(chunks_of("b", b"2\n"))
    with pytest.raises(LedgerBroken, match="offsets of dc1, this is dc2"):
        done(load_table(loader(dc="dc2"), job(table, topic.name)))


async def test_a_batch_planned_for_another_parser(
    loader: Start, topic: Topic, table: Location, monkeypatch: pytest.MonkeyPatch
):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    planned(loader("dies"), table, 1000, topic.name)
    monkeypatch.setitem(VERSIONS, "lines", 2)
    with pytest.raises(LedgerBroken, match="planned for the parser lines/1"):
        done(load_table(loader(), job(table, topic.name)))


async def test_a_lost_ledger_is_never_recreated(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    done(load_table(loader(), job(table, topic.name)))
    shutil.rmtree(TablePaths.of(table).ledger)
    with pytest.raises(LedgerBroken, match="no entry for batch 0"):
        done(load_table(loader(), job(table, topic.name)))
    check_exact(table, topic.committed)


def test_tables_that_are_not_ours(tmp_path: Path):
    write_deltalake(str(tmp_path / "rows"), pa.table({"text": ["x"]}))
    write_deltalake(str(tmp_path / "columns"), pa.table({"text": pa.array([], pa.string())}))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "letter.txt").write_text("dear")
    cases = {"rows": "no batch ledger entry", "columns": "has other columns than the job", "files": "not a Delta table"}
    for name, said in cases.items():
        with pytest.raises(ForeignTable, match=said):
            prepare(TablePaths.of(tmp_path / name))
