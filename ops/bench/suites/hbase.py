"""Benchmarks of HBase's changes: a subscription against HBase's own replication to a second HBase.

Both are serial peers of one region server, which ships the same changes to each in turn. The times are those that the
targets write beside the changes: the gateway with a record, the second HBase with an entry of its write-ahead log.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from logferry.client.hbase.cells import MARK_FAMILY, CellBlock
from logferry.client.hbase.definition import PeerDefinition, peer_of
from logferry.client.hbase.master import HBaseMaster
from logferry.client.hbase.wal.entries import LogEnd, LogEntry, end_of_header, entry_at
from logferry.client.hbase.zookeeper import Registry
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.gateway.kafka.client import LATEST
from logferry.ops.bench.harness.figures import Figure, Rounds, Side, alternate, compared
from logferry.ops.bench.harness.gateways import gateway_pids, make_topic, running_stack
from logferry.ops.bench.harness.kafka import connected
from logferry.ops.bench.harness.usage import UsageMeter
from logferry.ops.stack.hbase_cluster import HBaseCluster
from logferry.ops.stack.kafka_cluster import LONG_RUN
from logferry.ops.stack.processes import Child
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 3
_CHANGES: Final = 100_000
_REGIONS: Final = 4
_RATE: Final = 500
_AT_RATE_S: Final = 20.0
_QUIET_S: Final = 3.0
_LONGEST_S: Final = 300.0
_LOOK_S: Final = 0.2
# Those of HBase itself, in place of those that make tests short.
_SETTINGS: Final = {
    "replication.source.size.capacity": str(64 << 20),
    "replication.source.nb.capacity": "25000",
    "replication.source.sleepforretries": "1000",
    "hbase.regionserver.handler.count": "30",
}
_numbers = count()


class Arrived(NamedTuple):
    """A change at its target. ``key``: what no two changes share. ``at_ms``: when it was written there."""

    key: bytes
    at_ms: int


def hbase_changes_s() -> Figure:
    """100,000 changes that wait, in batches of up to 40 rows: changes a second from the first to the last.

    ``cpu_s``: for a million changes, of the connector and the gateway; of the second HBase's region server. Both share
    the cost of the first region server, which reads and ships.
    """
    return compared("changes/s ours / second HBase", "changes_s", _measured())


def hbase_change_ms() -> Figure:
    """500 changes a second: milliseconds from the entry in the first log to the target; the ratio of the medians."""
    return compared("ms ours / second HBase", "p50_ms", _measured())


@cache
def _measured() -> Rounds:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = stack.enter_context(HBaseCluster(folder / "source", 1, _SETTINGS, jvm=LONG_RUN))
        other = stack.enter_context(HBaseCluster(folder / "other", 1, _SETTINGS, jvm=LONG_RUN))
        gateways = stack.enter_context(running_stack(1))
        registry = stack.enter_context(Registry([source.zookeeper]))
        bench = _Bench(source, HBaseMaster(registry.master))

        def ours(_: int) -> Side:
            with _subscribed(source, gateways, folder) as (name, topic, connector):
                pids = [connector.pid or 0, *gateway_pids(gateways)]
                bootstrap = gateways.cluster().bootstrap
                return bench.side(name, pids, lambda: _end_of(bootstrap, topic), lambda: _recorded(bootstrap, topic))

        def theirs(_: int) -> Side:
            with _replicated(source, other, bench.master) as name:
                logs = other.data / "WALs"
                pids = [other.children[other.names[0]].pid or 0]
                return bench.side(name, pids, lambda: _size_of(logs), lambda: list(_logged(logs, name)))

        return alternate(_ROUNDS, ours, theirs, warm_up_s=60)


# ---- the targets ----------------------------------------------------------------------------------------------------


@contextmanager
def _subscribed(source: HBaseCluster, gateways: Stack, folder: Path) -> Iterator[tuple[str, str, Child]]:
    """A new table, the topic of its changes, and the connector."""
    name = f"ours_{next(_numbers)}"
    source.shell(f"create {name} d 1 {_REGIONS}")
    topic = make_topic(gateways, name, 1)
    command = [sys.executable, "-m", "logferry.ops.cli.main", "hbase"]
    subscribe = ["subscribe", name, "--zookeeper", source.zookeeper, "--topic", name, "--tables", name]
    log = folder / f"{name}.log"
    connector = Child(name, [*command, *subscribe, *(f"--url={url}" for url in gateways.urls())], log)
    connector.start()
    try:
        _until(lambda: " hbase-serving " in log.read_text() or not connector.running, "the connector's start")
        if not connector.running:
            raise connector.failed("ended")
        yield name, topic, connector
    finally:
        connector.stop(15)
        remove = Child("remove", [*command, "remove", name, "--zookeeper", source.zookeeper], log)
        remove.start()
        remove.wait_for_end(60)


@contextmanager
def _replicated(source: HBaseCluster, other: HBaseCluster, master: HBaseMaster) -> Iterator[str]:
    """A new table in both."""
    name = f"theirs_{next(_numbers)}"
    for hbase in (other, source):
        hbase.shell(f"create {name} d 1 {_REGIONS}")
    host, _, port = other.zookeeper.partition(":")
    master.add_peer(name, peer_of(PeerDefinition("none", (name,)), f"{host}:{port}:/hbase"))
    try:
        yield name
    finally:
        master.remove_peer(name)


async def _read(bootstrap: str, topic: str) -> list[Arrived]:
    place = TopicPartition(topic, 0)
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed") as consumer:
        consumer.assign([place])
        await consumer.seek_to_beginning(place)
        end, found = (await consumer.end_offsets([place]))[place], list[Arrived]()
        while await consumer.position(place) < end:
            for record in (await consumer.getmany(place, timeout_ms=500)).get(place, ()):
                lines = chunk_of_record(record.value or b"", record.headers).data.splitlines()
                found += [Arrived(_key_of(line), record.timestamp) for line in lines]
        return found


def _recorded(bootstrap: str, topic: str) -> list[Arrived]:
    return asyncio.run(_read(bootstrap, topic))


def _end_of(bootstrap: str, topic: str) -> int:
    async def asked() -> int:
        async with connected(bootstrap) as kafka:
            return int((await kafka.offsets([(topic, 0)], LATEST))[topic, 0])

    return asyncio.run(asked())


def _key_of(line: bytes) -> bytes:
    """The timestamp: `write` of HBaseShell.java uses each once."""
    return line.partition(b'"timestamp":')[2].partition(b",")[0]


def _size_of(logs: Path) -> int:
    return sum(path.stat().st_size for path in logs.glob("*/*"))


def _logged(logs: Path, table: str) -> Iterator[Arrived]:
    for entry in _entries(logs, table):
        for cell in CellBlock(entry.cells).take(entry.cell_count):
            if cell.family != MARK_FAMILY:
                yield Arrived(str(cell.timestamp).encode(), entry.write_time)


def _entries(logs: Path, table: str) -> Iterator[LogEntry]:
    for path in logs.glob("*/*"):
        data = memoryview(path.read_bytes())
        at = end_of_header(data)
        while at is not None and (found := entry_at(data, at)) is not None and not isinstance(found, LogEnd):
            if found.table == table and found.cell_count:
                yield found
            at = found.end


# ---- measuring ------------------------------------------------------------------------------------------------------


class _Bench:
    """The first HBase, whose changes go to the targets."""

    def __init__(self, source: HBaseCluster, master: HBaseMaster) -> None:
        self._source, self.master = source, master

    def side(
        self, name: str, pids: Sequence[int], size: Callable[[], int], arrived: Callable[[], list[Arrived]]
    ) -> Side:
        """Of the target of the peer ``name``. ``size``: grows while something arrives."""
        self.master.disable_peer(name)
        waiting = self._write(name, 0, lambda base: self._source.shell(f"until {base + _CHANGES}"))
        with UsageMeter(pids) as meter:
            self.master.enable_peer(name)
            found = _settled(size, arrived, waiting)
        seconds = (max(one.at_ms for one in found) - min(one.at_ms for one in found)) / 1000
        logged = {one.key for one in found}
        more = self._write(name, _RATE, lambda _: time.sleep(_AT_RATE_S))
        later = [one for one in _settled(size, arrived, waiting + more) if one.key not in logged]
        written = {one.key: one.at_ms for one in _logged(self._source.data / "WALs", name)}
        late = quantiles([max(one.at_ms - written[one.key], 0) for one in later], n=100)
        found_s = {"changes_s": round(waiting / seconds), "cpu_s": round(meter.cpu_s / waiting * 1e6, 1)}
        return {**found_s, "p50_ms": late[49], "p99_ms": late[98]}

    def _write(self, table: str, rate: int, wait: Callable[[int], object]) -> int:
        """How many changes were written until ``wait`` returned. It is given the number before them."""
        base = int(self._source.shell("written"))
        self._source.shell(f"write {base} 4 {rate} {table} d")
        wait(base)
        return int(self._source.shell("stop")) - base


def _settled(size: Callable[[], int], arrived: Callable[[], list[Arrived]], wanted: int) -> list[Arrived]:
    """What has arrived once all has. It is looked at when nothing came for a while: looking costs much."""
    deadline = time.monotonic() + _LONGEST_S
    while True:
        _quiet(size, deadline)
        found = arrived()
        if len({one.key for one in found}) >= wanted:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(found)} of {wanted} changes arrived within {_LONGEST_S:.0f} s")


def _quiet(size: Callable[[], int], deadline: float) -> None:
    seen, since = size(), time.monotonic()
    while time.monotonic() - since < _QUIET_S and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        if (now := size()) != seen:
            seen, since = now, time.monotonic()


def _until(is_done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _LONGEST_S
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took more than {_LONGEST_S:.0f} s")
        time.sleep(_LOOK_S)
