"""Services of the loader fail in mid-load and return: Kafka is killed, the disk is full.

A following load continues by itself, and the table is exact. The disk is full for one process alone: the kernel lets
it write no file beyond a size, and says so in the midst of a write.
"""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Sent, Topic, check_kept, chunks_of
from tests.support.loader_process import LoaderProcess, data_files, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]

TOPIC = "dc1.logs"
AWAY_S = 3.0


def logs(round_: int) -> list[Sent]:
    """Half a megabyte of several sources, a bad line in each chunk."""
    sent: list[Sent] = []
    for source in range(4):
        line = b"%d of web%d %s\n" % (round_, source, b"x" * 90)
        parts = [line * 60 + b"\xff\n" for _ in range(20)]
        sent += chunks_of(f"web{source}", *parts, start=round_ * 10_000_000)
    return sent


class Following:
    """A following loader and its output."""

    def __init__(self, bootstrap: str, table: Location, scratch: Path) -> None:
        self.loader = LoaderProcess(bootstrap, table, TOPIC, "--follow", scratch=scratch, as_json=False)
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.loader.process.stdout is not None
        for line in self.loader.process.stdout:
            self.said += line.decode()

    def end(self) -> int:
        """Stops it by a signal. Returns its exit status."""
        self.loader.process.terminate()
        self._reader.join(60)
        return self.loader.finish()[0]

    def kill(self) -> None:
        if self.loader.process.poll() is None:
            self.loader.kill()
            self._reader.join(60)
            self.loader.finish()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    with KafkaCluster("dc1", tmp_path / "kafka") as cluster:
        yield cluster


@pytest.fixture
def table(warehouse: Location) -> Location:
    return warehouse / "logs"


@pytest.fixture
def following(cluster: KafkaCluster, table: Location, tmp_path: Path) -> Iterator[Following]:
    found = Following(cluster.bootstrap, table, tmp_path)
    yield found
    found.kill()


def loaded(table: Location) -> int:
    return last_batch(open_table(table))


async def test_kafka_is_killed_and_started_again(cluster: KafkaCluster, following: Following, table: Location):
    topic = Topic(cluster.bootstrap, TOPIC)
    await topic.create(2)
    for round_ in range(3):
        await topic.write(logs(round_), partitions=2)
        files = data_files(table)
        wait_for(lambda files=files: data_files(table) > files, "a batch under way", following.loader)  # type: ignore[misc]
        cluster.kill(1)
        await asyncio.sleep(AWAY_S)  # the fault itself
        await asyncio.to_thread(cluster.restart, 1)
    await topic.write(logs(9), partitions=2)
    rows = sum(chunk.data.count(b"\n") - 1 for _, chunk in topic.committed)
    wait_for(lambda: count(table) == rows, "all rows", following.loader)
    assert following.end() == 0, following.said
    check_kept(table, topic.committed)


def count(table: Location) -> int:
    found = open_table(table)
    return 0 if found is None else int(found.to_pyarrow_dataset().count_rows())


@pytest.mark.parametrize("who", ["jvm", "python"])
async def test_the_disk_is_full_and_has_room_again(
    who: str, cluster: KafkaCluster, following: Following, table: Location
):
    """Of the JVM, which writes rows; of Python, which commits."""
    if who == "python" and not table.is_local:
        pytest.skip("a commit to a store writes no local file")
    if who == "jvm" and str(table).startswith("hdfs:"):
        pytest.skip("Spark sends rows to HDFS without a local file")
    topic = Topic(cluster.bootstrap, TOPIC)
    await topic.create(2)
    await topic.write(logs(0), partitions=2)
    wait_for(lambda: loaded(table) >= 0, "the first batch", following.loader)
    pid = following.loader.jvm() if who == "jvm" else following.loader.process.pid
    assert pid is not None
    before = topic.committed[:]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    await topic.write(logs(1), partitions=2)
    wait_for(lambda: "File too large" in following.said, "word of it", following.loader)
    check_kept(table, before)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    rows = sum(chunk.data.count(b"\n") - 1 for _, chunk in topic.committed)
    wait_for(lambda: count(table) == rows, "all rows", following.loader)
    assert following.end() == 0, following.said
    check_kept(table, topic.committed)
    assert open_table(TablePaths.of(table).ledger) is not None
