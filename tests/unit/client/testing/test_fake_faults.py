"""The faults of `FakeGateway`, each with the client that has to live with it, and what a test asks of it."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from logferry.client import OutOfRange, Position, Reader, Rejected, Unknown, Writer
from logferry.client.testing import FakeGateway

PATIENCE_S = 60.0


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway({"orders": 2}) as running:
        yield running


def calls(gateway: FakeGateway, name: str) -> int:
    return sum(f"/{name}" in target for _, target in gateway.requests)


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        (lambda gateway: gateway.drop_answer(), 2),
        (lambda gateway: gateway.drop_answer(after_bytes=20), 2),
        (lambda gateway: gateway.drop_answer(after_bytes=1 << 20), 1),
        (lambda gateway: gateway.drop_request(), 2),
        (lambda gateway: gateway.refuse("quota"), 2),
        (lambda gateway: gateway.refuse("overloaded", retry_after_s=0.1), 2),
        (lambda gateway: gateway.refuse("outcome-unknown", 2), 3),
        (lambda gateway: gateway.delay(0.01), 1),
        (lambda gateway: gateway.refuse("forbidden", call="read"), 1),
    ],
)
def test_a_chunk_is_recorded_once_whatever_happens_to_the_write(gateway, fault, requests) -> None:
    fault(gateway)
    with Writer(gateway.url, "orders", "web1") as writer:
        writer.write(b"an order\n")
    assert [(chunk.seqno, chunk.data) for chunk in gateway.chunks("orders")] == [(1, b"an order\n")]
    assert calls(gateway, "chunks") == requests


def test_a_lost_answer_leaves_the_chunk_and_a_dropped_request_does_not(gateway) -> None:
    for drop, recorded in ((gateway.drop_request, []), (gateway.drop_answer, [b"an order\n"])):
        drop(1000)
        writer = Writer(gateway.url, "orders", "web1")
        writer.write(b"an order\n")
        with pytest.raises(Unknown):
            writer.close(timeout_s=0.2)
        assert [chunk.data for chunk in gateway.chunks("orders")] == recorded
        gateway.heal()


def test_a_refusal_ends_the_writer_with_its_kind(gateway) -> None:
    gateway.refuse("forbidden", call="session")
    with pytest.raises(Rejected) as refused, Writer(gateway.url, "orders", "web1") as writer:
        writer.open(PATIENCE_S)
    assert (refused.value.kind, refused.value.status) == ("forbidden", 403)
    with pytest.raises(ValueError, match="'chunks' is none of commit,"):
        gateway.refuse("forbidden", call="chunks")
    with pytest.raises(ValueError, match="'forbiden' is none of bad-request,"):
        gateway.refuse("forbiden")


def test_a_page_that_is_cut_off_comes_again(gateway) -> None:
    seqnos = [gateway.write("orders", "web1", b"x" * 1000) for _ in range(50)]
    for after_bytes in (1, 50, 200, 5000, 20_001):  # in the head, and in the page
        gateway.drop_answer(call="read", after_bytes=after_bytes)
    with Reader(gateway.url, "orders", follow=False) as reader:
        assert [chunk.seqno for chunk in reader] == seqnos
    gateway.refuse("out-of-range", call="read", first=7, next=9)
    with pytest.raises(OutOfRange) as missed, Reader(gateway.url, "orders", partitions=[0]) as reader:
        reader.read(PATIENCE_S)
    assert (missed.value.first, missed.value.next) == (7, 9)


def test_a_session_that_is_cut_off_resumes(gateway) -> None:
    for number in range(50):
        gateway.write("orders", f"web{number}", b"x" * 1000)
    gateway.drop_answer(3, call="stream", after_bytes=20_000)
    with Reader(gateway.url, "orders", consumer="billing", follow=False) as reader:
        found = [chunk.source_id for chunk in reader]
        gateway.drop_answer(call="commit")
        reader.commit()
        assert gateway.positions("billing") == reader.position
    assert sorted(found) == sorted(f"web{number}" for number in range(50))
    assert gateway.positions("other") == Position()


def test_a_reader_that_takes_nothing_keeps_no_partitions(gateway) -> None:
    """More than the sockets hold: its frames wait."""
    for number in range(20):
        gateway.write("orders", f"web{number}", bytes(1 << 20))
    url = f"{gateway.url}/v1/consumers/billing/stream?topic=dc1.orders"
    with urllib.request.urlopen(url, timeout=PATIENCE_S), Reader(gateway.url, "orders", consumer="billing") as reader:
        assert reader.read(PATIENCE_S) is not None


def test_it_stops_and_starts_with_all_that_it_holds(gateway) -> None:
    url = gateway.url
    with Writer(url, "orders", "web1") as writer, Reader(url, "orders") as reader:
        writer.write(b"before\n")
        assert data_of(reader) == b"before\n"
        gateway.stop()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        writer.write(b"meanwhile\n")
        gateway.start()
        assert gateway.url == url
        assert data_of(reader) == b"meanwhile\n"
    assert [chunk.data for chunk in gateway.chunks("dc1.orders", "web1")] == [b"before\n", b"meanwhile\n"]
    assert gateway.chunks("orders", "web2") == []


def data_of(reader: Reader) -> bytes:
    chunk = reader.read(PATIENCE_S)
    assert chunk is not None
    return chunk.data


def test_nothing_is_left_of_it() -> None:
    before = set(threading.enumerate())
    with FakeGateway({"orders": 1}) as gateway:
        with Reader(gateway.url, "orders") as page, Reader(gateway.url, "orders", consumer="billing") as session:
            gateway.write("orders", "web1", b"x")
            assert page.read(PATIENCE_S) is not None
            assert session.read(PATIENCE_S) is not None
            gateway.delay(1000, call="topics")
            waiting = threading.Thread(target=answer_of, args=(gateway.url + "/v1/topics",))
            waiting.start()
            while not calls(gateway, "topics"):
                time.sleep(0.01)
            began = time.monotonic()
            gateway.stop()
            waiting.join()
            assert time.monotonic() - began < PATIENCE_S
    assert set(threading.enumerate()) == before


def answer_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except (urllib.error.URLError, OSError):
        return 0


def test_a_source_is_known_already(gateway) -> None:
    assert gateway.write("orders", "web1", b"old\n", 8, attributes={"a": "b"}, created_ms=5) == 8
    assert gateway.write("orders", "web1", b"old\n") == 9
    writer = Writer(gateway.url, "orders", "web1")
    assert writer.recorded_seqno == 9
    assert writer.write(b"new\n") == 10
    writer.flush()
    assert gateway.write("orders", "web1", b"of another program\n") == 11
    writer.write(b"too late\n", 12)  # an 11 would count as its duplicate
    with pytest.raises(Rejected) as refused:
        writer.close()
    assert (refused.value.kind, refused.value.recorded_seqno) == ("overlap", 10)
    chunk = gateway.chunks("orders")[0]
    assert (chunk.dc, chunk.topic, chunk.offset, chunk.prev, chunk.created_ms) == ("dc1", "dc1.orders", 0, None, 5)
    for wrong in (9, 11):
        with pytest.raises(ValueError, match="is not above 11"):
            gateway.write("orders", "web1", b"", wrong)
    with pytest.raises(LookupError, match="create it"):
        gateway.write("payments", "web1", b"")
    with pytest.raises(LookupError, match="create it"):
        gateway.chunks("payments")
    gateway.create_topic("payments", 4)
    gateway.create_topic("payments", 6)
    with pytest.raises(ValueError, match="cannot be reduced"):
        gateway.create_topic("payments", 4)


def test_a_token_that_changes(gateway) -> None:
    gateway.token = "lf_new"
    with pytest.raises(Rejected) as refused, Writer(gateway.url, "orders", "web1", token="lf_old") as writer:
        writer.open(PATIENCE_S)
    assert refused.value.kind == "unauthenticated"
    with Writer(gateway.url, "orders", "web1", token="lf_new") as writer:
        writer.write(b"an order\n")


def test_a_body_in_pieces(gateway) -> None:
    with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as connection:
        head = (
            b"POST /v1/topics/orders/sources/s/chunks?seqno=1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(head + b"4\r\none\n\r\n4;a=b\r\ntwo\n\r\n0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    assert [chunk.data for chunk in gateway.chunks("orders")] == [b"one\ntwo\n"]
