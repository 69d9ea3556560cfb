"""Which lines are sent, from where on, and in which encoding; the seqnos stay positions in the file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.config import FileGroup, parse
from logferry.client.agent.search import Search
from logferry.client.files.chunking import starts_record
from logferry.client.files.lines import LineRules, compiled, one_byte_encoding
from logferry.client.files.tail import FileTail

WARNINGS = LineRules(compiled(["WARN", "ERROR"]), compiled(["health"]))


def following(client: Any, **options: Any) -> None:
    client.config = client.config._replace(files=(FileGroup((str(client.root / "*.log*"),), "t", **options),))
    client.restart()


def line(number: int) -> bytes:
    return b"%s line %d\n" % ((b"INFO", b"WARN", b"ERROR health", b"ERROR")[number % 4], number)


def wanted(content: bytes) -> bytes:
    kept = [each for each in content.splitlines(keepends=True) if WARNINGS.sent(each, True)[1] == {}]
    return b"".join(kept)


def test_each_pattern_has_its_own_flags_groups_and_references():
    rules = LineRules(compiled(["(?i)error|fail", r"(?P<q>['\"])x(?P=q)", r"(a|b)\1", r"(?P<q>z)\1"]))
    lines = [b"Error", b"FAIL", b"'x'", b"'x\"", b"aa", b"ab", b"zz", b"z"]
    assert [rules.sent(each + b"\n", True)[1] == {} for each in lines] == [True, True, True, False] + [True, False] * 2


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999}", "(?i", "(" * 5000, r"\1"])
def test_what_is_no_regular_expression_is_named(tmp_path: Path, pattern: str, capsys: pytest.CaptureFixture[str]):
    for option in ("--include-lines", "--exclude-lines", "--record-start"):
        with pytest.raises(SystemExit):
            parse(["--url", "http://h", "--topic", "t", "--state-dir", str(tmp_path), option, pattern, "/x"])
        assert "is no regular expression" in capsys.readouterr().err


def test_flags_of_the_start_of_a_record_stand_before_it():
    start = starts_record("(?i)error")
    assert [found.start() for found in start.finditer(b"Error 1\n error 2\nERROR 3\n")] == [0, 17]


def test_lines_are_left_out_and_the_seqnos_are_positions_in_the_file(client: Any, gateway: Any) -> None:
    following(client, rules=WARNINGS)
    content = b"".join(map(line, range(1000)))
    client.write("a.log", content)
    client.settle()
    (stored,) = [each for each in gateway.sources.values() if each.chunks]
    assert stored.content() == b"".join(line(number) for number in range(1000) if number % 4 in (1, 3))
    assert stored.recorded == len(content)
    assert sum(int(chunk.attributes["filtered"]) for chunk in stored.chunks) == 500


@pytest.mark.parametrize("fault", ["kill before", "kill after", "cut before", "cut after", "500 after"])
@pytest.mark.parametrize("client", [{"chunk_bytes": 1024, "line_bytes": 1024, "request_bytes": 2048}], indirect=True)
def test_rules_that_change_at_a_restart_lose_and_double_nothing(client: Any, gateway: Any, fault: str) -> None:
    """Also where all lines of a chunk are left out; through a rotation and a truncation."""
    from tests.support.fake_gateway import Killed

    following(client, rules=WARNINGS)
    first, second = b"".join(map(line, range(200))), b"INFO quiet\n" * 200 + b"".join(map(line, range(100)))
    client.write("a.log", first)
    gateway.faults.extend(["", "", fault])
    try:
        client.settle()
    except Killed:
        client.restart()
    client.settle()
    client.write("a.log", second)
    client.settle()
    (client.root / "a.log").rename(client.root / "a.log.1")
    client.write("a.log", first)
    client.settle()
    client.write("a.log", b"ERROR third\nINFO third\n", "wb")
    client.settle()
    before = client.stored()
    assert sorted(before) == sorted([wanted(first + second), wanted(first), b"ERROR third\n"])
    following(client)  # everything from now on
    client.write("a.log", b"INFO fourth\n")
    client.settle()
    assert sorted(client.stored()) == sorted([*before[:-1], before[-1] + b"INFO fourth\n"])


@pytest.mark.parametrize(
    "client", [{"chunk_bytes": 1024, "line_bytes": 1024, "request_bytes": 2048, "idle_s": 1.0}], indirect=True
)
def test_the_pieces_of_a_line_are_sent_whatever_they_hold(client: Any) -> None:
    following(client, rules=WARNINGS)
    client.write("a.log", b"INFO " + b"x" * 3000 + b"\nINFO short\nWARN short\nINFO without newline")
    client.settle()
    assert client.stored() == [b"INFO " + b"x" * 3000 + b"\nWARN short\nINFO without newline"]


def test_latin_1_arrives_as_utf_8(client: Any, gateway: Any) -> None:
    following(client, rules=LineRules(compiled(["ä"]), (), one_byte_encoding("latin-1")))
    content = "grün\nblässe\n".encode("latin-1")
    client.write("a.log", content)
    client.settle()
    assert client.stored() == ["blässe\n".encode()]
    assert max(each.recorded or 0 for each in gateway.sources.values()) == len(content)


@pytest.mark.parametrize(
    "name", ["utf-16", "utf-16le", "shift_jis", "gbk", "cp500", "nope", "base64", "utf-7", "euc-jp"]
)
def test_encodings_whose_lines_cannot_be_found_by_newlines_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not utf-8"):
        one_byte_encoding(name)


def test_encodings_with_one_byte_for_each_character() -> None:
    assert [one_byte_encoding(name) for name in ("utf-8", "UTF8", "cp1252", "koi8-r")] == [
        None,
        None,
        "cp1252",
        "koi8-r",
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--include-lines", "("], "--include-lines: '(' is no regular expression"),
        (["--encoding", "utf-16"], "--encoding: 'utf-16' is not utf-8"),
        (["--exclude-lines", "x", "--record-start", "y"], "--record-start: records are kept whole"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["--url", "http://h:1", "--topic", "t", "--state-dir", str(tmp_path), "/logs/*"]
    with pytest.raises(SystemExit):
        parse([*usual, *options])
    assert named in capsys.readouterr().err


# ---- where to begin ----------------------------------------------------------------------------------------


def test_files_that_were_there_before_the_client_begin_at_their_end(client: Any, gateway: Any) -> None:
    client.write("a.log", b"old\nhalf a ")
    client.write("empty.log", b"")
    following(client, starts_at_end=True)
    client.step()
    client.write("a.log", b"line\n")
    client.write("empty.log", b"first\n")
    client.write("new.log", b"all of it\n")
    client.settle()
    assert sorted(client.stored()) == [b"all of it\n", b"first\n", b"half a line\n"]
    (source,) = [each for name, each in gateway.sources.items() if "/a.log" in name]
    assert (source.base, source.recorded) == (4, 16)


def test_a_file_that_is_truncated_while_its_end_is_looked_for_is_sent(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.write("a.log", b"old\n")
    following(client, starts_at_end=True)
    end_of = Search.end_of

    def late(search: Search, tail: FileTail, saved_ns: int) -> int:
        end = end_of(search, tail, saved_ns)
        client.write("a.log", b"", "wb")
        return end

    monkeypatch.setattr(Search, "end_of", late)
    client.step()
    client.write("a.log", b"new\n")
    client.settle()
    assert client.stored() == [b"new\n"]


def test_what_began_at_its_end_continues_after_restarts_and_rotation(client: Any) -> None:
    client.write("a.log", b"old\n")
    following(client, starts_at_end=True)
    client.step()
    client.write("a.log", b"one\n")
    client.settle()
    client.close()
    client.write("a.log", b"two\n")
    (client.root / "a.log").rename(client.root / "a.log.1")
    client.write("a.log", b"made while the client was down\n")
    client.begin()
    client.settle()
    client.write("a.log", b"truncated\n", "wb")
    client.settle()
    assert sorted(client.stored()) == [b"made while the client was down\n", b"one\ntwo\n", b"truncated\n"]


def test_a_file_of_a_new_pattern_begins_at_its_end_if_it_was_there_long_before(client: Any) -> None:
    client.write("a.log", b"one\n")
    following(client, starts_at_end=True)
    client.write("b.txt", b"old\n")
    client.settle()
    client.agent.remember(client.now)
    client.close()
    later = (client.root / "b.txt").stat().st_mtime + 300
    os.utime(client.root / "state" / "checkpoint.json", (later, later))
    group = FileGroup((str(client.root / "*.log"), str(client.root / "*.txt")), "t", starts_at_end=True)
    client.config = client.config._replace(files=(group,))
    client.begin()
    client.settle()
    client.write("b.txt", b"new\n")
    client.settle()
    assert b"new\n" in client.stored()


def test_with_a_damaged_checkpoint_every_file_is_sent(client: Any) -> None:
    client.write("a.log", b"old\n")
    following(client, starts_at_end=True)
    client.step()
    client.write("a.log", b"not sent\n")
    client.agent.remember(client.now)
    client.close()
    (client.root / "state" / "checkpoint.json").write_bytes(b"damaged")
    client.begin()
    client.settle()
    assert b"old\nnot sent\n" in client.stored()


# ---- old files ---------------------------------------------------------------------------------------------


def aged(path: Path, s: float = 1000.0) -> None:
    os.utime(path, (time.time() - s, time.time() - s))


def test_old_files_are_left_out_until_they_are_written(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    client.write("old.log", b"old\n")
    client.write("young.log", b"young\n")
    aged(client.root / "old.log")
    following(client, ignore_older_s=500.0)
    client.settle()
    assert client.stored() == [b"young\n"]
    assert client.agent.watch.search.ignored == {str(client.root / "old.log")}
    client.write("old.log", b"again\n")
    client.step(60.0)
    client.settle()
    assert sorted(client.stored()) == [b"old\nagain\n", b"young\n"]
    assert not client.agent.watch.search.ignored


def test_a_file_that_the_checkpoint_has_is_followed_whatever_its_age(client: Any) -> None:
    following(client, ignore_older_s=500.0)
    client.write("a.log", b"one\n")
    client.settle()
    client.close()
    client.write("a.log", b"two\n")
    (client.root / "a.log").rename(client.root / "a.log.1")
    aged(client.root / "a.log.1")
    client.begin()
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]


@pytest.mark.parametrize("setting", ["--ignore-older-s=-1"])
def test_a_negative_age_is_refused(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--url", "http://h:1", "--topic", "t", "--state-dir", str(tmp_path), setting, "/logs/*"])
    assert "--ignore-older-s -1 is not between" in capsys.readouterr().err
