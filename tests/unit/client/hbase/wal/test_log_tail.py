"""Rounds of the tail over files made by hand, one at a time: growth at each byte, several files, replays, losses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from logferry.client.hbase.delivery import GatewayDelivery
from logferry.client.hbase.wal.folders import LocalStore, LogFolders
from logferry.client.hbase.wal.recorded import RecordedIds
from logferry.client.hbase.wal.tail import LogTail, TailOptions
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Dialer

from tests.support.fake_gateway import FakeGateway, Served
from tests.support.hbase_calls import ORDERS, OTHER_REGION, REGION, put
from tests.support.hbase_log_files import TRAILER, entry, header, mark, write_log

FIRST, SECOND = "one.example%2C16020%2C1700000000000", "two.example%2C16020%2C1700000000001"
NUMBER = 1_700_000_000_100


@pytest.fixture
def gateway() -> FakeGateway:
    found = FakeGateway(("orders",))
    found.prev_always = False
    return found


@pytest.fixture
def served(gateway: FakeGateway) -> Iterator[Served]:
    with Served(gateway) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("WALs", "oldWALs"):
        (tmp_path / name).mkdir()
    return tmp_path


class SlowStore(LocalStore):
    """``most``: bytes of a file that are shown. ``is_open``: no file is closed."""

    most = 1 << 30
    is_open = False

    def read(self, path: str, at: int, size: int) -> bytes:
        return super().read(path, at, min(size, max(self.most - at, 0)))

    def is_all(self, path: str, size: int) -> bool:
        return not self.is_open and super().is_all(path, size)


class Rounds:
    """A tail that is driven by hand."""

    def __init__(
        self,
        served: Served,
        gateway: FakeGateway,
        folder: Path,
        positions: bool = False,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        cluster, self._stop, self._gateway = GatewayCluster([served.url], None), threading.Event(), gateway
        delivery = GatewayDelivery(cluster, "orders", Dialer(), self._stop)
        recorded = RecordedIds(cluster, "orders", Dialer())
        options = TailOptions(positions=folder / "positions" if positions else None, left_out=left_out)
        self.store = SlowStore()
        folders = LogFolders(self.store, str(folder / "WALs"), str(folder / "oldWALs"))
        self.tail = LogTail(ORDERS, folders, delivery, recorded, options)

    def __call__(self, count: int = 1) -> bool:
        """Whether the last one read all logs to their ends."""
        return [self.tail.round(self._stop)[0] for _ in range(count)][-1]

    def ids(self, region: str = REGION) -> list[int]:
        """Of the edits that are recorded."""
        return [one.seqno for name, found in self._gateway.sources.items() if region in name for one in found.chunks]

    def end(self) -> None:
        """As a process that is stopped."""
        self._stop.set()
        self.tail.run(self._stop)


def live(folder: Path, log: str) -> Path:
    return folder / "WALs" / log.replace("%2C", ",")


def test_a_file_that_grows_by_each_byte_is_written_entry_by_entry(
    served: Served, gateway: FakeGateway, folder: Path
) -> None:
    entries = [mark(REGION, 2), entry(REGION, 3, [put("a")]), entry(REGION, 5, [put("b"), put("c")]), TRAILER]
    whole = header() + b"".join(entries)
    path = write_log(live(folder, FIRST), FIRST, NUMBER)
    path.write_bytes(b"")
    rounds = Rounds(served, gateway, folder)
    ends = [len(header()) + sum(map(len, entries[:count])) for count in (2, 3)]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        rounds(2)
        assert rounds.ids() == [3, 5][: sum(end <= size for end in ends)], size


def test_a_log_continues_in_the_next_file_when_nothing_more_can_come(
    served: Served, gateway: FakeGateway, folder: Path
) -> None:
    """Its writer broke: no trailer, and the new file begins with what was not acknowledged."""
    server = live(folder, FIRST)
    first = write_log(server, FIRST, NUMBER, entry(REGION, 3, [put("a")]), entry(REGION, 4, [put("b")])[:-3])
    rounds = Rounds(served, gateway, folder)
    rounds(3)
    write_log(server, FIRST, NUMBER + 1)  # the header comes before the last entries of the file before
    rounds(3)
    with first.open("ab") as file:
        file.write(entry(REGION, 4, [put("b")])[-3:] + entry(REGION, 5, [put("c")])[:-1])
    rounds(3)
    assert rounds.ids() == [3, 4]
    write_log(server, FIRST, NUMBER + 1, entry(REGION, 4, [put("b")]), entry(REGION, 5, [put("c")]))
    rounds(3)
    assert rounds.ids() == [3, 4, 5]
    assert rounds.tail.gaps == 0


def test_what_is_damaged_in_a_whole_file_is_not_taken_for_its_end(
    served: Served, gateway: FakeGateway, folder: Path
) -> None:
    path = write_log(folder / "oldWALs", FIRST, NUMBER, entry(REGION, 3, [put("a")]), b"\x7f", TRAILER)
    rounds = Rounds(served, gateway, folder)
    assert not rounds(3)
    assert rounds.ids() == []
    whole = header() + entry(REGION, 3, [put("a")]) + entry(REGION, 4, [put("b")]) + TRAILER
    path.write_bytes(whole)
    rounds(3)
    assert rounds.ids() == [3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_rounds_may_be_cut_and_repeated_anywhere(served: Served, gateway: FakeGateway, folder: Path, seed: int) -> None:
    """Two regions change places, files are rolled and moved, and the tail starts again and again."""
    chance = Random(seed)
    logs = {
        FIRST: [mark(REGION, 2), *(entry(REGION, n, [put(f"{n}")]) for n in range(3, 9)), mark(REGION, 9, True),
                mark(OTHER_REGION, 21, opened=20), *(entry(OTHER_REGION, n, [put(f"{n}")]) for n in range(22, 30))],
        SECOND: [mark(OTHER_REGION, 2), *(entry(OTHER_REGION, n, [put(f"{n}")]) for n in range(3, 19)),
                 mark(OTHER_REGION, 19, True), mark(REGION, 11, opened=10),
                 *(entry(REGION, n, [put(f"{n}")]) for n in range(12, 20))],
    }  # fmt: skip
    for log, parts in logs.items():
        cut = chance.randrange(1, len(parts))
        is_old = chance.random() < 0.5
        place = folder / "oldWALs" if is_old else live(folder, log)
        write_log(place, log, NUMBER, *parts[:cut], *([TRAILER] if is_old or chance.random() < 0.5 else []))
        write_log(live(folder, log), log, NUMBER + 9, *parts[cut:])
    for _ in range(chance.randrange(1, 4)):
        rounds = Rounds(served, gateway, folder, positions=chance.random() < 0.5)
        rounds(chance.randrange(1, 4))
        if chance.random() < 0.7:
            rounds.end()
    rounds = Rounds(served, gateway, folder)
    assert rounds(5)
    assert rounds.ids(REGION) == [*range(3, 9), *range(12, 20)]
    assert rounds.ids(OTHER_REGION) == [*range(3, 19), *range(22, 30)]
    assert rounds.tail.gaps == 0


def test_a_file_that_was_written_to_its_end_may_go(served: Served, gateway: FakeGateway, folder: Path) -> None:
    done = write_log(folder / "oldWALs", FIRST, NUMBER, entry(REGION, 3, [put("a")]), TRAILER)
    open_file = write_log(live(folder, SECOND), SECOND, NUMBER, entry(OTHER_REGION, 3, [put("b")]))
    rounds = Rounds(served, gateway, folder)
    rounds(3)
    assert (rounds.ids(), rounds.ids(OTHER_REGION)) == ([3], [3])
    done.unlink()
    rounds(3)
    assert rounds.tail.gaps == 0
    open_file.unlink()
    rounds(3)
    assert rounds.tail.gaps == 1


def test_an_entry_with_a_foreign_cell_stops_its_log_alone_and_what_is_before_is_written(
    served: Served, gateway: FakeGateway, folder: Path
) -> None:
    foreign = bytearray(entry(REGION, 4, [put("b", b"")]))
    foreign[-1] = 77  # the type of its cell
    write_log(live(folder, FIRST), FIRST, NUMBER, entry(REGION, 3, [put("a")]), bytes(foreign))
    write_log(live(folder, SECOND), SECOND, NUMBER, entry(OTHER_REGION, 3, [put("c")]))
    rounds = Rounds(served, gateway, folder)
    rounds(9)
    assert (rounds.ids(), rounds.ids(OTHER_REGION)) == ([3], [3])


def test_a_daughter_waits_for_its_parent_also_while_that_one_cannot_be_read(
    served: Served, gateway: FakeGateway, folder: Path
) -> None:
    parent, daughter = b"orders,,1." + REGION.encode() + b".", b"orders,m,2." + OTHER_REGION.encode() + b"."
    foreign = bytearray(entry(REGION, 4, [put("b", b"")]))
    foreign[-1] = 77
    whole = mark(REGION, 2, name=parent) + entry(REGION, 3, [put("a")])
    closed = mark(REGION, 5, is_close=True, name=parent)
    path = write_log(live(folder, FIRST), FIRST, NUMBER, whole, bytes(foreign), closed)
    opened = mark(OTHER_REGION, 7, opened=6, name=daughter)
    write_log(live(folder, SECOND), SECOND, NUMBER, opened, entry(OTHER_REGION, 8, [put("c")]))
    rounds = Rounds(served, gateway, folder)
    rounds(20)
    assert (rounds.ids(), rounds.ids(OTHER_REGION)) == ([3], [])
    path.write_bytes(header() + whole + entry(REGION, 4, [put("b", b"")]) + closed)
    rounds(3)
    assert (rounds.ids(), rounds.ids(OTHER_REGION)) == ([3, 4], [8])


def test_files_of_other_kinds_are_named_once_and_counted(
    served: Served, gateway: FakeGateway, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_log(live(folder, FIRST), FIRST, NUMBER, entry(REGION, 3, [put("a")]))
    others = [f"{FIRST}-peer.{NUMBER}.syncrep", f"{FIRST}.meta.{NUMBER}.meta", "notes", "left-out"]
    for name in others:
        (folder / "oldWALs" / name).write_bytes(b"x")
    rounds = Rounds(served, gateway, folder, left_out=frozenset({"left-out"}))
    rounds(3)
    assert rounds.ids() == [3]
    found = [one.getMessage() for one in caplog.records if "hbase-wal-passed-over" in one.getMessage()]
    assert len(found) == 2
    assert "file=notes" in found[0]
    assert others[0] in found[1]
    assert "the log of synchronous replication" in found[1]
    assert rounds.tail.gaps == 2


def test_the_old_logs_of_each_server_may_have_a_folder(served: Served, gateway: FakeGateway, folder: Path) -> None:
    """hbase.separate.oldlogdir.by.regionserver"""
    path = write_log(live(folder, FIRST), FIRST, NUMBER, entry(REGION, 3, [put("a")]))
    rounds = Rounds(served, gateway, folder)
    rounds(2)
    with path.open("ab") as file:
        file.write(entry(REGION, 4, [put("b")]))
    old = folder / "oldWALs" / live(folder, FIRST).name
    old.mkdir()
    path.rename(old / path.name)
    rounds(3)
    assert rounds.ids() == [3, 4]
    assert rounds.tail.gaps == 0


def test_sequence_ids_that_are_given_a_second_time_are_a_gap(
    served: Served, gateway: FakeGateway, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Edit 4 was on one DataNode when the server died: HBase has lost it, and gives its id to another one."""
    former = write_log(live(folder, FIRST), FIRST, NUMBER, mark(REGION, 2), entry(REGION, 3, [put("a")]))
    whole = former.read_bytes()
    former.write_bytes(whole + entry(REGION, 4, [put("never-acknowledged")]) + entry(REGION, 5, [put("neither")]))
    rounds = Rounds(served, gateway, folder)
    rounds(3)
    assert rounds.ids() == [3, 4, 5]
    former.write_bytes(whole)
    former.rename(folder / "oldWALs" / former.name)
    opened = mark(REGION, 4, opened=4)
    write_log(live(folder, SECOND), SECOND, NUMBER, opened, entry(REGION, 5, [put("b")]), entry(REGION, 6, [put("c")]))
    rounds(5)
    assert f"hbase-wal-gap region={REGION} after=5 before=4" in caplog.text
    assert rounds.tail.gaps == 1
    assert rounds.ids() == [3, 4, 5, 6], "5 looks like a duplicate"


def test_marks_behind_the_last_change_are_no_gap(served: Served, gateway: FakeGateway, folder: Path) -> None:
    """HBase replays no marks: a region of a dead server may begin with the id of one."""
    flushed = mark(REGION, 4).replace(b"REGION_EVENT", b"FLUSH_EVENT_")
    former = (mark(REGION, 2), entry(REGION, 3, [put("a")]), flushed)
    write_log(folder / "oldWALs", FIRST, NUMBER, *former)
    write_log(live(folder, SECOND), SECOND, NUMBER, mark(REGION, 4, opened=4), entry(REGION, 5, [put("b")]))
    rounds = Rounds(served, gateway, folder)
    rounds(5)
    assert rounds.ids() == [3, 5]
    assert rounds.tail.gaps == 0


@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_without_its_end_mark_ends_when_it_is_closed_and_all_of_it_is_shown(
    served: Served, gateway: FakeGateway, folder: Path, is_open: bool
) -> None:
    """As in HDFS: the DataNode with the last bytes is away, or the writer that died has still its lease."""
    first = mark(REGION, 2) + entry(REGION, 3, [put("a")])
    write_log(folder / "oldWALs", FIRST, NUMBER, first, entry(REGION, 4, [put("b")]))
    write_log(live(folder, FIRST), FIRST, NUMBER + 1, entry(REGION, 5, [put("c")]))
    rounds = Rounds(served, gateway, folder)
    rounds.store.most = len(header()) + len(first) + 7
    rounds.store.is_open = is_open
    assert not rounds(3)
    assert rounds.ids() == [3]
    rounds.store.most = 1 << 30
    rounds(3)
    assert rounds.ids() == ([3, 4] if is_open else [3, 4, 5])
    rounds.store.is_open = False
    rounds(3)
    assert rounds.ids() == [3, 4, 5]
    assert rounds.tail.gaps == 0
