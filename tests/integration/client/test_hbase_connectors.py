"""Two connectors that carry out calls of the same region at a time, before real gateway workers.

HBase ships a call again that took too long, also to another connector, while the first one is still carried out. It
ships what follows as soon as one of them is done. The tests are the region server: no HBase is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

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
from tests.support.hbase_calls import CLUSTER, edits_with_parts, rows_of, ship_overlapping


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


@pytest.mark.parametrize("seed", range(3))
def test_calls_that_overlap_are_written_once_and_in_order(
    workers: Gateway, topic: str, ports: list[int], seed: int
) -> None:
    edits = edits_with_parts(seed)
    assert ship_overlapping(ports, edits, seed) > 10, "the calls did not overlap"
    found = chunks_of(workers.kafka.bootstrap, f"dc1.{topic}")
    assert [(one.sequence_id, one.change.row.decode()) for one in found] == rows_of(edits)
    assert {one.source_id.partition("/")[2] for one in found} > {"", "2", "3"}
