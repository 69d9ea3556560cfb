"""The ledger beside real Delta tables: one entry a batch whoever writes, and no load where the tables do not fit."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Field, Transaction, write_deltalake
from deltalake.schema import PrimitiveType
from logferry.loaders.errors import ForeignTable, LedgerBroken, StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import JobOrigin, LedgerEntry, TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage import ledger as ledger_module
from logferry.loaders.storage.commit import committed_batch
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import APP, Ledger, last_batch, new_entry, read_ledger
from logferry.loaders.storage.snapshots import newest_table
from logferry.loaders.storage.tables import read_state

RACERS = 4
RACES = 25


def entry(batch: int, run: str = "run", start: int = 0) -> LedgerEntry:
    ranges = [Range("dc1.a", 1, "id", 7, 7), Range("dc1.a", 0, "id", start, start + 10)]
    return new_entry(batch, "dc1", "lines/1", run, ranges)


def commit(path: Path, batch: int) -> None:
    """What a batch leaves in the main table or the quarantine, as far as the state goes."""
    properties = CommitProperties(app_transactions=[Transaction(APP, batch)])
    write_deltalake(str(path), pa.table({"text": ["x"]}), mode="append", commit_properties=properties)


@pytest.fixture
def paths(tmp_path: Path) -> TablePaths:
    return TablePaths.of(tmp_path / "logs")


@pytest.fixture
def ledger(paths: TablePaths) -> Ledger:
    ledger = Ledger(paths.ledger)
    ledger.create()
    return ledger


def test_an_entry_says_where_its_job_reads(ledger: Ledger):
    origin = JobOrigin("kafka1:9092,kafka2:9092", ("*.nginx", "dc1.orders"), duplicate_window_days=3)
    assert ledger.put(entry(0)._replace(origin=origin)).origin == origin
    assert ledger.put(entry(1)).origin is None
    older = '{"bootstrap_servers": "kafka1:9092", "topics": ["dc1.orders"]}'
    assert JobOrigin.parse(older) == JobOrigin("kafka1:9092", ("dc1.orders",), duplicate_window_days=14)


def test_an_entry_is_read_without_those_of_other_batches(ledger: Ledger, paths: TablePaths):
    """A load asks for one or two with each batch, and there may be a hundred thousand."""
    entries = [ledger.put(entry(batch)) for batch in range(3)]
    DeltaTable(str(paths.ledger)).optimize.compact()
    entries.append(ledger.put(entry(3)))
    merged = set(DeltaTable(str(paths.ledger)).file_uris())
    entries.append(ledger.put(entry(4)))
    assert [ledger.get(batch) for batch in range(5)] == entries
    (newest,) = set(DeltaTable(str(paths.ledger)).file_uris()) - merged
    Path(newest).unlink()
    assert [ledger.get(batch) for batch in range(4)] == entries[:4]
    with pytest.raises(StorageUnavailable):
        ledger.get(4)


def test_an_entry_comes_back_as_it_was_put(ledger: Ledger, paths: TablePaths):
    first = entry(0)
    assert ledger.put(first) == first
    assert ledger.get(0) == first
    assert read_ledger(paths.main) == [first]
    assert first.ranges[0].partition == 0, "sorted"
    assert first.reads == (Range("dc1.a", 0, "id", 0, 10),)


def test_the_first_entry_of_a_batch_stands(ledger: Ledger):
    first = ledger.put(entry(0, "one", start=0))
    assert ledger.put(entry(0, "two", start=5)) == first
    assert ledger.put(entry(1, "two", start=10)).run == "two"
    assert [e.run for e in ledger.entries()] == ["one", "two"]


def test_an_older_batch_is_never_put_again(ledger: Ledger):
    ledger.put(entry(0, "one"))
    ledger.put(entry(1, "one", 10))
    assert ledger.put(entry(0, "late", 99)).run == "one"
    assert len(ledger.entries()) == 2


def test_a_missing_entry_is_an_error(ledger: Ledger):
    with pytest.raises(LedgerBroken, match="no entry for batch 3"):
        ledger.get(3)


def test_creating_again_keeps_what_is_there(ledger: Ledger):
    ledger.put(entry(0))
    ledger.create()
    assert ledger.last() == 0


def test_without_a_table_there_is_nothing(paths: TablePaths):
    assert read_ledger(paths.main) == []
    assert Ledger(paths.ledger).last() == -1


def test_a_folder_that_is_not_a_table(paths: TablePaths):
    Path(paths.main).mkdir()
    assert open_table(paths.main) is None


def _race(path: Path, racer: int, barrier: object, results: object) -> None:
    ledger = Ledger(Location.of(path))
    barrier.wait()  # type: ignore[attr-defined]
    ledger.create()
    seen = []
    for batch in range(RACES):
        barrier.wait()  # type: ignore[attr-defined]
        seen.append(ledger.put(entry(batch, run=f"racer-{racer}", start=1000 * racer)))
    results.put(seen)  # type: ignore[attr-defined]


def test_racing_processes_agree_on_every_entry(paths: TablePaths):
    """Creation and puts by several processes at once: one entry a batch stands, and all of them get that one."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(RACERS), context.Queue()
    racers = [context.Process(target=_race, args=(paths.ledger, i, barrier, results)) for i in range(RACERS)]
    for racer in racers:
        racer.start()
    seen = [results.get(timeout=120) for _ in racers]
    for racer in racers:
        racer.join()
    results.close()
    results.join_thread()
    stands = read_ledger(paths.main)
    assert [e.batch for e in stands] == list(range(RACES))
    assert all(answers == stands for answers in seen)


# ---- table, quarantine and ledger together -----------------------------------------------------------------


def test_nothing_there_yet(paths: TablePaths):
    assert read_state(paths) == (-1, None, None)


def test_planned_and_not_written(paths: TablePaths, ledger: Ledger):
    planned = ledger.put(entry(0))
    assert read_state(paths) == (-1, None, planned)


def test_planned_and_quarantined(paths: TablePaths, ledger: Ledger):
    planned = ledger.put(entry(0))
    commit(Path(paths.quarantine), 0)
    assert read_state(paths) == (-1, None, planned)


def test_written(paths: TablePaths, ledger: Ledger):
    done = ledger.put(entry(0))
    commit(Path(paths.quarantine), 0)
    commit(Path(paths.main), 0)
    assert read_state(paths) == (0, done, None)
    planned = ledger.put(entry(1, start=10))
    assert read_state(paths) == (0, done, planned)


def test_the_state_outlives_the_commit_files(paths: TablePaths, ledger: Ledger):
    """As after years: the commits are only in a checkpoint."""
    for batch in range(3):
        last = ledger.put(entry(batch, start=10 * batch))
        commit(Path(paths.quarantine), batch)
        commit(Path(paths.main), batch)
    for path in (paths.main, paths.ledger, paths.quarantine):
        table = DeltaTable(str(path))
        table.create_checkpoint()
        for log in Path(path / "_delta_log").glob("*.json"):
            if int(log.stem) < table.version():
                log.unlink()
    assert read_state(paths) == (2, last, None)


def test_no_entry_for_what_the_table_holds(paths: TablePaths, ledger: Ledger):
    ledger.put(entry(0))
    commit(Path(paths.quarantine), 0)
    commit(Path(paths.main), 1)
    with pytest.raises(LedgerBroken, match="no entry for batch 1"):
        read_state(paths)


def test_no_ledger_for_what_the_table_holds(paths: TablePaths):
    commit(Path(paths.quarantine), 0)
    commit(Path(paths.main), 0)
    with pytest.raises(LedgerBroken):
        read_state(paths)


def test_the_quarantine_was_removed(paths: TablePaths, ledger: Ledger):
    ledger.put(entry(0))
    commit(Path(paths.main), 0)
    with pytest.raises(LedgerBroken, match="quarantine is missing"):
        read_state(paths)


def test_the_table_was_put_back(paths: TablePaths, ledger: Ledger):
    for batch in range(3):
        ledger.put(entry(batch))
    commit(Path(paths.quarantine), 0)
    commit(Path(paths.main), 0)
    with pytest.raises(LedgerBroken, match="restored"):
        read_state(paths)


def test_the_table_was_removed(paths: TablePaths, ledger: Ledger):
    for batch in range(2):
        ledger.put(entry(batch))
    with pytest.raises(LedgerBroken, match="recreated"):
        read_state(paths)


def test_a_quarantine_of_another_table(paths: TablePaths, ledger: Ledger):
    commit(Path(paths.quarantine), 4)
    with pytest.raises(LedgerBroken, match="holds batch 4"):
        read_state(paths)


def write_batch(path: Path, batch: int, run: str) -> None:
    """A commit as the loader makes it, with the name of the run."""
    said = json.dumps({"app": APP, "batch": batch, "run": run})
    properties = CommitProperties(app_transactions=[Transaction(APP, batch)], custom_metadata={"userMetadata": said})
    write_deltalake(str(path), pa.table({"text": ["x"]}), mode="append", commit_properties=properties)


def test_who_wrote_a_batch(paths: TablePaths):
    for batch, run in enumerate(["one", "two", "one"]):
        write_batch(Path(paths.main), batch, run)
    assert [committed_batch(paths.main, batch, "one") for batch in range(4)] == [
        (True, None),
        (False, None),
        (True, None),
        None,
    ]


def test_commits_beyond_a_gap_do_not_name_the_writer_of_a_batch(paths: TablePaths):
    """A late loader can write into the past where the history was dropped; that is no part of the table."""
    for batch, run in enumerate(["late", "other", "other", "other"]):
        write_batch(Path(paths.main), batch, run)
    DeltaTable(str(paths.main)).create_checkpoint()
    Path(paths.main / "_delta_log" / f"{1:020}.json").unlink()
    assert committed_batch(paths.main, 0, "late") == (False, None)
    assert committed_batch(paths.main, 2, "other") == (True, None)


def test_rows_that_no_batch_accounts_for(paths: TablePaths, ledger: Ledger):
    write_deltalake(str(paths.main), pa.table({"text": ["x"]}))
    with pytest.raises(ForeignTable, match="no batch ledger entry"):
        read_state(paths)


def test_kind_and_settings_come_back(ledger: Ledger):
    put = ledger.put(entry(0)._replace(kind="requarantine", settings='{"columns": []}'))
    assert (put.kind, put.settings) == ("requarantine", '{"columns": []}')
    assert ledger.put(entry(1, start=10)).kind == "load"


def test_a_ledger_from_before_there_were_kinds(paths: TablePaths):
    rows = pa.table(
        {
            "batch": [0],
            "dc": ["dc1"],
            "topic": ["dc1.a"],
            "topic_id": ["id"],
            "partition": pa.array([0], pa.int32()),
            "start": [0],
            "end": [5],
            "parser": ["lines/1"],
            "run": ["r"],
            "planned": pa.array([1], pa.timestamp("us", "UTC")),
        }
    )
    properties = CommitProperties(app_transactions=[Transaction(APP, 0)])
    write_deltalake(str(paths.ledger), rows, commit_properties=properties)
    ledger = Ledger(paths.ledger)
    assert ledger.get(0).kind == "load"
    ledger.create()
    ledger.put(entry(1, start=5))
    assert [(e.batch, e.kind, e.settings) for e in ledger.entries()] == [(0, "load", ""), (1, "load", "")]


def test_the_last_batch_is_that_of_the_stored_version(paths: TablePaths):
    """Of new versions the new commits alone are read: others commit in between, clean the log up, or put another table
    in its place.
    """
    main = Path(paths.main)

    def seen() -> int:
        found = last_batch(newest_table(paths.main))
        assert found == DeltaTable(str(main)).transaction_version(APP)
        return found

    def others_commit() -> None:
        theirs = CommitProperties(app_transactions=[Transaction("another program", 99)])
        write_deltalake(str(main), pa.table({"text": ["theirs"]}), mode="append", commit_properties=theirs)

    commit(main, 0)
    assert seen() == 0
    others_commit()
    assert seen() == 0
    for batch in (1, 2):
        commit(main, batch)
    others_commit()
    assert seen() == 2
    for batch in range(3, 12):
        commit(main, batch)
    assert seen() == 11
    commit(main, 12)
    others_commit()
    table = DeltaTable(str(main))
    table.create_checkpoint()
    (main / "_delta_log" / f"{table.version() - 1:020}.json").unlink()
    assert seen() == 12
    shutil.rmtree(main)
    commit(main, 5)
    while DeltaTable(str(main)).version() < table.version():
        others_commit()
    assert seen() == 5


def test_an_entry_is_written_where_a_column_is_added_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is where two loaders create the ledger at the same time: one creation becomes a second commit."""
    ledger = Ledger(TablePaths.of(Location.of(tmp_path / "logs")).ledger)
    ledger.create()
    first = new_entry(0, "dc1", "lines/1", "run", [Range("dc1.a", 0, "id", 0, 10)])
    existing, asked = ledger_module.existing_table, 0

    def behind(path: Location) -> Any:
        nonlocal asked
        asked += 1
        table = existing(path)
        if asked == 1:
            other = DeltaTable(path.uri)
            other.alter.add_columns([Field("later", PrimitiveType("long"), nullable=True)])
        return table

    monkeypatch.setattr(ledger_module, "existing_table", behind)
    assert ledger.put(first) == first
    assert asked == 2
    assert ledger.last() == 0
