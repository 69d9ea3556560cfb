"""From files to sources: who they are, what becomes of them, and when they are let go."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from logferry.client.files.tail import FileTail, ReadPlace


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_chunks_carry_who_and_where(client: Any, gateway: Any) -> None:
    client.write("a.log", b"one\ntwo\n")
    client.settle()
    ((name, stored),) = gateway.sources.items()
    path = str(client.root / "a.log")
    assert name.startswith(f"h:{path}#")
    (chunk,) = stored.chunks
    assert (chunk.prev, chunk.seqno, chunk.data) == (0, 8, b"one\ntwo\n")
    assert chunk.attributes == {"host": "h", "path": path, "env": "test"}


def test_a_rename_keeps_source_and_path_also_over_a_restart(client: Any, gateway: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    (client.root / "a.log").rename(client.root / "a.log.1")
    client.write("a.log.1", b"two\n")
    client.settle()
    client.restart()
    client.write("a.log.1", b"three\n")
    client.write("a.log", b"new\n")
    client.settle()
    assert sorted(client.stored()) == [b"new\n", b"one\ntwo\nthree\n"]
    paths = {chunk.attributes["path"] for stored in gateway.sources.values() for chunk in stored.chunks}
    assert paths == {str(client.root / "a.log")}


def test_a_gateway_that_has_more_than_the_file_makes_it_a_new_source(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.write("a.log", b"one\n")
    client.step()
    next(iter(gateway.sources.values())).recorded = 999
    client.restart()
    client.settle()
    assert client.stored() == [b"one\n"]
    assert len(gateway.sources) == 2
    assert "the gateway has recorded 999 bytes of it, it holds 4" in caplog.text


def test_a_file_that_changes_between_start_and_session_is_a_new_source(client: Any, gateway: Any) -> None:
    """The same head, so that only the bytes before the position, as the checkpoint knows them, tell."""
    head = b"# a long header\n" * 100
    client.write("a.log", head + b"first\n" * 100)
    client.settle()
    assert client.agent.remember(client.now)
    client.restart()
    client.agent.tick(client.now)
    client.write("a.log", head + b"other\n" * 200, "wb")
    client.settle()
    assert client.stored() == [head + b"first\n" * 100, head + b"other\n" * 200]


def test_a_last_line_waits_until_the_file_is_idle_and_may_continue(client: Any, gateway: Any) -> None:
    client.write("a.log", b"one\ntw")
    client.step(1)
    client.step(1)
    assert client.step(1) == 0
    assert client.stored() == [b"one\n"]
    assert client.step(client.config.idle_s) == 1
    client.write("a.log", b"o\nthree\n")
    client.settle()
    (stored,) = gateway.sources.values()
    assert [(c.data, c.attributes.get("split")) for c in stored.chunks] == [
        (b"one\n", None), (b"tw", "open"), (b"o\n", "last"), (b"three\n", None),
    ]  # fmt: skip


def test_a_rotated_file_is_dropped_when_it_is_sent_and_quiet(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.step()
    (client.root / "a.log").rename(client.root / "archived")
    client.write("archived", b"two")
    client.settle()
    assert list(client.agent.watch.sources)
    client.step(client.config.rotated_timeout_s)
    client.step(client.config.rotated_timeout_s)
    client.step(client.config.rotated_timeout_s)
    assert client.stored() == [b"one\ntwo"]
    assert not client.agent.watch.sources
    assert not client.checkpoint.entries


def test_a_rotated_file_is_read_to_its_end_over_many_restarts(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    (client.root / "a.log").rename(client.root / "archived")
    for _ in range(3):
        client.write("archived", b"more\n")
        client.restart()
        client.step()
        assert client.agent.remember(client.now)
    client.settle()
    assert client.stored() == [b"one\n" + b"more\n" * 3]


def test_a_file_that_no_pattern_asks_for_any_more_is_left_alone(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    only_b = client.config.files[0]._replace(patterns=(str(client.root / "b.log"),))
    client.config = client.config._replace(files=(only_b,))
    client.write("a.log", b"two\n")
    client.restart()
    client.settle()
    assert client.stored() == [b"one\n"]


def test_a_file_that_is_gone_after_a_restart_is_reported_once(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    (client.root / "a.log").unlink()
    for _ in range(2):
        client.restart()
        client.settle()
        assert client.agent.remember(client.now)
    assert caplog.text.count("file-gone") == 1


def test_a_file_without_read_permission_is_reported_once(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tests may run as root, whom no permission stops; so the system's answer is put in."""
    really = os.open

    def refuse(path: Any, *arguments: Any) -> Any:
        if str(path).endswith("a.log"):
            raise PermissionError(13, "Permission denied")
        return really(path, *arguments)

    client.write("a.log", b"one\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        client.step()
        client.step()
        assert client.agent.failures() == {str(client.root / "a.log"): "Permission denied"}
    assert caplog.text.count("file-unreadable") == 1
    client.settle()
    assert client.stored() == [b"one\n"]
    assert not client.agent.failures()


def test_a_file_on_a_broken_disk_does_not_stop_the_others(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.write("a.log", b"one\n")
    client.write("b.log", b"two\n")
    client.settle()
    bad = next(s for name, s in client.agent.watch.sources.items() if "a.log" in name).tail
    for name in ("a.log", "b.log"):
        client.write(name, b"more\n")
    with monkeypatch.context() as patch:

        def read(tail: FileTail, limit: int, place: ReadPlace | None = None) -> bytes:
            if tail is bad:
                raise OSError(5, "Input/output error")
            return whole(tail, limit, place)

        whole = FileTail.read
        patch.setattr(FileTail, "read", read)
        for _ in range(20):
            client.step()
        assert client.stored() == [b"one\n", b"two\nmore\n"]
    assert caplog.text.count("file-unreadable") == 1
    for _ in range(20):
        client.step(400.0)
    assert client.stored() == [b"one\nmore\n", b"two\nmore\n"]


def test_a_file_that_fails_at_its_first_read_leaves_no_descriptor(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(fd: int, size: int, at: int) -> bytes:
        raise OSError(5, "Input/output error")

    client.write("a.log", b"one\n")
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr("logferry.client.files.tail.os.pread", broken)
        for _ in range(10):
            client.step()
    assert descriptors() == before
    assert client.agent.failures() == {str(client.root / "a.log"): "Input/output error"}
    client.settle()
    assert client.stored() == [b"one\n"]
    assert not client.agent.failures()


def test_a_file_that_could_not_be_read_and_vanished_is_no_failure_any_more(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: str, *_: object) -> int:
        raise PermissionError(13, "Permission denied")

    client.write("a.log", b"one\n")
    with monkeypatch.context() as patch:
        patch.setattr("logferry.client.files.tail.os.open", denied)
        client.step()
        assert client.agent.failures() == {str(client.root / "a.log"): "Permission denied"}
    (client.root / "a.log").unlink()
    client.step()
    assert not client.agent.failures()


def test_a_file_that_cannot_be_read_when_it_is_truncated_is_taken_up_later(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tail: FileTail, now: float) -> FileTail:
        raise OSError(5, "Input/output error")

    client.write("a.log", b"one\ntwo\n")
    client.settle()
    before = descriptors()
    client.write("a.log", b"three\n", "wb")
    with monkeypatch.context() as patch:
        patch.setattr(FileTail, "renewed", broken)
        client.step()  # and it is found again in the same round
    assert descriptors() == before
    client.settle()
    assert client.stored() == [b"one\ntwo\n", b"three\n"]


@pytest.mark.parametrize("client", [{"heartbeat_s": 0.0}], indirect=True)
def test_a_file_that_cannot_be_looked_at_stops_nothing(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a lost server: each look fails. After that the pause is that of few failures, not of many looks."""
    client.write("a.log", b"one\n")
    client.write("b.log", b"one\n")
    client.settle()
    (lost,) = (key for key, source in client.agent.watch._live.items() if source.tail.path.endswith("a.log"))
    fstat = os.fstat

    def broken(fd: int) -> os.stat_result:
        facts = fstat(fd)
        if (facts.st_dev, facts.st_ino) == lost:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return facts

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", broken)
        for _ in range(60):
            client.step(0.25)
        client.write("a.log", b"two\n")
        client.write("b.log", b"two\n")
        for _ in range(3):
            client.step(0.25)
    assert sorted(client.stored()) == [b"one\n", b"one\ntwo\n"]
    for _ in range(80):  # longer than the third pause
        client.step(0.25)
    assert client.stored() == [b"one\ntwo\n"] * 2
