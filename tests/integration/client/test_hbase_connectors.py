"""Two connectors that carry out calls of the same region at a time, before real gateway workers.

HBase ships a call again that took too long, also to another connector, while the first one is still carried out. It
ships what follows as soon as one of them is done. The tests are the region server: no HBase is needed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import pytest
from logferry.client.hbase import changes
from logferry.client.hbase.connector import Shipping
from logferry.client.hbase.definition import PeerDefinition
from logferry.client.hbase.delivery import GatewayDelivery
from logferry.client.hbase.server import PeerServer, ServerLimits
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Dialer

from tests.support.gateway import Gateway
from tests.support.hbase import chunks_of, make_topic
from tests.support.hbase_calls import CLUSTER, REGION, Edit, RegionServer, put

EDITS = 120


@pytest.fixture
def topic(request: pytest.FixtureRequest, workers: Gateway) -> str:
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    make_topic(workers.urls[0], name)
    return name


@pytest.fixture
def ports(workers: Gateway, topic: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of two connectors, which cut edits of more than 10 kB."""
    monkeypatch.setattr(changes, "PART_BYTES", 10_000)
    servers = []
    for _ in range(2):
        delivery = GatewayDelivery(GatewayCluster(workers.urls, None), topic, Dialer(), threading.Event())
        shipping = Shipping(PeerDefinition(topic, ("orders",)), CLUSTER, delivery)
        servers.append(PeerServer("127.0.0.1", 0, shipping.carry_out, ServerLimits()))
    for server in servers:
        server.start()
    yield [server.port for server in servers]
    for server in servers:
        server.close()


def edits_of(seed: int) -> list[Edit]:
    """Every fourth has several parts."""
    chance = random.Random(seed)
    sizes = [chance.randint(20, 40) if number % 4 == 0 else chance.randint(1, 3) for number in range(EDITS)]
    return [
        (REGION, 3 * number + 2, [put(f"{number}-{n}", b"v" * 1000) for n in range(size)])
        for number, size in enumerate(sizes)
    ]


def ship(port: int, edits: list[Edit]) -> str:
    with RegionServer(port) as source:
        return source.ship(edits)


@pytest.mark.parametrize("seed", range(3))
def test_calls_that_overlap_are_written_once_and_in_order(
    workers: Gateway, topic: str, ports: list[int], seed: int
) -> None:
    chance, edits = random.Random(seed), edits_of(seed)
    late: list[Future[str]] = []
    at = 0
    with ThreadPoolExecutor(64) as pool:
        while at < len(edits):
            count = chance.randint(1, 12)
            calls = [pool.submit(ship, port, edits[at : at + count]) for port in chance.choices(ports, k=3)]
            done, others = wait(calls, 60, FIRST_COMPLETED)
            assert [call.result() for call in done] == [""] * len(done)
            late += others
            at += count
        assert {call.result(60) for call in late} <= {""}
    assert len(late) > 10, "the calls did not overlap"
    found = chunks_of(workers.kafka.bootstrap, f"dc1.{topic}")
    shown = [(one.sequence_id, one.change.row.decode()) for one in found]
    assert shown == [(seqno, cell.row.decode()) for _, seqno, cells in edits for cell in cells]
    assert {one.source_id.partition("/")[2] for one in found} > {"", "2", "3"}
