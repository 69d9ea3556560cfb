"""A mirror (from dc1 to dc2 unless said otherwise) whose workers a test starts one by one, and what it says.

Both sides of a mirrored topic, read by plain Kafka consumers, not through the code that is under test.

For tests of tables that move: two data centres with mirrors both ways, topics in each, and loaders in either."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiohttp
from logferry.gateway.config import KafkaSettings
from logferry.gateway.contract.mirror_state import HistoryBlock, partition_of_key
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.batches.mirror_offsets import MirrorOffsets
from logferry.loaders.commands.move import move_table
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.planning.position_plan import PositionChange, ResetTarget
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.spark.kafka_access import kafka_topics
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, ServiceWorker, Setting, configuration, free_ports
from logferry.ops.stack.stack import Stack
from pyspark.sql import SparkSession

from tests.support.checker import committed_records
from tests.support.loader import Sent, Topic

_BROKEN_MIRROR = Path(__file__).parents[1] / "crash" / "mirror" / "broken_mirror.py"


class Centres(Protocol):
    """Of a `Stack`, or of clusters that a test has started itself."""

    def cluster(self, dc: str, /) -> KafkaCluster: ...


class Mirror:
    """Workers of a mirror, started one by one, whole or broken. ``dc``: where to; ``remote``: where from."""

    def __init__(
        self, stack: Centres, folder: Path, prefix: str, workers: int = 1, dc: str = "dc2", **settings: Setting
    ) -> None:
        self._folder, self._port, self._dc = folder, free_ports(workers)[0], dc
        self.pairs = f"{prefix}.mirror.{dc}.pairs"
        self.file = folder / f"mirror-{dc}.toml"
        self.file.write_text(
            configuration(
                {
                    "dc": dc,
                    "prefix": prefix,
                    "listen": f"127.0.0.1:{self._port}",
                    "workers": workers,
                    "accept_weak_kafka": ["replication", "min-isr"],
                    "remote": [
                        {
                            "dc": "dc1",
                            "topics": [f"{prefix}*"],
                            "kafka": {"bootstrap_servers": stack.cluster("dc1").bootstrap},
                        }
                    ],
                    "kafka": {"bootstrap_servers": stack.cluster(dc).bootstrap},
                    **settings,
                }
            )
        )

    def start(self, broken: str | None = None, number: int = 0) -> ServiceWorker:
        log = self._folder / f"mirror-{self._dc}-{number}.log"
        worker = ServiceWorker(
            f"{self._dc}/mirror-{number}", self.file, number, self._port + number, log, "logferry.mirror"
        )
        if broken is not None:
            command = [sys.executable, str(_BROKEN_MIRROR), broken, "--config", str(self.file)]
            worker.child = Child(f"{broken}-{number}", [*command, "--worker", str(number)], log)
        worker.child.start()
        return worker


def remote(stack: Stack, dc: str, *prefixes: str, **settings: Setting) -> Setting:
    """An entry of a mirror's configuration: ``prefixes`` are the data centres whose topics are taken there."""
    kafka = {"bootstrap_servers": stack.cluster(dc).bootstrap}
    return {"dc": dc, **({"prefixes": prefixes} if prefixes else {}), **settings, "kafka": kafka}


async def make_topic(stack: Stack, name: str, partitions: int = 4, dc: str = "dc1") -> str:
    """Its full name."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{stack.urls(dc)[0]}/v1/topics/{name}", json={"partitions": partitions}) as answer:
            assert answer.status == 201, await answer.text()
    return f"{dc}.{name}"


async def stopped(urls: Sequence[str] | str, topic: str) -> dict[str, Any]:
    """What the workers say of a partition of the topic once it stops."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            for url in [urls] if isinstance(urls, str) else urls:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/v1/status") as answer:
                        for found in (await answer.json())["partitions"]:
                            if found["topic"] == topic and "stop" in found:
                                return dict(found["stop"])
            await asyncio.sleep(0.1)


class Copied(NamedTuple):
    """One record as it stands in either cluster; its offset apart, all of it must be the same."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    timestamp_ms: int


Log = dict[int, list[tuple[int, Copied]]]
"""Partition → (offset, record), in order; a partition without records is missing."""


async def read_log(bootstrap: str, topic: str) -> Log:
    """All committed records up to the end of every partition; open transactions are waited for."""
    found: Log = {}
    for record in await committed_records(bootstrap, topic):
        copied = Copied(record.key, record.value, tuple(record.headers), record.timestamp)
        found.setdefault(record.partition, []).append((record.offset, copied))
    return found


def differences(original: Log, copy: Log) -> list[str]:
    """Where the copy is not the original, record by record, in order; empty when it is."""
    found = []
    for number in sorted(original.keys() | copy.keys()):
        records, ours = original.get(number, []), copy.get(number, [])
        if len(records) != len(ours):
            found.append(f"partition {number}: {len(records)} records there, {len(ours)} here")
        for index, ((_, wanted), (offset, got)) in enumerate(zip(records, ours, strict=False)):
            if wanted != got:
                found.append(f"partition {number}: record {index} (offset {offset} here) differs")
                break
    return found


async def differences_in_the_end(original: tuple[str, str], copy: tuple[str, str], within_s: float = 60) -> list[str]:
    """(bootstrap, topic) of both. The original is at rest; the copy is read until it is the same, or time is up."""
    wanted = await read_log(*original)
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        found = differences(wanted, await read_log(*copy))
        if not found or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(0.2)


async def pairs_by_history(bootstrap: str, history_topic: str) -> dict[tuple[str, int], dict[int, int]]:
    """By partition, original offset → local offset, as the mirror's history tells it."""
    found: dict[tuple[str, int], dict[int, int]] = {}
    for records in (await read_log(bootstrap, history_topic)).values():
        for _, record in records:
            known = found.setdefault(partition_of_key(record.key or b""), {})
            for run in HistoryBlock.decode(record.value or b"").ranges:
                for step in range(run.size):
                    assert run.source + step not in known, "an original offset is paired twice"
                    known[run.source + step] = run.local + step
    return found


def true_pairs(original: Log, copy: Log) -> dict[int, dict[int, int]]:
    """By partition, original offset → local offset: the records are the same in the same order."""
    return {
        number: {there: here for (there, _), (here, _) in zip(records, copy[number], strict=True)}
        for number, records in original.items()
    }


PREFIX = "logferry"


class Places:
    """A topic of one name in both data centres (``topics``, where they are written), and a table of both."""

    def __init__(self, stack: Stack, name: str, table: Location) -> None:
        self.stack = stack
        self.topics = {dc: Topic(stack.cluster(dc).bootstrap, f"{dc}.{name}") for dc in ("dc1", "dc2")}
        self.job = TableJob(path=table, topics=[f"*.{name}"], max_records=1000)

    def copy_of(self, dc: str) -> Topic:
        """The copy of that data centre's topic, in the other one."""
        return Topic(self.topics["dc2" if dc == "dc1" else "dc1"].bootstrap, self.topics[dc].name)

    @property
    def table(self) -> Location:
        return self.job.path

    @property
    def sent(self) -> list[Sent]:
        return [one for topic in self.topics.values() for one in topic.committed]

    async def mirrored(self) -> None:
        """Returns when both copies are as their originals. Nobody writes meanwhile."""
        for dc, topic in self.topics.items():
            copy = self.copy_of(dc).bootstrap
            assert await differences_in_the_end((topic.bootstrap, topic.name), (copy, topic.name)) == []

    def load(self, loader: Loader, offsets: int | None = None) -> list[BatchDone]:
        """``offsets``: one batch with so many, and no more."""
        job = self.job if offsets is None else self.job.model_copy(update={"max_records": offsets})
        done = (event for event in load_table(loader, job) if isinstance(event, BatchDone))
        return list(islice(done, None if offsets is None else 1))

    def move(self, loader: Loader, *targets: str, wait_s: float = 0, yes: bool = True) -> list[PositionChange] | None:
        """What was said; None: it was there already."""
        said: list[PositionChange] = []

        def agreed(moves: Iterable[PositionChange]) -> bool:
            said.extend(moves)
            return yes

        wanted = [ResetTarget.parse(text) for text in targets]
        done = move_table(loader, self.job, PREFIX, wanted, wait_s, agreed)
        return None if done == [] else said


@contextmanager
def loader_at(spark: SparkSession, stack: Stack, dc: str, run: str = "run", *, notes: bool = True) -> Iterator[Loader]:
    """One in that data centre. ``notes``: it notes where positions are in the originals."""
    settings = KafkaSettings(bootstrap_servers=stack.cluster(dc).bootstrap)
    books = MirrorOffsets(settings, PREFIX, dc)
    try:
        with kafka_topics(spark, settings) as kafka:
            yield Loader(spark, kafka, dc, run, mirror_offsets=books if notes else None)
    finally:
        books.close()


async def both_ways(places: Places, partitions: int) -> None:
    """Makes the topics, and waits for their copies."""
    for topic in places.topics.values():
        await topic.create(partitions)
    async with asyncio.timeout(60):
        for dc in places.topics:
            while not await places.copy_of(dc).exists():  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.1)
