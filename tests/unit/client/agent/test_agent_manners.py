"""The client is a guest on its host: what it may take has limits."""

from __future__ import annotations

import os
from typing import Any

import pytest
from logferry.client.transport.connections import Reply

from tests.support.fake_gateway import FakeGateway

KIB = 1024


SMALL = {"chunk_bytes": KIB, "line_bytes": KIB, "request_bytes": KIB}


@pytest.mark.parametrize("client", [{"bytes_per_s": 1000, **SMALL}], indirect=True)
def test_bytes_over_the_network_are_limited(client: Any, gateway: Any) -> None:
    for name in ("a.log", "b.log"):
        client.write(name, os.urandom(30_000).replace(b"\n", b"") + b"\n")
    client.pusher.encoding = "none"
    client.step()
    sent = []
    for _ in range(40):
        client.step(0.5)
        sent.append(sum(len(content) for content in client.stored()))
    assert 15_000 < sent[-1] <= 22_000
    assert all(after - before <= 2 * KIB for before, after in zip(sent, sent[2:]))
    for _ in range(100):
        client.step(0.5)
    assert sorted(client.stored()) == sorted(path.read_bytes() for path in client.root.glob("*.log"))


@pytest.mark.parametrize("client", [{"cpu_percent": 10.0}], indirect=True)
def test_time_of_a_processor_is_limited(client: Any, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    used = [0.0]
    monkeypatch.setattr("logferry.client.agent.agent.time.process_time", lambda: used[0])

    def costly(url: str, headers: dict[str, str], body: bytes, method: str) -> Reply:
        used[0] += 0.5
        return gateway(url, headers, body)

    client.restart()
    client.pusher.exchange = costly
    for number in range(100):
        client.write("a.log", b"%d\n" % number)
        client.step(1.0)
    assert 15 <= len(gateway.requests) <= 22
    assert client.step(10.0) == 1
    assert client.stored() == [(client.root / "a.log").read_bytes()]


REQUESTS = {"chunk_bytes": 8 * KIB, "line_bytes": 8 * KIB, "request_bytes": 16 * KIB}


def delete(client: Any, gateway: Any, count: int, lines: int = 900) -> list[bytes]:
    """Files that were deleted one after the other while the gateway was away; what they held."""
    for number in range(count):
        client.write(f"{number}.log", b"%d\n" % number)
    client.settle()
    gateway.faults.extend(["503"] * 1000)
    held = []
    for number in range(count):
        client.write(f"{number}.log", (b"x" * 99 + b"\n") * lines)
        client.step()
        held.append((client.root / f"{number}.log").read_bytes())
        (client.root / f"{number}.log").unlink()
        client.step()
        client.step()
    return held


@pytest.mark.parametrize("client", [{"max_deleted_bytes": 200 * KIB, **REQUESTS}], indirect=True)
def test_deleted_files_are_kept_open_up_to_a_limit_the_oldest_goes_first(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    held = delete(client, gateway, 3)
    gateway.faults.clear()
    for _ in range(100):
        client.step(20.0)
    first, *others = sorted(client.stored())
    assert others == held[1:]
    assert held[0].startswith(first)
    assert f"sent_to={len(first)} size={len(held[0])}" in caplog.text
    assert caplog.text.count("deleted-dropped") == 1


@pytest.mark.parametrize("client", [{"max_deleted_bytes": 200 * KIB, **REQUESTS}], indirect=True)
def test_what_was_sent_goes_before_what_was_not(client: Any, gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    client.write("a.log", b"y" * 99 + b"\n")
    client.write("a.log", (b"y" * 99 + b"\n") * 900)
    client.settle()
    client.step(0.5)
    (client.root / "a.log").unlink()
    held = delete(client, gateway, 2)
    gateway.faults.clear()
    for _ in range(100):
        client.step(20.0)
    assert set(held) <= set(client.stored())
    assert "deleted-dropped" not in caplog.text


@pytest.mark.parametrize("client", [{"max_deleted_bytes": 300 * KIB, **REQUESTS}], indirect=True)
def test_within_the_limit_nothing_is_lost(client: Any, gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    held = delete(client, gateway, 3)
    gateway.faults.clear()
    for _ in range(100):
        client.step(20.0)
    assert sorted(client.stored()) == held
    assert "deleted-dropped" not in caplog.text


@pytest.mark.parametrize("client", [{"max_deleted_bytes": 0}], indirect=True)
def test_a_file_that_was_only_renamed_is_not_deleted(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    (client.root / "a.log").rename(client.root / "archived")
    client.write("archived", b"two\n")
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]
    assert "deleted-dropped" not in caplog.text
