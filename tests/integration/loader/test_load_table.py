"""The load of a table out of a real Kafka: transactions, ranges, and several loaders."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from logferry.loaders.batches.execute import BatchDone, Loader, do_batch
from logferry.loaders.batches.records import read, write_files
from logferry.loaders.errors import TopicChanged
from logferry.loaders.location import Location
from logferry.loaders.parsing import rows as parsing_rows
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.storage.commit import commit_files, committed_batch
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import Ledger, last_batch, new_entry, read_ledger
from logferry.loaders.storage.tables import QUARANTINE_COLUMNS, read_state
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Topic, check_exact, chunks_of, stored
from tests.support.table_loads import done, job, planned

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]


# ---- what is read ------------------------------------------------------------------------------------------


async def test_committed_lines_are_loaded_once_and_the_next_load_reads_new_ones(
    loader: Start, topic: Topic, table: Location
):
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


@pytest.mark.anywhere
async def test_ranges_that_end_in_control_records_and_aborted_data(loader: Start, topic: Topic, table: Location):
    """Batches of every small size, over committed, aborted and empty transactions, cut anywhere."""
    await topic.create()
    for i in range(4):
        await topic.write(chunks_of(f"s{i}", b"%d\n" % i, b"more\n"), commit=i % 2 == 0)
    for size in (1, 5):
        own = table.with_name(f"by-{size}")
        batches = done(load_table(loader(), job(own, topic.name, max_records=size)))
        check_exact(own, topic.committed)
        assert all(sum(r.size for r in batch.ranges) <= size for batch in batches)
        ranges = [r for entry in read_ledger(Location.of(own)) for r in entry.reads]
        assert [r.start for r in ranges] == [0, *(r.end for r in ranges[:-1])]


@pytest.mark.anywhere
async def test_nothing_beyond_the_last_stable_offset(loader: Start, topic: Topic, table: Location):
    """An open transaction holds back its records and all later ones. The next load reads all of them."""
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


@pytest.mark.anywhere
async def test_several_topics_and_later_partitions(loader: Start, topic: Topic, kafka: KafkaCluster, table: Location):
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


@pytest.mark.anywhere
async def test_topics_loaded_in_turn_keep_their_places(
    loader: Start, topic: Topic, kafka: KafkaCluster, table: Location
):
    await topic.create()
    other = Topic(kafka.bootstrap, f"{topic.name}-other")
    await other.create()
    for round_ in range(2):
        await topic.write(chunks_of("a", b"%d\n" % round_, start=9 * round_))
        await other.write(chunks_of("b", b"%d\n" % round_, start=9 * round_))
        done(load_table(loader(), job(table, topic.name)))
        done(load_table(loader(), job(table, other.name)))
    check_exact(table, [*topic.committed, *other.committed])


@pytest.mark.anywhere
async def test_records_of_other_producers_are_quarantined(loader: Start, topic: Topic, table: Location):
    await topic.create()
    raw = await topic.write_raw(b"a\nb", b"\xff", [("who", b"someone")])
    (batch,) = done(load_table(loader(), job(table, topic.name)))
    assert (batch.rows, batch.quarantined) == (0, 1)
    (row,) = stored(TablePaths.of(table).quarantine)
    assert (row["bytes"], row["key"], row["offset"], row["line"]) == (b"a\nb", b"\xff", raw.offset, None)
    assert row["source_id"] is None
    assert "seqno" in row["reason"]


@pytest.mark.anywhere
async def test_compacted_topics_are_not_loaded(loader: Start, topic: Topic, kafka: KafkaCluster, table: Location):
    state = Topic(kafka.bootstrap, f"{topic.name}-state")
    await topic.create()
    await state.create(1, **{"cleanup.policy": "compact"})
    await topic.write(chunks_of("a", b"1\n"))
    await state.write(chunks_of("a", b"state"))
    done(load_table(loader(), job(table, f"{topic.name}*")))
    check_exact(table, topic.committed)
    with pytest.raises(TopicChanged, match="is compacted"):
        done(load_table(loader(), job(table, state.name)))


# ---- several loaders, and those that died -------------------------------------------------------------------


async def test_a_planned_batch_is_loaded_as_it_was_planned(loader: Start, topic: Topic, table: Location):
    """The next run has other limits, and Kafka has more records. The ranges of the ledger are loaded unchanged."""
    await topic.create()
    await topic.write(chunks_of("a", b"1\n", b"2\n", b"3\n"))
    entry = planned(loader("dies"), table, 2, topic.name)
    await topic.write(chunks_of("b", b"4\n"))
    first, second = done(load_table(loader("continues"), job(table, topic.name)))
    assert first.ranges == entry.reads
    assert first.ranges[0].end == 2
    assert second.ranges[0].start == 2
    check_exact(table, topic.committed)


async def test_a_planned_batch_comes_first_whatever_the_job_names(
    loader: Start, topic: Topic, kafka: KafkaCluster, table: Location
):
    """The next run is for another topic without new records."""
    await topic.create()
    empty = Topic(kafka.bootstrap, f"{topic.name}-empty")
    await empty.create()
    await topic.write(chunks_of("a", b"1\n"))
    planned(loader("dies"), table, 1000, topic.name)
    done(load_table(loader(), job(table, empty.name)))
    check_exact(table, topic.committed)


async def test_a_loader_that_dies_after_the_quarantine(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write(chunks_of("a", b"ok\n\xff\n"))
    entry = planned(loader("dies"), table, 1000, topic.name)
    dies, paths = loader("dies"), TablePaths.of(table)
    batch = read(dies.spark, dies.kafka.options(), "dc1", entry.reads)
    written = write_files(parsing_rows.quarantined_rows(batch.frame, QUARANTINE_COLUMNS), paths.quarantine, entry.batch)
    commit_files(written, paths.quarantine, entry.batch, "dies")
    (again,) = done(load_table(loader("continues"), job(table, topic.name)))
    assert again.ours
    check_exact(table, topic.committed)
    quarantine = committed_batch(paths.quarantine, 0, "continues")
    assert quarantine is not None
    assert not quarantine.ours


async def test_a_batch_that_another_loader_wrote_meanwhile(loader: Start, topic: Topic, table: Location):
    """A late loader has an entry that another one has loaded: its rows are refused, and it reports this."""
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


async def test_racing_loaders_from_the_very_first_batch(loader: Start, topic: Topic, table: Location):
    """They also create the tables. Every batch has one winner, and every loader ends without an error."""
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


async def test_two_loaders_with_plans_of_their_own_load_one(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n", b"2\n", b"3\n"))
    first = planned(loader("one"), table, 1, topic.name)
    other = new_entry(first.batch, "dc1", "lines/1", "two", [r._replace(end=3) for r in first.ranges])
    assert Ledger(TablePaths.of(table).ledger).put(other) == first
    done(load_table(loader("two"), job(table, topic.name)))
    check_exact(table, topic.committed)
