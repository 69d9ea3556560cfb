"""Files that are closed while they are quiet (``close_inactive_s``): what is read afterwards, and what can be lost."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.config import FileGroup, parse
from logferry.client.files.tail import FileTail

from tests.support.fake_gateway import FakeGateway, Served
from tests.unit.client.agent.conftest import Client
from tests.unit.client.agent.test_agent_main import running
from tests.unit.client.agent.test_agent_rotation import rewrite_file

CLOSE_S = 60.0
ROTATED_S = 300.0
HEAD = b"#Version: 1.0\n"
BOUND_S = 120.0


@pytest.fixture(params=["inotify", "polled"])
def closing(tmp_path: Path, gateway: FakeGateway, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of ``*.log`` and ``*.log.1``: other names are hidden from it."""
    patterns = str(tmp_path / "*.log"), str(tmp_path / "*.log.1")
    group = FileGroup(patterns, "t", close_inactive_s=CLOSE_S)
    client = Client(tmp_path, gateway, files=(group,), rotated_timeout_s=ROTATED_S)
    if request.param == "polled":
        hints = client.agent.watch.looks.hints
        hints.close()
        hints.unusable = "as for a test"
    yield client
    client.close()


def descriptors(below: Path, pid: int | str = "self") -> list[str]:
    """What the process has open below the folder."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(each.readlink())
        except OSError:
            continue
        if target.startswith(f"{below}/") and "/state/" not in target:
            found.append(target)
    return sorted(found)


def rest(client: Client, *open_ones: str) -> None:
    """So long that files are closed; ``open_ones`` are not."""
    client.settle()
    for _ in range(4):
        client.step(CLOSE_S)
    assert descriptors(client.root) == [str(client.root / name) for name in open_ones]


def with_closed(client: Client, *names: str, content: bytes = b"one\n") -> None:
    for name in names or ("a.log",):
        client.write(name, HEAD + content)
    rest(client)


def searched(client: Client, times: int = 3, later_s: float = 61.0) -> None:
    """So long that all files are searched for."""
    for _ in range(times):
        client.step(later_s)
    client.settle()


def test_a_quiet_file_is_closed_and_opened_when_it_is_written(closing: Client, gateway: FakeGateway) -> None:
    with_closed(closing)
    (stored,) = gateway.sources.values()
    beats = len(stored.beats)
    for _ in range(10):
        closing.step(100.0)
    assert len(stored.beats) >= beats + 3  # its source stays known
    assert stored.beats[-1]["watermark_ms"] is not None
    assert descriptors(closing.root) == []
    closing.write("a.log", b"two\n")
    closing.settle()
    assert closing.stored() == [HEAD + b"one\ntwo\n"]
    assert descriptors(closing.root) == [str(closing.root / "a.log")]
    rest(closing)
    assert len(gateway.sources) == 1


def test_a_line_of_a_closed_file_is_sent_at_once(closing: Client) -> None:
    with_closed(closing, "a.log", "b.log")
    if closing.agent.watch.looks.hints.unusable:
        return
    assert closing.agent.watch.looks.hints.armed == 2
    closing.write("a.log", b"two\n")
    assert closing.step(0.001) == 1
    assert HEAD + b"one\ntwo\n" in closing.stored()
    assert descriptors(closing.root) == [str(closing.root / "a.log")]


def test_lost_events_open_no_closed_file(closing: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are armed again by their paths."""
    with_closed(closing, "a.log", "b.log")
    hints = closing.agent.watch.looks.hints
    if hints.unusable:
        return
    for source in closing.agent.watch.sources.values():
        assert source.tail is not None
        hints.disarm(source.tail.key)
    opened = []
    monkeypatch.setattr(FileTail, "open", lambda path, *_: opened.append(path))
    closing.step(20.0)
    assert (hints.armed, opened) == (2, [])


@pytest.mark.parametrize("client", [{"close_inactive_s": CLOSE_S, "once": True}, {}], indirect=True)
def test_with_once_or_by_default_nothing_is_closed(client: Client) -> None:
    client.write("a.log", b"one\n")
    rest(client, "a.log")


def test_a_file_that_is_not_sent_to_its_end_stays_open(closing: Client, gateway: FakeGateway) -> None:
    closing.write("a.log", b"one\n")
    gateway.is_away = True
    for _ in range(5):
        closing.step(CLOSE_S)
    assert descriptors(closing.root) == [str(closing.root / "a.log")]
    gateway.is_away = False
    for _ in range(5):
        closing.step(CLOSE_S)
    rest(closing)
    assert closing.stored() == [b"one\n"]


def test_a_restart_continues_a_closed_file(closing: Client) -> None:
    with_closed(closing)
    closing.restart()
    closing.write("a.log", b"two\n")
    closing.settle()
    assert closing.stored() == [HEAD + b"one\ntwo\n"]


def test_a_file_of_which_the_gateway_has_said_nothing_stays_open(closing: Client, gateway: FakeGateway) -> None:
    """Only the checkpoint says that it was sent."""
    with_closed(closing)
    gateway.is_away = True
    assert closing.agent.remember(closing.now)
    closing.restart()
    for _ in range(4):
        closing.step(CLOSE_S)
    assert descriptors(closing.root) == [str(closing.root / "a.log")]


def test_a_gateway_that_asks_for_a_new_session_gets_it(closing: Client, gateway: FakeGateway) -> None:
    """It may even have recorded less: the file is opened, and read again."""
    with_closed(closing)
    (stored,) = gateway.sources.values()
    stored.session += 1
    stored.recorded = stored.base = None
    stored.chunks.clear()
    for _ in range(10):
        closing.step(100.0)
    closing.settle()
    assert closing.stored() == [HEAD + b"one\n"]


# ---- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", ["a.log.1", "hidden"])
@pytest.mark.parametrize("recreated", [False, True])
def test_a_file_renamed_while_it_was_closed_is_read_to_its_end(closing: Client, new: str, recreated: bool) -> None:
    """Also by its writer, who has it open, and while another file has its name."""
    with_closed(closing)
    with (closing.root / "a.log").open("ab") as writer:
        (closing.root / "a.log").rename(closing.root / new)
        if recreated:
            closing.write("a.log", HEAD + b"another\n")
        writer.write(b"two\n")
    searched(closing)
    closing.write(new, b"three\n")
    closing.settle()
    wanted = [HEAD + b"one\ntwo\nthree\n"] + [HEAD + b"another\n"] * recreated
    assert sorted(closing.stored()) == sorted(wanted)
    paths = {source.tail.path for source in closing.agent.watch.sources.values() if source.tail is not None}
    assert (str(closing.root / "a.log.1") in paths) == (new == "a.log.1")


def test_many_rotations_of_closed_files(closing: Client) -> None:
    """Each file is closed when it is renamed, and each but the last one is hidden afterwards."""
    for number in range(4):
        closing.write("a.log", HEAD + b"%d\n" % number)
        rest(closing)
        if number > 1:
            (closing.root / "a.log.1").rename(closing.root / f"a.log.{number}")
        (closing.root / "a.log").rename(closing.root / "a.log.1")
        closing.write("a.log.1", b"late %d\n" % number)
    searched(closing)
    assert sorted(closing.stored()) == [HEAD + b"%d\nlate %d\n" % (number, number) for number in range(4)]


def test_a_file_moved_away_and_back_is_the_same(closing: Client, tmp_path: Path) -> None:
    """Within the time for which renamed files are followed."""
    with_closed(closing)
    (tmp_path / "elsewhere").mkdir()
    (closing.root / "a.log").rename(tmp_path / "elsewhere" / "a")
    searched(closing, times=2)
    (tmp_path / "elsewhere" / "a").rename(closing.root / "a.log")
    closing.write("a.log", b"two\n")
    searched(closing)
    assert closing.stored() == [HEAD + b"one\ntwo\n"]


def test_a_link_turned_to_another_file_leads_to_a_new_source(closing: Client) -> None:
    """The one that it led to before is still read to its end."""
    closing.write("first", b"one\n")
    (closing.root / "a.log").symlink_to("first")
    rest(closing)
    closing.write("second", b"1\n")
    (closing.root / "a.log").unlink()
    (closing.root / "a.log").symlink_to("second")
    closing.write("first", b"two\n")
    searched(closing)
    assert sorted(closing.stored()) == [b"1\n", b"one\ntwo\n"]


# ---- what is gone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_folder", [False, True])
def test_a_file_removed_while_it_was_closed_is_finished(
    tmp_path: Path, gateway: FakeGateway, with_folder: bool, caplog: pytest.LogCaptureFixture
) -> None:
    group = FileGroup((str(tmp_path / "*/*.log"),), "t", close_inactive_s=CLOSE_S)
    client = Client(tmp_path, gateway, files=(group,))
    (tmp_path / "pod").mkdir()
    client.write("pod/a.log", b"one\n")
    rest(client)
    (tmp_path / "pod/a.log").unlink()
    if with_folder:
        (tmp_path / "pod").rmdir()
    (source,) = client.agent.watch.sources.values()
    searched(client, times=2)
    assert source.status(client.now).waits_for == "its file to be found again"
    assert not source.status(client.now).error
    searched(client, times=8)
    (stored,) = gateway.sources.values()
    assert stored.beats[-1]["finished"]
    assert not client.agent.watch.sources
    assert ("file-gone" in caplog.text) == bool(client.agent.watch.looks.hints.unusable)
    client.close()


def test_a_file_removed_while_it_is_open_is_closed_when_it_is_quiet(closing: Client, gateway: FakeGateway) -> None:
    """Nothing could open it again: so its source is finished, and its space is freed."""
    closing.write("a.log", b"one\n")
    closing.settle()
    with (closing.root / "a.log").open("ab") as writer:
        (closing.root / "a.log").unlink()
        writer.write(b"two\n")
    closing.settle()
    assert descriptors(closing.root) == [f"{closing.root}/a.log (deleted)"]
    rest(closing)
    closing.settle()
    (stored,) = gateway.sources.values()
    assert (stored.content(), stored.beats[-1]["finished"]) == (b"one\ntwo\n", True)


def test_a_removed_file_is_not_closed_before_it_is_sent(closing: Client, gateway: FakeGateway) -> None:
    gateway.is_away = True
    closing.write("a.log", b"one\ntwo\n")
    closing.step()
    (closing.root / "a.log").unlink()
    for _ in range(4):
        closing.step(CLOSE_S)
    gateway.is_away = False
    searched(closing, times=6)
    assert closing.stored() == [b"one\ntwo\n"]


def test_lines_written_just_before_the_removal_of_a_closed_file_are_lost(
    closing: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The one loss that this setting allows; an open file has none. The log names it, and no other removal where events
    show that nothing was written.
    """
    with_closed(closing, "a.log", "b.log")
    with caplog.at_level("INFO", "logferry.client"):
        closing.write("a.log", b"lost\n")
        (closing.root / "a.log").unlink()
        (closing.root / "b.log").unlink()
        searched(closing, times=10)
    assert closing.stored() == [HEAD + b"one\n"] * 2
    gone = sorted(line.split(" source=")[1] for line in caplog.messages if line.startswith("file-gone"))
    assert [line.split("/")[-1].partition("#")[0] for line in gone] == (
        ["a.log", "b.log"] if closing.agent.watch.looks.hints.unusable else ["a.log"]
    )


def test_a_file_compressed_while_it_was_closed_is_read_on_in_its_gz(closing: Client, gateway: FakeGateway) -> None:
    with_closed(closing, "a.log", "b.log")
    closing.write("a.log", b"two\n")
    for name in ("a.log", "b.log"):
        path = closing.root / name
        (closing.root / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    searched(closing, times=10)
    assert sorted(closing.stored()) == [HEAD + b"one\n", HEAD + b"one\ntwo\n"]
    assert [stored.beats[-1]["finished"] for stored in gateway.sources.values()] == [True, True]


@pytest.mark.parametrize("is_noticed", [False, True])
@pytest.mark.parametrize("recreated", ["", "another inode", "the same inode"])
@pytest.mark.parametrize("late", [b"", b"two\n"])
def test_a_closed_file_that_was_copied_and_removed_continues_in_the_copy(
    closing: Client, recreated: str, late: bytes, is_noticed: bool
) -> None:
    """``is_noticed``: that the file is gone, before the copy is found."""
    with_closed(closing, content=b"one\n" * 500)
    closing.write("a.log", late)
    shutil.copyfile(closing.root / "a.log", closing.root / "a.log.1")
    if recreated == "the same inode":
        rewrite_file(closing.root / "a.log", HEAD + b"1\n")
    else:
        (closing.root / "a.log").unlink()
    if recreated == "another inode":
        closing.write("has the inode", b"")
        closing.write("a.log", HEAD + b"1\n")
    (source,) = closing.agent.watch.sources.values()
    closing.agent.watch.refresh(source if is_noticed else None, closing.now)
    searched(closing, times=10)
    wanted = [HEAD + b"one\n" * 500 + late] + [HEAD + b"1\n"] * bool(recreated)
    assert sorted(closing.stored()) == sorted(wanted)


@pytest.mark.parametrize("removed", [False, True])
def test_a_copy_of_a_closed_file_is_not_sent_again(closing: Client, removed: bool) -> None:
    """The original is opened to compare them, and stays open until the copy is decided."""
    with_closed(closing, content=b"one\n" * 500)
    shutil.copyfile(closing.root / "a.log", closing.root / "a.log.1")
    closing.step(1.0)
    assert str(closing.root / "a.log") in descriptors(closing.root)
    if removed:
        (closing.root / "a.log").unlink()
    searched(closing)
    assert [content for content in closing.stored() if content] == [HEAD + b"one\n" * 500]


# ---- hostile sequences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [HEAD + b"other\n", HEAD + b"one\ntwo\n", HEAD + b"one\n", b""])
@pytest.mark.parametrize("same_inode", [False, True])
@pytest.mark.parametrize("name", ["a.log", "c.log"])
def test_another_file_after_the_removal_of_a_closed_one_is_a_new_source(
    closing: Client, gateway: FakeGateway, content: bytes, same_inode: bool, name: str
) -> None:
    """Deleted, and a new file at the same path or at another one, perhaps with the inode used again. It begins as the
    old one, or is equal to it.
    """
    with_closed(closing)
    if same_inode:
        rewrite_file(closing.root / "a.log", content)
        if name != "a.log":
            (closing.root / "a.log").rename(closing.root / name)
    else:
        (closing.root / "a.log").unlink()
        closing.write("has the inode", b"")
        closing.write(name, content)
    for _ in range(3):
        searched(closing, times=4)
        closing.write(name, b"more\n")
    closing.settle()
    assert sorted(closing.stored()) == sorted([HEAD + b"one\n", content + b"more\n" * 3])
    by_content = {stored.content(): source for source, stored in gateway.sources.items()}
    assert f"/{name}#" in by_content[content + b"more\n" * 3]


@pytest.mark.parametrize("name", ["a.log", "c.log"])
def test_a_used_inode_without_birth_time_is_recognised_by_the_content(
    closing: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("logferry.client.files.tail.born_ns", lambda _: 0)
    with_closed(closing)
    rewrite_file(closing.root / "a.log", HEAD + b"other lines\n")
    (closing.root / "a.log").rename(closing.root / name)
    searched(closing, times=10)
    assert sorted(closing.stored()) == [HEAD + b"one\n", HEAD + b"other lines\n"]


def test_a_used_inode_of_a_file_that_no_pattern_shows_is_not_sent(
    closing: Client, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the folder, with the inode of the closed file, and is nobody's business."""
    for births in (True, False):
        if not births:
            monkeypatch.setattr("logferry.client.files.tail.born_ns", lambda _: 0)
        with_closed(closing)
        rewrite_file(closing.root / "a.log", b"secret\n")
        (closing.root / "a.log").rename(closing.root / "secret")
        searched(closing, times=10)
        assert not any(b"secret" in stored for stored in closing.stored())
        (closing.root / "secret").unlink()


@pytest.mark.parametrize("content", [HEAD + b"two\n", b"#Version: 2.0\none\n", HEAD + b"one more line\n", b"", b"1\n"])
def test_a_file_truncated_and_rewritten_while_it_was_closed_is_a_new_source(closing: Client, content: bytes) -> None:
    """Also to the same size, and with the old time of change."""
    with_closed(closing)
    path = closing.root / "a.log"
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_ino == before.st_ino
    searched(closing, times=4)
    assert closing.stored() == [HEAD + b"one\n"] + [content] * bool(content)
    closing.write("a.log", b"more\n")
    closing.settle()
    assert closing.stored() == [HEAD + b"one\n", content + b"more\n"]


def test_without_births_a_truncated_file_is_named_and_an_empty_one_is_the_same(
    closing: Client, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("logferry.client.files.tail.born_ns", lambda _: 0)
    closing.write("b.log", b"")
    with_closed(closing)
    os.truncate(closing.root / "a.log", 0)
    closing.write("b.log", b"1\n")
    searched(closing)
    assert "truncated: it holds 0 bytes" in caplog.text
    assert (sorted(closing.stored()), "file-gone" in caplog.text) == ([HEAD + b"one\n", b"1\n"], False)
    assert len(closing.agent.watch.sources) == 2


def test_a_touched_or_linked_file_is_the_same(closing: Client) -> None:
    with_closed(closing)
    (closing.root / "a.log").touch()
    (closing.root / "a.log").chmod(0o600)
    os.link(closing.root / "a.log", closing.root / "b.log")
    rest(closing)
    (closing.root / "a.log").unlink()
    closing.write("b.log", b"two\n")
    searched(closing)
    assert closing.stored() == [HEAD + b"one\ntwo\n"]


def mount(*arguments: str) -> None:
    made = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"mounting is not permitted here: {made.stderr.decode().strip()}")


def test_a_file_system_of_closed_files_is_unmounted_and_mounted_again(tmp_path: Path, gateway: FakeGateway) -> None:
    """While it is away the source waits, however long; the space of a deleted file is free at once."""
    disk, root = tmp_path / "disk", tmp_path / "root"
    disk.mkdir()
    (root / "logs").mkdir(parents=True)
    with ExitStack() as stack:
        mount("-t", "tmpfs", "-o", "size=16m", "logferry-test", str(disk))
        stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
        mount("--bind", str(disk), str(root / "logs"))
        stack.callback(subprocess.run, ["umount", "-l", str(root / "logs")], check=True)
        group = FileGroup((str(root / "logs/*.log"),), "t", close_inactive_s=CLOSE_S)
        client = Client(root, gateway, files=(group,))
        stack.callback(client.close)
        client.write("logs/a.log", HEAD + b"one\n")
        client.write("logs/large.log", (b"x" * 9999 + b"\n") * 100)
        rest(client)
        free = os.statvfs(disk).f_bfree
        (root / "logs/large.log").unlink()
        assert os.statvfs(disk).f_bfree - free > 1_000_000 // 4096
        subprocess.run(["umount", str(root / "logs")], check=True)  # busy, if a file were open
        searched(client, times=20)
        assert any("a.log" in name for name in client.agent.watch.sources)
        assert not any(stored.beats[-1].get("finished") for stored in gateway.sources.values() if stored.beats)
        with (disk / "a.log").open("ab") as file:
            file.write(b"two\n")
        mount("--bind", str(disk), str(root / "logs"))
        searched(client, times=10)
        client.write("logs/a.log", b"three\n")
        client.settle()
        assert sorted(client.stored())[0] == HEAD + b"one\ntwo\nthree\n"
        assert len(gateway.sources) == 2


# ---- the whole client ------------------------------------------------------------------------------------------


def test_a_thousand_quiet_files_hold_few_descriptors_and_a_deleted_one_no_space(tmp_path: Path) -> None:
    """A client as a process: one of the files is busy all the time."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for number in range(1000):
        (logs / f"{number}.log").write_bytes(b"%d\n" % number)
    deadline = time.monotonic() + BOUND_S

    def until(holds: Any) -> None:
        while not holds():
            assert time.monotonic() < deadline
            with (logs / "busy.log").open("ab") as busy:
                busy.write(b"busy\n")
            time.sleep(0.1)

    with (
        Served(FakeGateway()) as served,
        running(tmp_path, served.url, "--close-inactive-s", "2", str(logs / "*.log")) as process,
    ):
        until(lambda: len(served.gateway.sources) >= 1001)
        until(lambda: descriptors(logs, process.pid) == [str(logs / "busy.log")])
        assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 60
        (logs / "7.log").unlink()
        with (logs / "8.log").open("ab") as writer:
            writer.write(b"more\n")
        sources = served.gateway.sources
        until(lambda: any(stored.content() == b"8\nmore\n" for stored in sources.values()))
        assert descriptors(logs, process.pid) == [str(logs / "8.log"), str(logs / "busy.log")]
        assert sum(len(stored.content()) > 0 for stored in sources.values()) == 1001


@pytest.mark.parametrize("setting", ["--close-inactive-s=-1"])
def test_a_negative_time_is_refused(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--url", "http://h:1", "--topic", "t", "--state-dir", str(tmp_path), setting, "/logs/*"])
    assert "--close-inactive-s -1 is not between" in capsys.readouterr().err
