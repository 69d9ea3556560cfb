"""The checkpoint: whole or not at all, and a defined answer to everything that may lie in its place."""

import json
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from logferry.client.files.checkpoint import FILE, FORGET_AFTER_MS, Checkpoint, CheckpointEntry, StateUnusable
from logferry.client.files.identity import fingerprint


def entry(name: str = "h:/a#1", **changes: object) -> CheckpointEntry:
    now_ms = int(time.time() * 1000)
    return CheckpointEntry(
        **{
            **CheckpointEntry(name, "/a", "/a.1", 1, 2, fingerprint(b"head"), 4, fingerprint(b"head"), now_ms).facts(),
            **changes,
        }
    )


def written(folder: Any, *entries: CheckpointEntry) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.entries = {e.source_id: e for e in entries}
    checkpoint.generation = 7
    checkpoint.save()
    checkpoint.close()


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    entries = [entry(), entry("h:/\N{SNOWMAN} \udcff#2", path="/\udcff")]
    written(tmp_path / "new" / "folder", *entries)
    checkpoint = Checkpoint.open(tmp_path / "new" / "folder")
    assert [one.facts() for one in checkpoint.entries.values()] == [one.facts() for one in entries]
    assert checkpoint.generation == 7
    checkpoint.close()


def test_a_second_client_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = Checkpoint.open(tmp_path)
    with pytest.raises(StateUnusable, match="another client"):
        Checkpoint.open(tmp_path)
    first.close()
    Checkpoint.open(tmp_path).close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw.replace(b'"position": 4', b'"position": 5'),
        lambda raw: b"\0" * len(raw),
        lambda raw: b"[]\n" + raw,
        lambda raw: b'{"version": "x"}\n',
        lambda raw: raw.replace(b"logferry-push", b"something-else"),
    ],
)
def test_a_corrupt_one_is_set_aside_and_everything_is_new(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, entry())
    raw = (tmp_path / FILE).read_bytes()
    assert damage(raw) != raw
    (tmp_path / FILE).write_bytes(damage(raw))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.entries == {}
    assert not (tmp_path / FILE).exists()
    assert [path.read_bytes() for path in tmp_path.glob(FILE + ".corrupt-*")] == [damage(raw)]
    assert checkpoint.next_generation() > 7
    checkpoint.close()
    assert "state-corrupt" in caplog.text


def test_one_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    written(tmp_path, entry())
    raw = (tmp_path / FILE).read_bytes().replace(b'"version": 7', b'"version": 8')
    (tmp_path / FILE).write_bytes(raw)
    for _ in range(2):  # the lock is free again after the refusal
        with pytest.raises(StateUnusable, match="version 8"):
            Checkpoint.open(tmp_path)
    assert (tmp_path / FILE).read_bytes() == raw


def test_an_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateUnusable, match=str(tmp_path / "file")):
        Checkpoint.open(tmp_path / "file")


def test_generations_rise_even_when_the_clock_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(tmp_path)
    clock = iter([100.0, 100.0, 50.0, 200.0])
    monkeypatch.setattr("logferry.client.files.checkpoint.time.time", lambda: next(clock))
    assert [checkpoint.next_generation() for _ in range(4)] == [100_000, 100_001, 100_002, 200_000]
    checkpoint.close()


def test_entries_of_files_not_seen_for_long_are_forgotten(tmp_path: Path) -> None:
    old = entry("h:/old#1", seen_ms=int(time.time() * 1000) - FORGET_AFTER_MS - 1)
    written(tmp_path, old, entry())
    assert [e["source_id"] for e in json.loads((tmp_path / FILE).read_bytes().split(b"\n")[1])["entries"]] == ["h:/a#1"]


def test_the_one_before_stays_whole_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, entry())
    before = (tmp_path / FILE).read_bytes()
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.entries["h:/b#2"] = entry("h:/b#2")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("logferry.client.files.checkpoint.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save()
    checkpoint.close()
    assert (tmp_path / FILE).read_bytes() == before


OF_6 = b', "real_path": ""'
OF_5 = b', "marks": []'
OF_4 = b', "dc": "", "since": 0' + OF_5


@pytest.mark.parametrize(
    ("version", "missing"),
    [(1, b', "born_ns": 0, "topic": ""' + OF_4), (2, b', "topic": ""' + OF_4), (3, OF_4), (4, OF_5), (6, OF_6)],
)
def test_one_of_a_version_before_is_read(tmp_path: Path, version: int, missing: Any) -> None:
    written(tmp_path, entry())
    head, body, _ = (tmp_path / FILE).read_bytes().split(b"\n")
    assert missing in body
    body = body.replace(missing, b"").replace(b' "dc": "", "host": "", "machine": "", "boot": "",', b"")
    head = json.dumps({"format": "logferry-push", "version": version, "crc32": zlib.crc32(body)}).encode()
    (tmp_path / FILE).write_bytes(head + b"\n" + body + b"\n")
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint.entries) == ["h:/a#1"]
    checkpoint.close()
