"""The generated access logs: their lines are as in life, and what is written is whole when it ends."""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from logferry.ops.generate.__main__ import SITES, AccessLog, LogFile, generate

NOON = 1_795_262_400.0  # 2026-11-21 12:00:00 UTC
COMBINED = re.compile(
    rb"[0-9a-f.:]+ - [^ ]+ \[\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d \+0000\] "
    rb'"(?:[^"\\]|\\.)+" \d{3} \d+ "[^"]+" "[^"]+"\n\Z'
)


def some_lines(count: int, seed: int = 7) -> list[bytes]:
    logs = [AccessLog(site, seed) for site in SITES]
    return [logs[number % len(logs)].line(NOON + number / 1000) for number in range(count)]


def is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_every_line_is_one_line_of_the_combined_format() -> None:
    for line in some_lines(20_000):
        assert COMBINED.match(line), line
        assert not re.search(rb"[\x00-\x1f]", line[:-1]), line


def test_the_seed_decides_all_but_the_clock() -> None:
    assert some_lines(2000) == some_lines(2000)
    assert some_lines(2000) != some_lines(2000, seed=8)
    later = AccessLog("shop.log", 7).line(NOON + 86_400)
    assert later == AccessLog("shop.log", 7).line(NOON).replace(b"[21/Nov", b"[22/Nov")


def test_lengths_and_characters_are_as_in_life() -> None:
    lines = some_lines(100_000)
    assert 120 < statistics.median(map(len, lines)) < 300
    assert max(map(len, lines)) > 20_000
    assert sum(len(line) > 4096 for line in lines) < len(lines) / 1000
    other_alphabets = [line for line in lines if is_utf8(line) and not line.isascii()]
    assert len(lines) / 50 < len(other_alphabets) < len(lines) / 2
    assert 0 < sum(not is_utf8(line) for line in lines) < len(lines) / 100


def test_the_shares_of_the_sites_are_the_whole() -> None:
    assert sum(SITES.values()) == pytest.approx(1.0)


def new_file(path: Path) -> LogFile:
    return LogFile(path, AccessLog("shop.log", 3))


def test_over_many_calls_as_many_bytes_are_made_as_were_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    file, sizes = new_file(path), [0]
    for _ in range(20_000):
        file.grow(50.0)
        sizes.append(file.bytes)
    file.close()
    longest = max(map(len, path.read_bytes().splitlines(keepends=True)))
    assert 0 <= path.stat().st_size - 1_000_000 <= longest
    assert any(before == after for before, after in pairwise(sizes[1:]))


def test_a_write_may_end_in_mid_line_and_the_rest_follows(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    file = new_file(path)
    file.grow(1000.0, cut=0.7)
    begun = path.read_bytes()
    assert not begun.endswith(b"\n")
    file.grow(1000.0)
    whole = path.read_bytes()
    assert whole.startswith(begun)
    assert whole.endswith(b"\n")
    file.grow(1000.0, cut=0.0)
    assert path.read_bytes() == whole
    file.close()
    assert path.read_bytes().startswith(whole)
    assert len(path.read_bytes()) >= 3000
    assert all(map(COMBINED.match, filter(is_utf8, path.read_bytes().splitlines(keepends=True))))
    assert file.bytes == path.stat().st_size


def test_a_rotated_file_is_written_on_until_the_new_one_is_opened(tmp_path: Path) -> None:
    path, old = tmp_path / "a.log", tmp_path / "a.log.1"
    file = new_file(path)
    file.grow(500.0)
    before = path.read_bytes()
    file.rename()
    file.grow(500.0, cut=0.5)
    assert not path.exists()
    meanwhile = old.read_bytes()
    file.reopen()
    file.grow(500.0)
    file.close()
    assert len(before) < len(meanwhile) < old.stat().st_size
    assert old.read_bytes().endswith(b"\n")
    assert all(map(COMBINED.match, filter(is_utf8, path.read_bytes().splitlines(keepends=True))))
    assert old.stat().st_size + path.stat().st_size == file.bytes


def test_all_that_is_written_is_whole_lines(tmp_path: Path) -> None:
    ticks = iter(range(40))
    written = generate(tmp_path, 2e6, 5, lambda: next(ticks, None) is not None)
    assert set(written) == set(SITES)
    for name, size in written.items():
        data = (tmp_path / name).read_bytes()
        assert len(data) == size > 0
        assert all(COMBINED.match(line) for line in data.splitlines(keepends=True) if is_utf8(line))
        assert data.endswith(b"\n")


def test_the_program_ends_in_order_on_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "logferry.ops.generate", "--dir", str(tmp_path / "logs"), "--seed", "9"]
    with subprocess.Popen([*command, "--rotate-at", "0.1"], stdout=subprocess.PIPE) as program:
        old, new = tmp_path / "logs" / "shop.log.1", tmp_path / "logs" / "shop.log"
        deadline = time.monotonic() + 60
        while not (old.exists() and new.exists() and new.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        program.send_signal(signal.SIGTERM)
        said = json.loads(program.communicate(timeout=60)[0])
    assert program.returncode == 0
    assert said["seed"] == 9
    assert said["bytes"]["shop.log"] == old.stat().st_size + new.stat().st_size
    for path in (tmp_path / "logs").iterdir():
        assert path.read_bytes().endswith(b"\n")
