"""Reading one incarnation: what was changed behind our back is noticed, a rename is not."""

import builtins
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logferry.client.files import identity
from logferry.client.files.identity import HEAD_BYTES, MARK_BYTES, born_ns, fingerprint, grown
from logferry.client.files.tail import BufferedRemainder, FileChanged, FileTail


@pytest.fixture
def path(tmp_path: Path) -> Any:
    return tmp_path / "a.log"


@pytest.fixture
def opened(path: Any) -> Iterator[Any]:
    tails = []

    def open_it(content: bytes = b"", **options: Any) -> FileTail:
        path.write_bytes(content)
        tail = FileTail.open(str(path), 0.0, **options)
        assert tail is not None
        tails.append(tail)
        return tail

    yield open_it
    for tail in tails:
        tail.close()


def written(path: Any, content: bytes, at: int) -> None:
    """As if at second ``at``; in place, so that the inode stays."""
    with path.open("r+b") as file:
        file.truncate()
        file.write(content)
    os.utime(path, (at, at))


def passed(tail: FileTail) -> bytes:
    data = tail.read(1 << 20)
    tail.cover(data)
    tail.advance(data)
    return data


def test_it_reads_on_where_it_was_after_a_rename_and_a_removal(path: Any, opened: Any) -> None:
    tail = opened(b"one\n")
    assert passed(tail) == b"one\n"
    with path.open("ab") as writer:
        path.rename(path.with_name("a.log.1"))
        writer.write(b"two\n")
        writer.flush()
        path.with_name("a.log.1").unlink()
        writer.write(b"three\n")
    tail.look(1.0)
    assert passed(tail) == b"two\nthree\n"


def looked_and_read(tail: FileTail) -> bytes:
    tail.look(1.0)
    return tail.read(100)


@pytest.mark.parametrize(
    "after",
    [
        b"",
        b"x",
        b"other..\n",  # as long as before
        b"something longer than it was\n",
        b"first\n2nd\nsomething longer\n",  # the same head, other bytes before the position
    ],
)
def test_a_truncation_is_noticed_whatever_follows_it(path: Any, opened: Any, after: bytes) -> None:
    tail = opened(b"first\nsecond\n")
    passed(tail)
    written(path, after, 1)
    with pytest.raises(FileChanged):
        looked_and_read(tail)


def test_a_rewrite_with_the_same_head_is_noticed_by_the_bytes_before_the_position(path: Any, opened: Any) -> None:
    head = b"# a long header\n" * 100
    tail = opened(head + b"first\n" * 100)
    passed(tail)
    written(path, head + b"other\n" * 200, 1)
    with pytest.raises(FileChanged, match="before position"):
        looked_and_read(tail)


def test_a_rewrite_with_the_same_bytes_before_the_position_is_noticed_by_its_head(path: Any, opened: Any) -> None:
    tail = opened(b"first\n" + b"." * 2000 + b"\n")
    passed(tail)
    written(path, b"other\n" + b"." * 2000 + b"\nmore\n", 1)
    with pytest.raises(FileChanged, match="its first"):
        looked_and_read(tail)


def test_a_rewrite_of_the_same_length_while_a_request_is_under_way_is_noticed(path: Any, opened: Any) -> None:
    tail = opened(b"one\n")
    data = tail.read(100)
    tail.cover(data)
    written(path, b"two\n", 1)
    tail.look(1.0)
    tail.advance(data)
    with pytest.raises(FileChanged):
        tail.look(2.0)


def test_a_touched_file_is_the_same(path: Any, opened: Any) -> None:
    tail = opened(b"one\n")
    passed(tail)
    os.utime(path, (5, 5))
    tail.look(1.0)
    assert tail.read(100) == b""


def test_the_head_grows_with_what_is_sent_and_is_checked(path: Any, opened: Any) -> None:
    tail = opened(b"a\n")
    assert not tail.cover(tail.read(100))  # known since it was opened
    tail.advance(tail.read(100))
    with path.open("ab") as writer:
        writer.write(b"b" * 2000 + b"\n")
    tail.look(1.0)
    data = tail.read(100)
    assert tail.cover(data)
    assert tail.head.length == HEAD_BYTES
    tail.advance(data)
    assert not tail.cover(tail.read(5000))
    written(path, b"a\n" + b"c" * 2000 + b"\n", 1)
    with pytest.raises(FileChanged):
        tail.read(100)


def test_bytes_in_hand_that_are_no_longer_the_files_are_not_covered(path: Any, opened: Any) -> None:
    tail = opened(b"")
    with path.open("ab") as writer:
        writer.write(b"one\n")
    tail.look(1.0)
    data = tail.read(100)
    written(path, b"two\n", 1)
    with pytest.raises(FileChanged):
        tail.cover(data)


def test_a_quiet_file_is_looked_at_less_often_and_a_lively_one_always(
    path: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = opened(b"one\n")
    really = os.fstat
    looks: list[int] = []

    def noted(fd: int) -> os.stat_result:
        looks.append(fd)
        return really(fd)

    monkeypatch.setattr(os, "fstat", noted)
    for tick in range(5 * 1000):
        tail.look(tick * 0.2)
    assert 1000 <= len(looks) <= 1150
    with path.open("ab") as writer:
        writer.write(b"two\n")
    tail.look(1001.0)
    assert tail.size == 8
    looks.clear()
    for tick in range(10):
        tail.look(1001.2 + tick * 0.2)
    assert len(looks) == 10


def test_once_reads_no_further_than_the_size_at_first(path: Any, opened: Any) -> None:
    tail = opened(b"one\ntw", once=True)
    with path.open("ab") as writer:
        writer.write(b"o\n")
    tail.look(1.0)
    assert (tail.end, tail.is_last(0.0, 99.0)) == (6, True)
    assert tail.read(100) == b"one\ntw"


def test_going_to_a_place_beyond_the_file_is_refused(opened: Any) -> None:
    tail = opened(b"one\n")
    with pytest.raises(FileChanged, match="5 bytes of it, it holds 4"):
        tail.go_to(5)
    tail.go_to(4)
    assert tail.mark == b"one\n"


def test_a_file_is_finished_when_it_is_away_sent_and_quiet(path: Any, opened: Any) -> None:
    tail = opened(b"one\n")
    assert not tail.is_finished(1e9, 10.0)
    tail.away_since = 100.0
    assert not tail.is_finished(1e9, 10.0)
    passed(tail)
    assert not tail.is_finished(109.0, 10.0)
    assert tail.is_finished(110.0, 10.0)
    tail.changed_at = 105.0
    assert not tail.is_finished(110.0, 10.0)


def test_a_descriptor_is_given_up_only_if_the_file_can_be_found_again(path: Any, opened: Any) -> None:
    tail = opened(b"one\n")
    tail.give_up()
    assert not tail.is_open
    assert tail.pread(9, 0) == b"one\n"
    path.unlink()
    tail.give_up()
    assert tail.is_open
    assert tail.pread(9, 0) == b"one\n"


def test_a_file_that_was_removed_while_its_descriptor_was_given_up_is_missing(path: Any, opened: Any) -> None:
    tail = opened(b"one\n")
    tail.give_up()
    path.unlink()
    assert not tail.look(5.0)
    assert (tail.is_missing, tail.looked_at) == (True, 0.0)
    with pytest.raises(FileNotFoundError):
        tail.pread(9, 0)


def test_what_is_not_a_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert FileTail.open(str(tmp_path / "pipe"), 0.0) is None
    assert FileTail.open(str(tmp_path / "missing"), 0.0) is None
    assert FileTail.open(str(tmp_path), 0.0) is None


@pytest.mark.parametrize(
    ("content", "position", "fits"),
    [
        (b"head and tail", 8, True),
        (b"head and more", 9, True),
        (b"head and", 8, True),
        (b"head an", 8, False),
        (b"HEAD and tail", 8, False),
        (b"head AND tail", 8, False),
    ],
)
def test_differs(path: Any, content: bytes, position: int, fits: bool) -> None:
    path.write_bytes(content)
    tail = FileTail.open(str(path), 0.0)
    assert tail is not None
    mark = b"head and "[:position][-3:]
    assert (tail.differs(fingerprint(b"head"), position, fingerprint(mark)) == "") is fits
    tail.close()


def test_the_mark_is_the_end_of_what_was_passed() -> None:
    assert grown(b"", b"abc") == b"abc"
    assert grown(b"abc", b"def") == b"abcdef"
    long = bytes(range(256)) * 2
    assert grown(b"abc", long) == long[-MARK_BYTES:]
    assert grown(long[-MARK_BYTES:], b"x") == long[1 - MARK_BYTES :] + b"x"


def test_remains_are_read_within_their_bounds() -> None:
    remains = BufferedRemainder(100, b"abcdef", b"\n")
    assert (remains.read(4), remains.end) == (b"abcd", 106)
    remains.advance(b"abcd")
    assert (remains.read(4), remains.mark) == (b"ef", b"\nabcd")
    remains.go_to(101)
    assert (remains.read(9), remains.mark) == (b"bcdef", b"\na")
    for position in (99, 107):
        with pytest.raises(FileChanged):
            remains.go_to(position)


def test_a_birth_stays_the_same_whatever_is_written(path: Any) -> None:
    path.write_bytes(b"one")
    fd = os.open(path, os.O_RDWR)
    born = born_ns(fd)
    if not born:
        pytest.skip("this file system does not know when files were made")
    assert abs(born - path.stat().st_mtime_ns) < 60_000_000_000
    os.write(fd, b"more")
    os.truncate(fd, 0)
    os.utime(path, (1, 1))
    assert born_ns(fd) == born
    os.close(fd)


@pytest.mark.parametrize("error", [ImportError, MemoryError])
def test_a_python_without_ctypes_knows_no_births(path: Any, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def refuse(name: Any, *arguments: Any) -> Any:
        if name == "ctypes":
            raise error
        return really(name, *arguments)

    really = builtins.__import__
    path.write_bytes(b"one")
    fd = os.open(path, os.O_RDONLY)
    identity._statx.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refuse)
        assert born_ns(fd) == 0
    identity._statx.cache_clear()
    os.close(fd)
