"""Benchmarks of compaction against Delta's own OPTIMIZE: 10,000 small files of the same table."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.batches.merge_files import spark_merge
from logferry.loaders.config import SparkSettings
from logferry.loaders.location import Location
from logferry.loaders.spark.session import spark_session
from logferry.loaders.storage.commit import statistics
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.merge import Merge
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared
from logferry.ops.runtime.jars import spark_jars
from pyspark.sql import SparkSession

_FILES: Final = 10_000
_ROWS: Final = 300
_ROUNDS: Final = 3
# Rounds of a JVM that still compiles do not count.
_WARM_UP_S: Final = 60.0
_TIME: Final = pa.timestamp("us", "UTC")
_SCHEMA: Final = pa.schema(
    [
        *(("topic", pa.string()), ("source_id", pa.string()), ("seqno", pa.int64()), ("line", pa.int32())),
        *(("partition", pa.int32()), ("offset", pa.int64()), ("dc", pa.string())),
        *(("recorded", _TIME), ("event_time", _TIME), ("text", pa.string())),
    ]
)


def _make(path: Path) -> None:
    """A table of many small files, each with the lines of some sources in some seconds."""
    DeltaTable.create(str(path), Schema.from_arrow(_SCHEMA))
    first = datetime(2026, 1, 1, tzinfo=UTC)
    adds: list[AddAction | RemoveAction] = []
    for number in range(_FILES):
        at = pa.array([first + timedelta(seconds=number)] * _ROWS, _TIME)
        one = pa.repeat(pa.scalar(number, pa.int64()), _ROWS)
        lines = [f'10.0.{number % 256}.{i % 256} "GET /{number * 7919 % 9973}/{i * 31 % 97}" 200' for i in range(_ROWS)]
        sources = [f"web{(number + i) % 50}" for i in range(_ROWS)]
        seconds = [pa.repeat(pa.scalar(value, kind), _ROWS) for value, kind in ((0, pa.int32()), (number, pa.int64()))]
        columns = [pa.repeat("dc1.x", _ROWS), pa.array(sources), one, pa.array(range(_ROWS), pa.int32())]
        columns += [*seconds, pa.repeat("dc1", _ROWS), at, at, pa.array(lines)]
        name = f"batch-{number:08}-bench/part.parquet"
        (path / name).parent.mkdir()
        pq.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), path / name, compression="zstd")
        stats = json.dumps(statistics(pq.read_metadata(path / name)))
        adds.append(AddAction(name, (path / name).stat().st_size, {}, 0, True, stats))
    table = DeltaTable(str(path))
    table.create_write_transaction([*adds], "append", table.schema(), partition_by=[])


Compact = Callable[[Path], object]


@contextmanager
def _prepared() -> Iterator[tuple[Callable[[Compact, int], Side], SparkSession]]:
    """A function that measures a compaction of a copy of the table, and a running session."""
    with tempfile.TemporaryDirectory(prefix="logferry-bench-") as name:
        folder = Path(name)
        _make(folder / "made")
        (folder / "spark").mkdir()

        def side(compact: Compact, _: int) -> Side:
            path = folder / "table"
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(folder / "made", path)
            began = time.monotonic()
            compact(path)
            seconds = time.monotonic() - began
            table = open_table(Location.of(path))
            if table is None or table.to_pyarrow_dataset().count_rows() != _FILES * _ROWS:
                raise RuntimeError("rows are missing")
            return {"files_s": _FILES / seconds, "seconds": seconds, "left": len(table.file_uris())}

        with spark_session(SparkSettings(), spark_jars(), folder / "spark") as spark:
            yield side, spark


def _optimize(spark: SparkSession, path: Path) -> None:
    spark.sql(f"OPTIMIZE delta.`{path}`").collect()


def compact_vs_optimize() -> Figure:
    """`logferry table compact` in its own process, without Spark: files per second; the peer's JVM is warm."""
    with _prepared() as (side, spark):
        rounds = alternate(
            _ROUNDS,
            partial(side, lambda path: Merge().run(Location.of(path))),
            partial(side, partial(_optimize, spark)),
            warm_up_s=_WARM_UP_S,
        )
    return compared("files/s of compact / of OPTIMIZE", "files_s", rounds)


def compact_on_executors_vs_optimize() -> Figure:
    """The same by Spark's executors, as on a cluster, in the session of the peer."""
    with _prepared() as (side, spark):
        ours = spark_merge(lambda: spark, Merge().target_mb)
        rounds = alternate(
            _ROUNDS,
            partial(side, lambda path: ours.run(Location.of(path))),
            partial(side, partial(_optimize, spark)),
            warm_up_s=_WARM_UP_S,
        )
    return compared("files/s of compact by Spark / of OPTIMIZE", "files_s", rounds)
