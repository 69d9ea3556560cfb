"""The load of a table out of a real Kafka: transactions, ranges, states that must stop it, and several loaders."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from logferry.loaders.batches import execute as batches
from logferry.loaders.batches.create_tables import prepare, read_state
from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.batches.read import kept, read
from logferry.loaders.config import TableJob
from logferry.loaders.errors import ForeignTable, LedgerBroken, TopicChanged
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.parsing import rows as parse
from logferry.loaders.parsing.settings import VERSIONS
from logferry.loaders.planning.plan import Range, Stopped
from logferry.loaders.runs import table_run as load
from logferry.loaders.runs.table_run import LoadEvent, load_table
from logferry.loaders.storage.commit import commit_files, committed
from logferry.loaders.storage.data_files import Written, write_files
from logferry.loaders.storage.ledger import (
    Ledger,
    LedgerEntry,
    TablePaths,
    last_batch,
    new_entry,
    open_table,
    read_ledger,
)
from logferry.ops.stack.kafka_cluster import Cluster
from pyspark.sql import DataFrame

from tests.support.loader import Topic, check_exact, chunks_of, stored

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]


@pytest.fixture
def topic(kafka: Cluster, topic_name: str) -> Topic:
    return Topic(kafka.bootstrap, f"dc1.{topic_name}")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "logs"


def job(table: Path, *topics: str, max_records: int = 1000) -> TableJob:
    return TableJob(path=table, topics=list(topics), max_records=max_records)


def done(events: Iterator[LoadEvent]) -> list[BatchDone]:
    return [event for event in events if isinstance(event, BatchDone)]


def stops(events: Iterator[LoadEvent]) -> list[Stopped]:
    return [event for event in events if isinstance(event, Stopped)]


def planned(loader: Loader, table: Path, max_records: int = 1000, *topics: str) -> LedgerEntry:
    """Goes as far as a loader that dies after it has written the ledger."""
    events = load_table(loader, job(table, *topics, max_records=max_records))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "do_batch", _die)
        with pytest.raises(_Dead):
            list(events)
    return read_ledger(table)[-1]


class _Dead(Exception):
    pass


def _die(*_: object) -> BatchDone:
    raise _Dead


# ---- what is read ------------------------------------------------------------------------------------------


async def test_committed_lines_once_and_again_only_what_is_new(loader: Start, topic: Topic, table: Path):
    await topic.create(partitions=4)
    await topic.write(chunks_of("a", b"1\n2\n", b"3\r\n\n", b""), partitions=4)
    await topic.write(chunks_of("b", b"aborted\n"), partitions=4, commit=False)
    await topic.write(chunks_of("c", b"x\xff\ny", b"\x00\n"), partitions=4)
    (first,) = done(load_table(loader(), job(table, topic.name)))
    check_exact(table, topic.committed)
    assert (first.batch, first.ours, first.rows, first.quarantined, first.records) == (0, True, 6, 1, 5)
    assert done(load_table(loader(), job(table, topic.name))) == []
    await topic.write(chunks_of("a", b"4\n", start=100), partitions=4)
    (second,) = done(load_table(loader(), job(table, topic.name)))
    check_exact(table, topic.committed)
    assert (second.batch, second.rows) == (1, 1)


async def test_ranges_that_end_in_control_records_and_aborted_data(loader: Start, topic: Topic, table: Path):
    """Batches of every small size, over committed, aborted and empty transactions, cut anywhere."""
    await topic.create()
    for i in range(4):
        await topic.write(chunks_of(f"s{i}", b"%d\n" % i, b"more\n"), commit=i % 2 == 0)
    for size in (1, 5):
        own = table.with_name(f"by-{size}")
        batches = done(load_table(loader(), job(own, topic.name, max_records=size)))
        check_exact(own, topic.committed)
        assert all(sum(r.size for r in batch.ranges) <= size for batch in batches)
        ranges = [r for entry in read_ledger(own) for r in entry.reads]
        assert [r.start for r in ranges] == [0, *(r.end for r in ranges[:-1])]


async def test_nothing_beyond_the_last_stable_offset(loader: Start, topic: Topic, table: Path):
    """An open transaction holds back itself and what was committed after it; nothing of that is left out later."""
    await topic.create()
    await topic.write(chunks_of("a", b"before\n"))
    late = chunks_of("open", b"late\n")
    producer = await topic.open_transaction(late)
    await topic.write(chunks_of("b", b"after\n"))
    done(load_table(loader(), job(table, topic.name)))
    check_exact(table, topic.committed[:1])
    await producer.commit_transaction()
    await producer.stop()
    done(load_table(loader(), job(table, topic.name)))
    check_exact(table, [*topic.committed, *late])


async def test_several_topics_and_partitions_that_come_later(loader: Start, topic: Topic, kafka: Cluster, table: Path):
    await topic.create()
    other = Topic(kafka.bootstrap, topic.name.replace("dc1.", "dc2."))
    await topic.write(chunks_of("a", b"1\n"))
    pattern = topic.name.replace("dc1.", "*.")
    done(load_table(loader(), job(table, pattern)))
    await topic.grow(3)
    await other.create(2)
    await topic.write(chunks_of("b", b"2\n", b"3\n") + chunks_of("c", b"4\n"), partitions=3)
    await other.write(chunks_of("d", b"5\n"), partitions=2)
    done(load_table(loader(), job(table, pattern)))
    check_exact(table, [*topic.committed, *other.committed])
    assert {(row["topic"], row["dc"]) for row in stored(table)} == {(topic.name, "dc1"), (other.name, "dc1")}
    seen = {(r.topic, r.partition) for r in read_ledger(table)[-1].ranges}
    assert seen == {(topic.name, 0), (topic.name, 1), (topic.name, 2), (other.name, 0), (other.name, 1)}


async def test_topics_loaded_in_turn_keep_their_places(loader: Start, topic: Topic, kafka: Cluster, table: Path):
    await topic.create()
    other = Topic(kafka.bootstrap, f"{topic.name}-other")
    await other.create()
    for round_ in range(2):
        await topic.write(chunks_of("a", b"%d\n" % round_, start=9 * round_))
        await other.write(chunks_of("b", b"%d\n" % round_, start=9 * round_))
        done(load_table(loader(), job(table, topic.name)))
        done(load_table(loader(), job(table, other.name)))
    check_exact(table, [*topic.committed, *other.committed])


async def test_records_of_others_are_quarantined_not_lost(loader: Start, topic: Topic, table: Path):
    await topic.create()
    raw = await topic.write_raw(b"a\nb", b"\xff", [("who", b"someone")])
    (batch,) = done(load_table(loader(), job(table, topic.name)))
    assert (batch.rows, batch.quarantined) == (0, 1)
    (row,) = stored(TablePaths.of(table).quarantine)
    assert (row["bytes"], row["key"], row["offset"], row["line"]) == (b"a\nb", b"\xff", raw.offset, None)
    assert row["source_id"] is None
    assert "seqno" in row["reason"]


async def test_compacted_topics_are_no_logs(loader: Start, topic: Topic, kafka: Cluster, table: Path):
    state = Topic(kafka.bootstrap, f"{topic.name}-state")
    await topic.create()
    await state.create(**{"cleanup.policy": "compact"})
    await topic.write(chunks_of("a", b"1\n"))
    await state.write(chunks_of("a", b"state"))
    done(load_table(loader(), job(table, f"{topic.name}*")))
    check_exact(table, topic.committed)
    with pytest.raises(TopicChanged, match="is compacted"):
        done(load_table(loader(), job(table, state.name)))


# ---- what must stop it -------------------------------------------------------------------------------------


async def test_a_topic_created_anew_stops_and_the_others_go_on(
    loader: Start, topic: Topic, kafka: Cluster, table: Path
):
    await topic.create()
    other = Topic(kafka.bootstrap, f"{topic.name}-other")
    await other.create()
    await topic.write(chunks_of("a", b"1\n"))
    done(load_table(loader(), job(table, f"{topic.name}*")))
    await topic.delete()
    (gone,) = stops(load_table(loader(), job(table, f"{topic.name}*")))
    assert "does not exist any more" in gone.reason
    await topic.create()
    again = Topic(kafka.bootstrap, topic.name)
    await again.write(chunks_of("a", b"new 1\n", b"new 2\n", b"new 3\n"))
    await other.write(chunks_of("b", b"2\n"))
    (anew,) = stops(load_table(loader(), job(table, f"{topic.name}*")))
    assert "created anew" in anew.reason
    check_exact(table, [*topic.committed, *other.committed])


async def test_a_planned_batch_of_a_topic_created_anew_is_refused(loader: Start, topic: Topic, table: Path):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    planned(loader("dies"), table, 1000, topic.name)
    await topic.delete()
    await topic.create()
    await Topic(topic.bootstrap, topic.name).write(chunks_of("a", b"new 1\n", b"new 2\n"))
    with pytest.raises(TopicChanged, match="created anew"):
        done(load_table(loader(), job(table, topic.name)))
    assert stored(table) == []


async def test_a_topic_created_anew_while_it_is_read_is_noticed(
    loader: Start, topic: Topic, table: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was read may be either topic's: nothing of it is written."""
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    await topic.write(chunks_of("b", b"\xff\n"))
    rounds: list[Path] = []

    def anew_afterwards(rows: DataFrame, path: Path, *more: Any) -> Written:
        """The rows are the old topic's, the lines of the quarantine the new one's."""
        written = write_files(rows, path, *more)
        if not rounds:
            change = threading.Thread(target=asyncio.run, args=(anew(),))
            change.start()
            change.join()
        rounds.append(path)
        return written

    async def anew() -> None:
        await topic.delete()
        await topic.create()
        for number in range(3):
            await topic.write(chunks_of("c", b"\xfe\n", start=number * 10))

    monkeypatch.setattr(batches, "write_files", anew_afterwards)
    with pytest.raises(TopicChanged, match="created anew while it was read"):
        done(load_table(loader(), job(table, topic.name)))
    paths = TablePaths.of(table)
    assert rounds == [paths.main, paths.quarantine]
    assert stored(paths.main) == []
    assert stored(paths.quarantine) == []


async def test_records_removed_before_they_were_loaded_stop_the_topic(loader: Start, topic: Topic, table: Path):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    done(load_table(loader(), job(table, topic.name)))
    await topic.write(chunks_of("b", b"2\n", b"3\n"))
    await topic.remove_before(0, 3)
    (stop,) = stops(load_table(loader(), job(table, topic.name)))
    assert "records 2 to 2 of partition 0 were removed" in stop.reason
    check_exact(table, topic.committed[:1])


async def test_records_removed_after_the_plan_are_not_left_out(loader: Start, topic: Topic, table: Path):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n", b"2\n"))
    planned(loader("dies"), table, 1000, topic.name)
    await topic.remove_before(0, 1)
    with pytest.raises(TopicChanged, match="were removed"):
        done(load_table(loader(), job(table, topic.name)))
    assert stored(table) == []


async def test_reading_itself_fails_when_records_are_gone(loader: Start, topic: Topic, tmp_path: Path):
    """Behind the plan's back: removed between the look at the offsets and the read."""
    await topic.create()
    await topic.write(chunks_of("a", b"1\n", b"2\n", b"3\n"))
    loads = loader()
    topic_id = loads.kafka.ids([topic.name])[topic.name]
    await topic.remove_before(0, 2)
    batch = read(loads.spark, topic.bootstrap, "dc1", [Range(topic.name, 0, topic_id, 0, 3)])
    with pytest.raises(TopicChanged, match="reading some"):
        kept(batch, [Range("some", 0, topic_id, 0, 3)])
    with pytest.raises(TopicChanged, match="writing some"), sorted_errors("writing some"):
        write_files(parse.rows(parse.parsed(batch.frame)), tmp_path, 0)


async def test_a_topic_that_was_never_there(loader: Start, table: Path):
    with pytest.raises(TopicChanged, match="no topic"):
        done(load_table(loader(), job(table, "dc9.nothing*")))
    (stop,) = stops(load_table(loader(), job(table, "dc9.nothing")))
    assert stop.reason == "dc9.nothing does not exist"


async def test_a_ledger_of_another_data_centre(loader: Start, topic: Topic, table: Path):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    done(load_table(loader(dc="dc1"), job(table, topic.name)))
    await topic.write(chunks_of("b", b"2\n"))
    with pytest.raises(LedgerBroken, match="offsets of dc1, this is dc2"):
        done(load_table(loader(dc="dc2"), job(table, topic.name)))


async def test_a_batch_planned_for_another_parser(
    loader: Start, topic: Topic, table: Path, monkeypatch: pytest.MonkeyPatch
):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    planned(loader("dies"), table, 1000, topic.name)
    monkeypatch.setitem(VERSIONS, "lines", 2)
    with pytest.raises(LedgerBroken, match="planned for the parser lines/1"):
        done(load_table(loader(), job(table, topic.name)))


async def test_a_lost_ledger_is_never_made_anew(loader: Start, topic: Topic, table: Path):
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
    cases = {"rows": "no batch of this loader", "columns": "another table", "files": "not a Delta table"}
    for name, said in cases.items():
        with pytest.raises(ForeignTable, match=said):
            prepare(TablePaths.of(tmp_path / name))


# ---- several loaders, and those that died -------------------------------------------------------------------


async def test_a_planned_batch_is_loaded_as_it_was_planned(loader: Start, topic: Topic, table: Path):
    """The next run has other limits, and Kafka has got more; the ledger's ranges stand all the same."""
    await topic.create()
    await topic.write(chunks_of("a", b"1\n", b"2\n", b"3\n"))
    entry = planned(loader("dies"), table, 2, topic.name)
    await topic.write(chunks_of("b", b"4\n"))
    first, second = done(load_table(loader("goes on"), job(table, topic.name)))
    assert first.ranges == entry.reads
    assert first.ranges[0].end == 2
    assert second.ranges[0].start == 2
    check_exact(table, topic.committed)


async def test_a_planned_batch_comes_first_whatever_is_wanted_now(
    loader: Start, topic: Topic, kafka: Cluster, table: Path
):
    """The next run is about another topic, and that one has nothing new."""
    await topic.create()
    empty = Topic(kafka.bootstrap, f"{topic.name}-empty")
    await empty.create()
    await topic.write(chunks_of("a", b"1\n"))
    planned(loader("dies"), table, 1000, topic.name)
    done(load_table(loader(), job(table, empty.name)))
    check_exact(table, topic.committed)


async def test_dead_after_the_quarantine(loader: Start, topic: Topic, table: Path):
    await topic.create()
    await topic.write(chunks_of("a", b"ok\n\xff\n"))
    entry = planned(loader("dies"), table, 1000, topic.name)
    dies, paths = loader("dies"), TablePaths.of(table)
    batch = read(dies.spark, topic.bootstrap, "dc1", entry.reads)
    written = write_files(parse.quarantined(batch.frame), paths.quarantine, entry.batch)
    commit_files(written, paths.quarantine, entry.batch, "dies")
    (again,) = done(load_table(loader("goes on"), job(table, topic.name)))
    assert again.ours
    check_exact(table, topic.committed)
    quarantine = committed(paths.quarantine, 0, "goes on")
    assert quarantine is not None
    assert not quarantine.ours


async def test_a_batch_that_another_loader_did_meanwhile(loader: Start, topic: Topic, table: Path):
    """A loader that comes back late with an entry in its hands: its rows are refused, and it says so."""
    await topic.create()
    await topic.write(chunks_of("a", b"1\n\xff\n"))
    entry = planned(loader("slow"), table, 1000, topic.name)
    done(load_table(loader("fast"), job(table, topic.name)))
    late = do_batch(loader("slow"), TablePaths.of(table), entry)
    assert not late.ours
    check_exact(table, topic.committed)
    await topic.write(chunks_of("b", b"2\n"))
    (again,) = done(load_table(loader("slow"), job(table, topic.name)))
    assert again.ours
    check_exact(table, topic.committed)


async def test_racing_loaders_from_the_very_first_batch(loader: Start, topic: Topic, table: Path):
    """Creation of the tables included; every batch has one winner, everybody ends well."""
    await topic.create(partitions=2)
    for i in range(8):
        await topic.write(chunks_of("a", b"%d\n\xff\n" % i, start=99 * i) + chunks_of("b", b"x\n", start=99 * i))
    results: dict[str, list[BatchDone]] = {}
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            results[name] = done(load_table(loader(name), job(table, topic.name, max_records=8)))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    racers = [threading.Thread(target=run, args=(name,)) for name in ("one", "two", "three")]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert failures == []
    check_exact(table, topic.committed)
    won = sorted(batch.batch for batches in results.values() for batch in batches if batch.ours)
    assert won == list(range(last_batch(open_table(table)) + 1))
    assert read_state(TablePaths.of(table)).planned is None


async def test_two_loaders_with_plans_of_their_own_load_one(loader: Start, topic: Topic, table: Path):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n", b"2\n", b"3\n"))
    first = planned(loader("one"), table, 1, topic.name)
    other = new_entry(first.batch, "dc1", "lines/1", "two", [r._replace(end=3) for r in first.ranges])
    assert Ledger(TablePaths.of(table).ledger).put(other) == first
    done(load_table(loader("two"), job(table, topic.name)))
    check_exact(table, topic.committed)
