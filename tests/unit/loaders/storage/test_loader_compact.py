"""Tables merged and tidied: which files and rows go, and that nothing else does. Without Spark."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from logferry.loaders.location import Location
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage import retention
from logferry.loaders.storage.commit import DataFiles, commit_files
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import existing_table, last_batch, read_ledger
from logferry.loaders.storage.retention import batch_of, compact, removable
from logferry.loaders.storage.rewrite import Rewriter, of_ranges

from tests.support.loaded_table import HOUR, MAIN, NOON, LoadedTable, T

# ---- merging ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parted", [None, ["topic"]])
def test_files_are_merged_and_nothing_else_changes(tmp_path: Path, parted: list[str] | None):
    logs = LoadedTable(tmp_path, parted)
    for _ in range(6):
        logs.load(NOON, NOON + HOUR, bad=[NOON])
    before = logs.offsets, logs.quarantined, logs.states, read_ledger(logs.paths.main)
    found = {tidied.path: tidied for tidied in compact(logs.paths.main)}
    assert (found[logs.paths.main].before, found[logs.paths.main].after) == (6, 1)
    assert (found[logs.paths.ledger].before, found[logs.paths.ledger].after) == (6, 1)
    assert all(tidied.removed == 0 for tidied in found.values()), "pinned readers need what was merged"
    assert set(found) == {logs.paths.main, logs.paths.quarantine, logs.paths.ledger, logs.paths.segments}
    assert (logs.offsets, logs.quarantined, logs.states, read_ledger(logs.paths.main)) == before
    assert [last_batch(open_table(path)) for path in found] == [5] * 4
    pinned = DeltaTable(str(logs.paths.main), version=6)
    assert len(pinned.file_uris()) == 6
    assert pinned.to_pyarrow_table().num_rows == 12
    # What nobody has named for so long goes; the log opens all the same.
    gone = {tidied.path: tidied for tidied in compact(logs.paths.main, timedelta(0))}
    assert gone[logs.paths.main].removed == 6
    assert (logs.offsets, logs.quarantined, logs.states, read_ledger(logs.paths.main)) == before
    logs.load(NOON)
    assert len(logs.offsets) == 13


def test_files_of_unfinished_batches_stay_however_old(tmp_path: Path):
    logs = LoadedTable(tmp_path)
    logs.load(NOON)
    long_ago = time.time() - 365 * 86_400
    places = {}
    for batch, age in ((0, long_ago), (0, time.time()), (1, long_ago), (7, long_ago)):
        folder = logs.paths.main / f"batch-{batch:08}-{'old' if age == long_ago else 'new'}"
        file = folder / "topic=x" / "part-1.parquet"
        Path(file.parent).mkdir(parents=True)
        for name in (file, file.with_name(".part-1.parquet.crc"), folder / "_temporary"):
            Path(name).write_bytes(b"x")
            os.utime(name, (age, age))
        os.utime(folder, (age, age))
        places[batch, age == long_ago] = file
    logs.plan(1)
    assert sum(tidied.removed for tidied in compact(logs.paths.main)) > 0
    empty = logs.paths.main / "batch-00000000-old"
    assert [file for file in Path(empty).rglob("*") if file.is_file()] == []
    os.utime(empty, (long_ago, long_ago))
    assert len(list(compact(logs.paths.main))) == 4
    assert not Path(empty).exists()
    assert {key: Path(file).exists() for key, file in places.items()} == {
        (0, True): False,
        (0, False): True,
        (1, True): True,
        (7, True): True,
    }
    assert logs.offsets == [0]


def test_which_unneeded_files_are_removed():
    names = [
        "part-1.parquet",
        "batch-00000004-ab/p.parquet",
        "batch-00000005-ab/topic=a/p.parquet",
        "dc=1/part.parquet",
    ]
    assert removable(names, 4) == [names[0], names[1], names[3]]
    assert [batch_of(name) for name in names] == [None, 4, 5, None]


def test_a_merge_that_loses_its_files_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logs = LoadedTable(tmp_path, segments=False)
    for _ in range(4):
        logs.load(NOON, NOON)
    times: list[Path] = []

    def rows_go_after_the_look(path: Path) -> DeltaTable:
        table = existing_table(Location.of(path))
        if path == logs.paths.main and not times:
            times.append(path)
            rule = of_ranges([Range(T, 0, "id", 3, 4)], "dc1")
            commit_files(
                DataFiles(Location.of(path), (), 0),
                Location.of(path),
                4,
                "other",
                changes=Rewriter(Location.of(path), 4, rule).actions,
            )
        return table

    monkeypatch.setattr(retention, "pinned_table", rows_go_after_the_look)
    tidied = retention.compact_table(logs.paths.main, 3, timedelta(days=7))
    assert times
    assert tidied.after == 1
    assert logs.offsets == [0, 1, 2, 4, 5, 6, 7]


# ---- rows out of files -----------------------------------------------------------------------------------


def test_ranges_of_ten_thousand_partitions_choose_files(tmp_path: Path):
    logs = LoadedTable(tmp_path, segments=False)
    logs.load(NOON, NOON)
    table = DeltaTable(str(logs.paths.main))
    rule = of_ranges([Range(T, partition, "id", 2, 9) for partition in range(10_000)], "dc1")
    assert table.file_uris(file_pruning_predicate=rule.files) == []
    rule = of_ranges([Range(T, partition, "id", 1, 9) for partition in range(10_000)], "dc1")
    assert table.file_uris(file_pruning_predicate=rule.files) == table.file_uris()


@pytest.mark.parametrize("parted", [None, ["topic", "dc"]])
def test_rows_go_and_the_others_stay_as_they_are(tmp_path: Path, parted: list[str] | None):
    logs = LoadedTable(tmp_path, parted, segments=False)
    for _ in range(3):
        logs.load(NOON, None, NOON)
    whole = DeltaTable(str(logs.paths.main)).to_pyarrow_table().sort_by("offset")
    untouched = set(DeltaTable(str(logs.paths.main)).file_uris())
    path = logs.paths.main
    rewriter = Rewriter(path, 3, of_ranges([Range(T, 0, "id", 1, 2), Range(T, 0, "id", 3, 6)], "dc1"))
    commit_files(DataFiles(path, (), 0), path, 3, "run", parted or (), changes=rewriter.actions)
    left = DeltaTable(str(path)).to_pyarrow_table().sort_by("offset")
    assert left.equals(whole.take([0, 2, 6, 7, 8]))
    assert len(untouched & set(DeltaTable(str(path)).file_uris())) == 1
    # Those that were loaded in another data centre have other offsets, as do other topics and partitions.
    for rule in (
        of_ranges([Range(T, 0, "id", 0, 9)], "dc2"),
        of_ranges([Range(T, 1, "id", 0, 9)], "dc1"),
        of_ranges([Range("dc1.other", 0, "id", 0, 9)], "dc1"),
    ):
        batch = last_batch(open_table(path)) + 1
        commit_files(
            DataFiles(path, (), 0), path, batch, "run", parted or (), changes=Rewriter(path, batch, rule).actions
        )
        assert logs.offsets == [0, 2, 6, 7, 8]


def test_a_removal_of_files_repeats_after_a_commit_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """delta-rs lets a removal pass whose file a compaction has replaced meanwhile: its rows would stand twice."""
    logs = LoadedTable(tmp_path, segments=False)
    for _ in range(3):
        logs.load(NOON, NOON)
    path, times = logs.paths.main, []
    looked = Rewriter.actions

    def merged_after_the_look(self: Rewriter, table: DeltaTable) -> Any:
        actions = looked(self, table)
        times.append(table.version())
        if len(times) == 1:
            DeltaTable(str(path)).optimize.compact()
        elif len(times) == 2:
            write_deltalake(str(path), pa.Table.from_pylist([], schema=MAIN), mode="append")
        return actions

    monkeypatch.setattr(Rewriter, "actions", merged_after_the_look)
    rewriter = Rewriter(path, 3, of_ranges([Range(T, 0, "id", 0, 3)], "dc1"))
    commit_files(DataFiles(path, (), 0), path, 3, "run", changes=rewriter.actions)
    assert len(times) == 3
    assert DeltaTable(str(path)).version() == times[-1] + 1, "what goes and what comes are one commit"
    assert logs.offsets == [3, 4, 5]
    assert last_batch(open_table(path)) == 3


def test_a_replacement_of_all_files_repeats_after_a_commit_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logs = LoadedTable(tmp_path, segments=False)
    for _ in range(3):
        logs.load(NOON, NOON)
    path, create = logs.paths.main, DeltaTable.create_write_transaction
    times: list[int] = []

    def merged_first(self: DeltaTable, *given: Any, **more: Any) -> None:
        if not times:
            times.append(1)
            DeltaTable(str(path)).optimize.compact()
        create(self, *given, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", merged_first)
    commit_files(DataFiles(path, (), 0), path, 3, "run", replace=True)
    assert times
    assert logs.offsets == []
