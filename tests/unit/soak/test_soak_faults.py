"""The faults of `make soak`: a plan is that of its seed, links lose what they say, rotation keeps every line."""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import time
from pathlib import Path

import pytest
from logferry.client.files.checkpoint import Checkpoint, CheckpointEntry
from logferry.client.files.identity import Fingerprint, fingerprint
from logferry.ops.stack.processes import free_ports

from tests.soak.files import HostFile, Messages, is_in_checkpoints
from tests.soak.injector import Injector, renumber_devices
from tests.soak.lines import decode_line
from tests.soak.links import Mode, Relay
from tests.soak.plan import KINDS, MODES, draw_faults


def test_a_seed_draws_one_plan_with_every_kind() -> None:
    plan = list(draw_faults(7, 3000, 1.0))
    assert plan == list(draw_faults(7, 3000, 1.0)) != list(draw_faults(8, 3000, 1.0))
    assert {fault.kind for fault in plan} == set(KINDS)
    assert 2700 < len(plan) < 3300
    assert all(fault.target in KINDS[fault.kind].targets and fault.at_s < 3000 for fault in plan)


def test_every_kind_can_be_carried_out() -> None:
    verbs = Injector(None, {})._verbs  # type: ignore[arg-type]
    assert [kind for kind in KINDS if kind not in verbs and kind.rpartition(" ")[2] not in verbs] == []


@pytest.mark.parametrize("mode", MODES)
def test_rotation_keeps_every_line_in_order(mode: str, tmp_path: Path) -> None:
    file = HostFile("host/log", tmp_path / "app.log", mode, Messages(None, random.Random(1)))
    for _ in range(4):
        file.write(3)
        assert file.rotate(lambda path: True)
    file.write(2)
    file.close()
    seen = []
    for path in tmp_path.iterdir():
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        seen += [decode_line(line) for line in data.split(b"\n")[:-1]]
    assert sorted(line.number for line in seen if line) == list(range(1, file.number + 1))
    assert bool(file.truncated) == (mode == "copytruncate-compress")
    assert not file.rotate(lambda path: False) or mode in ("create", "dateext")
    file.close()


async def _asked(mode: Mode) -> tuple[bytes, bytes]:
    """What a server gets of a request, and the client of its answer, with the link in that mode for a while."""
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readline())
        writer.write(b"answer\n")
        await writer.drain()
        writer.close()

    front, back = free_ports(2)
    relay = Relay("127.0.0.1", front, back)
    async with await asyncio.start_server(serve, "127.0.0.1", back):
        await relay.start()
        if mode:
            disturbed = asyncio.create_task(relay.disturb(mode, 0.3))
            await asyncio.sleep(0)
        answer = b""
        try:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", front)
                writer.write(b"request\n")
                answer = await reader.read()
                writer.close()
        except OSError:
            pass
        if mode:
            await disturbed
        relay.close()
    return bytes(got), answer


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("", (b"request\n", b"answer\n")),
        ("link slow", (b"request\n", b"answer\n")),
        ("link silent", (b"request\n", b"answer\n")),  # after the silence
        ("link refused", (b"", b"")),
        ("answers lost", (b"request\n", b"")),
    ],
)
async def test_a_link_carries_what_its_mode_lets_through(mode: Mode, expected: tuple[bytes, bytes]) -> None:
    assert await _asked(mode) == expected


def test_only_the_incarnation_that_a_client_has_sent_is_known(tmp_path: Path) -> None:
    file, state = tmp_path / "app.log", tmp_path / "state"
    file.write_bytes(b"first\n")
    written = Checkpoint.open(state)
    facts, head = file.stat(), fingerprint(b"first\n")
    entry = CheckpointEntry("web1:/a#1", "/a", "/a", facts.st_dev, facts.st_ino, head, 6, head, int(time.time() * 1000))
    written.entries = {entry.source_id: entry}
    written.save()
    assert is_in_checkpoints([state], file)
    os.truncate(file, 0)
    assert not is_in_checkpoints([state], file)
    file.write_bytes(b"second\n")
    assert not is_in_checkpoints([state], file)
    assert not is_in_checkpoints([state, tmp_path / "other"], file)
    written.close()


def test_a_renumbered_checkpoint_is_one_that_the_client_reads(tmp_path: Path) -> None:
    written = Checkpoint.open(tmp_path)
    none = Fingerprint(0, "")
    entry = CheckpointEntry("web1:/a#1", "/a", "/a", 7, 8, none, 5, none, int(time.time() * 1000))
    written.entries = {entry.source_id: entry}
    written.note_boot()
    written.save()
    written.close()
    renumber_devices(tmp_path)
    read = Checkpoint.open(tmp_path)
    assert [(one.device, one.inode) for one in read.entries.values()] == [(8, 8)]
    assert read.note_boot()
    read.close()
