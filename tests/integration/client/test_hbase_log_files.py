"""The tail before files that are cut, empty, of another kind, moved or gone: the others continue, nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway import Gateway
from tests.support.hbase import chunks_of, make_topic
from tests.support.hbase_calls import OTHER_REGION, REGION, put
from tests.support.hbase_log import HBaseTail
from tests.support.hbase_log_files import TRAILER, entry, header, mark, write_log

FIRST, SECOND = "one.example%2C16020%2C1700000000000", "two.example%2C16020%2C1700000000001"
NUMBER = 1_700_000_000_100


class LogFolder:
    """WALs and oldWALs made by hand, a topic, and a tail."""

    def __init__(self, workers: Gateway, topic: str, folder: Path) -> None:
        self._workers, self._topic, self._folder = workers, topic, folder
        self.live = folder / "WALs"
        self.old = folder / "oldWALs"
        self.live.mkdir()
        self.old.mkdir()
        make_topic(workers.urls[0], topic)
        self.tails: list[HBaseTail] = []

    def tail(self, *more: str) -> HBaseTail:
        log = self._folder / f"tail-{len(self.tails)}.log"
        self.tails.append(HBaseTail(self._folder, self._workers.urls, self._topic, log, ["orders"], *more))
        return self.tails[-1].start()

    def server(self, log: str) -> Path:
        return self.live / log.replace("%2C", ",")

    def rows(self) -> list[str]:
        """Of the changes in the topic, in order."""
        return [one.change.row.decode() for one in chunks_of(self._workers.kafka.bootstrap, f"dc1.{self._topic}")]

    def rows_with(self, last: str) -> list[str]:
        deadline = time.monotonic() + 60
        while last not in (rows := self.rows()):
            assert time.monotonic() < deadline, (rows, self.tails[-1].child.log_tail())
            time.sleep(0.1)
        return rows


@pytest.fixture
def files(workers: Gateway, topic_name: str, tmp_path: Path) -> Iterator[LogFolder]:
    found = LogFolder(workers, topic_name.replace("-", "_")[-60:], tmp_path)
    yield found
    for tail in found.tails:
        tail.kill()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_file_that_grows_is_written_entry_by_entry(files: LogFolder) -> None:
    path = write_log(files.server(FIRST), FIRST, NUMBER, mark(REGION, 2), entry(REGION, 3, [put("a")]))
    tail = files.tail()
    assert files.rows_with("a") == ["a"]
    whole = entry(REGION, 4, [put("b"), put("c")])
    append(path, whole[:-1])
    append(path, whole[-1:] + entry(REGION, 5, [put("d")]) + TRAILER)
    write_log(files.server(FIRST), FIRST, NUMBER + 7, entry(REGION, 6, [put("e")]))
    assert files.rows_with("e") == ["a", "b", "c", "d", "e"]
    assert tail.stop() == 0


def test_files_that_are_cut_empty_or_of_another_kind_stop_no_other(files: LogFolder) -> None:
    names = [f"server{number}.example%2C16020%2C1700000000000" for number in range(5)]
    regions = [f"{number:032x}" for number in range(5)]
    cut = entry(regions[0], 4, [put("never-acknowledged")])[:-2]
    write_log(files.old, names[0], NUMBER, entry(regions[0], 3, [put("before-the-cut")]), cut)
    for number, kind in ((1, header(has_compression=True)), (2, header(encryption_key=b"key")), (3, b"PWAX")):
        path = write_log(files.old, names[number], NUMBER)
        path.write_bytes(kind + entry(regions[number], 3, [put("unreadable")]))
    empty = write_log(files.server(names[4]), names[4], NUMBER)
    empty.write_bytes(b"")
    (files.old / f"{names[0]}.meta.{NUMBER}.meta").write_bytes(b"of no table")
    live = write_log(files.server(FIRST), FIRST, NUMBER, mark(REGION, 2), entry(REGION, 3, [put("a")]))
    refused = {names[number] + f".{NUMBER}" for number in (1, 2, 3)}
    tail = files.tail("--leave-out", *refused)
    files.rows_with("before-the-cut")  # the regions have no order between them
    assert set(files.rows_with("a")) == {"before-the-cut", "a"}
    append(empty, header() + entry(regions[4], 3, [put("later")]))
    assert "later" in files.rows_with("later")
    tail.wait_logged(b" hbase-wal-cut ")
    assert tail.stop() == 0

    with_all = files.tail()
    for text in (b"it is compressed", b"it is encrypted", b"no log of HBase 2"):
        with_all.wait_logged(text)
    append(live, entry(REGION, 4, [put("b")]))
    assert "b" in files.rows_with("b"), "the region is a new one: no file that cannot be read has older entries of it"
    assert with_all.stop() == 0


def test_a_region_that_left_a_server_whose_log_cannot_be_read_waits_for_it(files: LogFolder) -> None:
    former = write_log(files.old, FIRST, NUMBER)
    entries = entry(REGION, 3, [put("1")]) + entry(REGION, 4, [put("2")]) + mark(REGION, 5, is_close=True)
    former.write_bytes(header(has_compression=True) + entries)
    write_log(files.server(SECOND), SECOND, NUMBER, mark(REGION, 7, opened=6), entry(REGION, 8, [put("3")]))
    tail = files.tail()
    tail.wait_logged(b"it is compressed")
    time.sleep(1)  # many rounds
    assert files.rows() == []
    restored = files.live.parent / "restored"
    restored.write_bytes(header() + entries)
    restored.replace(former)  # as the guide says: in one step
    assert files.rows_with("3") == ["1", "2", "3"]
    assert tail.stop() == 0


def test_files_that_move_while_they_are_read_are_no_gap(files: LogFolder) -> None:
    positions = str(files.live.parent / "positions")
    path = write_log(files.server(FIRST), FIRST, NUMBER, mark(REGION, 2), entry(REGION, 3, [put("a")]))
    tail = files.tail("--positions", positions)
    files.rows_with("a")
    append(path, entry(REGION, 4, [put("b")]))
    splitting = files.live / f"{files.server(FIRST).name}-splitting"
    files.server(FIRST).rename(splitting)
    files.rows_with("b")
    append(splitting / path.name, entry(REGION, 5, [put("c")]))
    (splitting / path.name).rename(files.old / path.name)
    splitting.rmdir()
    assert files.rows_with("c") == ["a", "b", "c"]
    write_log(files.server(SECOND), SECOND, NUMBER, mark(REGION, 7, opened=6), entry(REGION, 8, [put("d")]))
    assert files.rows_with("d") == ["a", "b", "c", "d"]
    assert tail.stop() == 0
    (files.old / path.name).unlink()  # HBase's cleaner: it is written
    again = files.tail("--positions", positions)
    write_log(files.server(SECOND), SECOND, NUMBER + 1, entry(REGION, 9, [put("e")]))
    assert files.rows_with("e") == ["a", "b", "c", "d", "e"]
    assert again.stop() == 0, again.child.log_tail()


def test_a_file_that_is_gone_before_it_was_written_is_a_gap(files: LogFolder) -> None:
    positions = str(files.live.parent / "positions")
    lost = write_log(files.server(FIRST), FIRST, NUMBER, mark(REGION, 2), entry(REGION, 3, [put("a")]))
    tail = files.tail("--positions", positions)
    files.rows_with("a")
    assert tail.stop() == 0
    append(lost, entry(REGION, 4, [put("never-read")]))
    lost.unlink()
    write_log(files.server(FIRST), FIRST, NUMBER + 5, entry(REGION, 5, [put("b")]))
    write_log(files.server(SECOND), SECOND, NUMBER, mark(OTHER_REGION, 2), entry(OTHER_REGION, 3, [put("c")]))
    again = files.tail("--positions", positions)
    again.wait_logged(f" hbase-wal-gap log={FIRST} file={NUMBER} ".encode())
    files.rows_with("b")
    assert sorted(files.rows_with("c")) == ["a", "b", "c"]
    assert again.stop() == 1


def test_positions_of_another_definition_are_refused(files: LogFolder) -> None:
    positions = str(files.live.parent / "positions")
    tail = files.tail("--positions", positions)
    tail.wait_logged(b" hbase-tailing ")
    assert tail.stop() == 0
    other = files.tail("--positions", positions, "--families", "d")
    assert other.child.wait_for_end(60)
    assert other.child.exit_status == 2
    assert "another definition" in other.child.log_tail()


def test_a_log_that_came_and_went_unseen_is_a_gap_once_its_region_is_opened_elsewhere(files: LogFolder) -> None:
    positions = str(files.live.parent / "positions")
    write_log(files.server(FIRST), FIRST, NUMBER, mark(REGION, 2), entry(REGION, 3, [put("a")]))
    tail = files.tail("--positions", positions)
    files.rows_with("a")
    assert tail.stop() == 0
    write_log(files.server(SECOND), SECOND, NUMBER, mark(REGION, 9, opened=8), entry(REGION, 10, [put("b")]))
    again = files.tail("--positions", positions)
    again.wait_logged(f" hbase-wal-gap region={REGION} after=3 before=8".encode())
    assert files.rows_with("b") == ["a", "b"]
    assert again.stop() == 1
