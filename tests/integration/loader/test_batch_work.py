"""The work of a batch, counted: it does not grow with the table, within a run or at the start of one.

Counted are files that are opened, tables that are opened as a whole, and calls into Spark's JVM, which makes the
requests to Kafka. Nothing here looks at a clock.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
from deltalake.transaction import AddAction
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.batches.records import source
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.planning.source_facts import SourceFacts, SourceKey
from logferry.loaders.runs.table_run import load_table, prepare, tidy
from logferry.loaders.storage import ledger, snapshots, tables
from logferry.loaders.storage.commit import _CHECKPOINT, DataFiles, commit_files, commit_rows
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import Ledger, new_entry
from logferry.loaders.storage.ledger_summary import MERGE_EVERY
from logferry.loaders.storage.side_tables import LeftOutChunk, add_sources, known_before, left_out_rows
from logferry.loaders.storage.tables import read_state
from py4j.clientserver import ClientServerConnection

from tests.support.loader import Topic, chunks_of
from tests.support.table_loads import job

_IN_OPEN: Final = 0x20
_IN_Q_OVERFLOW: Final = 0x4000
NOW = datetime.now(UTC)
TOPICS = ("dc1.a", "dc2.a")


def in_new_process(work: Callable[[], Any]) -> Any:
    """Nothing is known of a table in a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def added(batch: int, files: int, path: Location) -> DataFiles:
    """Files that nothing opens."""
    stats = '{"numRecords": 1}'
    names = [f"batch-{batch:08}-x/{number}.parquet" for number in range(files)]
    return DataFiles(path, tuple(AddAction(name, 100, {}, 1, True, stats) for name in names), files)


def batch_of(paths: TablePaths, batch: int, *, sources: int = 1, files: int = 1, partitions: int = 1) -> None:
    """What a batch does with the tables, without its rows."""
    state = read_state(paths)
    assert state.last == batch - 1
    ranges = [Range("dc1.a", number, "id", batch, batch + 1) for number in range(partitions)]
    entry = Ledger(paths.ledger).put(new_entry(batch, "dc1", "lines/1", "run", ranges))
    known_before(paths, batch, "run", lambda *_: {}, ["host0"])
    facts = {SourceKey(TOPICS[n % 2], f"host{n}"): SourceFacts(batch, batch + 1, NOW) for n in range(sources)}
    add_sources(paths.sources, entry.batch, "run", facts)
    note = LeftOutChunk(batch, "dc1.a", 0, batch, "host0", batch, "dc2.a")
    commit_rows(left_out_rows([note]), paths.left_out, batch, "run")
    commit_files(added(batch, files, paths.main), paths.main, batch, "run")
    tidy(paths, batch, 16)


class OpenedFiles:
    """The files that anybody opens below a folder, by the kernel's own account: inotify (7)."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK)
        self._folder, self._watched = folder, dict[int, Path]()
        self._watch()

    def _watch(self) -> None:
        for folder in (self._folder, *(path for path in self._folder.rglob("*") if path.is_dir())):
            number = self._libc.inotify_add_watch(self._fd, bytes(folder), _IN_OPEN)
            assert number > 0, os.strerror(ctypes.get_errno())
            self._watched[number] = folder

    def since(self) -> set[Path]:
        """Those that were opened since the last call and were there then; folders, too."""
        found = set()
        with suppress(BlockingIOError):
            while events := os.read(self._fd, 1 << 16):
                at = 0
                while at < len(events):
                    number, mask, _, size = struct.unpack_from("iIII", events, at)
                    assert not mask & _IN_Q_OVERFLOW
                    name = events[at + 16 : at + 16 + size].rstrip(b"\0").decode()
                    found.add(self._watched[number] / name)
                    at += 16 + size
        self._watch()
        return found

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenedFiles]:
    with closing(OpenedFiles(tmp_path)) as files:
        yield files


@pytest.mark.long
def test_a_batch_reads_as_many_files_of_a_large_table(tmp_path: Path, opened: OpenedFiles):
    """In a run, a table with 3,000 files, 2,000 sources and 129 batches takes as many as a new one. At the start of a
    run the commits after the last checkpoint come to it, and the files of side tables since they were merged.
    """
    paths = TablePaths.of(tmp_path / "t")
    prepare(paths)

    def four(first: int) -> list[int]:
        """The first of them knows nothing of the table."""
        found = []
        for batch in range(first, first + 4):
            opened.since()
            batch_of(paths, batch)
            found.append(len([path for path in opened.since() if path.is_file() and path.name != "_last_checkpoint"]))
        return found

    batch_of(paths, 0)
    early = in_new_process(lambda: four(1))
    batch_of(paths, 5, sources=2000, files=3000)
    for batch in range(6, 2 * MERGE_EVERY + 1):
        batch_of(paths, batch)
        opened.since()
    late = in_new_process(lambda: four(2 * MERGE_EVERY + 1))
    assert late[1:] == early[1:]
    assert late[0] <= 4 * _CHECKPOINT + MERGE_EVERY


async def test_kafka_is_asked_once_for_all_partitions(
    loader: Callable[..., Loader], topic: Topic, table: Location, monkeypatch: pytest.MonkeyPatch
):
    """A batch of a topic with 60 partitions makes no more calls into the JVM than one of a topic with 2; and no table
    is opened as a whole after the first batch of a run and the summing up that follows it.
    """
    count = Counter[str]()
    send = ClientServerConnection.send_command

    def counting(self: Any, command: str) -> Any:
        # Objects that Python gives up are released at any time.
        count["calls"] += not command.startswith("m\n")
        return send(self, command)

    def opening(place: Any, open_table: Callable[[Any], Any] = open_table) -> Any:
        found = open_table(place)
        count["opened"] += found is not None
        return found

    monkeypatch.setattr(ClientServerConnection, "send_command", counting)
    for module in (snapshots, ledger, tables):
        monkeypatch.setattr(module, "open_table", opening)

    async def load(partitions: int) -> list[Counter[str]]:
        one = Topic(topic.bootstrap, f"{topic.name}-{partitions}")
        await one.create(partitions)
        await one.write(chunks_of("web1", *([b"a line\n"] * 4)), partitions=partitions)
        return await asyncio.to_thread(batches_of, one)

    def batches_of(one: Topic) -> list[Counter[str]]:
        found, before = [], count.copy()
        for event in load_table(loader(), job(table / str(len(one.name)), one.name, max_records=1)):
            if isinstance(event, BatchDone):
                found.append(count - before)
                before = count.copy()
        return found[:4]

    narrow, wide = await load(2), await load(60)
    assert all(abs(b["calls"] - a["calls"]) < 40 for a, b in zip(narrow, wide, strict=True)), (narrow, wide)
    assert [batch["opened"] for batch in (*narrow[2:], *wide[2:])] == [0] * 4


async def test_one_partition_is_read_in_parts(loader: Callable[..., Loader], topic: Topic):
    """On all cores, and each record once."""
    await topic.create(1)
    await topic.write(chunks_of("web1", *([b"a line\n"] * 150)))
    one = loader()
    (view,) = one.kafka.views([topic.name]).values()
    read = Range(topic.name, 0, view.topic_id, 0, view.partitions[0].stable)

    def found() -> tuple[int, list[int]]:
        frame = source(one.spark, one.kafka.options(), [read])
        return frame.rdd.getNumPartitions(), [row["offset"] for row in frame.select("offset").collect()]

    parts, offsets = await asyncio.to_thread(found)
    assert parts == 2 * one.spark.sparkContext.defaultParallelism
    assert sorted(offsets) == list(range(150))
