"""What a thread keeps of a table is never older than the table, whatever others do to it."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from logferry.loaders.location import Location
from logferry.loaders.storage.commit import commit_rows
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.snapshots import kept_state, newest_table

SCHEMA = pa.schema([pa.field("n", pa.int64())])


def write(path: Path, *numbers: int, mode: str = "append") -> None:
    write_deltalake(str(path), pa.table({"n": list(numbers)}, schema=SCHEMA), mode=mode)  # type: ignore[call-overload]


def numbers(path: Path) -> list[int]:
    table = newest_table(path)
    return [] if table is None else sorted(table.to_pyarrow_table()["n"].to_pylist())


def test_what_others_commit_is_seen_in_the_same_object(tmp_path: Path):
    path = tmp_path / "t"
    assert newest_table(path) is None
    write(path, 1)
    first = newest_table(path)
    write(path, 2)
    assert newest_table(path) is first
    assert numbers(path) == [1, 2]
    write(path, 3, mode="overwrite")
    assert numbers(path) == [3]
    DeltaTable(str(path)).alter.set_table_properties({"delta.appendOnly": "true"})
    assert newest_table(path) is first
    assert first is not None
    assert first.metadata().configuration["delta.appendOnly"] == "true"


def test_threads_do_not_share_an_object(tmp_path: Path):
    write(tmp_path / "t", 1)
    found: list[object] = [newest_table(tmp_path / "t")]
    other = threading.Thread(target=lambda: found.append(newest_table(tmp_path / "t")))
    other.start()
    other.join()
    assert found[0] is not found[1]


def test_a_table_that_was_removed_or_recreated_is_opened_again(tmp_path: Path):
    path = tmp_path / "t"
    write(path, 1)
    write(path, 2)
    assert numbers(path) == [1, 2]
    shutil.rmtree(path)
    assert newest_table(path) is None
    for versions in (1, 2, 3):
        write(path, 1)
        write(path, 2)
        assert numbers(path) == [1, 2]
        shutil.rmtree(path)
        for version in range(versions):
            write(path, 10 + version)
        assert numbers(path) == list(range(10, 10 + versions)), "as many versions, fewer, or more"
        shutil.rmtree(path)


@pytest.mark.parametrize("cleaned", [range(5), range(1, 5)])
def test_a_commit_in_the_past_is_not_taken_for_the_newest_state(tmp_path: Path, cleaned: range):
    path = tmp_path / "t"
    log = path / "_delta_log"
    write(path, 0)
    frozen = newest_table(path)
    assert frozen is not None
    for number in range(1, 6):
        write(path, number)
    late = (log / f"{1:020}.json").read_text()
    DeltaTable(str(path)).create_checkpoint()
    for version in cleaned:
        (log / f"{version:020}.json").unlink()
    # A loader that slept through all that commits as if nothing had happened: the version after its own is free.
    (log / f"{1:020}.json").write_text(late)
    assert numbers(path) == list(range(6))
    table = newest_table(path)
    assert table is not None
    assert table.version() == 5


def test_a_state_is_made_of_each_file_once_until_files_are_replaced(tmp_path: Path):
    path = tmp_path / "t"
    seen: list[int] = []

    def add(state: set[int], rows: pa.Table) -> None:
        seen.extend(rows["n"].to_pylist())
        state.update(rows["n"].to_pylist())

    def state() -> set[int]:
        return kept_state(Location.of(path), set[int], add)

    assert state() == set()
    write(path, 1)
    assert state() == {1}
    write(path, 2, 3)
    assert state() == {1, 2, 3}
    assert state() == {1, 2, 3}
    assert seen == [1, 2, 3]
    write(path, 4, mode="overwrite")
    assert state() == {4}
    shutil.rmtree(path)
    write(path, 5)
    assert state() == {5}
    assert seen == [1, 2, 3, 4, 5]


def test_a_batch_whose_commit_was_overwritten_is_not_there(tmp_path: Path):
    """The version is the same, and it is another commit: so it is in each way to look."""
    path = Location.of(tmp_path / "t")
    write(tmp_path / "t", 0)
    for batch in range(3):
        assert commit_rows(pa.table({"n": [batch]}, schema=SCHEMA), path, batch, "run").ours
        assert last_batch(newest_table(path)) == last_batch(open_table(path)) == batch
    newest = max((tmp_path / "t" / "_delta_log").glob("*.json"))
    newest.write_text(json.dumps({"commitInfo": {"timestamp": 0, "operation": "SET TBLPROPERTIES"}}) + "\n")
    assert last_batch(newest_table(path)) == last_batch(open_table(path)) == 1
    assert commit_rows(pa.table({"n": [2]}, schema=SCHEMA), path, 2, "again").ours
    assert numbers(tmp_path / "t") == [0, 0, 1, 2]
