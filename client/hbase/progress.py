"""How far HBase has shipped to a subscription: from ZooKeeper, and from the figures that region servers publish.

Each fact is read at another moment, so they need not fit each other exactly. One of the connectors, the first by name,
reports them to the gateway, whose console shows them.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from logferry.client.events import log_event
from logferry.client.hbase import messages
from logferry.client.hbase.definition import PeerDefinition, Unfit
from logferry.client.hbase.frames import CallFailed
from logferry.client.hbase.master import ENABLED, HBaseMaster
from logferry.client.hbase.messages import ForeignBytes
from logferry.client.hbase.metrics import figures_of
from logferry.client.hbase.zookeeper import Registry, Unanswered
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Connections, Dialer, NoResponse

_TIMEOUT_S = 5.0
_MOST_BYTES = 4 << 20
_BEAN = "jmx?qry=Hadoop:service=HBase,name=RegionServer,sub=Replication"
_PROTOBUF_MARK = b"PBUF"
_LONG_CALL_S = 30
REPORT_EVERY_S = 30.0
_FIRST_REPORT_S = 5.0
_MOST_TEXT = 2000


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


def pushed_of(registry: Registry, name: str, region: str) -> int | None:
    """The highest sequence id that HBase has shipped of the region, -1: nothing. None: it keeps these ids elsewhere, as
    HBase 3 does. Raises Unanswered.
    """
    top = "replication/regions"
    data = registry.hbase_data(f"{top}/{region[:2]}/{region[2:4]}/{region[4:]}-{name}")
    if data is None and registry.hbase_data(top) is None:
        return None
    return _position(data) if data else -1


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


# ---- the whole of a subscription ------------------------------------------------------------------------------------


def listed(name: str, registry: Registry, peer: Any) -> dict[str, Any]:
    """What `logferry hbase list` shows. ``peer``: of HBase, or None. Raises Unanswered, Unfit."""
    definition = registry.definition(name)
    state = "no peer in HBase" if peer is None else "active" if peer.state.state == ENABLED else "paused"
    if peer is not None and not peer.config.serial:
        state += ", but not serial: changes would be lost"
    facts = definition._asdict() if definition else dict.fromkeys(PeerDefinition._fields, "") | {"tables": ()}
    return {"name": name, "state": state, **facts, "connectors": registry.connectors(name)}


def logs_of(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that HBase has to ship. ``one``: as `with_progress`."""
    return [wal for server in one["servers"] for queue in server["queues"] for wal in queue["wals"]]


def add_sizes(one: dict[str, Any], sizes: Mapping[str, int]) -> None:
    """Adds ``size`` to each log, and to each queue ``left_bytes``; null: a log is missing, which is a problem, too.
    ``one``: as `with_progress`. ``sizes``: of logs by their names.
    """
    for wal in logs_of(one):
        wal["size"] = sizes.get(wal["wal"])
        if wal["size"] is None:
            why = "is missing, or --wals or --old-wals is another HBase's"
            one["problems"].append(f"{wal['wal']}, which HBase has to ship, {why}")
    for queue in (queue for server in one["servers"] for queue in server["queues"]):
        left = [None if wal["size"] is None else max(wal["size"] - wal["position"], 0) for wal in queue["wals"]]
        queue["left_bytes"] = None if None in left else sum(size for size in left if size is not None)


def with_progress(one: dict[str, Any], registry: Registry) -> dict[str, Any]:
    """``one``: as `listed`. Raises Unanswered."""
    name = one["name"]
    servers = servers_progress(registry, name)
    figures = {connector: figures_of(note) for connector, note in registry.notes(name).items()}
    problems = [f"the state is: {one['state']}"] if one["state"] != "active" else []
    if not one["connectors"]:
        problems.append("no connector runs: HBase keeps the changes; start `logferry hbase subscribe`")
    problems += [f"{server.server}: {server.problem}" for server in servers if server.problem]
    problems += [
        f"{connector}: a call of HBase waits for {seconds} s; see the connector's log"
        for connector, found in figures.items()
        if (seconds := found.get("oldest_call_s", 0)) > _LONG_CALL_S
    ]
    return {
        **one,
        "connector_figures": figures,
        "servers": [_server_shown(server) for server in servers],
        # HBase before the gateway: what it has shipped was recorded before.
        "pushed_seqnos": dict(sorted(pushed(registry, name))),
        "problems": problems,
    }


def _server_shown(one: ServerProgress) -> dict[str, Any]:
    queues = [
        {"taken_over_from": queue.of, "wals": [{"wal": wal, "position": at} for wal, at in queue.wals]}
        for queue in one.queues
    ]
    return {**one._asdict(), "queues": queues}


# ---- the report -----------------------------------------------------------------------------------------------------


def report_of(found: dict[str, Any], dc: str) -> dict[str, Any]:
    """The body of ``PUT /v1/hbase/{name}``. ``found``: of `with_progress`. ``dc``: of the gateway."""
    names = ("calls", "failed_calls", "chunks", "change_age_ms", "oldest_call_s", "waits")
    connectors = [
        {"connector": one, **{name: figures[name] for name in names if name in figures}}
        for one in found["connectors"]
        for figures in (found["connector_figures"].get(one, {}),)
    ]
    servers = []
    for one in found["servers"]:
        counts = {bool(queue["taken_over_from"]): 0 for queue in one["queues"]}
        for queue in one["queues"]:
            counts[bool(queue["taken_over_from"])] += len(queue["wals"])
        figures = {name: one[name] for name in ("server", "shipped_operations", "age_ms", "oldest_wal_ms")}
        problem = one["problem"][:_MOST_TEXT] or None
        logs = {"logs": sum(counts.values()), "taken_over": counts.get(True, 0)}
        servers.append({**figures, **logs, "problem": problem})
    return {
        "topics": [f"{dc}.{found['topic']}"],
        "tables": list(found["tables"]),
        "state": found["state"],
        "every_s": REPORT_EVERY_S,
        "connectors": connectors,
        "servers": servers,
        "problems": [one[:_MOST_TEXT] for one in found["problems"]],
    }


class GatewayReports:
    """Of one connector, as ``HOST:PORT``, in a thread of its own. A gateway that refuses them, or is away, costs
    reports and nothing else.
    """

    def __init__(self, name: str, connector: str, registry: Registry, cluster: GatewayCluster, dialer: Dialer) -> None:
        self._name, self._connector, self._registry, self._cluster = name, connector, registry, cluster
        self._connections = Connections(_TIMEOUT_S, dialer)
        self._dc = ""
        self._failure: str | None = None

    def run(self, stop: threading.Event) -> None:
        """Until ``stop`` is set."""
        while not stop.wait(REPORT_EVERY_S if self._dc else _FIRST_REPORT_S):
            self.report()
        self._connections.close()

    def report(self) -> None:
        """If it is the first of the connectors."""
        try:
            if self._registry.connectors(self._name)[:1] != [self._connector]:
                return
            self._send()
            self._failure = None
        except (Unanswered, CallFailed, Unfit, NoResponse, ValueError, KeyError, TypeError) as error:
            if self._failure is None:
                log_event("hbase-unreported", reason=error)
            self._failure = str(error)

    def _send(self) -> None:
        """Raises Unanswered, CallFailed, Unfit, NoResponse, ValueError."""
        base = self._cluster.current_url()
        headers = {"User-Agent": "logferry-hbase", **self._cluster.authorization(base)}
        try:
            if not self._dc:
                self._dc = str(
                    json.loads(self._connections.exchange(f"{base}/v1/caller", headers, None, "GET").body)["dc"]
                )
            peer = HBaseMaster(self._registry.master).peers().get(self._name)
            found = with_progress(listed(self._name, self._registry, peer), self._registry)
            body = json.dumps(report_of(found, self._dc)).encode()
            headers["Content-Type"] = "application/json"
            reply = self._connections.exchange(f"{base}/v1/hbase/{self._name}", headers, body, "PUT")
        except NoResponse:
            self._cluster.failed(base)
            raise
        if reply.status not in (200, 201):
            raise ValueError(f"{base} answers {reply.status}: {reply.body[:300].decode('utf-8', 'replace')}")
