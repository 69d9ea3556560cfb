"""``--check``: what would be sent and why; nothing is sent and nothing is written."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.main import main
from logferry.client.files.checkpoint import FILE, Checkpoint, CheckpointEntry
from logferry.client.files.identity import fingerprint


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs it over ``*`` of the folder; returns exit status and lines, without the folder's name."""

    def run(*patterns: str, options: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        globs = [str(tmp_path / pattern) for pattern in patterns or ("*",)]
        where = ("--url", "http://127.0.0.1:1", "--topic", "t", "--state-dir", str(tmp_path / "state"))
        status = main([*where, "--host", "h", "--check", *options, *globs])
        return status, capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()

    return run


def known(folder: Path, name: str, position: int) -> None:
    """Writes a checkpoint that knows the file up to the position."""
    path = folder / name
    facts, content = path.stat(), path.read_bytes()
    checkpoint = Checkpoint.open(folder / "state")
    head, mark = fingerprint(content), fingerprint(content[:position])
    entry = CheckpointEntry(
        f"h:{path}#1", str(path), str(path), facts.st_dev, facts.st_ino, head, position, mark, 2**60, topic="t"
    )
    checkpoint.entries[entry.source_id] = entry
    checkpoint.save()
    checkpoint.close()


def test_what_is_sent_and_what_is_left_out(check: Any, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\ntwo\n")
    (tmp_path / "a.log.1.gz").write_bytes(b"x")
    (tmp_path / "b.debug.log").write_bytes(b"x")
    os.link(tmp_path / "a.log", tmp_path / "z.log")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert check(options=("--exclude", "*.debug.log")) == (
        0,
        [
            "send  a.log -> t: 8 bytes, as a new source: first seen",
            "skip  a.log.1.gz: compressed: its plain incarnation was a source",
            "skip  b.debug.log: excluded",
            "skip  pipe: not a regular file",
            "skip  z.log: another name of a file",
            "1 files, 8 bytes; the gateway decides where each resumes",
        ],
    )
    assert not (tmp_path / "state").exists()


def test_known_files_continue_even_while_a_client_runs(check: Any, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\ntwo\n")
    known(tmp_path, "a.log", 4)
    before = (tmp_path / "state" / FILE).read_bytes()
    running = Checkpoint.open(tmp_path / "state")
    assert check("*.log") == (
        0,
        [
            "send  a.log -> t: 4 bytes, from position 4",
            "1 files, 4 bytes; the gateway decides where each resumes",
        ],
    )
    running.close()
    assert (tmp_path / "state" / FILE).read_bytes() == before


def test_why_a_known_file_is_another_one(check: Any, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\ntwo\n")
    known(tmp_path, "a.log", 4)
    (tmp_path / "a.log").write_bytes(b"new\n")
    status, lines = check("*.log")
    assert status == 0
    assert lines[0].startswith("over  a.log: sent up to position 4, h:")
    assert lines[1] == "send  a.log -> t: 4 bytes, as a new source: its first 8 bytes are not what they were"


def test_a_file_that_was_compressed_meanwhile_continues_in_its_gz(check: Any, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\ntwo\n")
    known(tmp_path, "a.log", 4)
    (tmp_path / "a.log.1.gz").write_bytes(gzip.compress((tmp_path / "a.log").read_bytes()))
    (tmp_path / "a.log").unlink()
    assert check("*.log*") == (
        0,
        [
            "send  a.log.1.gz -> t: 4 bytes, from position 4",
            "1 files, 4 bytes; the gateway decides where each resumes",
        ],
    )


def test_nothing_there_is_a_no(check: Any) -> None:
    assert check("*.log") == (1, ["0 files, 0 bytes; the gateway decides where each resumes"])


@pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 99])
def test_a_damaged_checkpoint_is_left_where_it_is(
    check: Any, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.log").write_bytes(b"one\n")
    known(tmp_path, "a.log", 4)
    (tmp_path / "state" / FILE).write_bytes(damage)
    status, lines = check("*.log")
    assert (status, lines[0]) == (0, "send  a.log -> t: 4 bytes, as a new source: first seen")
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [FILE, "lock"]


def test_one_of_a_newer_version_is_named(check: Any, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\n")
    known(tmp_path, "a.log", 4)
    newer = (tmp_path / "state" / FILE).read_bytes().replace(b'"version": 7', b'"version": 8')
    (tmp_path / "state" / FILE).write_bytes(newer)
    assert check("*.log") == (2, [])


@pytest.mark.parametrize("options", [(), ("--exclude", "*.log")])
def test_a_name_that_is_no_utf_8_and_one_that_steers_the_terminal(
    check: Any, tmp_path: Path, options: tuple[str, ...]
) -> None:
    for name in (b"\xff\x1b[2J.log", "\x9b2J\u202e.log".encode()):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"line\n")
    status, lines = check(options=options)
    assert status == (1 if options else 0)
    assert [line.split(":")[0].split(" ->")[0][6:] for line in lines[:2]] == [
        "\\x9b2J\\u202e.log",
        "\\udcff\\x1b[2J.log",
    ]


def test_each_topic_of_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_bytes(b"one\ntwo\n")
    known(tmp_path, "a.log", 4)
    text = f'url = "http://127.0.0.1:1"\nstate_dir = "{tmp_path}/state"\nhost = "h"\n'
    (tmp_path / "push.toml").write_text(f'{text}[[files]]\npaths = "{tmp_path}/*.log"\ntopics = ["t", "u"]\n')
    assert main(["--config", str(tmp_path / "push.toml"), "--check"]) == 0
    assert capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines() == [
        "send  a.log -> t: 4 bytes, from position 4",
        "send  a.log -> u: 8 bytes, as a new source: first seen",
        "1 files, 12 bytes; the gateway decides where each resumes",
    ]
    assert not (tmp_path / "state" / "topics").exists()
