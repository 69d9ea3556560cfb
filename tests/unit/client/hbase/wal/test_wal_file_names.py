"""Which files of HBase's folders are logs of tables, of which log, and in which order; the files of positions."""

from __future__ import annotations

from pathlib import Path

import pytest
from logferry.client.hbase.definition import Unfit
from logferry.client.hbase.wal.file_names import has_no_tables, log_file
from logferry.client.hbase.wal.folders import LocalStore, LogFolders
from logferry.client.hbase.wal.positions import LogPosition, TailPositions, load_positions, save_positions
from logferry.client.hbase.wal.region_order import Place

from tests.support.hbase_calls import ORDERS

SERVER = "host-1.example%2C16020%2C1700000000000"


@pytest.mark.parametrize(
    ("name", "log", "number"),
    [
        (f"{SERVER}.1700000000100", SERVER, 1700000000100),
        (f"{SERVER}.regiongroup-3.1700000000100", f"{SERVER}.regiongroup-3", 1700000000100),
    ],
)
def test_the_name_has_log_and_number(name: str, log: str, number: int) -> None:
    found = log_file(name, f"/x/{name}", True)
    assert found is not None
    assert (found.log, found.number, found.path, found.is_closed) == (log, number, f"/x/{name}", True)


@pytest.mark.parametrize(
    ("name", "is_harmless"),
    [
        (f"{SERVER}.meta.1700000000100.meta", True),
        (f"{SERVER}.1700000000100$masterlocalwal$", True),
        ("pv2-00000000000000000001.log", True),
        (f"{SERVER}-peer.1700000000100.syncrep", False),
        (f"{SERVER}.1700000000100.tmp", False),
        (SERVER, False),
        ("", False),
    ],
)
def test_other_files_are_no_logs_of_tables(name: str, is_harmless: bool) -> None:
    assert log_file(name, name, False) is None
    assert has_no_tables(name) == is_harmless


class MovingStore(LocalStore):
    """Each file moves to oldWALs after it was listed and before its size is asked for."""

    def size(self, path: str) -> int:
        if "/WALs/" in path:
            Path(path).rename(Path(path).parents[2] / "oldWALs" / Path(path).name)
        return super().size(path)


def test_the_size_of_a_log_that_moves_is_found(tmp_path: Path) -> None:
    (tmp_path / "oldWALs").mkdir()
    (tmp_path / "WALs" / "server").mkdir(parents=True)
    names = [f"{SERVER}.170000000010{number}" for number in range(3)]
    for number, name in enumerate(names):
        (tmp_path / "WALs" / "server" / name).write_bytes(b"x" * number)
    folders = LogFolders(MovingStore(), str(tmp_path / "WALs"), str(tmp_path / "oldWALs"))
    assert folders.sizes({*names[1:], f"{SERVER}.1700000000199"}) == {names[1]: 1, names[2]: 2}


def test_positions_are_read_as_they_were_saved(tmp_path: Path) -> None:
    file = tmp_path / "positions"
    assert load_positions(file, ORDERS) == TailPositions({}, {})
    positions = TailPositions({SERVER: LogPosition(Place(5, 7), (5, 9))}, {"r": 4})
    save_positions(file, ORDERS, positions)
    assert load_positions(file, ORDERS) == positions
    with pytest.raises(Unfit, match="another definition"):
        load_positions(file, ORDERS._replace(families=("d",)))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format":1}', b"\xff", b'{"format":1,"definition":3}'])
def test_a_file_that_holds_no_positions_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "positions"
    file.write_bytes(content)
    with pytest.raises(Unfit):
        load_positions(file, ORDERS)
