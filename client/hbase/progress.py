"""How far HBase has shipped to a subscription: from ZooKeeper, and from the figures that region servers publish.

Each fact is read at another moment, so they need not fit each other exactly.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from logferry.client.hbase import messages
from logferry.client.hbase.messages import ForeignBytes
from logferry.client.hbase.zookeeper import Registry

_TIMEOUT_S = 5.0
_MOST_BYTES = 4 << 20
_BEAN = "jmx?qry=Hadoop:service=HBase,name=RegionServer,sub=Replication"
_PROTOBUF_MARK = b"PBUF"


class WalQueue(NamedTuple):
    """The write-ahead logs that a region server has still to ship. ``wals``: each with the position in it that is
    shipped. ``of``: the dead server whose logs they are; empty: its own.
    """

    of: str
    wals: tuple[tuple[str, int], ...]


class ServerProgress(NamedTuple):
    """Of one region server. ``age_ms``: how old the last shipped operation was when it was shipped. ``oldest_wal_ms``:
    the age of the oldest log to ship. Each is None where the server has not published it: it publishes again every ten
    seconds or so, thus not at once for a new subscription. ``problem``: why none could be asked; empty: they were.
    """

    server: str
    queues: tuple[WalQueue, ...]
    shipped_operations: int | None
    age_ms: int | None
    oldest_wal_ms: int | None
    problem: str


def servers_progress(registry: Registry, name: str) -> list[ServerProgress]:
    """Of all region servers that live, or have logs to ship. Raises Unanswered."""
    ports = {server: _info_port(registry, server) for server in registry.hbase_children("rs")}
    with_queues = {server: queues for server, queues in _queues(registry, name) if queues or server in ports}
    found = []
    for server in sorted({*ports, *with_queues}):
        figures, problem = _figures(server, ports[server]) if server in ports else ({}, "the server is dead")
        prefix = f"source.{name}."
        values = (figures.get(prefix + key) for key in ("shippedOps", "ageOfLastShippedOp", "oldestWalAge"))
        shipped, age, oldest = (int(value) if isinstance(value, (int, float)) else None for value in values)
        found.append(ServerProgress(server, with_queues.get(server, ()), shipped, age, oldest, problem))
    return found


def pushed(registry: Registry, name: str) -> Iterator[tuple[str, int]]:
    """Of each region the highest sequence id that HBase has shipped. Raises Unanswered."""
    top = "replication/regions"
    for first in registry.hbase_children(top):
        for second in registry.hbase_children(f"{top}/{first}"):
            for node in registry.hbase_children(f"{top}/{first}/{second}"):
                rest, _, peer = node.partition("-")
                if peer == name:
                    yield first + second + rest, _position(registry.hbase_data(f"{top}/{first}/{second}/{node}"))


def _queues(registry: Registry, name: str) -> Iterator[tuple[str, tuple[WalQueue, ...]]]:
    """By region server. A queue that was taken over is named PEER-SERVER-SERVER..."""
    for server in registry.hbase_children("replication/rs"):
        found = []
        for queue in registry.hbase_children(f"replication/rs/{server}"):
            peer, _, of = queue.partition("-")
            if peer == name:
                path = f"replication/rs/{server}/{queue}"
                wals = ((wal, _position(registry.hbase_data(f"{path}/{wal}"))) for wal in registry.hbase_children(path))
                found.append(WalQueue(of, tuple(sorted(wals))))
        yield server, tuple(found)


def _position(data: bytes | None) -> int:
    if not data:
        return 0
    try:
        return int(messages.parse("WalPosition", data.removeprefix(_PROTOBUF_MARK)).position)
    except ForeignBytes:
        return 0


def _info_port(registry: Registry, server: str) -> int:
    data = registry.hbase_data(f"rs/{server}")
    try:
        return int(messages.parse("RegionServerInfo", (data or b"").removeprefix(_PROTOBUF_MARK)).infoPort)
    except ForeignBytes:
        return 0


def _figures(server: str, port: int) -> tuple[dict[str, Any], str]:
    """The figures, empty where the server has not published any yet, or the reason why they cannot be had."""
    if port <= 0:
        return {}, "the server publishes no figures (hbase.regionserver.info.port is -1)"
    url = f"http://{server.partition(',')[0]}:{port}/{_BEAN}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            beans = json.loads(answer.read(_MOST_BYTES))["beans"]
            return (dict(beans[0]) if beans else {}), ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, f"{url} does not answer: {error}"
