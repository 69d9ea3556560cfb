"""After a power failure: copies of a file whose end was lost, a second failure, and files of NUL bytes alone."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

LINES = b"".join(b"line %07d\n" % number for number in range(10_000))
NULS = bytes(3000)


@pytest.fixture(autouse=True)
def first_boot(client: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.is_one_of_many = True  # a source may begin behind what another one has
    monkeypatch.setattr("logferry.client.files.checkpoint.boot", lambda: "one")
    client.restart()


def down(client: Any) -> None:
    assert client.agent.remember(client.now)
    client.close()


def reboots(monkeypatch: pytest.MonkeyPatch, number: str = "two") -> None:
    monkeypatch.setattr("logferry.client.files.checkpoint.boot", lambda: number)


def sent_and_cut(client: Any, cut: int, zeros: bool) -> bytes:
    """The client is down; what the file holds now."""
    client.write("a.log", LINES)
    client.settle()
    down(client)
    left = LINES[:-cut] + bytes(cut) * zeros + b"\nof the next start\n"
    client.write("a.log", left, "r+b")
    os.truncate(client.root / "a.log", len(left))
    return left


@pytest.mark.parametrize(("cut", "again"), [(100, 4096), (5000, 64 << 10)])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("then", ["truncated", "recreated", "removed"])
@pytest.mark.parametrize("seen", [False, True])
def test_a_copy_of_a_file_whose_end_was_lost_is_not_sent_from_its_start(
    client: Any,
    gateway: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cut: int,
    again: int,
    zeros: bool,
    then: str,
    seen: bool,
) -> None:
    """The copy was made after the power failure and before the client started. ``seen``: a pattern fits it."""
    caplog.set_level("INFO")
    if not seen:
        patterns = (str(client.root / "*.log"),)
        client.config = client.config._replace(
            files=tuple(files._replace(patterns=patterns) for files in client.config.files)
        )
        client.restart()
    left = sent_and_cut(client, cut, zeros)
    shutil.copyfile(client.root / "a.log", client.root / "a.log.1")
    if then == "truncated":
        os.truncate(client.root / "a.log", 0)
    else:
        (client.root / "a.log").rename(client.root / "gone")
    if then != "removed":
        client.write("a.log", b"second\n")
    (client.root / "gone").unlink(missing_ok=True)
    reboots(monkeypatch)
    client.begin()
    client.agent.tick(client.now)
    down(client)  # before a request; the next start is of the same boot
    client.begin()
    client.settle()
    assert f"source-over source=h:{client.root}/a.log#" in caplog.text
    client.restart()
    client.write("a.log.1", b"late\n")
    client.settle()
    assert client.stored().count(LINES) == 1
    (new,) = [stored for name, stored in gateway.sources.items() if "a.log.1#" in name and stored.chunks]
    begin = new.chunks[0].seqno - len(new.chunks[0].data)
    assert new.content() == left[begin:] + b"late\n"
    assert len(LINES) - again <= begin <= len(LINES) - cut
    assert client.stored().count(b"second\n") == (then != "removed")


def test_without_a_reboot_such_a_copy_is_sent_whole(client: Any) -> None:
    """A program rewrote the file: lines that are all the same would look as if they had been sent."""
    client.write("a.log", b"ping\n" * 4000)
    client.settle()
    down(client)
    client.write("a.log.1", b"ping\n" * 3900)
    os.truncate(client.root / "a.log", 0)
    client.begin()
    client.settle()
    assert sorted(client.stored()) == [b"ping\n" * 3900, b"ping\n" * 4000]


def test_another_power_failure_before_the_new_source_has_sent_anything(
    client: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of the first source is known of the one that begins behind it, too."""
    sent_and_cut(client, 100, zeros=False)
    reboots(monkeypatch)
    client.begin()
    client.agent.tick(client.now)
    assert [source.entry.since for source in client.agent.watch.sources.values() if source.tail]
    down(client)  # before a request
    os.truncate(client.root / "a.log", len(LINES) - 7800)
    reboots(monkeypatch, "three")
    client.begin()
    client.settle()
    _, *new = [stored for stored in gateway.sources.values() if stored.chunks]
    (begin,) = [stored.chunks[0].seqno - len(stored.chunks[0].data) for stored in new]
    assert len(LINES) - 7800 - (64 << 10) <= begin
    assert new[0].content() == LINES[begin:-7800]


# ---- NUL bytes alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"\nof the next start\n"])
def test_a_file_of_nuls_alone_is_no_copy_of_another_one(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, more: bytes
) -> None:
    """Both were written and renamed before the power failure and not sent. Each is sent and named in the log."""
    down(client)
    client.write("a.log.1", NULS)
    client.write("a.log", NULS + NULS)
    reboots(monkeypatch)
    client.begin()
    for _ in range(10):
        client.step()
    client.write("a.log.1", more)
    for _ in range(10):
        client.step()
    assert sorted(client.stored()) == sorted([NULS + more, NULS + NULS])
    for name in ("a.log", "a.log.1"):
        assert f"nul-hole source=h:{client.root}/{name}#" in caplog.text


@pytest.mark.parametrize("lines", [b"", b"\nof the next start\n"])
def test_nuls_in_the_place_of_nuls_are_the_same_file(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lines: bytes
) -> None:
    """Undecidable: it was truncated and written again, and the power failed twice. No line is missing, and the NUL
    bytes behind those that are known are in the log."""
    client.write("a.log", NULS)
    for _ in range(10):
        client.step()
    assert client.stored() == [NULS]
    down(client)
    os.truncate(client.root / "a.log", 0)
    client.write("a.log", NULS + NULS + lines)
    reboots(monkeypatch)
    caplog.clear()
    client.begin()
    for _ in range(10):
        client.step()
    assert client.stored() == [NULS + NULS + lines]
    assert f"position={len(NULS)} bytes={len(NULS)}" in caplog.text
