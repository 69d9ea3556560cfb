"""A Kafka whose link to others goes through a relay: it has a second address, where brokers name the relay's."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from logferry.ops.stack.kafka_cluster import Cluster
from logferry.ops.stack.ports import free_ports

from tests.support.relay import Relay


@contextmanager
def relayed(name: str, folder: Path) -> Iterator[tuple[Cluster, Relay, str]]:
    """One broker, the relay before it, and the bootstrap address of those who come through the relay."""
    broker, controller, behind = free_ports(3)
    folder.mkdir()
    facts = {
        "format": 1,
        "cluster_id": urlsafe_b64encode(name.rjust(16, "c").encode()).decode().rstrip("="),
        "ports": {1: (broker, controller)},
    }
    (folder / "cluster.json").write_text(json.dumps(facts))
    with Relay(f"http://127.0.0.1:{behind}") as relay:
        near = f"PLAINTEXT://127.0.0.1:{broker}"
        settings = {
            "listeners": f"{near},CONTROLLER://127.0.0.1:{controller},FAR://127.0.0.1:{behind}",
            "advertised.listeners": f"{near},FAR://127.0.0.1:{relay.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,FAR:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
        with Cluster(name, folder, settings=settings) as cluster:
            assert cluster.bootstrap == f"127.0.0.1:{broker}", "the ports changed"
            yield cluster, relay, f"127.0.0.1:{relay.port}"
