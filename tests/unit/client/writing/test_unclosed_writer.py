"""Writers that a program forgot to close, and a writer whose gateway never answers: both are named."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from logferry.client import AsyncWriter, Unknown, Writer
from logferry.client.transport import cluster
from logferry.client.transport.cluster import TROUBLE_AFTER_S, TROUBLE_EVERY_S, TroubleLog

from tests.support.fake_gateway import FakeGateway, Served

PROGRAM = """
import logging, sys
from logferry.client import Writer
logging.basicConfig(level="WARNING")
writer = Writer(sys.argv[1], "t", "s")
for number in range(100):
    writer.write(b"%d" % number)
{end}
"""


@pytest.fixture
def closed_port() -> Iterator[str]:
    """Bound, and nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def run(url: str, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM.format(end=end), url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("end", ["", "del writer", "sys.exit(0)", "raise KeyError('the program fails')"])
def test_chunks_of_a_writer_that_was_not_closed_are_still_recorded(end: str) -> None:
    gateway = FakeGateway()
    gateway.prev_always = False
    with Served(gateway) as served:
        done = run(served.url, end)
    assert [chunk.data for chunk in gateway.sources["s"].chunks] == [b"%d" % number for number in range(100)]
    assert "KeyError" in end or done.returncode == 0, done.stderr


def test_chunks_that_a_process_leaves_behind_are_named() -> None:
    gateway = FakeGateway()
    gateway.prev_always = False
    gateway.faults.extend(["", *["503"] * 10_000])  # the session opens
    with Served(gateway) as served:
        done = run(served.url, "")
    assert "ResourceWarning: the writer of s was not closed: 100 of its chunks may be lost" in done.stderr
    assert "writer-unclosed source=s waiting=100 unrecorded=100" in done.stderr


def test_a_writer_that_was_closed_says_nothing() -> None:
    gateway = FakeGateway()
    gateway.prev_always = False
    with Served(gateway) as served:
        done = run(served.url, "writer.close()")
    assert (done.returncode, done.stderr) == (0, "")


def test_trouble_is_logged_after_some_seconds_and_then_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [100.0]
    monkeypatch.setattr("logferry.client.transport.cluster.time.monotonic", lambda: clock[0])
    log = TroubleLog("writer of s")

    def lines(seconds: float) -> int:
        caplog.clear()
        for _ in range(int(seconds * 10)):
            began = clock[0]
            clock[0] += 0.1
            log.failed(began, "refused")
        return caplog.text.count("gateway-silent")

    assert lines(TROUBLE_AFTER_S - 0.5) == 0
    assert lines(TROUBLE_EVERY_S) == 1
    assert lines(10 * TROUBLE_EVERY_S) in (9, 10)
    log.worked()
    assert lines(TROUBLE_AFTER_S - 0.5) == 0
    clock[0] += 1000.0
    log.worked()
    log.failed(clock[0] - TROUBLE_AFTER_S, "timed out")  # one request that took so long
    assert "for_s=5 why=" in caplog.text


def test_a_wrong_url_is_logged_by_a_writer_that_waits(
    closed_port: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "TROUBLE_AFTER_S", 0.2)
    writer = Writer(closed_port, "t", "s")
    with pytest.raises(Unknown):
        writer.open(timeout_s=2.0)
    assert caplog.text.count("gateway-silent") == 1
    assert "writer of s" in caplog.text
    writer.close()  # it has no chunks


async def test_an_async_writer_that_is_collected_unclosed_is_named(closed_port: str) -> None:
    writer: Any = AsyncWriter(closed_port, "t", "s")
    writer._http = object()
    with pytest.warns(ResourceWarning) as warned:
        writer.__del__()
    assert ["the writer of s was not closed: 0 chunks are lost" in str(one.message) for one in warned] == [True]
    writer._http = None
