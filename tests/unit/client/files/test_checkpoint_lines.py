"""Saves after the first one of a process append a line; whatever is cut off or damaged, what was saved before stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logferry.client.files.checkpoint import FILE, Checkpoint, CheckpointEntry
from logferry.client.files.identity import fingerprint


def entry(name: str, position: int = 4) -> CheckpointEntry:
    head = fingerprint(b"head")
    return CheckpointEntry(name, "/a", "/a", 1, 2, head, position, head, int(time.time() * 1000))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    made = Checkpoint.open(tmp_path)
    for number in range(50):
        made.put(entry(f"h:/{number}#1"))
    made.save()
    yield made
    made.close()


def positions(folder: Path) -> dict[str, int]:
    stored = Checkpoint.peek(folder)
    stored.close()
    return {name: entry.position for name, entry in stored.entries.items()}


def test_a_save_appends_what_changed_and_what_is_gone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    whole = (tmp_path / FILE).read_bytes()
    checkpoint.put(entry("h:/1#1", 10))
    checkpoint.drop("h:/2#1")
    checkpoint.put(entry("h:/new#2", 1))
    checkpoint.dc = "west"
    checkpoint.save()
    raw = (tmp_path / FILE).read_bytes()
    assert raw.startswith(whole)
    assert len(raw) - len(whole) < len(whole) / 5
    found = positions(tmp_path)
    assert (found["h:/1#1"], found["h:/new#2"], len(found)) == (10, 1, 50)
    assert "h:/2#1" not in found
    stored = Checkpoint.peek(tmp_path)
    stored.close()
    assert stored.dc == "west"


def test_a_save_cut_off_at_any_byte_leaves_the_one_before(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.put(entry("h:/1#1", 10))
    checkpoint.save()
    before = (tmp_path / FILE).read_bytes()
    checkpoint.put(entry("h:/1#1", 20))
    checkpoint.save()
    after = (tmp_path / FILE).read_bytes()
    for end in range(len(before), len(after) - 1):  # the last byte is the newline
        for rest in (b"", b"\0" * (len(after) - end)):  # a power failure may leave zeros
            (tmp_path / FILE).write_bytes(after[:end] + rest)
            assert positions(tmp_path)["h:/1#1"] == 10, end
    (tmp_path / FILE).write_bytes(after)
    assert positions(tmp_path)["h:/1#1"] == 20


def test_the_first_save_of_a_process_leaves_no_torn_line_behind(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.put(entry("h:/1#1", 10))
    checkpoint.save()
    checkpoint.close()
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'0a1b2c3d {"torn')
    again = Checkpoint.open(tmp_path)
    assert again.is_whole_next
    again.put(entry("h:/2#1", 30))
    again.save()
    again.put(entry("h:/3#1", 40))
    again.save()
    again.close()
    assert b"torn" not in (tmp_path / FILE).read_bytes()
    found = positions(tmp_path)
    assert [found[f"h:/{number}#1"] for number in (1, 2, 3)] == [10, 30, 40]


def test_a_damaged_line_in_the_middle_is_left_out_and_logged(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, position in ((1, 10), (2, 20), (3, 30)):
        checkpoint.put(entry(f"h:/{number}#1", position))
        checkpoint.save()
    raw = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(raw.replace(b'"position": 20', b'"position": 21'))
    found = positions(tmp_path)
    assert [found[f"h:/{number}#1"] for number in (1, 2, 3)] == [10, 4, 30]
    assert "state-corrupt" in caplog.text


def short_write(fd: int, data: bytes) -> int:
    return REAL_WRITE(fd, data[: len(data) // 2])


def failing_sync(fd: int) -> None:
    raise OSError(28, "No space left on device")


REAL_WRITE = os.write


@pytest.mark.parametrize(("call", "does"), [("write", short_write), ("fdatasync", failing_sync)])
def test_after_a_save_that_failed_the_next_one_is_whole(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, does: Callable[..., object]
) -> None:
    checkpoint.put(entry("h:/1#1", 10))
    with monkeypatch.context() as patch:
        patch.setattr(f"logferry.client.files.checkpoint.os.{call}", does)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save()
    assert positions(tmp_path)["h:/1#1"] in (4, 10)
    assert len(positions(tmp_path)) == 50
    assert checkpoint.is_whole_next
    checkpoint.put(entry("h:/2#1", 20))
    checkpoint.save()
    assert len((tmp_path / FILE).read_bytes().splitlines()) == 2
    assert (positions(tmp_path)["h:/1#1"], positions(tmp_path)["h:/2#1"]) == (10, 20)


def test_the_file_does_not_grow_without_bound(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logferry.client.files.checkpoint.LEAST_APPENDED_BYTES", 10_000)
    os.close(checkpoint._fd)
    checkpoint._fd = -1  # so that the next save writes a whole one
    checkpoint.save()
    whole = (tmp_path / FILE).stat().st_size
    for number in range(200):
        checkpoint.put(entry("h:/1#1", number))
        checkpoint.save()
        assert (tmp_path / FILE).stat().st_size <= 2 * max(whole, 10_000) + 1000
    assert positions(tmp_path)["h:/1#1"] == 199


def test_a_save_is_on_the_disk_before_it_returns(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real: dict[str, Callable[..., Any]] = {"write": os.write, "fdatasync": os.fdatasync}

    def noted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            order.append(name)
            return real[name](*arguments)

        return call

    for name in real:
        monkeypatch.setattr(os, name, noted(name))
    checkpoint.put(entry("h:/1#1", 10))
    checkpoint.save()
    assert order == ["write", "fdatasync"]
