"""Subscriptions of a real HBase: what is refused and why, filters, every kind of change, pause, resume, remove."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from logferry.client.hbase import connector as connectors
from logferry.client.hbase import master as masters
from logferry.client.hbase.cells import TYPES
from logferry.client.hbase.changes import CLOCKS_MS
from logferry.client.hbase.definition import ROOT, PeerDefinition, Unfit
from logferry.client.hbase.delivery import _CLOSE_IDS
from logferry.client.hbase.master import HBaseMeta
from logferry.client.hbase.server import ServerLimits
from logferry.client.hbase.zookeeper import Address, Registry
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Dialer
from logferry.ops.stack.hbase_cluster import HBaseCluster

from tests.support.gateway import Gateway
from tests.support.hbase import (
    Change,
    HBaseConnector,
    chunks_of,
    is_packed,
    judge,
    make_topic,
    needs_jdk,
    scanned,
    stored,
    wait_shipped,
)
from tests.support.hbase_calls import RegionServer, put
from tests.support.hbase_log import HBaseTail

pytestmark = needs_jdk


@pytest.fixture(scope="module")
def hbase(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HBaseCluster]:
    with HBaseCluster(tmp_path_factory.mktemp("hbase"), servers=1) as running:
        yield running


class Subscription:
    """A table with the families d and e, a topic and a connector, all of one name."""

    def __init__(self, hbase: HBaseCluster, workers: Gateway, name: str, folder: Path) -> None:
        self.hbase, self.name, self.folder, self._workers = hbase, name, folder, workers
        self.topic = make_topic(workers.urls[0], name)
        self.connectors: list[HBaseConnector] = []

    def create_table(self, scope: int = 1) -> None:
        self.hbase.shell(f"create {self.name} d,e {scope} 1")

    def connector(self, *more: str, tables: str = "", topic: str = "", log: str = "connector") -> HBaseConnector:
        names = self.name, topic or self.name, self.folder / f"{log}.log", tables or self.name
        found = HBaseConnector(self.hbase, self._workers.urls, *names, *more)
        self.connectors.append(found)
        return found

    def refused(self, *more: str, tables: str = "", topic: str = "") -> str:
        """The message of a connector that ends with wrong use."""
        connector = self.connector(*more, tables=tables, topic=topic, log="refused")
        connector.child.start()
        text = connector.end()
        assert connector.child.exit_status == 2, text
        return text

    def put(self, row: str, family: str = "d", qualifier: str = "q", value: str = "v") -> None:
        self.hbase.shell(f"put {self.name} {row} {family} {qualifier} {value}")

    def wait_shipped(self) -> None:
        wait_shipped(self.hbase, self._workers.kafka.bootstrap, self.topic, [self.name], self.folder)

    def rows(self) -> list[str]:
        """Of the changes in the topic, in order."""
        return [one.change.row.decode() for one in chunks_of(self._workers.kafka.bootstrap, self.topic)]

    def rows_with(self, last: str) -> list[str]:
        """`rows`, once this one is among them."""
        deadline = time.monotonic() + 60
        while last not in (rows := self.rows()):
            assert time.monotonic() < deadline, rows
            time.sleep(0.2)
        return rows

    def status(self, *more: str) -> dict[str, Any]:
        found = json.loads(self.command("status", "--json", *more))["subscriptions"]
        (shown,) = (one for one in found if one["name"] == self.name)
        return dict(shown)

    def status_with(self, fits: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Once it fits: region servers and connectors publish their figures every ten seconds or so."""
        deadline = time.monotonic() + 60
        while not fits(shown := self.status()):
            assert time.monotonic() < deadline, shown
            time.sleep(0.5)
        return shown

    def reported(self) -> dict[str, Any]:
        """What the gateway shows, once a connector has reported."""
        deadline = time.monotonic() + 120
        while True:
            with urllib.request.urlopen(f"{self._workers.urls[1]}/v1/hbase", timeout=60) as answer:
                found = {one["name"]: one for one in json.load(answer)["subscriptions"]}
            if self.name in found:
                return dict(found[self.name])
            assert time.monotonic() < deadline, self.connectors[-1].child.log_tail()
            time.sleep(0.5)

    def command(self, *arguments: str, expect: int = 0) -> str:
        command = [sys.executable, "-m", "logferry.ops.cli.main", "hbase", *arguments]
        command += ["--zookeeper", self.hbase.zookeeper]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def subscription(
    hbase: HBaseCluster, workers: Gateway, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Subscription]:
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[:50].rstrip("_")
    found = Subscription(hbase, workers, name, tmp_path)
    yield found
    for connector in found.connectors:
        connector.kill()
    if f'"{name}"' in found.command("list", "--json"):
        found.command("remove", name)


def test_every_kind_of_change_is_in_the_topic_as_hbase_has_it(subscription: Subscription) -> None:
    subscription.create_table()
    connector = subscription.connector().start()
    for number, kind in enumerate(("delete", "delete_column", "delete_family", "delete_family_version")):
        subscription.put(f"row-{number}", value="\\x00\\xFF")
        subscription.put(f"\\xFE{number}", family="e")
        subscription.hbase.shell(f"delete {subscription.name} row-{number} {kind} d q 1795341498000")
    subscription.wait_shipped()
    connector.stop()
    there = scanned(subscription.hbase, subscription.name, subscription.folder)
    found = chunks_of(subscription._workers.kafka.bootstrap, subscription.topic)
    assert judge(found, {subscription.name: there}) == 0
    assert {one.change.type for one in found} == set(TYPES.values())
    assert Change(b"\xfe3", b"e", b"q", b"v", 0, "put") in {one.change._replace(timestamp=0) for one in found}


def test_only_what_the_filters_want_is_written(subscription: Subscription) -> None:
    subscription.create_table()
    more = ("--families", "d", "--qualifiers", "q", "--row-prefixes", "a", "b", "--row-pattern", "[0-9]$")
    connector = subscription.connector(*more).start()
    for row, family, qualifier in (
        ("a1", "d", "q"), ("a2", "e", "q"), ("a3", "d", "other"), ("c4", "d", "q"), ("ax", "d", "q"), ("b5", "d", "q"),
    ):  # fmt: skip
        subscription.put(row, family, qualifier)
    subscription.hbase.shell(f"delete {subscription.name} b5 delete_family d q 1795341498000")
    subscription.put("b9")
    rows = subscription.rows_with("b9")
    connector.stop()
    assert rows == ["a1", "b5", "b5", "b9"]


def test_a_write_without_the_log_is_not_shipped(subscription: Subscription) -> None:
    """As the guide says."""
    subscription.create_table()
    connector = subscription.connector().start()
    subscription.hbase.shell(f"unlogged {subscription.name} silent d q v")
    subscription.put("loud")
    rows = subscription.rows_with("loud")
    connector.stop()
    assert rows == ["loud"]


@pytest.mark.long
def test_a_large_edit_is_written_in_parts(subscription: Subscription) -> None:
    """HBase writes the changes of one call to a region as one edit."""
    subscription.create_table()
    connector = subscription.connector().start()
    subscription.hbase.shell(f"bulk {subscription.name} d 12000")
    subscription.wait_shipped()
    connector.stop()
    found = chunks_of(subscription._workers.kafka.bootstrap, subscription.topic)
    assert judge(found, {subscription.name: scanned(subscription.hbase, subscription.name, subscription.folder)}) == 0
    assert len(found) == 12000
    assert any("/" in one.source_id for one in found), "the edits were small"


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_the_tail_writes_the_chunks_of_the_peer(subscription: Subscription, encoding: str) -> None:
    subscription.create_table()
    name, tailed = subscription.name, f"{subscription.name}_tailed"
    connector = subscription.connector("--format", encoding).start()
    subscription.put("row-1", value="\\x00\\xFF")
    subscription.put("\\xFE1", family="e")
    subscription.hbase.shell(f"delete {name} row-1 delete_column d q 1795341498000")
    subscription.hbase.shell(f"bulk {name} d 12000")  # in parts
    subscription.wait_shipped()
    connector.stop()
    topic = make_topic(subscription._workers.urls[0], tailed)
    workers, folder = subscription._workers, subscription.folder
    tail = HBaseTail(subscription.hbase.data, workers.urls, tailed, folder / "tail", [name], "--format", encoding)
    tail.start()
    wait_shipped(subscription.hbase, workers.kafka.bootstrap, topic, [name], folder)
    assert tail.stop() == 0, tail.child.log_tail()
    by_peer, by_tail = (
        sorted((source_id, chunk) for _, source_id, chunk in asyncio.run(stored(workers.kafka.bootstrap, one)))
        for one in (subscription.topic, topic)
    )
    assert by_peer == by_tail
    assert {is_packed(chunk) for _, chunk in by_tail} == {encoding == "msgpack"}
    assert any("/" in source_id for source_id, _ in by_tail)


def test_families_that_are_not_replicated_are_refused_with_the_command(subscription: Subscription) -> None:
    subscription.create_table(scope=0)
    subscription.hbase.shell(f"scope {subscription.name} d 1")
    text = subscription.refused()
    assert f"alter '{subscription.name}', {{NAME => 'e', REPLICATION_SCOPE => 1}}" in text
    assert "NAME => 'd'" not in text
    subscription.connector("--families", "d").start().stop()


def test_a_table_that_is_not_there_is_refused(subscription: Subscription) -> None:
    assert "HBase has no table missing" in subscription.refused(tables="missing")


def test_a_peer_that_is_not_serial_is_refused_and_ends_a_connector(subscription: Subscription) -> None:
    subscription.create_table()
    connector = subscription.connector().start()
    subscription.hbase.shell(f"serial {subscription.name} false")
    assert "344 of 2900" in subscription.refused()
    assert "but not serial" in subscription.command("list")
    text = connector.end()
    assert (connector.child.exit_status, "is not serial" in text) == (2, True)
    subscription.hbase.shell(f"serial {subscription.name} true")
    subscription.connector().start().stop()


def test_a_peer_that_is_changed_is_looked_at_at_once(
    subscription: Subscription, workers: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The less HBase ships while it is not serial, the better: no time to look again is waited for."""
    monkeypatch.setattr(connectors, "CHECK_EVERY_S", 3600.0)
    subscription.create_table()
    name, stop, ready = subscription.name, threading.Event(), threading.Event()
    cluster, here = GatewayCluster(workers.urls, None), Address("127.0.0.1", 0)
    definition = PeerDefinition(name, (name,)).check()
    with Registry([subscription.hbase.zookeeper]) as registry, ThreadPoolExecutor(1) as pool:
        one = connectors.Connector(name, definition, registry, cluster, Dialer(), here, here.host, ServerLimits())
        run = pool.submit(one.run, stop, lambda port: ready.set())
        try:
            assert ready.wait(60)
            subscription.hbase.shell(f"serial {name} false")
            with pytest.raises(Unfit, match="is not serial"):
                run.result(60)
        finally:
            stop.set()
            registry.changed.set()
    subscription.hbase.shell(f"serial {name} true")


@pytest.mark.long
def test_a_table_that_is_dropped_does_not_end_the_others(subscription: Subscription) -> None:
    dropped = f"{subscription.name}_2"
    tables = f"{subscription.name} {dropped}"
    subscription.create_table()
    subscription.hbase.shell(f"create {dropped} d 1 1")
    connector = subscription.connector(tables=tables).start()
    subscription.hbase.shell(f"drop {dropped}")
    connector.wait_logged(b"hbase-table-missing table=" + dropped.encode())
    subscription.put("after")
    assert subscription.rows_with("after") == ["after"]
    connector.stop()
    connector.start()
    subscription.put("started-again")
    assert subscription.rows_with("started-again") == ["after", "started-again"]
    connector.stop()


def test_a_region_waits_for_those_that_it_came_out_of(
    subscription: Subscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region server ships the new regions, while HBase has the last edits of the old ones still to ship."""
    name, hbase = subscription.name, subscription.hbase
    rows = ("0", "2", "6", "b")
    hbase.shell(f"create {name} d 1 3")
    connector = subscription.connector().start()
    for row in rows:
        subscription.put(row, value="first")
    assert set(subscription.rows_with("b")) <= set(rows)
    subscription.wait_shipped()
    subscription.command("pause", name)
    for row in rows:
        subscription.put(row, value="last-of-the-parent")
    split, *merged = [one.split("@")[0] for one in hbase.shell(f"regions {name}").split()]
    hbase.shell(f"split {split} 1")
    hbase.shell(f"merge {' '.join(merged)}")
    for row in rows:
        subscription.put(row, value="of-the-child")
    lower, upper, both = [one.split("@")[0] for one in hbase.shell(f"regions {name}").split()]
    with Registry([hbase.zookeeper]) as registry:
        meta = HBaseMeta(registry.meta)
        parents = meta.parents(name)
        with monkeypatch.context() as patch:
            patch.setattr(masters, "_ROWS", 1)
            assert meta.parents(name) == parents, "a scan in pieces"
        cluster_id, (connected,) = registry.cluster_id(), registry.connectors(name)
    assert {one.region for one in parents[both]} == set(merged)
    assert [one.region for one in (*parents[lower], *parents[upper])] == [split, split]
    with RegionServer(int(connected.rpartition(":")[2])) as source:
        for child, row in ((lower, "0"), (both, "6")):
            refusal = source.ship([(child, 1, [put(row, b"too early")])], cluster=cluster_id, table=name)
            assert re.search(f"region {child} waits for its parent [0-9a-f]{{32}}, shipped to [0-9]+ of", refusal)
            assert any(one.region in refusal for one in parents[child])
    subscription.command("resume", name)
    subscription.wait_shipped()
    connector.stop()
    found = chunks_of(subscription._workers.kafka.bootstrap, subscription.topic)
    assert judge(found, {name: scanned(hbase, name, subscription.folder)}) == 0
    for row in rows:
        values = [one.change.value for one in found if one.change.row == row.encode()]
        assert values == [b"first", b"last-of-the-parent", b"of-the-child"]
    for parent in (*parents[both], *parents[lower]):
        last = max(one.sequence_id for one in found if one.source_id == parent.region)
        assert last <= parent.end - _CLOSE_IDS, "HBase closes a region with fewer sequence ids than before"


def test_two_new_subscriptions_of_one_topic_do_not_both_begin(subscription: Subscription) -> None:
    """Not even where the second one is stored between the look and the writing of the first one."""
    mine, other = f"{subscription.name}_1", f"{subscription.name}_2"
    definition = PeerDefinition(subscription.name, (subscription.name,)).check()

    class Raced(Registry):
        def _create(self, path: str, data: bytes) -> None:
            super()._create(f"{ROOT}/{other}/subscription", definition.packed())
            super()._create(path, data)

    with Raced([subscription.hbase.zookeeper]) as registry:
        with pytest.raises(Unfit, match=f"{other} writes the topic"):
            registry.define(mine, definition)
        assert registry.names().count(mine) == 0
        registry.remove(other)


@pytest.mark.long
def test_a_region_that_is_truncated_is_noticed(subscription: Subscription) -> None:
    """HBase begins its sequence ids again: what follows looks like duplicates."""
    subscription.create_table()
    connector = subscription.connector().start()
    for number in range(5):
        subscription.put(f"before-{number}")
    assert len(subscription.rows_with("before-4")) == 5
    (region,) = subscription.hbase.shell(f"regions {subscription.name}").split()
    time.sleep(CLOCKS_MS / 1000 + 1)  # of two region servers the clocks may differ by so much
    subscription.hbase.shell(f"truncate {region.split('@')[0]}")
    subscription.put("after")
    connector.wait_logged(b"as after truncate_region")
    assert subscription.rows() == [f"before-{number}" for number in range(5)]
    connector.stop()


def test_a_peer_of_another_kind_is_left_alone(subscription: Subscription) -> None:
    subscription.create_table()
    foreign = f"{subscription.name}_other"
    subscription.hbase.shell(f"peer {foreign} {subscription.hbase.zookeeper}:/elsewhere")
    subscription.hbase.shell(f"create {foreign} d 1 1")
    text = subscription.command(
        "subscribe", foreign, "--tables", foreign, "--topic", foreign, "--url", "http://127.0.0.1:1", expect=2
    )
    assert "that is not ours" in text
    assert "is no subscription" in subscription.command("remove", foreign, expect=2)


def test_another_definition_and_a_topic_in_use_are_refused(subscription: Subscription) -> None:
    subscription.create_table()
    connector = subscription.connector().start()
    assert "row prefixes: (none) is stored, a is given" in subscription.refused("--row-prefixes", "a")
    second = f"{subscription.name}_2"
    arguments = ("--tables", subscription.name, "--topic", subscription.name)
    assert f"{subscription.name} writes the topic" in subscription.command("subscribe", second, *arguments, expect=2)
    assert second not in subscription.command("list")
    connector.stop()


def test_a_subscription_is_listed_paused_resumed_and_removed(subscription: Subscription) -> None:
    subscription.create_table()
    connector = subscription.connector().start()
    name = subscription.name
    (listed,) = [
        one for one in json.loads(subscription.command("list", "--json"))["subscriptions"] if one["name"] == name
    ]
    assert (listed["state"], listed["topic"], listed["tables"], len(listed["connectors"])) == (
        "active",
        name,
        [name],
        1,
    )
    subscription.put("before")
    subscription.wait_shipped()
    shown = subscription.status_with(
        lambda shown: (
            any(server["shipped_operations"] for server in shown["servers"])
            and all(figures.get("chunks") for figures in shown["connector_figures"].values())
        )
    )
    assert shown["problems"] == []
    assert max(shown["pushed_seqnos"].values()) > 0
    assert "operations shipped" in subscription.command("status")
    url = subscription._workers.urls[0]
    compared = subscription.status("--url", url)
    (region,) = compared["recorded_seqnos"]
    assert compared["recorded_seqnos"][region] == compared["pushed_seqnos"][region]
    (figures,) = compared["connector_figures"].values()
    assert (figures["chunks"], figures["failed_calls"]) == (1, 0)
    text = subscription.command("status", "--url", url)
    assert re.search(r"connector \S+: [0-9]+ calls done, 0 refused, 1 chunks recorded", text), text
    assert "regions: 1 in HBase, 1 in the gateway, which has less of 0" in text
    assert subscription.reported()["topics"] == [f"dc1.{name}"]
    assert "is paused" in subscription.command("pause", name)
    subscription.put("while-paused")
    connector.stop()
    assert subscription.rows() == ["before"]
    assert "none: HBase keeps the changes" in subscription.command("list")
    assert "no connector runs" in subscription.command("status", expect=1)
    check_sizes(subscription)
    connector.start()
    subscription.command("resume", name)
    subscription.wait_shipped()
    assert subscription.rows() == ["before", "while-paused"]
    subscription.command("remove", name)
    assert name not in subscription.command("list")
    text = connector.end()
    assert (connector.child.exit_status, "was removed" in text) == (2, True)
    assert name not in subscription.command("list"), "the connector has left nothing"
    assert f"there is no subscription {name}" in subscription.command("pause", name, expect=2)


def check_sizes(subscription: Subscription) -> None:
    """Of the logs that a subscription has still to ship, by the files of HBase."""
    folders = ["--wals", f"{subscription.hbase.data}/WALs", "--old-wals", f"{subscription.hbase.data}/oldWALs"]
    shown = json.loads(subscription.command("status", "--json", *folders, expect=1))["subscriptions"]
    (own,) = (one for one in shown if one["name"] == subscription.name)
    queues = [queue for server in own["servers"] for queue in server["queues"]]
    sizes = {path.name: path.stat().st_size for path in subscription.hbase.data.glob("*WALs/**/*") if path.is_file()}
    assert queues
    assert all(0 < wal["size"] <= sizes[wal["wal"]] for queue in queues for wal in queue["wals"])
    assert any(queue["left_bytes"] for queue in queues), "a row waits"
    assert re.search(r"to ship, [0-9,]+ bytes \(position", subscription.command("status", *folders, expect=1))
    (empty := subscription.folder / "empty").mkdir()
    text = subscription.command("status", "--wals", str(empty), "--old-wals", str(empty), expect=1)
    assert "which HBase has to ship, is missing" in text
    assert "no folder" in subscription.command("status", "--wals", "/none", "--old-wals", "/none", expect=2)
    assert "name both folders" in subscription.command("status", "--wals", "/none", expect=2)


def test_a_topic_that_is_missing_is_an_error_and_nothing_is_lost(subscription: Subscription, workers: Gateway) -> None:
    subscription.create_table()
    later = f"{subscription.name}_later"
    connector = subscription.connector(topic=later).start()
    subscription.put("early")
    connector.wait_logged(b"hbase-not-recorded kind=unknown-topic")
    shown = subscription.status_with(
        lambda shown: any(found.get("waits") for found in shown["connector_figures"].values())
    )
    ((wait,),) = (figures["waits"] for figures in shown["connector_figures"].values())
    assert (wait["who"], "unknown-topic" in wait["reason"]) == ("127.0.0.1", True)
    assert "127.0.0.1 last waited at" in subscription.command("status")
    subscription.topic = make_topic(workers.urls[0], later)
    subscription.wait_shipped()
    connector.stop()
    assert subscription.rows() == ["early"]


def test_a_wrong_zookeeper_or_folder_is_named(subscription: Subscription) -> None:
    text = subscription.command("list", "--hbase-folder", "/nothing", expect=3)
    assert "has no /nothing/master: HBase does not run, or its folder is another one (--hbase-folder)" in text
