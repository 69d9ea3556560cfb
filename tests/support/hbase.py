"""Connectors as processes before a real HBase, and the judge of what they wrote.

`judge` is the specification. HBase's own scan of all versions and deletes is the truth, and the topic, read with a
plain Kafka consumer, has to hold

* every change of the scan, and no other;
* each edit once: a region and a sequence id are in the topic together once, or once for each part of a large edit. The
  same change with another sequence id is HBase's own: its client had no answer, and wrote it again;
* the changes of a table in one partition, and those of each row in the order of their sequence ids, in which HBase
  carried them out, also when the row's region was split, merged or moved.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
import urllib.request
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from logferry.client.hbase.cells import TYPES
from logferry.gateway.contract.chunk import Chunk, chunk_of_record
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.hbase_cluster import HBaseCluster
from logferry.ops.stack.processes import Child

PARTITIONS = 3
_PATIENCE_S = 120.0
_STOP_S = 40.0

# The shell of the tests' HBase is a program in Java's source, which a JRE alone cannot start.
needs_jdk = pytest.mark.skipif(
    not (find_java().home / "bin" / "javac").exists(),
    reason="the Java of this machine is no JDK: apt-get install openjdk-17-jdk-headless",
)


class Change(NamedTuple):
    row: bytes
    family: bytes
    qualifier: bytes
    value: bytes
    timestamp: int
    type: str


class Written(NamedTuple):
    """A change in the topic, in the order of its partition."""

    table: str
    change: Change
    sequence_id: int
    source_id: str
    partition: int


class HBaseConnector:
    """``logferry hbase subscribe``: a process that tests kill, freeze and restart."""

    def __init__(
        self, hbase: HBaseCluster, urls: Sequence[str], name: str, topic: str, log: Path, tables: str, *more: str
    ) -> None:
        subscribe = [sys.executable, "-m", "logferry.ops.cli.main", "hbase", "subscribe", name]
        subscribe += ["--zookeeper", hbase.zookeeper, "--topic", topic, "--tables", *tables.split(), *more]
        self.child = Child(f"connector of {name}", [*subscribe, *(f"--url={url}" for url in urls)], log)

    def start(self) -> HBaseConnector:
        """Returns when HBase ships to it."""
        began = self.child.log.stat().st_size if self.child.log.exists() else 0
        self.child.start()
        self._until(b" hbase-serving ", began)
        return self

    def stop(self) -> None:
        assert self.child.stop(_STOP_S), f"it did not end\n{self.child.log_tail()}"
        assert self.child.exit_status == 0, self.child.log_tail()

    def kill(self) -> None:
        self.child.send(signal.SIGKILL)

    def freeze(self) -> None:
        self.child.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.child.send(signal.SIGCONT)

    def end(self) -> str:
        """Waits until it ends by itself; its log."""
        assert self.child.wait_for_end(_PATIENCE_S), f"it still runs\n{self.child.log_tail()}"
        return self.child.log.read_text(encoding="utf-8")

    def wait_logged(self, text: bytes) -> None:
        self._until(text, 0)

    def _until(self, text: bytes, began: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while text not in self.child.log.read_bytes()[began:]:
            assert self.child.running, f"the connector ended\n{self.child.log_tail()}"
            assert time.monotonic() < deadline, f"no {text!r} within {_PATIENCE_S} s\n{self.child.log_tail()}"
            time.sleep(0.05)


def make_topic(url: str, topic: str) -> str:
    """Its full name."""
    body = json.dumps({"partitions": PARTITIONS}).encode()
    request = urllib.request.Request(f"{url}/v1/topics/{topic}", data=body, method="PUT")
    with urllib.request.urlopen(request, timeout=_PATIENCE_S):
        return f"dc1.{topic}"


# ---- what is there --------------------------------------------------------------------------------------------------


def scanned(hbase: HBaseCluster, table: str, folder: Path, command: str = "scan") -> set[Change]:
    """``command``: ``shown`` for what a client sees, without older versions and deletes."""
    file = folder / f"{command}-{table.replace(':', '.')}"
    hbase.shell(f"{command} {table} {file}")
    found = set()
    for line in file.read_text().splitlines():
        *cell, timestamp, kind = line.split(" ")
        row, family, qualifier, value = (bytes.fromhex(text[1:]) for text in cell)
        found.add(Change(row, family, qualifier, value, int(timestamp), TYPES[int(kind)]))
    return found


async def stored(bootstrap: str, topic: str) -> list[tuple[int, str, Chunk]]:
    """Partition, source and chunk of everything that is committed, partition by partition."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    found: list[tuple[int, str, Chunk]] = []
    try:
        await consumer.start()
        consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(place) < end for place, end in ends.items()]):
            for place, records in (await consumer.getmany(timeout_ms=500)).items():
                for record in records:
                    chunk = chunk_of_record(record.value or b"", record.headers)
                    found.append((place.partition, record.key.decode(), chunk))
    finally:
        await consumer.stop()
    return sorted(found, key=lambda one: one[0])


def written(source_id: str, seqno: int, data: bytes, partition: int, *, is_packed: bool = False) -> Iterator[Written]:
    documents = msgpack.Unpacker(BytesIO(data)) if is_packed else map(json.loads, data.splitlines())
    for document in documents:
        assert document["sequence_id"] == seqno, (source_id, document)
        assert document["region"] == source_id.partition("/")[0], (source_id, document)
        row, family, qualifier, value = (bytes_of(document, name) for name in ("row", "family", "qualifier", "value"))
        change = Change(row, family, qualifier, value, document["timestamp"], document["type"])
        yield Written(document["table"], change, seqno, source_id, partition)


def bytes_of(document: dict[str, Any], name: str) -> bytes:
    if isinstance(document.get(name), bytes):
        return bytes(document[name])
    coded = document.get(f"{name}_base64")
    return b64decode(coded) if coded is not None else str(document.get(name, "")).encode()


def chunks_of(bootstrap: str, topic: str) -> list[Written]:
    return [
        line
        for partition, source_id, chunk in asyncio.run(stored(bootstrap, topic))
        for line in written(source_id, chunk.seqno, chunk.data, partition, is_packed=is_packed(chunk))
    ]


def is_packed(chunk: Chunk) -> bool:
    return chunk.attributes.get("format") == "msgpack"


# ---- the judge ------------------------------------------------------------------------------------------------------


def wait_shipped(hbase: HBaseCluster, bootstrap: str, topic: str, tables: Sequence[str], folder: Path) -> None:
    """Until the topic has every change of the scans. `judge` decides on the rest, once all connectors have ended.

    Fails when nothing more came for a while: how long all of it takes depends on how much was written meanwhile.
    """
    wanted = {(table, change) for table in tables for change in scanned(hbase, table, folder)}
    left, deadline = len(wanted) + 1, 0.0
    while missing := wanted - {(one.table, one.change) for one in chunks_of(bootstrap, topic)}:
        if len(missing) < left:
            left, deadline = len(missing), time.monotonic() + _PATIENCE_S
        assert time.monotonic() < deadline, (
            f"{len(missing)} of {len(wanted)} changes are not shipped: {list(missing)[:3]}"
        )
        time.sleep(0.5)


def judge(found: Sequence[Written], scans: dict[str, set[Change]]) -> int:
    """How many changes HBase's client wrote again. Raises AssertionError."""
    wanted = {(table, change) for table, changes in scans.items() for change in changes}
    there = {(one.table, one.change) for one in found}
    missing, foreign = wanted - there, there - wanted
    assert not missing, f"{len(missing)} of {len(wanted)} changes are lost: {sorted(missing)[:3]}"
    assert not foreign, f"{len(foreign)} changes are not HBase's: {sorted(foreign)[:3]}"
    twice = [
        key
        for key, count in Counter((one.source_id, one.sequence_id, one.change) for one in found).items()
        if count > 1
    ]
    assert not twice, f"{len(twice)} changes were written twice: {twice[:3]}"
    for table in scans:
        partitions = {one.partition for one in found if one.table == table}
        assert len(partitions) <= 1, f"{table} is in the partitions {partitions}"
    last: dict[tuple[str, bytes], int] = {}
    for one in found:
        key = one.table, one.change.row
        assert last.get(key, -1) <= one.sequence_id, f"{one} comes after sequence id {last[key]} of its row"
        last[key] = one.sequence_id
    return len(found) - len(there)
