"""Syslog on real sockets, with senders that are slow, wrong or too many."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from logferry.client.inputs import syslog_server
from logferry.client.inputs.counters import InputCounters
from logferry.client.inputs.listeners import Certificates, ListenAddress
from logferry.client.inputs.spool import KEPT_BYTES, Spool
from logferry.client.inputs.syslog_server import SyslogInput
from logferry.ops.stack.processes import free_ports


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Listening:
    """An input on all kinds of sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.issue()
        self.tcp, self.tls, self.udp = free_ports(3)
        self.unix = str(folder / "log")
        texts = [f"tcp://127.0.0.1:{self.tcp}", f"tls://127.0.0.1:{self.tls}", f"udp://127.0.0.1:{self.udp}"]
        self.addresses = [ListenAddress.of(text) for text in (*texts, f"unix://{self.unix}")]
        self.spool = Spool(folder / "spool" / "syslog.spool", 16 << 20, of_lines=True)
        self.spool.open()
        self.counters = InputCounters("syslog", "syslog", self.spool)
        certificates = Certificates(str(folder / "cert"), str(folder / "key"))
        self.input = SyslogInput(self.spool, self.counters, self.addresses, 64 << 10, certificates)
        self.input.start()

    def issue(self) -> None:
        issued = self.ca.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(self.folder / "key"))
        issued.cert_chain_pems[0].write_to_path(str(self.folder / "cert"))

    def stop(self) -> None:
        self.input.close(60)
        self.spool.close(60)
        assert self.counters.defect is None

    def connect(self, timeout_s: float = 60) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.tcp), timeout_s)

    def connect_tls(self, ca: trustme.CA | None = None) -> ssl.SSLSocket:
        context = ssl.create_default_context()
        (ca or self.ca).configure_trust(context)
        plain = socket.create_connection(("127.0.0.1", self.tls), 60)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.spool.path.read_bytes().splitlines()]

    def messages(self) -> list[str]:
        return [record["message"] for record in self.records()]

    def until_messages(self, count: int) -> list[str]:
        until(lambda: self.counters.messages == count and self.spool.is_empty)
        return self.messages()


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    found = Listening(tmp_path)
    yield found
    found.stop()


def test_every_kind_of_socket_and_framing(listening: Listening) -> None:
    with listening.connect() as sender:
        sender.sendall(b"<13>one\n8 <13>two\n<13>three\r\n\n\0<13>no newline")
    with listening.connect_tls() as sender:
        sender.sendall(b"<13>secret\n")
    until(lambda: listening.counters.messages == 5)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"<13>" + b"x" * 65_503, ("127.0.0.1", listening.udp))
        sender.sendto(b"\n", ("127.0.0.1", listening.udp))
    until(lambda: listening.counters.messages == 6)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"<13>Oct 11 22:14:15 app[7]: local\0", listening.unix)
    listening.until_messages(7)
    records = listening.records()
    assert sorted(record["message"] for record in records[:5]) == ["no newline", "one", "secret", "three", "two"]
    assert {record["peer"] for record in records[:6]} == {"127.0.0.1"}
    assert records[5]["message"] == "x" * 65_503
    assert "peer" not in records[6]
    assert (records[6]["app"], records[6]["pid"], records[6]["message"]) == ("app", "7", "local")
    assert Path(listening.unix).stat().st_mode & 0o777 == 0o666
    assert (listening.counters.refused, listening.counters.dropped) == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        b"<13>" + b"x" * 5_000_000 + b"\n",
        b"200000 " + b"x" * 200_000,
        b"99999999 x",  # the rest of this connection is taken for it
        b"<13>" + b"\0" * 100_000 + b"\n",
    ],
)
def test_a_message_without_an_end_is_passed_over(listening: Listening, wrong: bytes) -> None:
    with listening.connect() as sender:
        sender.sendall(wrong + b"<13>after\n")
    until(lambda: listening.counters.refused == 1)
    with listening.connect() as sender:
        sender.sendall(b"<13>other\n")
    expected = ["other"] if wrong.startswith(b"9") else ["after", "other"]
    assert sorted(listening.until_messages(len(expected))) == expected


def test_bytes_that_are_no_handshake(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syslog_server, "HANDSHAKE_S", 0.2)
    with socket.create_connection(("127.0.0.1", listening.tls), 60) as sender:
        sender.sendall(b"<13>plain\n" * 100)
        assert sender.recv(100) is not None
    until(lambda: listening.counters.refused == 1)
    with socket.create_connection(("127.0.0.1", listening.tls), 60) as sender:  # says nothing
        assert sender.recv(100) == b""
    until(lambda: listening.counters.refused == 2)
    with pytest.raises(ssl.SSLError):
        listening.connect_tls(trustme.CA())
    monkeypatch.setattr(syslog_server, "HANDSHAKE_S", 60.0)
    with listening.connect_tls() as sender:
        sender.sendall(b"<13>secret\n")
    assert listening.until_messages(1) == ["secret"]


def test_connections_beyond_the_limit_are_refused(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syslog_server, "CONNECTIONS", 20)
    senders = [listening.connect() for _ in range(300)]
    until(lambda: listening.counters.refused == 280)
    for number, sender in enumerate(senders[:20]):
        sender.sendall(b"<13>%d" % number)  # slow: the newline comes later
    for sender in senders[:20]:
        sender.sendall(b"\n")
    assert sorted(map(int, listening.until_messages(20))) == [*range(20)]
    for sender in senders:
        sender.close()

    def sends() -> bool:
        refused = listening.counters.refused
        with listening.connect() as sender:
            sender.sendall(b"<13>again\n")
            until(lambda: listening.counters.refused > refused or listening.counters.messages == 21)
        return listening.counters.messages == 21

    until(sends)


def whole_messages(sender: socket.socket, message: bytes) -> int:
    """Sends until nothing is read any more."""
    sent = 0
    with suppress(TimeoutError, socket.timeout):
        while sent < 1000:  # far more than the buffers of the system
            sender.sendall(message)
            sent += 1
    assert 0 < sent < 1000
    return sent


def test_connections_wait_for_room_and_datagrams_are_dropped(listening: Listening) -> None:
    filler = b"x" * ((1 << 20) - 1) + b"\n"
    while listening.spool.put(filler):
        until(lambda: listening.spool.is_empty)
    while listening.spool.put(b"y" * 999 + b"\n"):
        until(lambda: listening.spool.used_bytes <= 16 << 20)
    until(lambda: listening.spool.is_empty)
    begun = listening.spool.end
    message = b"<13>" + b"m" * 60_000 + b"\n"
    with listening.connect(2) as sender:
        sent = whole_messages(sender, message)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(b"<13>" + b"d" * 60_000, ("127.0.0.1", listening.udp))
            until(lambda: listening.counters.dropped == 1)
        acknowledged = listening.spool.end
        assert listening.spool.free_to(acknowledged) > 0
        listening.spool.free(acknowledged)
        until(lambda: listening.counters.messages == sent)
        sender.settimeout(60)
    until(lambda: listening.spool.is_empty)
    with listening.spool.path.open("rb") as file:
        file.seek(begun)
        lengths = [len(json.loads(line)["message"]) for line in file]
    assert lengths[:sent] == [60_000] * sent
    assert listening.spool.end > begun > KEPT_BYTES


def test_a_new_certificate_holds_for_new_connections(
    listening: Listening, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def shown() -> bytes | None:
        with listening.connect_tls() as sender:
            return sender.getpeercert(binary_form=True)

    first = shown()
    (listening.folder / "cert").write_text("no certificate")
    listening.input.reload()
    assert shown() == first
    assert "credentials-unusable" in caplog.text
    listening.issue()
    listening.input.reload()
    assert shown() not in (None, first)


def test_a_socket_that_is_in_use_is_refused(listening: Listening, tmp_path: Path) -> None:
    for address in listening.addresses:
        with pytest.raises(OSError, match="in use"):
            address.listen()
    other = tmp_path / "file"
    other.write_text("mine")
    with pytest.raises(OSError, match="in use"):
        ListenAddress.of(f"unix://{other}").listen()
    assert other.read_text() == "mine"
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as before:
        before.bind(str(stale))
    ListenAddress.of(f"unix://{stale}").listen().close()


@pytest.mark.parametrize(
    "text", ["", "1.2.3.4:5", "tcp://h", "tcp://h:1/x", "udp://:5", "unix://log", "http://h:1", "tcp://h:99999"]
)
def test_an_address_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|Port|port"):
        ListenAddress.of(text)
