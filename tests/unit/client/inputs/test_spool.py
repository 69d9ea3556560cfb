"""The spool on a real file: what is visible when, what is cut, freed and refused."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from logferry.client.files.checkpoint import StateUnusable
from logferry.client.inputs import spool as spools
from logferry.client.inputs.spool import BLOCK_BYTES, KEPT_BYTES, STEP_BYTES, WRITE_BYTES, Spool

LINE = b'{"n":1}\n'
LIMIT = 16 << 20


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def opened(path: Path, limit: int = LIMIT, of_lines: bool = True) -> Iterator[Spool]:
    spool = Spool(path, limit, of_lines)
    spool.open()
    try:
        yield spool
    finally:
        spool.close(60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "x.spool"


def test_what_was_put_is_there_after_the_next_start(path: Path) -> None:
    with opened(path) as spool:
        assert spool.last_line() == b""
        assert spool.put(LINE)
        assert spool.put(b'{"n":2}\n')
    with opened(path) as spool:
        assert (spool.end, spool.last_line()) == (16, b'{"n":2}')
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("torn", [b'{"n":', b"\0" * 5000, b"\0\0\n" + LINE, b'{"n":3}\0\n'])
def test_a_torn_record_is_cut(path: Path, torn: bytes) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(LINE + torn)
    with opened(path) as spool:
        assert (spool.end, spool.last_line()) == (len(LINE), LINE[:-1])
    assert path.read_bytes() == LINE


def test_bytes_of_standard_input_are_never_cut(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(LINE + b"\0 begun")
    with opened(path, of_lines=False) as spool:
        assert spool.end == len(LINE) + 7
        assert not spool.ends_with_newline()


def test_bytes_are_visible_when_they_are_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, may_return, sync = threading.Event(), threading.Event(), os.fdatasync

    def slow(fd: int) -> None:
        reached.set()
        assert may_return.wait(60)
        sync(fd)

    with opened(path) as spool:
        monkeypatch.setattr(os, "fdatasync", slow)
        spool.put(LINE)
        assert reached.wait(60)
        tail = spool.tail(0.0)
        assert (path.stat().st_size, tail.end, tail.read(100)) == (len(LINE), 0, b"")
        may_return.set()
        until(lambda: tail.end == len(LINE))
        assert tail.look(1.0)
        assert tail.read(100) == LINE
        tail.close()


def test_a_full_spool_takes_nothing_until_space_is_freed(path: Path) -> None:
    record = b"x" * (WRITE_BYTES - 1) + b"\n"
    with opened(path) as spool:
        for _ in range(16):
            assert spool.put_when_room(record)
        assert not spool.put(b"\n")
        until(lambda: spool.is_empty)
        waiting = threading.Thread(target=spool.put_when_room, args=(LINE,))
        waiting.start()
        assert spool.free_to(STEP_BYTES) == 0  # too little
        target = spool.free_to(KEPT_BYTES + STEP_BYTES)
        assert target == STEP_BYTES
        spool.free(KEPT_BYTES + STEP_BYTES)
        with path.open("rb") as file:  # its blocks are not counted: those of a fragmented file's extents are among them
            hole = [os.lseek(file.fileno(), at, what) for at, what in ((0, os.SEEK_HOLE), (BLOCK_BYTES, os.SEEK_DATA))]
        assert hole == [BLOCK_BYTES, STEP_BYTES]
        waiting.join(60)
        assert not waiting.is_alive()
        until(lambda: spool.is_empty)
        assert (spool.end, spool.freed) == (16 * WRITE_BYTES + len(LINE), STEP_BYTES)
    with opened(path) as spool:
        assert (spool.end, spool.freed) == (16 * WRITE_BYTES + len(LINE), STEP_BYTES)
        assert spool.begin == STEP_BYTES + WRITE_BYTES  # a whole line
        assert spool.last_line() == LINE[:-1]


def test_the_end_of_the_client_ends_a_wait_for_room(path: Path) -> None:
    taken: list[bool] = []
    with opened(path) as spool:
        while spool.put_when_room(b"x" * WRITE_BYTES) and spool.end + spool.used_bytes < LIMIT:
            until(lambda: spool.is_empty)
        until(lambda: spool.is_empty)
        while spool.put(b"x" * WRITE_BYTES):
            until(lambda: spool.is_empty)
        waiting = threading.Thread(target=lambda: taken.append(spool.put_when_room(b"x" * WRITE_BYTES)))
        waiting.start()
    waiting.join(60)
    assert taken == [False]


def test_a_disk_without_room_delays_and_loses_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(path) as spool:
        spool.put(LINE)
        until(lambda: spool.end == len(LINE))
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(LINE) + 3, before[1]))  # a write stops in the middle
        try:
            spool.put(b'{"n":2}\n')
            until(lambda: bool(spool.error))
            assert (spool.end, path.read_bytes()) == (len(LINE), LINE)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        until(lambda: spool.end == 2 * len(LINE))
        assert spool.error == ""
    assert path.read_bytes() == LINE + b'{"n":2}\n'


def test_a_removed_spool_stops_and_says_so(path: Path) -> None:
    with opened(path) as spool:
        path.unlink()
        spool.put(LINE)
        until(lambda: "removed" in spool.error)
        assert spool.end == 0


@pytest.mark.parametrize("kind", ["a link", "a folder", "another user's folder", "another user's file"])
def test_a_spool_of_somebody_else_is_refused(path: Path, kind: str) -> None:
    path.parent.mkdir(mode=0o700)
    if kind == "a link":
        path.symlink_to("/etc/passwd")
    elif kind == "a folder":
        path.mkdir()
    elif os.geteuid():
        pytest.skip("only root can give files away")
    elif kind == "another user's file":
        path.write_bytes(b"")
        os.chown(path, 65534, 65534)
    else:
        os.chown(path.parent, 65534, 65534)
    with pytest.raises(StateUnusable), opened(path):
        pass


def test_a_file_that_grew_too_long_begins_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "RENEW_BYTES", 2 * len(LINE))
    with opened(path) as spool:
        spool.put(LINE)
        until(lambda: spool.is_empty)
        spool.put(b'{"n":2}\n')
        until(lambda: spool.is_empty)
        spool.put(b'{"n":3}\n')
        spool.free(len(LINE))  # not all is acknowledged
        assert spool.end == 2 * len(LINE)
        spool.free(2 * len(LINE))
        until(lambda: spool.is_empty)
        assert path.read_bytes() == b'{"n":3}\n'
    path.write_bytes(b"")
    with opened(path) as spool:
        assert spool.last_line() == b'{"n":2}'  # what follows in the journal is not read twice
