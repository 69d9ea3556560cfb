"""What a tiny batch costs, whatever the table has become: seconds of a batch of one record, in one JVM that is warm.

The states are written by delta-rs, without loading: files, sources, partitions, batches. ``once``: a load of one batch
whose process knows nothing of the table yet, from its start to its end, without the start of Spark. ``follow``: a batch
within a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction
from logferry.gateway.config import KafkaSettings
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.config import SparkSettings, TableJob
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import BatchSizer, Limits
from logferry.loaders.planning.source_facts import SourceFacts, SourceKey
from logferry.loaders.runs.table_run import load_table, prepare
from logferry.loaders.spark.kafka_access import kafka_topics
from logferry.loaders.spark.session import spark_session
from logferry.loaders.storage.commit import DataFiles, commit_files
from logferry.loaders.storage.files import written_rows
from logferry.loaders.storage.ledger import APP, Ledger, entry_rows, new_entry
from logferry.loaders.storage.ledger_summary import merge_entries
from logferry.loaders.storage.side_tables import add_sources, create_side_tables
from logferry.ops.bench.harness.figures import Figure, Side
from logferry.ops.bench.harness.kafka import chunks, create_topics, temporary_kafka
from logferry.ops.runtime.jars import spark_environment, spark_jars

_TOPICS: Final = ("dc1.small", "dc2.small")
_WIDE: Final = 10
_RUNS: Final = 5
_BATCHES: Final = 12
_FILES: Final = 100_000
_SOURCES: Final = 300_000
_PARTITIONS: Final = 10_000
_MANY: Final = 10_000


def batch_overhead() -> Figure:
    """Median seconds of a batch of one record: new, 100,000 files, 300,000 sources, 10,000 partitions, 10,000 batches.

    ``ratio``: the slowest of them divided by that of a new table.
    """
    found: Side = {}
    with temporary_kafka("dc1", heap="512m") as (cluster, folder), _spark(folder) as loader_at:
        asyncio.run(create_topics(cluster.bootstrap, _TOPICS, 1))
        for topic in _TOPICS:
            _fill(cluster.bootstrap, topic)
        with loader_at(cluster.bootstrap) as loader:
            _measure(loader, folder / "warm", _TOPICS[:1], _nothing)
            for name, topics, inflate in (
                ("new", _TOPICS[:1], _nothing),
                ("files", _TOPICS[:1], _many_files),
                ("two_centres", _TOPICS, _nothing),
                ("sources", _TOPICS, _many_sources),
                ("batches", _TOPICS[:1], _many_batches),
            ):
                found |= {
                    f"{name}_{key}": value for key, value in _measure(loader, folder / name, topics, inflate).items()
                }
        with temporary_kafka("wide", heap="2g") as (wide, _), loader_at(wide.bootstrap) as loader:
            names = [f"dc1.wide{number}" for number in range(_WIDE)]
            asyncio.run(create_topics(wide.bootstrap, names, _PARTITIONS // _WIDE))
            _fill(wide.bootstrap, names[0])
            one = _measure(loader, folder / "partitions", ["dc1.wide*"], _nothing)
            found |= {f"partitions_{key}": value for key, value in one.items()}
    slowest = max(value for key, value in found.items() if key.endswith("_s"))
    return Figure(
        "slowest batch / batch of a new table", found, {}, _RUNS, ratio=round(slowest / found["new_once_s"], 3)
    )


@contextmanager
def _spark(folder: Path) -> Iterator[Callable[[str], AbstractContextManager[Loader]]]:
    os.environ |= spark_environment()
    with spark_session(SparkSettings(), spark_jars(), folder) as spark:

        @contextmanager
        def connected(bootstrap: str) -> Iterator[Loader]:
            with kafka_topics(spark, KafkaSettings(bootstrap_servers=bootstrap)) as kafka:
                yield Loader(spark, kafka, "dc1", "bench")

        yield connected


def _fill(bootstrap: str, topic: str) -> None:
    """Enough records for all loads of a table."""

    async def fill() -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
            for number, data in enumerate(chunks(_RUNS + 2 * _BATCHES, 1024)):
                headers = record_headers(Chunk(number + 1, number, 1_764_000_000_000, {"host": "web1"}, data))
                await producer.send(topic, data, key=b"web1", partition=0, headers=headers)

    asyncio.run(fill())


def _measure(loader: Loader, path: Path, topics: Sequence[str], inflate: Callable[[TablePaths], None]) -> Side:
    job = TableJob(path=Location.of(path), topics=list(topics), max_records=1)
    prepare(TablePaths.of(path))
    _in_thread(lambda: _load(loader, job, 1))
    began = time.monotonic()
    inflate(TablePaths.of(path))
    prepared = time.monotonic() - began
    once = [_in_thread(lambda: _load(loader, job, 1))[0] for _ in range(_RUNS)]
    follow = _in_thread(lambda: _load(loader, job, _BATCHES))[2:]
    took = {"once_s": round(statistics.median(once), 3), "follow_s": round(statistics.median(follow), 3)}
    print(f"{path.name}: prepared in {prepared:.0f} s, {took}", file=sys.stderr, flush=True)
    return took


def _load(loader: Loader, job: TableJob, batches: int) -> list[float]:
    """The seconds of each batch, those of the start included in the first."""
    took, began = [], time.monotonic()
    sizes = BatchSizer(1, 1 << 30, Limits(offsets=batches))
    for event in load_table(loader, job, sizes):
        if isinstance(event, BatchDone):
            took.append(time.monotonic() - began)
            began = time.monotonic()
    if len(took) != batches:
        raise RuntimeError(f"{len(took)} batches instead of {batches}")
    return took


def _in_thread(work: Callable[[], list[float]]) -> list[float]:
    """Nothing is known of a table in a new thread."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(work()))
    thread.start()
    thread.join()
    return found


# ---- states ------------------------------------------------------------------------------------------------------


def _nothing(_: TablePaths) -> None:
    pass


def _many_files(paths: TablePaths) -> None:
    """Small files with a row each, all of them batch 1; their names alone: a load opens none of them."""
    at, now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"), int(time.time() * 1000)
    bounds = {"topic": _TOPICS[0], "source_id": "web1", "seqno": 1, "partition": 0, "offset": 0, "recorded": at}
    stats = json.dumps(
        {"numRecords": 1, "minValues": bounds, "maxValues": bounds, "nullCount": dict.fromkeys(bounds, 0)}
    )
    adds = tuple(AddAction(f"batch-00000001-many/{n}.parquet", 4096, {}, now, True, stats) for n in range(_FILES))
    _put(paths, 1)
    commit_files(DataFiles(paths.main, adds, _FILES), paths.main, 1, "bench")


def _many_sources(paths: TablePaths) -> None:
    create_side_tables(paths)
    at = datetime.now(UTC)
    facts = {SourceKey(_TOPICS[n % 2], f"host{n}"): SourceFacts(1, 1000, at) for n in range(_SOURCES)}
    _put(paths, 1)
    add_sources(paths.sources, 1, "bench", facts)
    commit_files(DataFiles(paths.main), paths.main, 1, "bench")


def _many_batches(paths: TablePaths) -> None:
    """The first one by the loader's own code, the others as copies of what it wrote: all by it take half an hour."""
    _put(paths, 1)
    commit_files(DataFiles(paths.main), paths.main, 1, "bench")
    entry = Ledger(paths.ledger).get(1)
    for place in (paths.ledger, paths.main):
        log = Path(place.uri, "_delta_log")
        *_, newest = sorted(log.glob("*.json"))
        actions = [json.loads(line) for line in newest.read_text().splitlines()]
        kept = [action for action in actions if "commitInfo" in action]
        for batch in range(2, _MANY):
            lines: list[Any] = [*kept, {"txn": {"appId": APP, "version": batch}}]
            if place == paths.ledger:
                lines += map(_as_json, written_rows(place, entry_rows(entry._replace(batch=batch))))
            path = log / f"{int(newest.stem) + batch - 1:020}.json"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        DeltaTable(place.uri).create_checkpoint()
    merge_entries(paths.ledger, 1000)


def _as_json(add: AddAction | RemoveAction) -> Any:
    assert isinstance(add, AddAction)
    changed = {"modificationTime": add.modification_time, "dataChange": add.data_change, "stats": add.stats}
    return {"add": {"path": add.path, "partitionValues": {}, "size": add.size, **changed}}


def _put(paths: TablePaths, batch: int) -> None:
    ledger = Ledger(paths.ledger)
    before = ledger.get(batch - 1)
    ranges = [r.at_rest for r in before.ranges]
    ledger.put(new_entry(batch, "dc1", before.parser, "bench", ranges, settings=before.settings, origin=before.origin))
