"""Benchmark of HBase's changes into a topic, against HBase's own replication of the same changes to a second HBase."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvloop
from aiokafka import AIOKafkaConsumer, TopicPartition
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared
from logferry.ops.bench.harness.gateways import gateway_pids, make_topic, percentiles, running_stack
from logferry.ops.bench.harness.usage import UsageMeter
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.stack.hbase_cluster import HBaseCluster
from logferry.ops.stack.processes import Child
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 3
_WARM_UP_S: Final = 60.0
_CHANGES: Final = 60_000
_REGIONS: Final = 10
_PARTITIONS: Final = 4
# Of the changes; the table that is written last tells that all of them are there.
_TABLE, _END = "bench", "bench_end"
_OURS, _THEIRS = "ours", "theirs"
_START_S: Final = 120.0
_LONGEST_S: Final = 300.0
_POLL_S: Final = 0.05
# The measurement of latency: long enough for thousands of edits.
_RATE: Final = 1000
_LATENCY_S: Final = 15.0
_SERVER: Final = "region-server-1"


def hbase_changes_s() -> Figure:
    """Puts and deletes of every kind, one region server, ten regions; each round ships the same changes twice.

    Both peers are disabled while 60,000 changes are written. Then one is enabled alone, and timed until it has all of
    them: our serial peer, until the gateway has acknowledged the last change; then HBase's own, which is not serial,
    until a client of the second HBase sees it. ``cpu_us`` a change: of the connector and two gateway workers; of the
    second region server. ``source_cpu_us``: of the first region server, which ships. ``p50_ms``, ``p99_ms``: from the
    time of the write in HBase's log until a consumer of the topic has the change, at 1,000 changes a second.
    """
    with (
        tempfile.TemporaryDirectory() as name,
        running_stack(2) as stack,
        HBaseCluster(Path(name) / "first", servers=1) as first,
        HBaseCluster(Path(name) / "second", servers=1) as second,
    ):
        topic = make_topic(stack, _OURS, _PARTITIONS)
        for cluster in (first, second):
            cluster.shell(f"create {_TABLE} d 1 {_REGIONS}")
            cluster.shell(f"create {_END} d 1 1")
        first.shell(f"peer {_THEIRS} {second.zookeeper}:/hbase")
        first.shell(f"disable {_THEIRS}")
        connector = _connector(first, stack, Path(name))
        try:
            latency = _latency(first, stack, topic)
            bench = _Shipped(first, second, stack, connector)
            rounds = alternate(_ROUNDS, bench.ours, bench.theirs, _WARM_UP_S)
        finally:
            connector.send(9)
    found = compared("changes/s ours / HBase's replication", "changes_s", rounds)
    return found._replace(ours={**found.ours, **latency})


class _Shipped:
    def __init__(self, first: HBaseCluster, second: HBaseCluster, stack: Stack, connector: Child) -> None:
        self._first, self._second = first, second
        self._gateway = GatewayClient(stack.urls()[0])
        self._pids = {_OURS: [connector.pid or 0, *gateway_pids(stack)], _THEIRS: [_pid(second)]}
        region = first.shell(f"regions {_END}").partition("@")[0]
        self._source = f"/v1/topics/{_OURS}/sources/{region}?partition_key={_END}"
        self._count = 0

    def ours(self, number: int) -> Side:
        self._first.shell(f"disable {_OURS}")
        before = int(self._first.shell("written"))
        self._first.shell(f"write {number} 4 0 {_TABLE} d")
        self._first.shell(f"until {before + _CHANGES}")
        self._count = int(self._first.shell("stop")) - before
        recorded = self._recorded()
        self._first.shell(f"put {_END} {number} d q v")
        side = self._drained(_OURS, lambda: self._recorded() != recorded)
        self._first.shell(f"disable {_OURS}")
        return side

    def theirs(self, number: int) -> Side:
        side = self._drained(_THEIRS, lambda: self._second.shell(f"has {_END} {number}") == "true")
        self._first.shell(f"disable {_THEIRS}")
        return side

    def _drained(self, peer: str, is_done: Callable[[], bool]) -> Side:
        with UsageMeter(self._pids[peer]) as meter, UsageMeter([_pid(self._first)]) as source:
            self._first.shell(f"enable {peer}")
            _until(is_done, f"{peer} does not have all changes")
        return {
            "changes_s": self._count / meter.wall_s,
            "cpu_us": meter.cpu_s / self._count * 1e6,
            "source_cpu_us": source.cpu_s / self._count * 1e6,
        }

    def _recorded(self) -> int | None:
        found: int | None = self._gateway.request("GET", self._source)["recorded_seqno"]
        return found


def _latency(hbase: HBaseCluster, stack: Stack, topic: str) -> Side:
    """HBase's log and this process have the same clock."""

    async def read() -> list[float]:
        found: list[float] = []
        options = {"isolation_level": "read_committed", "fetch_max_wait_ms": 20}
        async with AIOKafkaConsumer(bootstrap_servers=stack.cluster().bootstrap, **options) as consumer:
            consumer.assign([TopicPartition(topic, number) for number in range(_PARTITIONS)])
            await consumer.seek_to_end()
            end = time.monotonic() + _LATENCY_S
            while time.monotonic() < end:
                for records in (await consumer.getmany(timeout_ms=100)).values():
                    now_ms = time.time() * 1000
                    for record in records:
                        chunk = chunk_of_record(record.value or b"", record.headers)
                        found.append(now_ms - (chunk.created_ms or 0))
        return found

    async def measured() -> list[float]:
        await asyncio.sleep(_LATENCY_S / 3)  # the first calls compile HBase's code
        return await read()

    hbase.shell(f"write 1000 2 {_RATE} {_TABLE} d")
    found = uvloop.run(measured())
    hbase.shell("stop")
    return percentiles(found)


def _connector(hbase: HBaseCluster, stack: Stack, folder: Path) -> Child:
    command = [sys.executable, "-m", "logferry.ops.cli.main", "hbase", "subscribe", _OURS, "--topic", _OURS]
    command += ["--zookeeper", hbase.zookeeper, "--tables", _TABLE, _END, *(f"--url={url}" for url in stack.urls())]
    child = Child("connector", command, folder / "connector.log")
    child.start()

    def is_serving() -> bool:
        child.check_end()
        return b" hbase-serving " in child.log.read_bytes()

    _until(is_serving, "HBase does not ship", _START_S)
    return child


def _pid(hbase: HBaseCluster) -> int:
    return hbase.children[_SERVER].pid or 0


def _until(is_done: Callable[[], bool], problem: str, within_s: float = _LONGEST_S) -> None:
    deadline = time.monotonic() + within_s
    while not is_done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{problem} after {within_s:g} s")
        time.sleep(_POLL_S)
