"""Tokens and certificates are rotated while the client runs: it reads them again, by itself and at SIGHUP."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from logferry.client.transport.cluster import Credentials, GatewayCluster
from logferry.client.transport.connections import Dialer

from tests.support.fake_gateway import FakeGateway, Served

BOUND_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def test_a_token_is_read_again_when_its_file_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    clusters = [GatewayCluster(["http://a:1"], "one"), GatewayCluster(["http://b:1"], "other")]
    credentials = Credentials(clusters, [str(file), None], Dialer())
    assert not credentials.read()
    (tmp_path / "new").write_text("two\n")
    (tmp_path / "new").rename(file)
    assert credentials.read()
    assert [cluster.token for cluster in clusters] == ["two", "other"]
    assert not credentials.read()
    for bad in (lambda: file.write_text(""), lambda: file.write_text("two words\n"), file.unlink):
        bad()
        assert not credentials.read()
        assert clusters[0].token == "two"
    assert caplog.text.count("credentials-unusable") == 3
    assert credentials.read(always=True) is False
    file.write_text("three\n")
    assert credentials.read()
    assert clusters[0].token == "three"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A running client, with its log in ``err``."""
    started: list[subprocess.Popen[bytes]] = []

    def start(url: str, *options: str) -> subprocess.Popen[bytes]:
        (tmp_path / "a.log").write_bytes(b"one\n")
        command = [sys.executable, "-m", "logferry.client", "--url", url, "--topic", "t", "--host", "h"]
        command += ["--state-dir", str(tmp_path / "state"), "--linger-ms", "20", *options, str(tmp_path / "*.log")]
        with (tmp_path / "err").open("wb") as err:
            started.append(subprocess.Popen(command, stderr=err))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def content(gateway: FakeGateway) -> list[bytes]:
    return [stored.content() for stored in gateway.sources.values() if stored.chunks]


def log_has(tmp_path: Path, event: str) -> Callable[[], bool]:
    return lambda: f" {event} " in (tmp_path / "err").read_text() + " "


def test_a_client_whose_token_was_rotated_continues_without_a_restart(
    tmp_path: Path, client: Callable[..., subprocess.Popen[bytes]]
) -> None:
    gateway = FakeGateway()
    gateway.token = "new"
    (tmp_path / "token").write_text("old\n")
    with Served(gateway) as served:
        process = client(served.url, "--token-file", str(tmp_path / "token"))
        until(log_has(tmp_path, "refused"))
        (tmp_path / "token").write_text("new\n")
        until(lambda: content(gateway) == [b"one\n"])
        assert process.poll() is None
        assert gateway.requests[-1][1]["authorization"] == "Bearer new"


def test_a_hangup_reads_the_authority_again_and_does_not_end_the_client(
    tmp_path: Path, client: Callable[..., subprocess.Popen[bytes]]
) -> None:
    authority, other = trustme.CA(), trustme.CA()
    other.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    gateway = FakeGateway()
    with Served(gateway, context=context) as served:
        process = client(served.url, "--ca-file", str(tmp_path / "ca.pem"), "-v")
        until(log_has(tmp_path, "retry"))
        (tmp_path / "other.pem").write_text("no certificate\n")
        os.replace(tmp_path / "other.pem", tmp_path / "ca.pem")  # noqa: PTH105
        process.send_signal(signal.SIGHUP)
        until(log_has(tmp_path, "credentials-unusable"))
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        process.send_signal(signal.SIGHUP)
        until(lambda: content(gateway) == [b"one\n"])
        process.terminate()
        assert process.wait(BOUND_S) == 0
