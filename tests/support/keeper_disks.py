"""A real Kafka whose brokers have several small disks (tmpfs) that fill and fail; a load with a checker; keepers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition, errors
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import ServiceWorker, Setting, configuration, free_ports, json_of

MIB = 1 << 20
_PATIENCE_S = 90
_PAUSE_S = 0.1
# Small segments, removed at once, so that small disks are enough.
DISK_SETTINGS = {
    "log.segment.bytes": str(MIB),
    "log.index.size.max.bytes": "65536",
    "log.retention.check.interval.ms": "500",
    "log.segment.delete.delay.ms": "500",
    # A broker without a processor for some seconds is no fault.
    "replica.lag.time.max.ms": "20000",
    "replica.high.watermark.checkpoint.interval.ms": "1000",
    "offsets.topic.num.partitions": "3",
    "transaction.state.log.num.partitions": "3",
    "auto.leader.rebalance.enable": "false",
    "num.replica.alter.log.dirs.threads": "2",
}


@dataclass
class DiskCluster:
    """``disks``: the log directories of each broker."""

    kafka: KafkaCluster
    disks: dict[int, list[Path]]

    def fail(self, broker: int, disk: int) -> str:
        """The directory vanishes: the next file that Kafka makes there fails. Returns its path."""
        path = self.disks[broker][disk]
        path.rename(path.with_name("gone"))
        return str(path)

    def free_percent(self, broker: int, disk: int) -> float:
        found = os.statvfs(self.disks[broker][disk].parent)
        return 100 * found.f_bavail / found.f_blocks

    def least_free_percent(self) -> float:
        return min(self.free_percent(broker, d) for broker, disks in self.disks.items() for d in range(len(disks)))


class FormattedDisks(KafkaCluster):
    """Formats the disks like the folder that `KafkaCluster` formats, each with an id of its own."""

    disks: Mapping[int, list[Path]]

    def _format_new_nodes(self, cluster_id: str) -> None:
        super()._format_new_nodes(cluster_id)
        for node, paths in self.disks.items():
            known = (self._folder(node) / "log" / "meta.properties").read_text(encoding="utf-8")
            for path in paths:
                own = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
                text = re.sub(r"directory\.id=.*", f"directory.id={own}", known)
                (path / "meta.properties").write_text(text, encoding="utf-8")


@contextmanager
def disk_cluster(folder: Path, brokers: int, mib: int = 96, count: int = 2, **more: str) -> Iterator[DiskCluster]:
    """``mib``: of each disk. The metadata have a directory of their own, apart from these. Skips without mounts."""
    disks = {node: [folder / f"disk-{node}-{d}" / "log" for d in range(count)] for node in range(1, brokers + 1)}
    with ExitStack() as stack:
        for path in (path for found in disks.values() for path in found):
            stack.enter_context(_mounted(path.parent, mib))
            path.mkdir()

        def settings_of(node: int, _broker: int, _controller: int) -> Mapping[str, str]:
            meta = folder / "kafka" / f"kafka-{node}" / "meta"
            return {"metadata.log.dir": str(meta), "log.dirs": ",".join(map(str, disks[node])), **DISK_SETTINGS, **more}

        kafka = FormattedDisks("disks", folder / "kafka", brokers, heap="192m", settings_of=settings_of)
        kafka.disks = disks
        stack.enter_context(kafka)
        yield DiskCluster(kafka, disks)


@contextmanager
def _mounted(path: Path, mib: int) -> Iterator[None]:
    path.mkdir(parents=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "logferry-test", str(path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting is not permitted here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


# ---- a load and its checker --------------------------------------------------------------------------------------


@dataclass
class Load:
    """Numbered records to every partition of a topic, the acknowledged ones, and what a consumer received."""

    topic: str
    partitions: int
    acknowledged: dict[int, list[int]] = field(default_factory=dict)
    received: dict[int, list[int]] = field(default_factory=dict)
    fewest_in_sync: int = 99
    refused: int = 0

    def _is_read(self, number: int) -> bool:
        return set(self.acknowledged[number]) <= set(self.received.get(number, ()))

    async def check(self, kafka: KafkaClient) -> None:
        """What is acknowledged is stored once and in order, and the consumer received it."""
        for number in range(self.partitions):
            acknowledged = self.acknowledged[number]
            assert acknowledged, f"nothing was written to partition {number}"
            stored = await stored_numbers(kafka, self.topic, number)
            assert stored == sorted(set(stored)), f"partition {number}: twice, or out of order"
            assert set(acknowledged) <= set(stored), f"partition {number}: acknowledged records are lost"
            await until(partial(self._is_read, number), "all is read")


async def stored_numbers(kafka: KafkaClient, topic: str, partition: int) -> list[int]:
    position, found = await kafka.offset(topic, partition, EARLIEST), list[int]()
    while True:
        fetched = await kafka.fetch(topic, partition, position, max_bytes=MIB)
        found += [int((record.value or b"").split(b" ", 1)[0]) for record in fetched.records]
        position = fetched.next_offset
        if fetched.at_end:
            return found


@asynccontextmanager
async def running_load(
    cluster: DiskCluster, kafka: KafkaClient, topic: str, partitions: int, size: int = 500, pause_s: float = 0.02
) -> AsyncIterator[Load]:
    """Writes, reads and looks at the replicas in sync until the end of the block."""
    load = Load(topic, partitions, {n: [] for n in range(partitions)}, {})
    servers = cluster.kafka.bootstrap
    # aiokafka asks for no new leader after KAFKA_STORAGE_ERROR.
    often = {"bootstrap_servers": servers, "metadata_max_age_ms": 1000}
    producer = AIOKafkaProducer(acks="all", enable_idempotence=True, linger_ms=2, **often)
    consumer = AIOKafkaConsumer(
        topic, group_id=f"{topic}.reader", auto_offset_reset="earliest", enable_auto_commit=False, **often
    )  # fmt: skip
    await producer.start()
    await consumer.start()
    stop = asyncio.Event()

    async def write(number: int) -> None:
        n = 0
        while not stop.is_set():
            n += 1
            try:
                await producer.send_and_wait(topic, b"%d " % n + bytes(size), partition=number)
                load.acknowledged[number].append(n)
            except errors.KafkaError:
                load.refused += 1
            await asyncio.sleep(pause_s)

    async def read() -> None:
        while True:
            for tp, records in (await consumer.getmany(timeout_ms=200)).items():
                numbers = [int((record.value or b"").split(b" ", 1)[0]) for record in records]
                load.received.setdefault(tp.partition, []).extend(numbers)
                with suppress(errors.KafkaError):
                    await consumer.commit({tp: records[-1].offset + 1})

    async def look() -> None:
        while True:
            with suppress(errors.KafkaError, TimeoutError):
                async with asyncio.timeout(2):
                    found = (await kafka.describe([topic])).topics.get(topic)
                if found is not None:
                    load.fewest_in_sync = min([load.fewest_in_sync, *(len(p.isr) for p in found.partitions)])
            await asyncio.sleep(_PAUSE_S)

    writers = [asyncio.create_task(write(number)) for number in range(partitions)]
    others = [asyncio.create_task(read()), asyncio.create_task(look())]
    try:
        yield load
        stop.set()
        await asyncio.gather(*writers)
        await load.check(kafka)
    finally:
        for task in (*writers, *others):
            task.cancel()
        await asyncio.gather(*writers, *others, return_exceptions=True)
        await consumer.stop()
        await producer.stop()


async def fill(cluster: DiskCluster, topic: str, partition: int, mib: int, first: int = 1) -> int:
    """Writes so many MiB of numbered records of 50 kB; returns the next number."""
    async with AIOKafkaProducer(bootstrap_servers=cluster.kafka.bootstrap, acks="all") as producer:
        last = first + mib * MIB // 50_000
        for n in range(first, last):
            sent = await producer.send(topic, b"%d " % n + bytes(50_000), partition=partition)
        await sent
    return last


async def commit(cluster: DiskCluster, group: str, topic: str, partition: int, offset: int) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=cluster.kafka.bootstrap, group_id=group, enable_auto_commit=False)
    await consumer.start()
    tp = TopicPartition(topic, partition)
    consumer.assign([tp])
    await consumer.commit({tp: offset})
    await consumer.stop()


async def create(kafka: KafkaClient, topic: str, partitions: int, replicas: int, **settings: str) -> None:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    await kafka.create_topic(topic, partitions, replicas, named)
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            found = (await kafka.describe([topic])).topics.get(topic)
            if found is not None and all(p.leader >= 0 and len(p.isr) == replicas for p in found.partitions):
                return
            await asyncio.sleep(_PAUSE_S)


@asynccontextmanager
async def client(cluster: DiskCluster) -> AsyncIterator[KafkaClient]:
    kafka = KafkaClient({"bootstrap_servers": cluster.kafka.bootstrap}, "test")
    await kafka.start()
    try:
        yield kafka
    finally:
        await kafka.close()


# ---- keepers -----------------------------------------------------------------------------------------------------


class KeeperProcess(ServiceWorker):
    """A keeper as it runs in production, quick to look."""

    def __init__(self, cluster: DiskCluster, folder: Path, name: str, module: str, settings: Mapping[str, Any]) -> None:
        [port] = free_ports(1)
        facts: dict[str, Setting] = {
            "dc": "dc1",
            "listen": f"127.0.0.1:{port}",
            "act": True,
            "session_timeout_ms": 6000,
            "kafka": {"bootstrap_servers": cluster.kafka.bootstrap},
            "watch": {"every_s": 0.5, "answer_s": 2, "growth_s": 20, "full_within_s": 0},
            **settings,
        }
        file = folder / f"{name}.toml"
        file.write_text(configuration(facts), encoding="utf-8")
        super().__init__(name, file, 0, port, folder / f"{name}.log", module)

    @property
    def status(self) -> dict[str, Any]:
        """As soon as it answers."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := json_of(self.url, "/v1/status")):
            assert self.child.running, f"the keeper ended; see {self.child.log}"
            assert time.monotonic() < deadline, "the keeper does not answer"
            time.sleep(_PAUSE_S)
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.child.log.read_text(encoding="utf-8").splitlines() if self.child.log.exists() else []
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [one for one in found if one["event"] == name]

    def findings(self) -> set[tuple[str, str]]:
        return {(one["kind"], one["what"]) for one in self.status.get("findings", ())}


@contextmanager
def keeper(
    cluster: DiskCluster,
    folder: Path,
    name: str = "keeper",
    module: str = "logferry.ops.keeper",
    **settings: Any,
) -> Iterator[KeeperProcess]:
    process = KeeperProcess(cluster, folder, name, module, settings)
    process.child.start()
    try:
        yield process
    finally:
        process.child.send(18)  # SIGCONT, for one that a test has stopped
        process.child.stop(15)


async def until(holds: Callable[[], Any], what: str = "", patience_s: float = _PATIENCE_S) -> Any:
    """The first true value; fails after the patience with what was awaited."""
    deadline = time.monotonic() + patience_s
    while not (found := await asyncio.to_thread(holds)):
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what or holds}"
        await asyncio.sleep(_PAUSE_S)
    return found


async def acts(kafka: KafkaClient, topic: str = "logferry.keeper.dc1.log") -> list[dict[str, Any]]:
    """The log of acts, read as anybody may read it."""
    position, found = await kafka.offset(topic, 0, EARLIEST), list[dict[str, Any]]()
    while position < await kafka.offset(topic, 0, LATEST):
        fetched = await kafka.fetch(topic, 0, position, max_bytes=MIB)
        found += [json.loads(record.value or b"{}") for record in fetched.records]
        position = fetched.next_offset
    return found


def may_mount() -> bool:
    """Whether this process may mount: root, in a container that allows it."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
        if made.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return made.returncode == 0
