"""Tables merged and tidied: which files and rows go, and that nothing else does. Without Spark."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage import merge
from logferry.loaders.storage.commit import DataFiles, commit_files
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch, read_ledger
from logferry.loaders.storage.merge import (
    CLUSTERED,
    KEPT_S,
    MERGED,
    Merge,
    MergedGroup,
    MergeGroup,
    commit_merge,
    plan_groups,
    round_of,
    write_here,
)
from logferry.loaders.storage.retention import batch_of, compact, compact_table, removable
from logferry.loaders.storage.rewrite import TableFile, of_ranges, table_files

from tests.support.loaded_table import HOUR, NOON, LoadedTable, T

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


# ---- the plan and the commit of a merge ------------------------------------------------------------------


def file(name: str, size: int, hour: int = 0, **values: str) -> TableFile:
    return TableFile(name, size, values, 1, {"event_time": NOON + hour * HOUR})


def test_groups_hold_a_span_of_time_of_one_partition():
    files = [file(f"f{n}", 40, hour=n * 7 % 5, topic="ab"[n % 2]) for n in range(10)] + [file("large", 80)]
    groups = [[one.name for one in group.files] for group in plan_groups(files, 100)]
    assert groups == [["f0", "f8"], ["f6", "f4"], ["f5", "f3"], ["f1", "f9"]]
    assert all(group.bytes <= 100 for group in plan_groups(files, 100))
    assert plan_groups([file("a", 70), file("b", 75)], 100) == [], "nothing is gained"
    assert [len(group.files) for group in round_of([MergeGroup((file("a", 1),) * 6_000)] * 3)] == [6_000]
    assert len(round_of([MergeGroup((file("a", 2 << 30),))] * 3)) == 2


def test_what_is_clustered_is_not_clustered_again():
    done = [file(f"{CLUSTERED}{n}/f.parquet", size) for n, size in enumerate((90, 20, 20, 90))]
    new = [file("new", 500), file("more", 5)]
    groups = [[one.name for one in group.files] for group in plan_groups([*done, *new], 100, cluster=True)]
    assert groups == [[done[1].name, done[2].name, "more", "new"]]
    assert plan_groups([done[0], done[1], done[3]], 100, cluster=True) == []
    assert len(plan_groups([new[0]], 100, cluster=True)) == 1


def merged_files(logs: LoadedTable) -> tuple[list[MergedGroup], str]:
    table = open_table(logs.paths.main)
    assert table is not None
    folder = f"{MERGED}test"
    return write_here(logs.paths.main, table, plan_groups(table_files(table), 1 << 20), folder), folder


def four(tmp_path: Path) -> LoadedTable:
    logs = LoadedTable(tmp_path, segments=False)
    for _ in range(4):
        logs.load(NOON, NOON)
    return logs


def test_a_merge_whose_files_were_replaced_is_given_up_and_the_next_one_merges(tmp_path: Path):
    logs = four(tmp_path)
    written, folder = merged_files(logs)
    logs.load(NOON)
    DeltaTable(str(logs.paths.main)).delete("offset = 3")
    assert commit_merge(logs.paths.main, written, folder, time.time()) == 0
    assert logs.offsets == [0, 1, 2, 4, 5, 6, 7, 8]
    assert compact_table(logs.paths.main, 4).after == 1
    assert logs.offsets == [0, 1, 2, 4, 5, 6, 7, 8]


def test_a_merge_does_not_conflict_with_loads_and_is_committed_once(tmp_path: Path):
    logs = four(tmp_path)
    written, folder = merged_files(logs)
    logs.load(NOON)
    assert commit_merge(logs.paths.main, written, folder, time.time()) == 4
    assert len(DeltaTable(str(logs.paths.main)).file_uris()) == 2
    version = DeltaTable(str(logs.paths.main)).version()
    assert commit_merge(logs.paths.main, written, folder, time.time()) == 4, "as after a lost answer"
    assert (DeltaTable(str(logs.paths.main)).version(), len(logs.offsets)) == (version, 9)
    assert last_batch(open_table(logs.paths.main)) == 4


def test_a_commit_in_between_is_noticed_whatever_was_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """delta-rs alone accepts the removal of a file that another commit has just removed: its rows would be doubled."""
    logs = four(tmp_path)
    written, folder = merged_files(logs)
    create, times = DeltaTable.create_write_transaction, list[int]()

    def replaced_first(self: DeltaTable, *given: Any, **more: Any) -> None:
        if not times:
            times.append(1)
            DeltaTable(str(logs.paths.main)).optimize.compact()
        create(self, *given, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", replaced_first)
    assert commit_merge(logs.paths.main, written, folder, time.time()) == 0
    assert times
    assert logs.offsets == list(range(8))


def test_a_frozen_merge_does_not_name_files_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is stopped after its last look at the table, and its files are deleted by age meanwhile."""
    logs = four(tmp_path)
    written, folder = merged_files(logs)
    (target,) = (logs.paths.main / add.path for one in written for add in one.adds)
    began = time.time()
    assert compact_table(logs.paths.main, 3, timedelta(0), Merge(0)).removed == 0, "they are young"
    long_ago = began - 2 * KEPT_S
    create, times = DeltaTable.create_write_transaction, list[int]()

    def frozen(self: DeltaTable, *given: Any, **more: Any) -> None:
        if not times:
            times.append(1)
            os.utime(target, (long_ago, long_ago))
            assert compact_table(logs.paths.main, 3, timedelta(0), Merge(0)).removed == 1
            assert not Path(target).exists()
            # The hours that it was stopped.
            monkeypatch.setattr(merge, "KEPT_S", 0.0)
        create(self, *given, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", frozen)
    with pytest.raises(StorageUnavailable, match="the merge took too long"):
        commit_merge(logs.paths.main, written, folder, began)
    assert logs.offsets == list(range(8))


def test_a_merge_is_cut_into_commits_each_complete_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logs = LoadedTable(tmp_path, segments=False)
    for _ in range(9):
        logs.load(NOON, None)
    monkeypatch.setattr(merge, "_ROUND_FILES", 4)
    commits, seen = merge.commit_merge, list[tuple[int, int]]()

    def interrupted(*given: Any) -> int:
        if len(seen) >= 4:
            raise KeyboardInterrupt
        return commits(*given)

    with monkeypatch.context() as patch:
        patch.setattr(merge, "commit_merge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Merge().run(logs.paths.main, lambda _, done, total: seen.append((done, total)))
    assert (logs.offsets, len(DeltaTable(str(logs.paths.main)).file_uris())) == (list(range(18)), 3)
    assert [done for done, _ in seen] == [0, 4, 4, 8, 8]
    assert Merge().run(logs.paths.main) == (3, 1)
    assert logs.offsets == list(range(18))


# ---- files of a batch that replaces rows ---------------------------------------------------------------


def test_ranges_of_ten_thousand_partitions_choose_files(tmp_path: Path):
    logs = LoadedTable(tmp_path, segments=False)
    logs.load(NOON, NOON)
    table = DeltaTable(str(logs.paths.main))
    rule = of_ranges([Range(T, partition, "id", 2, 9) for partition in range(10_000)], "dc1")
    assert table.file_uris(file_pruning_predicate=rule.files) == []
    rule = of_ranges([Range(T, partition, "id", 1, 9) for partition in range(10_000)], "dc1")
    assert table.file_uris(file_pruning_predicate=rule.files) == table.file_uris()


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
