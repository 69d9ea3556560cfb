"""What becomes of lines on their way: last ones, long ones, records of many, holes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from logferry.client.files.batches import RECORD_WAIT_S
from logferry.client.files.chunking import starts_record


def chunks(gateway: Any) -> list[tuple[bytes, str | None]]:
    return [(c.data, c.attributes.get("split")) for stored in gateway.sources.values() for c in stored.chunks]


RECORDS = {"record_start": starts_record(r"^\[")}


@pytest.mark.parametrize("client", [RECORDS], indirect=True)
def test_a_record_waits_for_its_last_lines_but_not_for_long(client: Any, gateway: Any) -> None:
    client.write("a.log", b"[1] error\n  at x\n")
    for _ in range(4):
        client.step(0.2)
    assert chunks(gateway) == []
    client.write("a.log", b"  at y\n[2] fine\n")
    client.step(0.2)
    client.step(0.2)
    assert chunks(gateway) == [(b"[1] error\n  at x\n  at y\n", None)]
    client.step(RECORD_WAIT_S)
    assert chunks(gateway)[1:] == [(b"[2] fine\n", None)]
    client.write("a.log", b"  late\n[3] half")
    client.step(0.2)
    assert len(chunks(gateway)) == 2
    client.step(RECORD_WAIT_S)
    assert chunks(gateway)[2:] == [(b"  late\n", "last")]
    client.step(client.config.idle_s)
    assert chunks(gateway)[3:] == [(b"[3] half", "open")]


@pytest.mark.parametrize("client", [RECORDS], indirect=True)
def test_records_stay_together_over_a_restart(client: Any, gateway: Any) -> None:
    client.write("a.log", b"[1] error\n  at x\n")
    client.step(0.2)
    client.step(0.2)
    client.restart()
    client.write("a.log", b"  at y\n[2] fine\n")
    client.settle()
    assert chunks(gateway) == [(b"[1] error\n  at x\n  at y\n", None), (b"[2] fine\n", None)]


@pytest.mark.parametrize(
    "client", [{"cut_lines": True, "line_bytes": 1024, "chunk_bytes": 1024, "request_bytes": 2048}], indirect=True
)
@pytest.mark.parametrize("every", [1, 3, 1000])
def test_a_long_line_is_cut_the_same_whenever_the_client_is_restarted(client: Any, gateway: Any, every: int) -> None:
    client.write("a.log", b"one\n" + b"x" * 9000 + b"\ntwo\n" + b"y" * 1025 + b"\n" + b"z" * 1024 + b"\n")
    for number in range(20):
        client.step()  # a session
        client.step()  # one request
        if number % every == 0:
            client.restart()
    client.settle()
    assert client.stored() == [b"one\n" + b"x" * 1024 + b"\ntwo\n" + b"y" * 1024 + b"\n" + b"z" * 1024 + b"\n"]
    (stored,) = gateway.sources.values()
    assert sum(int(c.attributes.get("cut", "0")) for c in stored.chunks) == 9000 - 1024 + 1
    assert stored.recorded == (client.root / "a.log").stat().st_size


def test_a_hole_is_reported_once_and_sent_unchanged(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As copytruncate leaves it where the writer does not append: it continues at its old position."""
    client.write("a.log", b"one\n")
    with (client.root / "a.log").open("r+b") as writer:
        writer.seek(0, os.SEEK_END)
        os.truncate(client.root / "a.log", 0)
        writer.write(b"two\n")
    with (client.root / "a.log").open("r+b") as writer:
        writer.seek(5000)
        writer.write(b"three\n")
    gateway.faults.extend(["", "503", "500 before"])
    client.settle()
    client.step(30.0)
    client.settle()
    assert client.stored() == [(client.root / "a.log").read_bytes()]
    told = [record.getMessage() for record in caplog.records if "nul-hole" in record.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("position=8 bytes=4992")
