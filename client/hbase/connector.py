"""One process that serves a subscription; several may serve the same one.

The order of the start: the definition is stored, the port listens, the connector is announced in ZooKeeper, and then
the peer is registered, if it is not there. So HBase never ships to a cluster that is not served. A crash in between
leaves nothing that the next start does not complete.

While it runs, the peer and the tables are checked every `CHECK_EVERY_S`, the peer also when it is changed, and a
connector that finds one unfit ends: a peer that is no longer serial would lose changes. A table that is dropped has
no more changes, and does not end those of the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from logferry.client.events import log_event
from logferry.client.hbase.changes import CellFilter, RegionHistory, SequenceRestarted, ShippedEdits, WrongCluster
from logferry.client.hbase.definition import PeerDefinition, Unfit, check_peer, cluster_key, missing_tables, peer_of
from logferry.client.hbase.delivery import GatewayDelivery, NotDelivered, ParentOrder
from logferry.client.hbase.frames import CallFailed, RemoteCall
from logferry.client.hbase.master import HBaseMaster, HBaseMeta
from logferry.client.hbase.metrics import Figures, render
from logferry.client.hbase.progress import GatewayReports, pushed_of
from logferry.client.hbase.server import CallRefused, PeerServer, ServerLimits
from logferry.client.hbase.zookeeper import Address, Registry, Unanswered
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Dialer
from logferry.client.transport.metrics_page import MetricsServer

CHECK_EVERY_S = 10.0
_AGAIN_S = 1.0
# HBase's default for a call, and the part of it that is used: the answer has to arrive before HBase gives up.
_CALL_S = 60.0
_PART = 0.75


class Shipping:
    """What a connector does with each call. ``check``: as for `GatewayDelivery.deliver`. Thread-safe."""

    def __init__(
        self,
        definition: PeerDefinition,
        cluster_id: str,
        delivery: GatewayDelivery,
        check: Callable[[str, str], None] = lambda table, region: None,
    ) -> None:
        self._filter, self._cluster_id, self._delivery = CellFilter(definition), cluster_id, delivery
        self._check = check
        self._encoding = definition.encoding
        self._history = RegionHistory()
        self.figures = Figures()

    def carry_out(self, call: RemoteCall) -> None:
        """Returns when everything in the call is recorded. Raises CallRefused, ForeignBytes."""
        allowed_s = min(call.timeout_ms / 1000 or _CALL_S, _CALL_S) * _PART
        try:
            edits = ShippedEdits(call.param, call.cells, self._cluster_id, self._filter, self._history, self._encoding)
            done = self._delivery.deliver(edits, call.came + allowed_s, self._check)
        except (WrongCluster, SequenceRestarted) as error:
            raise CallRefused(str(error)) from None
        except NotDelivered as error:
            if error.kind:
                log_event("hbase-not-recorded", kind=error.kind, reason=error)
            raise CallRefused(str(error)) from None
        for table, count in edits.bulk_loads.items():
            log_event("hbase-bulk-load", table=table, count=count)
        self.figures.recorded(done.chunks, done.bytes, edits.newest_ms)


class Connector:
    """``listen``: port 0 takes a free one. ``advertise``: the host that region servers connect to."""

    def __init__(
        self,
        name: str,
        definition: PeerDefinition,
        registry: Registry,
        cluster: GatewayCluster,
        dialer: Dialer,
        listen: Address,
        advertise: str,
        limits: ServerLimits,
        metrics_port: int = 0,
    ) -> None:
        self.name, self.definition = name, definition
        self._registry = registry
        self._master = HBaseMaster(registry.master)
        self._key = cluster_key(registry.hosts, name)
        self._cluster, self._dialer = cluster, dialer
        self._listen, self._advertise, self._limits = listen, advertise, limits
        self._metrics_port = metrics_port
        self._missing: list[str] = []
        self._note = b""

    def run(self, stop: threading.Event, ready: Callable[[int], None] = lambda port: None) -> None:
        """Until ``stop`` is set, whose setter also wakes `Registry.changed`; calls ``ready`` with the port once HBase
        ships. Raises Unfit, Unanswered, OSError.
        """
        is_new = self._registry.definition(self.name) is None
        self._check_tables(is_new)
        peer = self._master.peers().get(self.name)
        if peer is not None:
            check_peer(self.name, peer.config, self.definition, self._key)
        self._registry.define(self.name, self.definition)
        delivery = GatewayDelivery(self._cluster, self.definition.topic, self._dialer, stop)
        order = ParentOrder(
            HBaseMeta(self._registry.meta).parents,
            lambda region: pushed_of(self._registry, self.name, region),
            delivery.recorded,
            stop.wait,
        )
        shipping = Shipping(self.definition, self._registry.cluster_id(), delivery, order.check)
        figures = shipping.figures
        server = PeerServer(self._listen.host, self._listen.port, shipping.carry_out, self._limits, figures)
        node = f"{self._advertise},{server.port},{int(time.time() * 1000)}"
        server.start()
        page = None
        try:
            if self._metrics_port:
                page = MetricsServer(self._metrics_port, lambda: self._page(figures, server))
            self._registry.announce(self.name, node)
            self._register()
            log_event("hbase-serving", name=self.name, node=node, topic=self.definition.topic)
            ready(server.port)
            reports = GatewayReports(
                self.name, f"{self._advertise}:{server.port}", self._registry, self._cluster, self._dialer
            )
            threading.Thread(target=reports.run, args=(stop,), name="hbase-reports", daemon=True).start()
            self._watch(node, figures, stop)
        finally:
            stop.set()
            with suppress(Unanswered):  # the node ends with its session
                self._registry.withdraw(self.name, node)
            server.close()
            if page is not None:
                page.close()
            log_event("stopped", status=0, calls=figures.calls, chunks=figures.chunks, bytes=figures.bytes)

    def _page(self, figures: Figures, server: PeerServer) -> str:
        return render(self.name, figures, server.held_bytes, server.connection_count, self._registry.is_connected)

    def _register(self) -> None:
        """Adds the peer, unless it is there. Another connector may do the same at the same time."""
        if self.name in self._master.peers():
            return
        try:
            self._master.add_peer(self.name, peer_of(self.definition, self._key))
        except CallFailed as error:
            peer = self._master.peers().get(self.name)
            if peer is None:
                raise Unfit(f"HBase refuses the peer {self.name}: {error}") from None
            check_peer(self.name, peer.config, self.definition, self._key)

    def _watch(self, node: str, figures: Figures, stop: threading.Event) -> None:
        next_check = time.monotonic()
        while not stop.is_set():
            self._registry.changed.wait(max(next_check - time.monotonic(), 0))
            self._registry.changed.clear()
            if stop.is_set():
                return
            if self._registry.peer_changed.is_set():
                next_check = time.monotonic()
            try:
                if not self._registry.is_connected:
                    raise Unanswered("the connection to ZooKeeper is lost")
                if self._registry.definition(self.name) is None:
                    raise Unfit(f"the subscription {self.name} was removed")
                if self._registry.announce(self.name, node):
                    log_event("hbase-announced-again", name=self.name, node=node)
                    self._note = b""
                if (note := figures.note()) != self._note:
                    self._registry.note(self.name, node, note)
                    self._note = note
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + CHECK_EVERY_S
                    self._check()
            except (Unanswered, CallFailed) as error:
                log_event("hbase-silent", reason=error)
                # After a lost connection an event comes; otherwise it is tried again soon.
                wait_s = _AGAIN_S if self._registry.is_connected else CHECK_EVERY_S
                next_check = time.monotonic() + wait_s

    def _check(self) -> None:
        self._registry.watch_peer(self.name)
        peer = self._master.peers().get(self.name)
        if peer is None:
            raise Unfit(f"the peer {self.name} was removed from HBase; subscribe again to have it registered")
        check_peer(self.name, peer.config, self.definition, self._key)
        self._check_tables(is_new=False)

    def _check_tables(self, is_new: bool) -> None:
        missing = missing_tables(self.definition, self._master.tables(self.definition.tables))
        if missing and is_new:
            raise Unfit("\n  ".join(f"HBase has no table {table}: create it, or correct --tables" for table in missing))
        for table in missing:
            if table not in self._missing:
                log_event("hbase-table-missing", table=table)
        self._missing = missing
