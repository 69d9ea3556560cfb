"""inotify as a hint, with real files: how soon, what it costs, and what happens where it tells nothing."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.config import FileGroup
from logferry.client.agent.search import Search
from logferry.client.files.inotify import Found, Hints
from logferry.client.files.rotation import QUIET_S
from logferry.client.files.tail import FileTail

SILENT = pytest.mark.parametrize("client", [{"heartbeat_s": 0.0}], indirect=True)
ROUND_S = 0.001  # far below the times at which files are looked at, or searched for


def quiet(client: Any, *names: str) -> Any:
    """Sent, armed, and looked at for the last time some moments ago."""
    for name in names:
        client.write(name, b"first\n")
    client.settle()
    client.step(0.5)
    client.step(0.5)
    assert client.agent.watch.looks.hints.armed == len(names)
    return client.agent.watch.looks.hints


@SILENT
def test_a_line_of_a_quiet_file_is_sent_at_once(client: Any) -> None:
    quiet(client, "a.log", "b.log")
    client.write("a.log", b"more\n")
    assert client.step(ROUND_S) == 1
    assert b"first\nmore\n" in client.stored()


@SILENT
def test_a_busy_file_costs_one_event_and_is_armed_when_it_is_quiet(client: Any) -> None:
    hints = quiet(client, "a.log")
    for _ in range(50):
        client.write("a.log", b"x\n")
    found = hints.take()
    assert len(found.files) == 1
    assert hints.armed == 0
    for _ in range(50):
        client.write("a.log", b"x\n")
    assert hints.take().files == []
    client.settle()
    client.step(0.5)
    assert hints.armed == 1


@SILENT
def test_a_new_file_is_followed_at_once_though_it_is_gone_soon(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(client, "a.log")
    monkeypatch.setattr(Search, "is_due", lambda search, now: False)
    client.write("b.log", b"short ")
    client.step(ROUND_S)
    client.write("b.log", b"life\n")
    (client.root / "b.log").unlink()
    client.step(ROUND_S)
    client.step(ROUND_S)
    assert b"short life\n" in client.stored()


@pytest.mark.parametrize("client", [{"heartbeat_s": 0.0, "idle_s": 0.0}], indirect=True)
def test_files_in_new_folders_are_found_by_their_names(client: Any) -> None:
    group = FileGroup((str(client.root / "pods" / "*" / "*" / "*.log"),), "t")
    client.config = client.config._replace(files=(group,))
    (client.root / "pods").mkdir()
    client.restart()
    client.step()
    (client.root / "pods" / "p" / "c").mkdir(parents=True)
    client.write("pods/p/c/0.log", b"before the folder was watched\n")
    client.write("pods/p/c/0.txt", b"not wanted\n")
    for _ in range(3):
        client.step(ROUND_S)
    assert client.stored() == [b"before the folder was watched\n"]
    client.write("pods/p/c/1.log", b"after\n")
    (client.root / "pods" / "q").mkdir()
    client.step(ROUND_S)
    (client.root / "pods" / "q" / "c").mkdir()
    client.step(ROUND_S)
    client.write("pods/q/c/0.log", b"deep\n")
    for _ in range(3):
        client.step(ROUND_S)
    assert sorted(client.stored()) == [b"after\n", b"before the folder was watched\n", b"deep\n"]


@SILENT
def test_rotation_by_hints_alone_is_followed(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(client, "a.log")
    monkeypatch.setattr(Search, "is_due", lambda search, now: False)
    for number in range(20):
        client.write("a.log", b"old %d\n" % number)
        (client.root / "a.log").rename(client.root / f"a.log.{number}")
        client.write("a.log", b"new %d\n" % number)
        for _ in range(3):
            client.step(ROUND_S)
    assert sorted(client.stored()) == sorted(path.read_bytes() for path in client.root.glob("a.log*"))


@SILENT
def test_where_a_change_comes_without_an_event_the_folder_is_polled(client: Any, caplog: Any) -> None:
    """As through a mapping of the file into memory."""
    caplog.set_level("INFO")
    hints = quiet(client, "a.log", "b.log")
    with (client.root / "a.log").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        before = os.fstat(file.fileno()).st_mtime_ns
        while os.fstat(file.fileno()).st_mtime_ns == before:
            memory[0] = b"f"[0]
            memory.flush()
    client.step(ROUND_S)
    assert hints.armed == 2
    client.step(10.0)
    assert "folder-polled" not in caplog.text
    client.step(1.5)
    assert "folder-polled" in caplog.text
    for _ in range(3):
        client.write("a.log", b"polled\n")
        client.step(1.0)
    client.write("b.log", b"told\n")  # it is still armed
    client.step(1.0)
    client.settle()
    assert hints.armed == 0
    assert hints.polled == {"changes come without events": 2}
    assert sorted(client.stored()) == [b"first\n" + b"polled\n" * 3, b"first\ntold\n"]


@SILENT
def test_an_event_that_is_late_makes_no_folder_polled(client: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    hints = quiet(client, "a.log")
    taken = hints.take
    hints.take = lambda: Found([], [], [], False, [])
    client.write("a.log", b"more\n")
    client.step(10.0)
    assert client.stored() == [b"first\nmore\n"]
    hints.take = taken
    client.step(1.5)
    assert "folder-polled" not in caplog.text
    client.step(0.5)
    assert hints.armed == 1


@SILENT
def test_after_an_overflow_everything_is_looked_at(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue of the kernel is made to overflow, with names that no pattern wants."""
    caplog.set_level("INFO")
    hints = quiet(client, "a.log", "b.log")
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for number in range(limit // 2 + 10):  # two events each
        os.close(os.open(client.root / f"{number}.tmp", os.O_CREAT | os.O_WRONLY))
        (client.root / f"{number}.tmp").unlink()
    client.write("a.log", b"more\n")
    client.write("c.log", b"new\n")
    taken = hints.take
    lost: list[Found] = []

    def kept() -> Found:
        lost.append(taken())
        return lost[-1]

    monkeypatch.setattr(hints, "take", kept)
    client.step(ROUND_S)
    assert lost[0].lost
    assert b"first\nmore\n" in client.stored()
    client.step(5.0)
    assert b"new\n" in client.stored()
    for _ in range(5):
        client.step(0.5)
    assert hints.armed == 3
    assert "folder-polled" not in caplog.text


@pytest.mark.parametrize("client", [{"heartbeat_s": 0.0}], indirect=True)
@pytest.mark.parametrize("limit", [0, 12])
def test_beyond_our_share_of_the_watches_files_are_polled(client: Any, limit: int) -> None:
    hints = client.agent.watch.looks.hints
    hints._most = limit // 4
    for number in range(8):
        client.write(f"{number}.log", b"first\n")
    client.settle()
    client.step(0.5)
    assert hints.armed == max(limit // 4 - 1, 0)  # one is that of the folder
    assert hints.polled == {"fs.inotify.max_user_watches is reached": 8 - hints.armed}
    for number in range(8):
        client.write(f"{number}.log", b"more\n")
    client.settle()
    assert client.stored() == [b"first\nmore\n"] * 8


@SILENT
@pytest.mark.parametrize(
    ("code", "why"), [(errno.EMFILE, "fs.inotify.max_user_instances is reached"), (errno.EPERM, os.strerror(1))]
)
def test_without_inotify_everything_is_polled(
    client: Any, monkeypatch: pytest.MonkeyPatch, code: int, why: str
) -> None:
    class Libc:
        @staticmethod
        def inotify_init1(flags: int) -> int:
            import ctypes

            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: Libc())
    client.restart()
    assert client.agent.watch.looks.hints.unusable == why
    client.write("a.log", b"first\n")
    client.settle()
    client.write("a.log", b"more\n")
    client.step()
    client.step()
    assert client.stored() == [b"first\nmore\n"]


def test_files_of_a_network_file_system_are_polled_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logferry.client.files.inotify._LOCAL", {})
    (tmp_path / "a.log").write_bytes(b"x")
    hints, tail = Hints(), FileTail.open(str(tmp_path / "a.log"), 0.0)
    assert tail is not None
    assert not hints.arm(tail.watch_path, tail.key, str(tmp_path), 0.0)
    assert not hints.watch_folders({str(tmp_path)}, 0.0)
    ((why, count),) = hints.polled.items()
    assert why.startswith("on a file system of type 0x")
    assert count == 1
    tail.close()
    hints.close()


def test_a_file_is_told_under_any_of_its_names_and_after_its_last_is_gone(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    path, other = tmp_path / "one" / "a.log", tmp_path / "two" / "b.log"
    path.write_bytes(b"x")
    os.link(path, other)
    hints, tail = Hints(), FileTail.open(str(path), 0.0)
    assert tail is not None

    def is_told(change: Any) -> bool:
        assert hints.arm(tail.watch_path, tail.key, str(tmp_path), 0.0)
        change()
        return hints.take().files == [tail.key]

    def append(to: Any) -> None:
        with to.open("ab") as file:
            file.write(b"x")

    assert is_told(lambda: append(other))
    assert is_told(lambda: os.truncate(other, 0))
    assert is_told(path.unlink)
    with other.open("ab", buffering=0) as file:
        assert is_told(other.unlink)
        assert is_told(lambda: file.write(b"x"))
    hints.disarm(tail.key)
    tail.close()
    hints.close()


def test_the_thread_wakes_the_main_loop_and_ends(tmp_path: Path) -> None:
    woken = threading.Semaphore(0)
    before = threading.active_count()
    hints = Hints()
    assert hints.watch_folders({str(tmp_path)}, 0.0)
    hints.start(woken.release)
    for number in range(3):
        (tmp_path / f"{number}.log").touch()
        assert woken.acquire(timeout=60)
        assert hints.is_due
        assert f"{number}.log" in {Path(path).name for path in hints.take().paths}
        while woken.acquire(timeout=0.05):
            hints.take()
    hints.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline


@SILENT
def test_a_line_between_the_last_look_and_the_watch_is_seen(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(client, "a.log")
    client.write("a.log", b"more\n")
    arm, lines = Hints.arm, [b"between\n"]

    def late(hints: Hints, *arguments: Any) -> bool:
        if lines:
            client.write("a.log", lines.pop())
        return arm(hints, *arguments)

    monkeypatch.setattr(Hints, "arm", late)
    client.step(ROUND_S)
    client.step(ROUND_S)
    assert not lines
    assert client.stored() == [b"first\nmore\nbetween\n"]


def seconds_until(client: Any, content: bytes) -> float:
    begin = client.now
    while content not in client.stored():
        client.step(0.1)
        assert client.now < begin + 100
    return float(client.now - begin)


@pytest.mark.parametrize("client", [{"heartbeat_s": 0.0, "idle_s": 0.0}], indirect=True)
def test_a_folder_that_is_made_again_is_watched_again(client: Any) -> None:
    """Its pattern has no wildcard before it, so nothing is watched above it."""
    folder = client.root / "d"
    client.config = client.config._replace(files=(FileGroup((str(folder / "*.log"),), "t"),))
    folder.mkdir()
    client.restart()
    quiet(client, "d/a.log")
    folder.rename(client.root / "renamed")
    folder.mkdir()
    client.write("d/a.log", b"new\n")
    client.write("renamed/a.log", b"more\n")
    client.write("renamed/b.log", b"no pattern shows it\n")
    assert seconds_until(client, b"new\n") < 1.0
    client.settle()
    assert sorted(client.stored()) == [b"first\nmore\n", b"new\n"]
    for number in range(9):
        shutil.rmtree(folder)
        for _ in range(number % 3):
            client.step(0.1)
        folder.mkdir()
        client.write("d/a.log", b"%d\n" % number)
        assert seconds_until(client, b"%d\n" % number) < 1.0


@SILENT
def test_a_folder_has_events_for_every_path_that_leads_to_it(client: Any) -> None:
    (client.root / "real").mkdir()
    (client.root / "link").symlink_to("real")
    patterns = (str(client.root / "real" / "*.log"), str(client.root / "link" / "*.txt"))
    client.config = client.config._replace(files=(FileGroup(patterns, "t"),))
    client.restart()
    client.step()
    client.step(0.1)
    client.write("real/a.log", b"log\n")
    client.write("real/a.txt", b"text\n")
    client.step(0.1)
    client.step(0.1)
    assert sorted(client.stored()) == [b"log\n", b"text\n"]


@SILENT
def test_another_name_of_a_followed_file_is_not_its_path(client: Any) -> None:
    """A copy is found beside the path."""
    client.config = client.config._replace(files=(FileGroup((str(client.root / "**" / "*.log"),), "t"),))
    (client.root / "kept").mkdir()
    client.restart()
    quiet(client, "a.log")
    os.link(client.root / "a.log", client.root / "kept" / "a.log")
    client.step(ROUND_S)
    (source,) = client.agent.watch.sources.values()
    assert source.tail.path == str(client.root / "a.log")
    (client.root / "a.log").rename(client.root / "b.log")
    client.step(ROUND_S)
    assert source.tail.path == str(client.root / "b.log")


@SILENT
def test_a_file_that_may_be_a_copy_waits_no_longer_than_without_events(client: Any) -> None:
    quiet(client, "a.log")
    client.step(10.0)  # all is searched, so not soon again
    client.write("a.log.1", b"first\n")
    begin = client.now
    while client.stored() != [b"first\n", b"first\n"]:
        client.step(0.1)
        assert client.now < begin + QUIET_S + 1.0


def test_a_source_whose_heartbeat_finds_new_lines_has_one_request(client: Any) -> None:
    quiet(client, "a.log")
    client.now += 400.0
    client.write("a.log", b"before its event is taken\n")
    jobs = client.agent.jobs(client.now, 5)
    for source, job in jobs:
        client.agent.finish(source, job, client.pusher.perform(job), client.now)
    assert len(jobs) == 1
    client.write("a.log", b"later\n")
    client.settle()
    assert client.stored() == [b"first\nbefore its event is taken\nlater\n"]


@pytest.mark.parametrize("client", [{"heartbeat_s": 0.0, "idle_s": 0.0}], indirect=True)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_folder_that_is_made_before_the_one_around_it_is_watched(
    client: Any, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    pods = client.root / "pods"
    client.config = client.config._replace(files=(FileGroup((str(pods / "*" / "*" / "*.log"),), "t"),))
    pods.mkdir()
    watch = Hints._watch_folder

    def late(hints: Hints, path: str, now: float) -> bool:
        if path == str(pods / "p"):
            (pods / "p" / "c").mkdir(exist_ok=True)
        return watch(hints, path, now)

    monkeypatch.setattr(Hints, "_watch_folder", late)
    if is_first:
        (pods / "p").mkdir()
    client.restart()
    client.step()
    (pods / "p").mkdir(exist_ok=True)
    client.step(ROUND_S)
    client.write("pods/p/c/0.log", b"soon\n")
    client.step(ROUND_S)
    client.step(ROUND_S)
    assert client.stored() == [b"soon\n"]
