"""The hard cases of files, with real renames and real inodes: no byte lost, none doubled, and why a source is new."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path
from typing import Any

import pytest


def rewrite_file(path: Path, content: bytes) -> bool:
    """Removes the file and makes one with the same inode, as file systems do when one has just become free.

    False where this one does not, or another process was faster: then it is a new file all the same.
    """
    inode = path.stat().st_ino
    path.unlink()
    others = []
    for number in range(100):
        path.write_bytes(content)
        if path.stat().st_ino == inode:
            break
        others.append(path.rename(path.with_name(f".other-{number}")))
    path.write_bytes(content)
    for other in others:
        other.unlink()
    return path.stat().st_ino == inode


def test_copytruncate_makes_a_new_generation_and_says_why(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.write("a.log", b"one\ntwo\n")
    client.settle()
    shutil.copyfile(client.root / "a.log", client.root / "copy")
    os.truncate(client.root / "a.log", 0)
    client.write("a.log", b"three\n")
    client.settle()
    assert client.stored() == [b"one\ntwo\n", b"three\n"]
    assert len({name.rpartition("#")[0] for name in gateway.sources}) == 1
    assert "source-over" in caplog.text
    assert "truncated: it holds 6 bytes, 8 were sent" in caplog.text


@pytest.mark.parametrize("down", [False, True])
def test_a_file_rewritten_in_place_is_new(client: Any, down: bool, caplog: pytest.LogCaptureFixture) -> None:
    client.write("a.log", b"first\nsecond\n")
    client.settle()
    if down:
        assert client.agent.remember(client.now)
        client.close()
    client.write("a.log", b"other\nsecond\nand more\n", "wb")
    if down:
        client.begin()
    client.settle()
    assert client.stored() == [b"first\nsecond\n", b"other\nsecond\nand more\n"]
    assert "source-over" in caplog.text
    assert "not what they were" in caplog.text


@pytest.mark.parametrize("down", [False, True])
def test_a_file_replaced_by_a_rename_is_new_and_the_old_one_is_read_to_its_end(client: Any, down: bool) -> None:
    """What the old one got after it had lost its name is read by a client that has it open, and by no other."""
    client.write("a.log", b"one\n")
    client.settle()
    writer = (client.root / "a.log").open("ab")
    if down:
        assert client.agent.remember(client.now)
        client.close()
    client.write("new", b"another\n")
    (client.root / "new").rename(client.root / "a.log")
    with writer:
        writer.write(b"two\n")
    if down:
        client.begin()
    client.settle()
    assert client.stored() == [b"one\n" if down else b"one\ntwo\n", b"another\n"]


def test_a_deleted_file_is_read_to_its_end_as_long_as_its_writer_writes(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    with (client.root / "a.log").open("ab") as writer:
        (client.root / "a.log").unlink()
        for number in range(3):
            writer.write(b"%d\n" % number)
            writer.flush()
            client.settle()
    assert client.stored() == [b"one\n0\n1\n2\n"]


@pytest.mark.parametrize("header", [b"", b"#Version: 1.0\n", b"#" + b"x" * 3000 + b"\n"])
def test_an_inode_used_again_while_the_client_is_down_is_another_file(
    client: Any, header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the new file begins with all the bytes of the old one."""
    client.write("a.log", header + b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    same_inode = rewrite_file(client.root / "a.log", header + b"one\ntwo\n")
    client.begin()
    client.settle()
    assert client.stored() == [header + b"one\n", header + b"one\ntwo\n"]
    assert not same_inode or "another file, made later, has its inode" in caplog.text


def test_a_reused_inode_without_birth_time_is_recognised_by_its_content(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("logferry.client.files.tail.born_ns", lambda fd: 0)
    client.restart()
    client.write("a.log", b"#Version: 1.0\none\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    same_inode = rewrite_file(client.root / "a.log", b"#Version: 1.0\nother\n")
    client.begin()
    client.settle()
    assert client.stored() == [b"#Version: 1.0\none\n", b"#Version: 1.0\nother\n"]
    assert not same_inode or "its first 18 bytes are not what they were" in caplog.text


def test_short_files_with_the_same_first_bytes_are_different_sources(client: Any) -> None:
    for number in range(5):
        client.write(f"{number}.log", b"#Version: 1.0\n")
    client.settle()
    client.restart()
    for number in range(5):
        client.write(f"{number}.log", b"%d\n" % number)
    client.settle()
    assert sorted(client.stored()) == [b"#Version: 1.0\n%d\n" % number for number in range(5)]


@pytest.mark.parametrize("rotations", [1, 3])
def test_rotations_while_the_client_is_down_lose_and_double_nothing(client: Any, rotations: int) -> None:
    for number in range(3):
        client.write(f"a.log.{number}" if number else "a.log", b"file %d\n" % number)
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    client.write("a.log", b"its end\n")
    for turn in range(rotations):
        for number in range(2 + turn, -1, -1):
            old = client.root / (f"a.log.{number}" if number else "a.log")
            old.rename(client.root / f"a.log.{number + 1}")
        client.write("a.log", b"turn %d\n" % turn)
    client.begin()
    client.settle()
    held = [path.read_bytes() for path in client.root.glob("a.log*")]
    assert sorted(client.stored()) == sorted(held)
    assert len(held) == 3 + rotations


def test_a_file_that_is_compressed_is_finished_first_and_the_gz_is_no_source(client: Any, gateway: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    (client.root / "a.log").rename(client.root / "a.log.1")
    client.write("a.log.1", b"two\n")
    client.write("a.log", b"three\n")
    (client.root / "a.log.1.gz").write_bytes(gzip.compress((client.root / "a.log.1").read_bytes()))
    (client.root / "a.log.1").unlink()
    client.settle()
    assert client.stored() == [b"one\ntwo\n", b"three\n"]
    assert len(gateway.sources) == 2


LINES = b"".join(b"%d %s\n" % (number, b"x" * 50) for number in range(3000))


def compress(client: Any, name: str) -> None:
    path = client.root / name
    (client.root / f"{name}.1.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@pytest.mark.parametrize("client", [{"request_bytes": 16384, "chunk_bytes": 8192, "line_bytes": 8192}], indirect=True)
@pytest.mark.parametrize("restart_every", [1, 1000])
def test_a_file_compressed_while_the_client_was_down_is_read_on_in_its_gz(
    client: Any, gateway: Any, restart_every: int
) -> None:
    for name in ("other", "another"):
        (client.root / f"{name}.gz").write_bytes(gzip.compress(b"something else\n" * 100))
    (client.root / "broken.gz").write_bytes(gzip.compress(LINES)[:5000])
    client.write("a.log", b"one\ntwo\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    client.write("a.log", LINES + b"no newline")
    compress(client, "a.log")
    client.write("a.log", b"new\n")
    client.begin()
    for number in range(30):
        client.step()
        client.step()
        if number % restart_every == 0:
            client.restart()
    client.settle()
    assert client.stored() == [b"one\ntwo\n" + LINES + b"no newline", b"new\n"]
    old, _ = gateway.sources.values()
    assert {chunk.attributes["path"] for chunk in old.chunks} == {str(client.root / "a.log")}
    assert old.beats[-1]["finished"]
    assert len(client.checkpoint.entries) == 1


def test_a_gz_that_holds_less_than_was_sent_is_another_file(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    client.write("a.log", b"one\ntwo\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    (client.root / "a.log").write_bytes(b"one\n")
    compress(client, "a.log")
    client.begin()
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]
    assert "file-gone" in caplog.text


def test_empty_files_are_no_sources_until_they_hold_something(client: Any, gateway: Any) -> None:
    client.write("a.log", b"")
    client.settle()
    client.restart()
    client.settle()
    assert not gateway.sources
    client.write("a.log", b"one\n")
    client.settle()
    assert client.stored() == [b"one\n"]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_other_names_of_a_file_are_no_other_sources(client: Any, link: Any) -> None:
    client.write("m.log", b"one\n")
    client.settle()
    link(client.root / "m.log", client.root / "a.log")
    client.write("m.log", b"two\n")
    client.settle()
    client.restart()
    client.settle()
    (client.root / "m.log").unlink()
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]


def test_a_symbolic_link_that_is_turned_to_another_file_leads_to_a_new_source(client: Any) -> None:
    for number in range(2):
        (client.root / f"target-{number}").write_bytes(b"%d\n" % number)
    (client.root / "current.log").symlink_to("target-0")
    client.settle()
    (client.root / "next").symlink_to("target-1")
    (client.root / "next").rename(client.root / "current.log")
    client.write("target-0", b"late\n")
    client.settle()
    assert client.stored() == [b"0\nlate\n", b"1\n"]


@pytest.mark.parametrize("client", [{"exclude": ("*.debug.log*", "*/b.l*")}], indirect=True)
def test_excluded_files_are_not_sent(client: Any) -> None:
    for name in ("a.log", "a.debug.log", "b.log", "debug.log"):
        client.write(name, name.encode() + b"\n")
    client.settle()
    assert client.stored() == [b"a.log\n", b"debug.log\n"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_target_of_a_link_that_was_rotated_while_the_client_was_down_is_read_to_its_end(
    client: Any, is_gone: bool
) -> None:
    """As under /var/log/containers. ``is_gone``: the link leads nowhere when the client starts."""
    (client.root / "pods").mkdir()
    client.write("pods/0", b"one\n")
    (client.root / "c.log").symlink_to("pods/0")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    client.write("pods/0", b"two\n")
    (client.root / "pods" / "0").rename(client.root / "pods" / "0.20261122")
    if not is_gone:
        client.write("pods/0", b"three\n")
    client.begin()
    client.settle()
    assert client.stored() == [b"one\ntwo\n", *([] if is_gone else [b"three\n"])]
