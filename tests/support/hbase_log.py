"""Everything in the write-ahead logs of an HBase that a test has ended, as a second truth beside its scan.

`logged` reads the files one after another, without any order between them, and knows nothing of tails and peers:
what it finds has no order either. `compare` holds a topic against it: unlike the scan, the log has the region and the
sequence id of each change.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from logferry.client.hbase.cells import MARK_FAMILY, CellBlock
from logferry.client.hbase.wal.entries import LogEnd, LogEntry, end_of_header, entry_at
from logferry.client.hbase.wal.file_names import log_file
from logferry.ops.stack.hbase_cluster import HBaseCluster
from logferry.ops.stack.processes import Child

from tests.support.gateway import Gateway
from tests.support.hbase import Change, Written, chunks_of, judge, scanned, wait_shipped

_PATIENCE_S = 120.0
_STOP_S = 40.0


class Logged(NamedTuple):
    """A change in the log."""

    table: str
    region: str
    sequence_id: int
    change: Change


def log_paths(hbase: Path) -> list[Path]:
    """``hbase``: the folder of its data."""
    found = [*hbase.glob("WALs/*/*"), *hbase.glob("oldWALs/*")]
    return sorted(path for path in found if log_file(path.name, str(path), False))


def entries_of(data: bytes) -> Iterator[LogEntry]:
    """The whole entries of a file."""
    view = memoryview(data)
    at = end_of_header(view)
    while at is not None and at < len(view):
        found = entry_at(view, at)
        if found is None or isinstance(found, LogEnd):
            return
        yield found
        at = found.end


def logged(hbase: Path, tables: Sequence[str]) -> set[Logged]:
    """Each once: what a server wrote again after its file broke is the same change."""
    found = set()
    for path in log_paths(hbase):
        for entry in entries_of(path.read_bytes()):
            if entry.table not in tables:
                continue
            for cell in CellBlock(entry.cells).take(entry.cell_count):
                if cell.family != MARK_FAMILY:
                    change = Change(cell.row, cell.family, cell.qualifier, cell.value, cell.timestamp, cell.type)
                    found.add(Logged(entry.table, entry.region, entry.sequence_id, change))
    return found


def compare(found: Sequence[Written], log: set[Logged]) -> None:
    """The topic has every change of the log with its region and sequence id, once, and no other. Raises
    AssertionError.
    """
    there = Counter(Logged(one.table, one.source_id.partition("/")[0], one.sequence_id, one.change) for one in found)
    missing, foreign = log - there.keys(), there.keys() - log
    assert not missing, f"{len(missing)} of {len(log)} changes of the log are lost: {sorted(missing)[:3]}"
    assert not foreign, f"{len(foreign)} changes are in no log: {sorted(foreign)[:3]}"
    twice = [one for one, count in there.items() if count > 1]
    assert not twice, f"{len(twice)} changes were written twice: {twice[:3]}"


# ---- the process ----------------------------------------------------------------------------------------------------


class HBaseTail:
    """``logferry hbase tail``: a process that tests kill and restart. ``root``: the folder with WALs and oldWALs."""

    def __init__(self, root: str | Path, urls: Sequence[str], topic: str, log: Path, tables: Sequence[str], *more: str):
        tail = [sys.executable, "-m", "logferry.ops.cli.main", "hbase", "tail", topic, "--topic", topic]
        tail += ["--wals", f"{root}/WALs", "--old-wals", f"{root}/oldWALs", "--tables", *tables, *more]
        self.child = Child(f"tail of {topic}", [*tail, *(f"--url={url}" for url in urls)], log)

    def start(self) -> HBaseTail:
        self.child.start()
        return self

    def kill(self) -> None:
        self.child.send(signal.SIGKILL)

    def stop(self) -> int:
        """Its exit status."""
        assert self.child.stop(_STOP_S), f"it did not end\n{self.child.log_tail()}"
        assert self.child.exit_status is not None
        return self.child.exit_status

    def wait_logged(self, text: bytes) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while text not in self.child.log.read_bytes():
            assert self.child.running, f"it ended\n{self.child.log_tail()}"
            assert time.monotonic() < deadline, f"no {text!r} within {_PATIENCE_S} s\n{self.child.log_tail()}"
            time.sleep(0.05)


class LoggedLoad:
    """Tables of an HBase of their own, and what is written to them."""

    def __init__(self, hbase: HBaseCluster, folder: Path, workers: Gateway) -> None:
        self.hbase, self.folder, self.workers = hbase, folder, workers
        self.tables = ["first", "second"]
        for table in self.tables:
            hbase.shell(f"create {table} d 0 4")

    def tail(self, topic: str, *more: str) -> HBaseTail:
        return HBaseTail(self.hbase.data, self.workers.urls, topic, self.folder / f"{topic}.log", self.tables, *more)

    def regions(self, table: str) -> list[str]:
        return [one.partition("@")[0] for one in self.hbase.shell(f"regions {table}").split()]

    def more(self, count: int) -> None:
        """Returns when so many more changes were written."""
        self.hbase.shell(f"until {int(self.hbase.shell('written')) + count}")

    def roll(self) -> None:
        for server in self.hbase.shell("servers").split():
            self.hbase.shell(f"roll {server}")

    def wait(self, topic: str) -> None:
        wait_shipped(self.hbase, self.workers.kafka.bootstrap, f"dc1.{topic}", self.tables, self.folder)

    def check(self, topic: str) -> int:
        """How many changes the topic has."""
        found = chunks_of(self.workers.kafka.bootstrap, f"dc1.{topic}")
        judge(found, {table: scanned(self.hbase, table, self.folder) for table in self.tables})
        compare(found, logged(self.hbase.data, self.tables))
        return len(found)
