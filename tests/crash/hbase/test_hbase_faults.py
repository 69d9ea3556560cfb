"""Changes under load while regions move and processes die: each is in the topic once, in order for each row.

`tests/support/hbase.py` says what that means, and compares with HBase's own scan; `tests/support/hbase_log.py` compares
with the write-ahead log, by regions and sequence ids. Each fault hits while changes are written, and the next one comes
when changes were written since.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from logferry.ops.runtime.jars import HBASE_VERSIONS
from logferry.ops.stack.hbase_cluster import MASTER, ZOOKEEPER, HBaseCluster, ShellError
from logferry.ops.stack.stack import Stack

from tests.support.hbase import HBaseConnector, chunks_of, judge, make_topic, needs_jdk, scanned, wait_shipped
from tests.support.hbase_log import compare, logged

pytestmark = needs_jdk

RATE = 4000
SHORT_RATE = 1500
# Of the regions in the order of their rows: which one, and the row where it is split; the two that are merged.
SPLITS = ((0, "1000"), (3, "5800"))
MERGES = (slice(-2, None), slice(3, 5))


@pytest.fixture(scope="module")
def hbase(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HBaseCluster]:
    with HBaseCluster(tmp_path_factory.mktemp("hbase")) as running:
        yield running


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=2, lanes=4) as running:
        yield running


class Load:
    """Tables, a subscription with its connectors, and changes that are written; what `finish` finds is judged."""

    def __init__(self, hbase: HBaseCluster, stack: Stack, name: str, folder: Path, tables: int, regions: int) -> None:
        self.hbase, self.stack, self.name, self.folder = hbase, stack, name, folder
        self._counts: Counter[str] = Counter()
        self.away: set[str] = set()  # processes of HBase that a test keeps dead
        self.tables = [f"{name}_{number}" for number in range(tables)]
        self.topic = make_topic(stack.urls()[0], name)
        for table in self.tables:
            hbase.shell(f"create {table} d 1 {regions}")
        self.connectors = [self._connector(number).start() for number in range(2)]

    def _connector(self, number: int) -> HBaseConnector:
        log = self.folder / f"connector-{number}.log"
        return HBaseConnector(self.hbase, self.stack.urls(), self.name, self.name, log, " ".join(self.tables))

    def count(self, what: str) -> int:
        """How often it was called with this before."""
        self._counts[what] += 1
        return self._counts[what] - 1

    def write(self, rate: int) -> None:
        self._base = int(self.hbase.shell("written"))
        self.hbase.shell(f"write {len(self.name)} 4 {rate} {','.join(self.tables)} d")

    def more(self, count: int) -> None:
        """Returns when so many more changes were written."""
        so_far = int(self.hbase.shell("written"))
        self.hbase.shell(f"until {so_far + count}")

    def regions(self, table: int = 0) -> list[tuple[str, str]]:
        """Name and server of each, in the order of their rows."""
        found = [one.split("@") for one in self.hbase.shell(f"regions {self.tables[table]}").split()]
        return [(name, server) for name, server in found]

    def finish(self, at_least: int) -> None:
        """Ends the writing, waits for the last change, ends the connectors, and judges."""
        count = int(self.hbase.shell("stop")) - self._base
        assert count >= at_least
        wait_shipped(self.hbase, self.stack.cluster().bootstrap, self.topic, self.tables, self.folder)
        for connector in self.connectors:
            connector.stop()
        scans = {table: scanned(self.hbase, table, self.folder) for table in self.tables}
        found = chunks_of(self.stack.cluster().bootstrap, self.topic)
        again = judge(found, scans)
        compare(found, logged(self.hbase.data, self.tables))
        print(f"{self.name}: {count} changes, {len(found)} in the topic, {again} written again by HBase's client")
        assert sum(map(len, scans.values())) >= at_least * 0.9

    def close(self) -> None:
        """Also of the subscription: a peer without connectors keeps logs, and holds memory of the region servers."""
        for connector in self.connectors:
            connector.kill()
        self.hbase.shell("stop")
        remove = [sys.executable, "-m", "logferry.ops.cli.main", "hbase", "remove", self.name]
        subprocess.run([*remove, "--zookeeper", self.hbase.zookeeper], check=True, timeout=120, capture_output=True)


@pytest.fixture
def load(hbase: HBaseCluster, stack: Stack, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Load]:
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[:60]
    tables, regions = (3, 7) if request.node.get_closest_marker("long") else (2, 4)
    running = Load(hbase, stack, name, tmp_path, tables, regions)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def supervised(load: Load) -> Iterator[None]:
    """What ends by itself is started again, as by a service manager: a region server does when it lost ZooKeeper."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            for name, child in load.hbase.children.items():
                if name not in load.away:
                    child.start()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def move(load: Load) -> None:
    """Every second region of a table, each to another server."""
    for name, _ in load.regions()[::2]:
        load.hbase.shell(f"move {name}")


def split(load: Load) -> None:
    """A region of each table, the second time another one: a daughter cannot be split at once."""
    place, row = SPLITS[load.count("split")]
    for table in range(len(load.tables)):
        load.hbase.shell(f"split {load.regions(table)[place][0]} {row}")


def merge(load: Load) -> None:
    """Two regions of each table that were neither split nor merged."""
    place = MERGES[load.count("merge")]
    for table in range(len(load.tables)):
        first, second = load.regions(table)[place]
        load.hbase.shell(f"merge {first[0]} {second[0]}")


def server_killed(load: Load) -> None:
    """With half of the regions; the other one takes them, and what was not shipped."""
    victim = load.hbase.names[0]
    load.hbase.kill(victim)
    load.hbase.wait_ready(servers=len(load.hbase.names) - 1)
    load.hbase.restart(victim)
    load.hbase.wait_ready()


def connector_killed(load: Load) -> None:
    """One of two: HBase ships the same again to the other one."""
    load.connectors[0].kill()
    load.more(2 * RATE)
    load.connectors[0].start()


def connectors_away(load: Load) -> None:
    for connector in load.connectors:
        connector.kill()
    load.more(5 * RATE)
    for connector in load.connectors:
        connector.start()


def connector_frozen(load: Load) -> None:
    """Longer than its session and HBase's patience; then it carries out calls that the other one has had since. The
    second time both are frozen: nothing is announced in ZooKeeper.
    """
    frozen = load.connectors[: load.count("frozen") + 1]
    for connector in frozen:
        connector.freeze()
    time.sleep(15)
    for connector in frozen:
        connector.thaw()
    for connector in frozen:
        connector.wait_logged(b"hbase-announced-again")
    load.more(RATE)


def worker_killed(load: Load) -> None:
    """Both in turn: each owns lanes, and is restarted by the stack."""
    for number in range(2):
        load.stack.kill(f"gateway-{number}")
        load.more(RATE)
        load.stack.wait_ready()


def broker_killed(load: Load) -> None:
    load.stack.restart("kafka-1")
    load.more(RATE)
    load.stack.wait_ready()


def zookeeper_killed(load: Load) -> None:
    """Away for less than a session: the connectors stay announced. On a slow machine it may be more: a region server
    that lost its session ends.
    """
    with supervised(load):
        load.hbase.restart(ZOOKEEPER)
        load.more(RATE)
        load.hbase.wait_ready()


def master_killed(load: Load) -> None:
    load.hbase.restart(MASTER)
    load.more(RATE)
    load.hbase.wait_ready()


def hbase_restarted(load: Load) -> None:
    """All of it, killed and started again: the first time without its ZooKeeper, the second time with it."""
    names = [MASTER, *load.hbase.names] + [ZOOKEEPER] * load.count("restart")
    for name in names:
        load.hbase.kill(name)
    for name in reversed(names):
        load.hbase.restart(name)
    load.hbase.wait_ready()
    load.more(RATE)


FAULTS = (
    *(move, split, merge, server_killed, connector_killed, connectors_away, connector_frozen, worker_killed),
    *(broker_killed, zookeeper_killed, master_killed, hbase_restarted),
)


# ---- all at once: what is killed stays away until `heal` ------------------------------------------------------------


def _moved_if_it_can(load: Load) -> None:
    with suppress(ShellError):
        load.hbase.shell(f"move {load.regions()[0][0]}")


def _away(*names: str) -> Callable[[Load], None]:
    """Of HBase's processes."""

    def strike(load: Load) -> None:
        for name in names:
            load.away.add(name)
            load.hbase.kill(name)

    return strike


STRIKES: dict[str, Callable[[Load], None]] = {
    "a region server": _away("region-server-1"),
    "the other region server": _away("region-server-2"),
    "the master": _away(MASTER),
    "ZooKeeper": _away(ZOOKEEPER),
    "a connector": lambda load: load.connectors[0].kill(),
    "the other connector frozen": lambda load: load.connectors[1].freeze(),
    "a worker": lambda load: load.stack.kill("gateway-0"),
    "the other worker": lambda load: load.stack.kill("gateway-1"),
    "a broker": lambda load: load.stack.restart("kafka-1"),
}


def heal(load: Load) -> None:
    load.connectors[1].thaw()
    load.away.clear()
    load.hbase.wait_ready()
    load.stack.wait_ready()
    assert load.connectors[1].child.running, load.connectors[1].child.log_tail()
    if not load.connectors[0].child.running:
        assert load.connectors[0].child.exit_status == -signal.SIGKILL, load.connectors[0].child.log_tail()
        load.connectors[0].start()


def test_regions_move_and_split_and_a_connector_is_killed(load: Load) -> None:
    """The short one, for CI."""
    load.write(SHORT_RATE)
    load.more(SHORT_RATE)
    load.connectors[0].kill()
    move(load)
    split(load)
    load.more(SHORT_RATE)
    load.connectors[0].start()
    merge(load)
    load.more(SHORT_RATE)
    load.finish(at_least=3 * SHORT_RATE)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_under_load(load: Load, fault: Callable[[Load], None]) -> None:
    load.write(RATE)
    load.more(2 * RATE)
    fault(load)
    load.more(2 * RATE)
    fault(load)
    load.more(2 * RATE)
    load.finish(at_least=6 * RATE)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_faults_at_once(load: Load, seed: int) -> None:
    """Several things are away together, for some seconds, in an order and for times that the seed decides."""
    chance = random.Random(seed)
    load.write(RATE)
    load.more(RATE)
    with supervised(load):
        for _ in range(5):
            chosen = chance.sample(sorted(STRIKES), 4)
            print(f"seed {seed}: {', '.join(chosen)}")
            for name in chosen:
                STRIKES[name](load)
                time.sleep(chance.uniform(0, 3))
            heal(load)
            _moved_if_it_can(load)
            load.more(RATE)
    load.finish(at_least=6 * RATE)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", [version for version in HBASE_VERSIONS if version != "2.6"])
def test_faults_of_another_version_of_hbase(version: str, stack: Stack, tmp_path: Path) -> None:
    with HBaseCluster(tmp_path / "hbase", version=version) as hbase:
        load = Load(hbase, stack, f"version_{version.replace('.', '_')}", tmp_path, 2, 7)
        load.write(RATE)
        for fault in (move, split, merge, server_killed, connector_killed, master_killed, hbase_restarted):
            load.more(RATE)
            fault(load)
        load.finish(at_least=7 * RATE)
        load.close()
