"""The chunks of a call on their way to the gateway: batches, order, repetitions, and what HBase is answered."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from logferry.client.hbase import changes, delivery
from logferry.client.hbase.changes import RegionChunk
from logferry.client.hbase.connector import Shipping
from logferry.client.hbase.delivery import GatewayDelivery, NotDelivered, batches_of
from logferry.client.hbase.frames import RemoteCall
from logferry.client.hbase.server import CallRefused, PeerServer, ServerLimits
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Dialer
from logferry.gateway.contract.chunk import Chunk

from tests.support.fake_gateway import FakeGateway, Served, Stored
from tests.support.hbase_calls import (
    CLUSTER,
    ORDERS,
    OTHER_CLUSTER,
    OTHER_REGION,
    REGION,
    edits_with_parts,
    put,
    rows_of,
    ship_overlapping,
    shipped,
)


@pytest.fixture
def gateway() -> FakeGateway:
    found = FakeGateway(("orders",))
    found.prev_always = False
    return found


@pytest.fixture
def served(gateway: FakeGateway) -> Iterator[Served]:
    with Served(gateway) as running:
        yield running


@pytest.fixture
def writing(served: Served, monkeypatch: pytest.MonkeyPatch) -> GatewayDelivery:
    monkeypatch.setattr(delivery, "RETRY_S", (0.01, 0.02))
    return GatewayDelivery(GatewayCluster([served.url], None), "orders", Dialer(), threading.Event())


def chunk(seqno: int, source: str = REGION, size: int = 10) -> RegionChunk:
    return RegionChunk("orders", source, Chunk(seqno, None, 1, {}, b"x" * size))


def seqnos(gateway: FakeGateway, source: str = REGION) -> list[int]:
    return [one.seqno for name, found in gateway.sources.items() if source in name for one in found.chunks]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_a_batch_ends_where_the_source_changes() -> None:
    chunks = [chunk(1), chunk(2), chunk(2, f"{REGION}/2"), chunk(3), chunk(9, OTHER_REGION)]
    found = [(batch.source_id, [seqno for seqno, _ in batch.chunks]) for batch in batches_of(chunks)]
    assert found == [(REGION, [1, 2]), (f"{REGION}/2", [2]), (REGION, [3]), (OTHER_REGION, [9])]


def test_a_batch_ends_where_it_is_full() -> None:
    sizes = [len(batch.chunks) for batch in batches_of(chunk(n, size=300_000) for n in range(7))]
    assert sizes == [3, 3, 1]
    assert [len(batch.chunks) for batch in batches_of(chunk(n) for n in range(6000))] == [5000, 1000]


def test_chunks_are_made_as_they_are_sent() -> None:
    """The memory for a call is bounded by a request, and not by all of its chunks."""
    made = 0

    def chunks() -> Iterator[RegionChunk]:
        nonlocal made
        for made in range(100):
            yield chunk(made, size=500_000)

    next(batches_of(chunks()))
    assert made < 5


def test_chunks_are_recorded_in_order(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    done = writing.deliver([chunk(3), chunk(7), chunk(8)], soon())
    assert (done.chunks, seqnos(gateway)) == (3, [3, 7, 8])
    assert all("session" not in url and "partition_key=orders" in url for url, _ in gateway.requests)


def test_what_is_shipped_again_is_a_duplicate(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    writing.deliver([chunk(3), chunk(7)], soon())
    writing.deliver([chunk(3), chunk(7), chunk(9)], soon())
    assert seqnos(gateway) == [3, 7, 9]


@pytest.mark.parametrize("fault", ["503", "429", "500 before", "500 after", "cut before", "cut after"])
def test_a_request_is_repeated_until_it_is_recorded(
    writing: GatewayDelivery, gateway: FakeGateway, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "pause_s", lambda *_: 0.01)
    gateway.faults.extend([fault, fault])
    writing.deliver([chunk(3), chunk(7)], soon())
    assert seqnos(gateway) == [3, 7]
    assert len(gateway.requests) == 3


def test_nothing_is_sent_after_something_that_is_not_recorded(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    gateway.faults.append("503")
    with pytest.raises(NotDelivered, match="not recorded in time"):
        writing.deliver([chunk(3), chunk(4, OTHER_REGION)], soon(0.5))
    assert gateway.sources == {}
    assert len(gateway.requests) == 1


def test_a_refusal_is_reported_at_once(served: Served) -> None:
    writing = GatewayDelivery(GatewayCluster([served.url], None), "missing", Dialer(), threading.Event())
    with pytest.raises(NotDelivered, match="the gateway refuses") as caught:
        writing.deliver([chunk(3)], soon())
    assert caught.value.kind == "unknown-topic"


def test_a_request_that_is_too_large_is_halved(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    gateway.largest_chunk_bytes = 100
    with pytest.raises(NotDelivered) as caught:
        writing.deliver([chunk(1), chunk(2), chunk(3, size=200), chunk(4)], soon())
    assert (caught.value.kind, seqnos(gateway)) == ("too-large", [1, 2])


def test_an_end_of_the_connector_ends_the_repetition(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    gateway.faults.extend(["503"] * 1000)
    threading.Timer(0.2, writing._stop.set).start()
    with pytest.raises(NotDelivered, match="the connector stops"):
        writing.deliver([chunk(3)], soon(60))


def test_what_the_gateway_names_as_recorded_is_not_sent_again(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    """A call of many requests, of which all but the last were recorded before HBase gave up, needs few."""
    chunks = [chunk(n, size=400_000) for n in range(20)]
    writing.deliver(chunks[:18], soon())
    del gateway.requests[:]
    writing.deliver([*chunks, chunk(1, OTHER_REGION)], soon())
    assert (seqnos(gateway), seqnos(gateway, OTHER_REGION)) == (list(range(20)), [1])
    assert len(gateway.requests) == 4


def test_a_part_is_sent_although_the_first_one_is_recorded(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    """A connector died between two parts of an edit."""
    parts = [chunk(n, source) for n in (3, 4) for source in (REGION, f"{REGION}/2", f"{REGION}/3")]
    for done in range(len(parts)):
        gateway.sources.clear()
        writing.deliver(parts[:done], soon())
        writing.deliver([*parts, chunk(5)], soon())
        assert [[one.seqno for one in gateway.sources[part.source_id].chunks] for part in parts[:3]] == [
            [3, 4, 5],
            [3, 4],
            [3, 4],
        ]


def test_a_call_ends_at_its_deadline_although_requests_succeed(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    """HBase has given it up, and ships it again; what is recorded stays."""

    def chunks() -> Iterator[RegionChunk]:
        for n in range(1, 10):
            yield chunk(n, size=900_000)
            if n == 3:
                time.sleep(max(deadline - time.monotonic(), 0) + 0.01)

    deadline = soon(0.5)
    with pytest.raises(NotDelivered, match="2 chunks are"):
        writing.deliver(chunks(), deadline)
    assert seqnos(gateway) == [1, 2]
    writing.deliver([chunk(n, size=900_000) for n in range(1, 10)], soon())
    assert seqnos(gateway) == list(range(1, 10))


def test_a_call_that_waited_for_too_long_is_not_begun(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    """Its time began when HBase sent it, and not when a thread was free."""
    late = call(timeout_ms=10_000)
    with pytest.raises(CallRefused, match="not recorded in time"):
        Shipping(ORDERS, CLUSTER, writing).carry_out(late._replace(came=late.came - 10))
    assert gateway.requests == []


def test_a_gateway_that_hangs_is_not_waited_for_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_SHORTEST_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        writing = GatewayDelivery(GatewayCluster([url], None), "orders", Dialer(), threading.Event())
        began = time.monotonic()
        with pytest.raises(NotDelivered, match="not recorded in time"):
            writing.deliver([chunk(3)], soon(0.5))
        assert time.monotonic() - began < 10, "it waited for the whole time of an answer"


def test_an_end_of_the_connector_ends_a_call_between_requests(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    def chunks() -> Iterator[RegionChunk]:
        for n in range(1, 9):
            yield chunk(n, size=900_000)
            if n == 3:
                writing._stop.set()

    with pytest.raises(NotDelivered, match="the connector stops"):
        writing.deliver(chunks(), soon())
    assert len(gateway.requests) == 2


def test_an_answer_that_names_no_seqno_is_no_acknowledgement(
    writing: GatewayDelivery, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "_write", lambda *_: {"recorded_seqno": -1, "written": 0, "duplicates": 0})
    with pytest.raises(NotDelivered, match="not recorded in time"):
        writing.deliver([chunk(0)], soon(0.2))


# ---- a whole call ---------------------------------------------------------------------------------------------------


def call(timeout_ms: int = 0, **options: Any) -> RemoteCall:
    request, block = shipped([(REGION, 5, [put("a")]), (REGION, 6, [put("b")])], **options)
    data = memoryview(request.SerializeToString())
    return RemoteCall(1, "ReplicateWALEntry", timeout_ms, data, memoryview(block), time.monotonic())


def test_a_call_is_done_when_all_of_it_is_recorded(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    shipping = Shipping(ORDERS, CLUSTER, writing)
    shipping.carry_out(call())
    assert (seqnos(gateway), shipping.figures.chunks) == ([5, 6], 2)


def test_a_call_of_another_cluster_is_refused_and_writes_nothing(
    writing: GatewayDelivery, gateway: FakeGateway
) -> None:
    with pytest.raises(CallRefused, match=f"of the cluster {OTHER_CLUSTER}"):
        Shipping(ORDERS, CLUSTER, writing).carry_out(call(cluster=OTHER_CLUSTER))
    assert gateway.requests == []


def test_hbase_is_answered_before_it_gives_the_call_up(writing: GatewayDelivery, gateway: FakeGateway) -> None:
    gateway.faults.extend(["500 before"] * 1000)
    began = time.monotonic()
    with pytest.raises(CallRefused, match="not recorded in time"):
        Shipping(ORDERS, CLUSTER, writing).carry_out(call(timeout_ms=4000))
    assert time.monotonic() - began < 4.0


def test_a_gateway_that_refuses_is_an_error_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    writing = GatewayDelivery(GatewayCluster([served.url], None), "missing", Dialer(), threading.Event())
    with pytest.raises(CallRefused, match="unknown-topic"):
        Shipping(ORDERS, CLUSTER, writing).carry_out(call())
    assert "hbase-not-recorded kind=unknown-topic" in caplog.text


@pytest.mark.parametrize("seed", range(3))
def test_two_connectors_that_overlap_write_each_change_once_and_in_order(
    served: Served, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """`test_hbase_connectors.py` does the same before a real gateway."""
    monkeypatch.setattr(changes, "PART_BYTES", 10_000)
    written: list[tuple[int, str]] = []
    write = gateway._write

    def noted(stored: Stored, *more: Any) -> dict[str, object]:
        before = len(stored.chunks)
        answer = write(stored, *more)
        written.extend(
            (one.seqno, json.loads(line)["row"]) for one in stored.chunks[before:] for line in one.data.splitlines()
        )
        return answer

    monkeypatch.setattr(gateway, "_write", noted)
    edits = edits_with_parts(seed)
    with ExitStack() as open_ones:
        ports = []
        for _ in range(2):
            writing = GatewayDelivery(GatewayCluster([served.url], None), "orders", Dialer(), threading.Event())
            server = PeerServer("127.0.0.1", 0, Shipping(ORDERS, CLUSTER, writing).carry_out, ServerLimits())
            open_ones.callback(server.close)
            server.start()
            ports.append(server.port)
        assert ship_overlapping(ports, edits, seed) > 10, "the calls did not overlap"
    assert written == rows_of(edits)
