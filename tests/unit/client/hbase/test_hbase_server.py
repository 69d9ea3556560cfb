"""The port for region servers over real sockets: answers, refusals, hostile input, and a bound of memory."""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from logferry.client.hbase import frames, messages, server
from logferry.client.hbase.cells import CODECS
from logferry.client.hbase.frames import RemoteCall
from logferry.client.hbase.server import CallRefused, PeerServer, ServerLimits

from tests.support.hbase_calls import REGION, RegionServer, put, shipped

EDITS = [(REGION, 5, [put("a")])]
SMALL = ServerLimits(call_bytes=4000, memory_bytes=6000, threads=2)
LENGTH = struct.Struct(">i")


@contextmanager
def serving(carry_out: Callable[[RemoteCall], None], limits: ServerLimits = SMALL) -> Iterator[int]:
    served = PeerServer("127.0.0.1", 0, carry_out, limits)
    served.start()
    try:
        yield served.port
    finally:
        served.close()


@pytest.fixture
def calls() -> list[RemoteCall]:
    return []


@pytest.fixture
def port(calls: list[RemoteCall]) -> Iterator[int]:
    with serving(calls.append) as served:
        yield served


def opening(**fields: object) -> bytes:
    header = messages.new("ConnectionHeader", **{"service_name": "AdminService", **fields}).SerializeToString()
    return bytes(frames.PREAMBLE + LENGTH.pack(len(header)) + header)


def test_a_call_is_carried_out_and_answered(port: int, calls: list[RemoteCall]) -> None:
    with RegionServer(port) as source:
        assert [source.ship(EDITS), source.ship(EDITS)] == ["", ""]
    assert [call.method for call in calls] == ["ReplicateWALEntry"] * 2
    assert all(bytes(call.cells) == shipped(EDITS)[1] for call in calls)


def test_a_call_byte_by_byte_is_the_same(port: int, calls: list[RemoteCall]) -> None:
    request, block = shipped(EDITS)
    data = frames.opening("AdminService", "hbase", CODECS[0]) + frames.request(7, "ReplicateWALEntry", request, block)
    with RegionServer(port, b"") as source:
        for n in range(len(data)):
            source.link.sendall(data[n : n + 1])
        assert source.answer() == ""
    assert calls[0].call_id == 7


def test_a_refused_call_says_why_and_the_connection_stays() -> None:
    texts = ["not now", ""]

    def carry_out(call: RemoteCall) -> None:
        if text := texts.pop(0):
            raise CallRefused(text)

    with serving(carry_out) as port, RegionServer(port) as source:
        assert source.ship(EDITS) == "logferry: not now"
        assert source.ship(EDITS) == ""


def test_a_defect_is_answered_too() -> None:
    """HBase would wait for its timeout, and nobody would know."""

    def carry_out(call: RemoteCall) -> None:
        raise ZeroDivisionError("a defect")

    with serving(carry_out) as port, RegionServer(port) as source:
        assert source.ship(EDITS) == "logferry: ZeroDivisionError('a defect')"


def test_another_method_is_refused(port: int, calls: list[RemoteCall]) -> None:
    with RegionServer(port) as source:
        assert "StopServer is not served here" in source.ship(EDITS, method="StopServer")
    assert calls == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"service_name": "ClientService", "cell_block_codec_class": CODECS[0]}, "'ClientService' is not served"),
        ({"cell_block_codec_class": "a.MessageCodec"}, "encoded by a.MessageCodec.*hbase.replication.rpc.codec"),
        ({}, "encoded by no codec"),
        ({"cell_block_codec_class": CODECS[0], "cell_block_compressor_class": "a.Gzip"}, "compressed by a.Gzip"),
        ({"cell_block_codec_class": CODECS[0], "rpc_crypto_cipher_transformation": "AES"}, "encryption"),
    ],
)
def test_a_connection_of_another_kind_has_every_call_refused(
    port: int, calls: list[RemoteCall], fields: dict[str, object], text: str
) -> None:
    """So that HBase logs the reason, too."""
    with RegionServer(port, opening(**fields)) as source:
        assert re.search(text, source.ship(EDITS))
        assert re.search(text, source.ship(EDITS))
    assert calls == []


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not HBase's protocol"),
        (b"HBas\x01\x50", "version 1 of HBase's protocol"),
        (b"HBas\x00\x51", "HBase wants Kerberos"),
        (b"HBas\x00\x52", "HBase wants delegation tokens"),
        (b"HBas\x00\x07", "the authentication 7"),
        (frames.PREAMBLE + LENGTH.pack(-1), "a connection header of -1 bytes"),
        (frames.PREAMBLE + LENGTH.pack(2**31 - 1), "a connection header of 2147483647 bytes"),
        (frames.PREAMBLE + LENGTH.pack(3) + b"\xff\xff\xff", "not a ConnectionHeader"),
        (opening(cell_block_codec_class=CODECS[0]) + LENGTH.pack(-5), "a call of -5 bytes"),
        (opening(cell_block_codec_class=CODECS[0]) + LENGTH.pack(3) + b"\xff\xff\xff", "request header"),
        (opening(cell_block_codec_class=CODECS[0]) + LENGTH.pack(5000) + b"\xff" * 5000, "5000 bytes without a header"),
    ],
)
def test_foreign_bytes_cut_the_connection_with_a_reason(
    port: int, start: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RegionServer(port, start) as source:
        assert source.is_cut
    assert reason in caplog.text
    with RegionServer(port) as source:
        assert source.ship(EDITS) == "", "others are served"


def test_a_call_that_is_cut_off_changes_nothing(port: int, calls: list[RemoteCall]) -> None:
    request, block = shipped(EDITS)
    data = frames.opening("AdminService", "hbase", CODECS[0]) + frames.request(1, "ReplicateWALEntry", request, block)
    for size in range(0, len(data), 7):
        with RegionServer(port, data[:size]):
            pass
    with RegionServer(port) as source:
        assert source.ship(EDITS) == ""
    assert len(calls) == 1


def test_a_cell_block_of_another_length_is_refused(port: int, caplog: pytest.LogCaptureFixture) -> None:
    header = messages.new("RequestHeader", call_id=1, method_name="ReplicateWALEntry", cell_block_meta={"length": 9})
    body = messages.delimited(header) + b"1234"
    with RegionServer(port, opening(cell_block_codec_class=CODECS[0]) + LENGTH.pack(len(body)) + body) as source:
        assert source.is_cut
    assert "should have 9 bytes and has 4" in caplog.text


def test_a_call_that_is_too_large_is_read_past_and_answered(port: int, calls: list[RemoteCall]) -> None:
    with RegionServer(port) as source:
        text = source.ship([(REGION, 5, [put("a", b"x" * 100_000)])])
        assert "at most 4000 are taken: lower replication.source.size.capacity" in text
        assert source.ship(EDITS) == "", "the connection stays in step"
    assert [len(call.cells) < 4000 for call in calls] == [True]


def test_calls_wait_for_room() -> None:
    """Two calls of 2500 bytes fit into 6000; the third one is read when one of them is done."""
    began, go = threading.Semaphore(0), threading.Semaphore(0)
    held: list[int] = []

    def carry_out(call: RemoteCall) -> None:
        held.append(1)
        began.release()
        assert go.acquire(timeout=20)
        held.pop()

    limits = SMALL._replace(threads=8)
    edits = [(REGION, 5, [put("a", b"x" * 2400)])]
    with serving(carry_out, limits) as port:
        request, block = shipped(edits)
        sources = [RegionServer(port) for _ in range(4)]
        for source in sources:
            source.link.sendall(frames.request(1, "ReplicateWALEntry", request, block))
        assert began.acquire(timeout=20)
        assert began.acquire(timeout=20)
        assert not began.acquire(timeout=0.5), "a third call was taken"
        assert len(held) == 2
        for _ in sources:
            go.release()
        assert [source.answer() for source in sources] == [""] * 4
        for source in sources:
            source.link.close()


def test_room_is_given_back_after_every_kind_of_call(caplog: pytest.LogCaptureFixture) -> None:
    """Each call takes more than half of the room: one that kept it would stop the next."""

    def carry_out(call: RemoteCall) -> None:
        raise CallRefused("no")

    edits = [(REGION, 5, [put("a", b"x" * 3600)])]
    broken = opening(cell_block_codec_class=CODECS[0]) + LENGTH.pack(3900) + b"\xff" * 3900
    with serving(carry_out) as port:
        for _ in range(3):
            with RegionServer(port, broken) as source:
                assert source.is_cut
            with RegionServer(port) as source:
                assert source.ship(edits) == "logferry: no"


def test_a_source_that_stops_inside_of_a_call_is_cut(monkeypatch: pytest.MonkeyPatch, calls: list[RemoteCall]) -> None:
    """And its room is given back."""
    monkeypatch.setattr(server, "_STALLED_S", 1.0)
    with serving(calls.append) as port:
        half = opening(cell_block_codec_class=CODECS[0]) + LENGTH.pack(3900) + b"\x00" * 100
        with RegionServer(port, half) as source:
            assert source.is_cut
        with RegionServer(port) as source:
            assert source.ship([(REGION, 5, [put("a", b"x" * 3600)])]) == ""


def test_a_source_that_sends_a_byte_now_and_then_is_cut(
    monkeypatch: pytest.MonkeyPatch, calls: list[RemoteCall]
) -> None:
    """It would hold the room of others for as long as it likes."""
    monkeypatch.setattr(server, "_STALLED_S", 0.5)
    with serving(calls.append) as port:
        with RegionServer(port, opening(cell_block_codec_class=CODECS[0]) + LENGTH.pack(3900)) as slow:
            deadline = time.monotonic() + 20
            with suppress(OSError):
                while time.monotonic() < deadline:
                    slow.link.sendall(b"\x00")
                    time.sleep(0.05)
            assert time.monotonic() < deadline, "it is still read"
        with RegionServer(port, b"HB") as silent:
            assert silent.is_cut
        with RegionServer(port) as source:
            assert source.ship([(REGION, 5, [put("a", b"x" * 3600)])]) == ""


def test_a_call_knows_when_it_came_although_it_waited_for_room(calls: list[RemoteCall]) -> None:
    go = threading.Event()

    def carry_out(call: RemoteCall) -> None:
        calls.append(call)
        assert go.wait(20)

    request, block = shipped([(REGION, 5, [put("a", b"x" * 3600)])])
    with serving(carry_out) as port, RegionServer(port) as first, RegionServer(port) as second:
        for source in (first, second):
            source.link.sendall(frames.request(1, "ReplicateWALEntry", request, block))
        time.sleep(0.3)
        freed = time.monotonic()
        go.set()
        assert [first.answer(), second.answer()] == ["", ""]
    assert all(0 < call.came < freed for call in calls)


def test_a_thread_that_cannot_be_had_costs_one_connection(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And not the port: nobody would be served any more."""
    start, left = threading.Thread.start, [1]

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name.startswith("hbase-127") and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    with RegionServer(port) as source:
        assert source.is_cut
    assert "can't start new thread" in caplog.text
    with RegionServer(port) as source:
        assert source.ship(EDITS) == ""


def test_the_end_waits_for_calls_that_are_carried_out() -> None:
    began, go = threading.Event(), threading.Event()

    def carry_out(call: RemoteCall) -> None:
        began.set()
        assert go.wait(20)

    served = PeerServer("127.0.0.1", 0, carry_out, SMALL)
    served.start()
    request, block = shipped(EDITS)
    with RegionServer(served.port) as source:
        source.link.sendall(frames.request(1, "ReplicateWALEntry", request, block))
        assert began.wait(20)
        end = threading.Thread(target=served.close)
        end.start()
        go.set()
        assert source.answer() == ""
        end.join(20)
        assert source.is_cut
    with suppress(OSError), RegionServer(served.port):
        pytest.fail("it still listens")
