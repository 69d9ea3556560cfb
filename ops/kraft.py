"""What a node of KRaft is told, what its folder must look like, and how it is asked whether it is there."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from logferry.ops.cli.problems import WrongUse

_ASK_TIMEOUT_S = 2.0
_METADATA, _METADATA_VERSION = 3, 1


class FolderUnusable(WrongUse):
    """The data folder holds something that is not a whole cluster of ours; the text says what, and what to do."""


def node_settings(node: int, ports: Mapping[int, tuple[int, int]], log: Path) -> dict[str, str]:
    """server.properties of one node of a cluster with the nodes of ``ports`` (node → broker, controller)."""
    replicas = str(min(3, len(ports)))
    in_sync = "2" if len(ports) >= 3 else "1"
    broker, controller = ports[node]
    return {
        "process.roles": "broker,controller",
        "node.id": str(node),
        "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{port}" for n, (_, port) in ports.items()),
        "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(log),
        # A lookup must not make a topic, and an acknowledged record must be on every replica that can lead.
        "auto.create.topics.enable": "false",
        "unclean.leader.election.enable": "false",
        "transaction.partition.verification.enable": "true",
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        # Small and quick, for one machine.
        "offsets.topic.num.partitions": "8",
        "transaction.state.log.num.partitions": "8",
        "share.coordinator.state.topic.num.partitions": "4",
        "group.initial.rebalance.delay.ms": "0",
        "log.cleaner.dedupe.buffer.size": str(16 << 20),
        # A killed broker is missed, and can come back, after this; the default is three times as long.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "num.recovery.threads.per.data.dir": "2",
    }


def check_node_folder(log: Path, node: int, cluster_id: str) -> None:
    """A node's log folder is not there, or formatted as a whole for this node. Raises FolderUnusable otherwise."""
    if not log.exists():
        return
    remedy = "remove it to lose its data and begin anew, or choose another data folder"
    try:
        text = (log / "meta.properties").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FolderUnusable(f"{log} is half-formatted: it has no meta.properties; {remedy}") from None
    meta = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    for name in ("cluster.id", "node.id", "directory.id"):
        if not meta.get(name):
            raise FolderUnusable(f"{log / 'meta.properties'} is half-written: no {name} in it; {remedy}")
    if meta["cluster.id"] != cluster_id:
        raise FolderUnusable(
            f"{log} belongs to the cluster {meta['cluster.id']}, but cluster.json above it says {cluster_id};"
            f" the folder was put together from two; {remedy}"
        )
    if meta["node.id"] != str(node):
        raise FolderUnusable(f"{log} belongs to node {meta['node.id']}, not to node {node}; {remedy}")


def known_brokers(port: int) -> set[int]:
    """The brokers that the one at ``port`` knows to be alive; none if it does not answer.

    A Metadata request, version 1, for no topics: [correlation] [brokers: id, host, port, rack] …
    """
    body = struct.pack(">hhih", _METADATA, _METADATA_VERSION, 1, -1) + struct.pack(">i", 0)
    try:
        with socket.create_connection(("127.0.0.1", port), _ASK_TIMEOUT_S) as link:
            link.sendall(struct.pack(">i", len(body)) + body)
            (size,) = struct.unpack(">i", _exactly(link, 4))
            return _broker_ids(_exactly(link, size))
    except (OSError, struct.error):
        return set()


def _broker_ids(answer: bytes) -> set[int]:
    count, at = struct.unpack_from(">i", answer, 4)[0], 8
    found = set()
    for _ in range(count):
        broker, host = struct.unpack_from(">ih", answer, at)
        at += 6 + host + 4
        (rack,) = struct.unpack_from(">h", answer, at)
        at += 2 + max(rack, 0)
        found.add(broker)
    return found


def _exactly(link: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = link.recv(count - len(parts))
        if not part:
            raise ConnectionResetError
        parts += part
    return parts
