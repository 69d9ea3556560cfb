"""Copies that rotation makes, where the patterns fit them: the source continues in the copy, and nothing is doubled."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from logferry.client.files.checkpoint import Checkpoint
from logferry.client.files.rotation import QUIET_S, originals

NAMES = ("a.log.1", "a.log-20261122", "a-20261122.log", "a.1.log", "a.log.old", "a-2026-11-22.log")


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("a.log.1", ["a.log"]),
        ("a.log-20261122", ["a.log"]),
        ("a.log-20261122-1530", ["a.log-20261122", "a.log"]),
        ("a-20261122.log", ["a.log"]),
        ("a.20261122.log", ["a.log"]),
        ("a.log.4.5", ["a.log.4", "a.log"]),
        ("a-2026-11-22.log", ["a-2026-11.log", "a-2026.log", "a.log"]),
        ("a-20261122-1530.log", ["a-20261122.log", "a.log"]),
        ("web-1-20261122.log", ["web-1.log", "web.log"]),
        ("a-1.log", ["a.log"]),
        ("a.1.log.gz", []),
        ("a.old.1.log", ["a.old.log", "a.log"]),
        ("ab.log", []),
        ("a.log.old", ["a.log"]),
        ("a.log.older", []),
        ("old", []),
        (".old", []),
        ("a.log", []),
    ],
)
def test_names_that_rotation_derives(name: str, of: list[str]) -> None:
    assert originals(name) == of


def text(name: str, lines: int) -> bytes:
    return b"".join(b"%s line %d\n" % (name.encode(), number) for number in range(lines))


def copytruncate(client: Any, name: str, to: str, until: Any = lambda: None) -> None:
    shutil.copyfile(client.root / name, client.root / to)
    until()
    os.truncate(client.root / name, 0)


@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("lines", [1, 300])
@pytest.mark.parametrize("down", [False, True])
def test_copytruncate_with_a_pattern_that_fits_the_copy_sends_every_line_once(
    client: Any, to: str, lines: int, down: bool
) -> None:
    """Also the lines that were not sent yet when the file was truncated."""
    client.write("a.log", text("first", lines))
    client.settle()
    if down:
        assert client.agent.remember(client.now)
        client.close()
    client.write("a.log", b"unsent\n")
    copytruncate(client, "a.log", to)
    client.write("a.log", b"second\n")
    if down:
        client.begin()
    client.settle()
    client.restart()
    client.settle()
    assert sorted(client.stored()) == sorted([text("first", lines) + b"unsent\n", b"second\n"])


def test_a_copy_that_is_found_before_the_truncation_waits_for_it(client: Any) -> None:
    client.write("a.log", text("first", 300))
    client.settle()

    def look() -> None:
        for _ in range(3):
            client.step(1.5)

    copytruncate(client, "a.log", "a.log.1", until=look)
    client.settle()
    assert client.stored() == [text("first", 300)]


def test_copytruncate_again_and_again(client: Any) -> None:
    expected = []
    for turn in range(4):
        client.write("a.log", text(f"turn {turn}", 100))
        if turn % 2:
            client.step()
        expected.append(text(f"turn {turn}", 100))
        for number in range(turn, 0, -1):
            (client.root / f"a.log.{number}").rename(client.root / f"a.log.{number + 1}")
        client.step()
        copytruncate(client, "a.log", "a.log.1")
        client.settle()
    assert sorted(client.stored()) == sorted(expected)


@pytest.mark.parametrize("down", [False, True])
def test_a_batch_under_way_while_the_file_is_truncated_is_sent_once(client: Any, down: bool) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    client.write("a.log", text("more", 100))
    client.now += 5
    client.agent.tick(client.now)
    ((source, job),) = client.agent.jobs(client.now, 5)
    client.write("a.log", b"behind it\n")
    copytruncate(client, "a.log", "a.log.1")
    client.write("a.log", b"two\n")
    client.now += 5
    client.agent.tick(client.now)
    outcome = client.pusher.perform(job)
    if down:
        client.restart()  # the answer was lost
    else:
        client.agent.finish(source, job, outcome, client.now)
    client.settle()
    assert sorted(client.stored()) == [b"one\n" + text("more", 100) + b"behind it\n", b"two\n"]


def test_a_copy_of_a_file_that_stays_is_not_sent(client: Any, gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    gateway.is_one_of_many = True  # the copy's own source begins behind what the other one has
    client.write("a.log", text("only", 300))
    client.settle()
    shutil.copyfile(client.root / "a.log", client.root / "a.log.1")
    client.write("a.log", b"more\n")
    client.settle()
    client.step(QUIET_S)
    client.settle()
    client.restart()
    client.write("a.log", b"and more\n")
    client.settle()
    assert client.stored() == [text("only", 300) + b"more\nand more\n"]
    assert "a copy of a followed file" in caplog.text


def test_files_that_only_begin_alike_are_sent_whole(client: Any) -> None:
    """Less than a head, or other lines behind it: then they are no copies, whatever their names say."""
    client.write("a.log", b"#Version: 1.0\n")
    client.write("b.log", b"#" * 2000 + b"\n")
    client.settle()
    client.write("a.log.1", b"#Version: 1.0\n")
    client.write("b.log.1", b"#" * 2000 + b"\nother\n")
    client.settle()
    for _ in range(3):
        client.step(QUIET_S)
    client.settle()
    expected = [b"#Version: 1.0\n"] * 2 + [b"#" * 2000 + b"\n", b"#" * 2000 + b"\nother\n"]
    assert sorted(client.stored()) == sorted(expected)


def test_a_copy_under_a_name_that_no_pattern_fits_still_has_the_lines_that_were_not_sent(client: Any) -> None:
    (client.root / "plain").write_bytes(b"")
    client.config = client.config._replace(
        files=tuple(files._replace(patterns=(str(client.root / "*.log"),)) for files in client.config.files)
    )
    client.restart()
    client.write("a.log", b"one\n")
    client.settle()
    client.write("a.log", b"unsent\n")
    copytruncate(client, "a.log", "a.log.1")
    client.write("a.log", b"two\n")
    client.settle()
    assert client.stored() == [b"one\nunsent\n", b"two\n"]


def test_a_file_moved_to_another_file_system_while_the_client_was_down_is_read_to_its_end(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    client.write("a.log", b"unsent\n")
    shutil.copyfile(client.root / "a.log", client.root / "a.log.1")
    (client.root / "a.log").unlink()
    client.begin()
    client.settle()
    assert client.stored() == [b"one\nunsent\n"]


@pytest.mark.parametrize("head", [b"", b"#" * 2000 + b"\n"])
def test_a_numbered_file_that_grows_does_not_wait(client: Any, head: bytes) -> None:
    """Its name and its beginning may be those of a copy, but it holds what the other file never did."""
    client.write("a.log", head + b"other\n" * 100 * bool(head))
    client.settle()
    client.write("a.1.log", head)
    for _ in range(4):
        client.write("a.1.log", b"its own\n")
        client.step(1.0)
        client.step(0.1)
    assert client.stored()[-1] == head + b"its own\n" * 4


def test_an_older_rotated_file_is_not_taken_for_the_copy(client: Any) -> None:
    client.write("a.log.1", b"old\n")
    client.write("a.log", b"one\n")
    client.settle()
    Path(client.root / "a.log.2").write_bytes(gzip.compress(b"one\n"))
    os.truncate(client.root / "a.log", 0)
    client.write("a.log", b"two\n")
    client.settle()
    assert sorted(client.stored())[-3:] == [b"old\n", b"one\n", b"two\n"]


@pytest.mark.parametrize("lines", [1, 300])
def test_a_suspected_copy_that_is_removed_while_it_waits_is_sent(client: Any, lines: int) -> None:
    """It begins as the followed file, but is another one."""
    client.write("a.log", text("same", lines))
    client.settle()
    client.write("a.log.1", text("same", lines) + b"its own\n")
    client.step(1.0)
    (client.root / "a.log.1").unlink()
    client.settle()
    assert sorted(client.stored()) == [text("same", lines), text("same", lines) + b"its own\n"]


def test_a_copy_that_is_removed_after_it_was_seen_still_has_the_lines_that_were_not_sent(client: Any) -> None:
    """As logrotate removes it, once it is compressed."""
    client.write("a.log", text("first", 300))
    client.settle()
    client.write("a.log", b"unsent\n")
    shutil.copyfile(client.root / "a.log", client.root / "a.log.1")
    client.now += 4.0  # the next search may be seconds later on a loaded machine
    client.agent.tick(client.now)
    (client.root / "a.log.1").unlink()
    os.truncate(client.root / "a.log", 0)
    client.write("a.log", b"second\n")
    client.settle()
    assert sorted(client.stored()) == sorted([text("first", 300) + b"unsent\n", b"second\n"])


@pytest.mark.parametrize("to", ["a.log.1", "a.log.1.2"])
def test_a_copy_of_less_than_was_sent_is_not_sent(client: Any, gateway: Any, to: str) -> None:
    """The program wrote between the copy and the truncation, and that was sent already."""
    gateway.is_one_of_many = True
    name = to[:-2]
    client.write(name, text("first", 300))
    client.settle()
    shutil.copyfile(client.root / name, client.root / to)
    client.write(name, b"late\n")
    client.step(1.0)
    client.step(1.0)
    os.truncate(client.root / name, 0)
    client.settle()
    client.restart()
    client.settle()
    assert client.stored() == [text("first", 300) + b"late\n"]


def test_a_copy_with_the_inode_of_a_file_that_was_removed_continues_the_source(client: Any) -> None:
    """As logrotate makes it, which removes an older copy first; the client is down."""
    client.write("a.log", text("first", 300))  # first: a copy is not older
    client.write("a.log.1", text("older", 300))
    client.settle()
    assert client.agent.remember(client.now)
    old = (client.root / "a.log.1").stat().st_ino
    client.close()
    client.write("a.log", b"unsent\n")
    shutil.copyfile(client.root / "a.log", client.root / "copy")
    (client.root / "a.log.1").write_bytes((client.root / "copy").read_bytes())  # the same inode, another content
    assert (client.root / "a.log.1").stat().st_ino == old
    os.truncate(client.root / "a.log", 0)
    client.write("a.log", b"second\n")
    client.begin()
    client.settle()
    client.restart()
    client.settle()
    assert sorted(client.stored()) == sorted([text("older", 300), text("first", 300) + b"unsent\n", b"second\n"])


def test_truncated_while_the_host_was_rebooted_with_other_device_numbers(client: Any) -> None:
    """Neither its number nor its content finds the file; the copy still has what was not sent."""
    client.config = client.config._replace(
        files=tuple(files._replace(patterns=(str(client.root / "*.log"),)) for files in client.config.files)
    )
    client.restart()
    client.write("a.log", text("sent", 100))
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    checkpoint = Checkpoint.open(Path(client.config.state_dir))
    for entry in checkpoint.entries.values():
        entry.device += 1000
    checkpoint.save()
    checkpoint.close()
    client.write("a.log", text("unsent", 5))
    copytruncate(client, "a.log", "a.log.1")
    client.write("a.log", b"two\n")
    client.begin()
    client.settle()
    assert sorted(client.stored()) == sorted([text("sent", 100) + text("unsent", 5), b"two\n"])


@pytest.mark.parametrize("lines", [1, 300])
@pytest.mark.parametrize("is_renumbered", [False, True])
@pytest.mark.parametrize("is_recreated", [False, True])
def test_copied_and_truncated_or_removed_while_the_client_is_down(
    client: Any, lines: int, is_renumbered: bool, is_recreated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy fits the pattern; under the old name another file begins, or the same one on another device. The log
    says so: what was written between the copy and the truncation is in neither."""
    caplog.set_level("INFO")
    client.write("a.log", text("first", lines))
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    if is_renumbered:
        checkpoint = Checkpoint.open(client.root / "state")
        for entry in checkpoint.entries.values():
            entry.device += 1000
        checkpoint.save()
        checkpoint.close()
    client.write("a.log", b"unsent\n")
    copytruncate(client, "a.log", "a.log.1")
    if is_recreated:
        (client.root / "a.log").rename(client.root / "gone")
        client.write("a.log", b"")
        (client.root / "gone").unlink()
    client.write("a.log", b"second\n")
    client.begin()
    client.settle()
    assert f"source-copied source=h:{client.root}/a.log#" in caplog.text
    client.restart()
    client.settle()
    assert sorted(client.stored()) == sorted([text("first", lines) + b"unsent\n", b"second\n"])


@pytest.mark.parametrize("lines", [1, 300])
@pytest.mark.parametrize("is_intact", [False, True])
def test_copied_and_renamed_out_of_the_pattern_while_the_client_is_down(
    client: Any, lines: int, is_intact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The source continues in the copy if the renamed file was truncated. Else it continues in that file, and the copy
    is a file of its own."""
    caplog.set_level("INFO")
    client.write("a.log", text("first", lines))
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    client.write("a.log", b"unsent\n")
    shutil.copyfile(client.root / "a.log", client.root / "a.log.1")
    if not is_intact:
        os.truncate(client.root / "a.log", 0)
    (client.root / "a.log").rename(client.root / "kept")
    client.begin()
    client.settle()
    assert (f"source-copied source=h:{client.root}/a.log#" in caplog.text) != is_intact
    client.restart()
    client.settle()
    assert client.stored() == [text("first", lines) + b"unsent\n"] * (1 + is_intact)


def test_a_copy_that_got_the_inode_of_its_original_is_sent_once(client: Any) -> None:
    """A copy of a copy, made while the client was down and the original was gone."""
    client.write("a.log", text("first", 300))
    client.settle()
    assert client.agent.remember(client.now)
    original = (client.root / "a.log").stat().st_ino
    client.close()
    shutil.copyfile(client.root / "a.log", client.root / "a.log.1")
    (client.root / "a.log").rename(client.root / "a.log.1.2")
    content = (client.root / "a.log.1").read_bytes()
    checkpoint = Checkpoint.open(client.root / "state")
    for entry in checkpoint.entries.values():  # as a file system that uses the inode again shows it
        entry.born_ns -= 1
    checkpoint.save()
    checkpoint.close()
    os.truncate(client.root / "a.log.1", 0)
    assert (client.root / "a.log.1.2").stat().st_ino == original
    client.begin()
    client.settle()
    client.restart()
    client.settle()
    assert client.stored() == [content]
