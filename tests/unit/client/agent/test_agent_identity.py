"""Whether a file after a start is the one that the checkpoint knows, though its host or file system has changed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from logferry.client.files.checkpoint import Checkpoint, CheckpointEntry
from logferry.gateway.contract.chunk import Chunk

CASES = pytest.mark.parametrize("known_birth", [True, False])


def while_down(client: Any, change: Any) -> None:
    """Ends the client, changes each entry of its checkpoint, and does not start it again."""
    assert client.agent.remember(client.now)
    client.close()
    checkpoint = Checkpoint.open(Path(client.config.state_dir))
    for entry in checkpoint.entries.values():
        change(entry)
    checkpoint.save()
    checkpoint.close()


def other_device(entry: CheckpointEntry) -> None:
    entry.device += 1000


def other_device_and_inode(entry: CheckpointEntry) -> None:
    entry.device += 1000
    entry.inode += 100_000_000


@CASES
@pytest.mark.parametrize("rotated", [False, True])
def test_a_file_is_the_same_after_its_file_system_got_another_device_number(
    client: Any, monkeypatch: pytest.MonkeyPatch, known_birth: bool, rotated: bool
) -> None:
    if not known_birth:
        monkeypatch.setattr("logferry.client.files.tail.born_ns", lambda fd: 0)
    for name in ("a.log", "b.log"):
        client.write(name, b"#Version: 1.0\n")
        client.write(name, name.encode() + b" one\n")
    client.settle()
    while_down(client, other_device)
    client.write("a.log", b"two\n")
    if rotated:
        (client.root / "a.log").rename(client.root / "a.log.1")
        client.write("a.log", b"#Version: 1.0\n")
    client.begin()
    client.settle()
    client.restart()
    client.settle()
    expected = [b"#Version: 1.0\na.log one\ntwo\n", b"#Version: 1.0\nb.log one\n"]
    assert sorted(client.stored()) == sorted([*expected, *([b"#Version: 1.0\n"] if rotated else [])])


def test_a_file_that_was_moved_out_of_the_patterns_is_found_on_another_device_number(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    while_down(client, other_device)
    client.write("a.log", b"two\n")
    (client.root / "a.log").rename(client.root / "old")
    client.begin()
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]


@pytest.mark.parametrize(("birth", "same"), [(0, True), (1, False)])
def test_with_another_inode_too_the_birth_decides(client: Any, birth: int, same: bool) -> None:
    client.write("a.log", b"one\n")
    client.settle()

    def change(entry: CheckpointEntry) -> None:
        other_device_and_inode(entry)
        entry.born_ns += birth

    if not next(iter(client.agent.watch.sources.values())).entry.born_ns:
        pytest.skip("this file system has no times of birth")
    while_down(client, change)
    client.begin()
    client.settle()
    assert client.stored() == ([b"one\n"] if same else [b"one\n", b"one\n"])


def test_other_bytes_on_another_device_number_are_another_file(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    while_down(client, other_device)
    client.write("a.log", b"two\nthree\n", "r+b")
    client.begin()
    client.settle()
    assert client.stored() == [b"one\n", b"two\nthree\n"]


def renumber(client: Any, inodes: int = 0) -> None:
    """Another mount is in place of the one on which the running client has its files open."""
    watch = client.agent.watch
    for source in list(watch._live.values()):
        del watch._live[source.tail.key]
        os.close(source.tail._fd)
        shutil.copyfile(source.tail.path, client.root / "before")
        source.tail._fd = os.open(client.root / "before", os.O_RDONLY)
        (client.root / "before").rename(client.root / f"before-{source.tail._fd}-{time.monotonic_ns()}")
        device, inode = source.tail.key
        source.tail.key = source.entry.device, source.entry.inode = device + 1000, inode + inodes
        watch._live[source.tail.key] = source


@CASES
@pytest.mark.parametrize("rotated", [False, True])
def test_a_running_client_knows_its_files_after_their_file_system_got_another_device_number(
    client: Any, monkeypatch: pytest.MonkeyPatch, known_birth: bool, rotated: bool
) -> None:
    if not known_birth:
        monkeypatch.setattr("logferry.client.files.tail.born_ns", lambda fd: 0)
    for name in ("a.log", "b.log"):
        client.write(name, name.encode() + b" one\n")
    client.settle()
    for _ in range(2):
        renumber(client)
        client.write("a.log", b"two\n")
        client.settle()
    if rotated:
        renumber(client)
        (client.root / "a.log").rename(client.root / "a.log.1")
        client.write("a.log", b"new\n")
        client.settle()
    client.restart()
    client.settle()
    expected = [b"a.log one\ntwo\ntwo\n", b"b.log one\n", *([b"new\n"] if rotated else [])]
    assert sorted(client.stored()) == sorted(expected)
    assert len(client.agent.watch.sources) == len(expected)


def test_a_batch_under_way_while_the_device_number_changes_is_sent_once(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    client.write("a.log", b"two\n")
    client.now += 5
    client.agent.tick(client.now)
    ((source, job),) = client.agent.jobs(client.now, 5)
    renumber(client)
    client.now += 5
    client.agent.tick(client.now)
    client.agent.finish(source, job, client.pusher.perform(job), client.now)
    client.write("a.log", b"three\n")
    client.settle()
    assert client.stored() == [b"one\ntwo\nthree\n"]


def test_a_file_that_could_not_be_read_meanwhile_continues_at_once(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    (source,) = client.agent.watch.sources.values()
    for _ in range(8):
        source.cannot_read(OSError(116, "Stale file handle"), client.now, False)
    renumber(client)
    client.write("a.log", b"two\n")
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]


@pytest.mark.parametrize(("content", "inodes"), [(b"other\n", 0), (b"one\n", 100_000_000)])
def test_another_file_on_another_device_is_a_new_source_of_a_running_client(
    client: Any, monkeypatch: pytest.MonkeyPatch, content: bytes, inodes: int
) -> None:
    """Other bytes; or the same ones, under another inode whose birth is not known."""
    monkeypatch.setattr("logferry.client.files.tail.born_ns", lambda fd: 0)
    client.write("a.log", b"one\n")
    client.settle()
    renumber(client, inodes)
    client.write("a.log", content, "r+b")
    client.settle()
    assert client.stored() == [b"one\n", content]


# ---- a state folder that was copied to another host ----------------------------------------------------------


def written_by_another(gateway: Any, data: bytes) -> None:
    """The host that the state folder was copied from, or another copy of it, has gone on."""
    for stored in gateway.sources.values():
        recorded = stored.recorded or 0
        stored.chunks.append(Chunk(recorded + len(data), recorded, 0, {}, data))
        stored.recorded = recorded + len(data)


@pytest.mark.parametrize("sign", ["host", "machine"])
def test_a_copied_state_folder_begins_new_sources_behind_what_was_sent(
    client: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch, sign: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("logferry.client.files.checkpoint.machine", lambda: "one")
    client.restart()
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    written_by_another(gateway, b"of another host\n")
    client.write("a.log", b"two\nthree\nfour\nfive\nsix\n")
    if sign == "host":
        client.config = client.config._replace(host="g")
    else:
        monkeypatch.setattr("logferry.client.files.checkpoint.machine", lambda: "two")
    client.begin()
    client.settle()
    client.write("a.log", b"seven\n")
    client.restart()
    client.settle()
    assert client.stored() == [b"one\nof another host\n", b"two\nthree\nfour\nfive\nsix\nseven\n"]
    old, new = gateway.sources
    assert new.startswith("g:" if sign == "host" else "h:")
    assert old.rpartition("#")[2] < new.rpartition("#")[2]
    assert gateway.sources[new].chunks[0].prev == 4
    assert caplog.text.count("state-copied") == 1


def test_nothing_leaves_before_the_new_names_are_on_the_disk(client: Any, gateway: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    client.write("a.log", b"two\n")
    client.config = client.config._replace(host="g")
    client.begin()
    gateway.faults.append("cut after")
    client.step()
    client.step()
    client.restart()
    client.settle()
    assert client.stored() == [b"one\n", b"two\n"]


def test_a_file_that_is_gone_from_a_copied_state_folder_is_reported_by_nobody(client: Any, gateway: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    (client.root / "a.log").unlink()
    client.config = client.config._replace(host="g")
    client.begin()
    client.settle()
    assert len(gateway.sources) == 1
    assert not client.checkpoint.entries


# ---- a power failure -----------------------------------------------------------------------------------------

LINES = b"".join(b"line %07d\n" % number for number in range(80_000))


@pytest.mark.parametrize(("cut", "again"), [(100, 4096), (5000, 64 << 10), (100_000, 1 << 20), (1_100_000, 1_300_000)])
@pytest.mark.parametrize("renumbered", [False, True])
def test_a_file_whose_end_a_power_failure_took_is_not_sent_again_from_its_start(
    client: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch, cut: int, again: int, renumbered: bool
) -> None:
    monkeypatch.setattr("logferry.client.files.checkpoint.boot", lambda: "one")
    client.restart()
    client.write("a.log", LINES)
    client.settle()
    while_down(client, other_device if renumbered else lambda entry: None)
    left = LINES[:-cut] + b"\nof the next start\n"
    client.write("a.log", left, "r+b")
    os.truncate(client.root / "a.log", len(left))
    monkeypatch.setattr("logferry.client.files.checkpoint.boot", lambda: "two")
    client.begin()
    client.settle()
    client.restart()
    client.write("a.log", b"more\n")
    client.settle()
    _, new = gateway.sources.values()
    begin = new.chunks[0].prev
    assert left[begin:] + b"more\n" == new.content()
    assert len(LINES) - begin <= again
    assert client.stored()[0] == LINES


def test_without_a_reboot_a_shorter_file_is_sent_from_its_start(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program rewrote it: lines that are all the same would look as if they had been sent."""
    monkeypatch.setattr("logferry.client.files.checkpoint.boot", lambda: "one")
    client.restart()
    client.write("a.log", b"ping\n" * 4000)
    client.settle()
    while_down(client, lambda entry: None)
    client.write("a.log", b"ping\n" * 3900, "wb")
    client.begin()
    client.settle()
    assert client.stored() == [b"ping\n" * 4000, b"ping\n" * 3900]
