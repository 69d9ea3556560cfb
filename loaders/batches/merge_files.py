"""Writes the files of a merge by Spark's executors: a job a group, several at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

from deltalake import DeltaTable
from logferry.loaders.batches.file_view import NUMBER, view_of
from logferry.loaders.batches.rewrite_rows import Session
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.location import Location
from logferry.loaders.storage.commit import new_files
from logferry.loaders.storage.files import storage_errors
from logferry.loaders.storage.merge import Merge, MergedGroup, MergeGroup
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

_JOBS: Final = 16
# The order of rows in clustered files, of those columns that a table has.
_ORDER: Final = ("source_id", "event_time", "recorded", "seqno", "line")


def spark_merge(session: Session, target_mb: int, *, cluster: bool = False) -> Merge:
    """A merge by Spark. ``cluster``: the rows of a group are sorted by source and time, and each file has a range."""
    return Merge(target_mb, cluster, partial(_write, session, target_mb << 20, cluster))


def _write(
    session: Session,
    target: int,
    cluster: bool,
    path: Location,
    table: DeltaTable,
    groups: Sequence[MergeGroup],
    folder: str,
) -> list[MergedGroup]:
    """Raises LoadError."""
    spark = session()
    parted = list(table.metadata().partition_columns)
    numbered = [(number, file) for number, group in enumerate(groups) for file in group.files]

    def write(number: int, view: DataFrame) -> MergedGroup:
        group = groups[number]
        seen = Observation()
        rows = view.where(F.col(NUMBER) == number).drop(NUMBER, *parted)
        rows = rows.observe(seen, F.count(F.lit(1)).alias("rows"))
        files = max(1, round(group.bytes / target))
        if cluster:
            order = [name for name in _ORDER if name in rows.columns]
            rows = rows.repartitionByRange(files, *order).sortWithinPartitions(*order)
        else:
            rows = rows.coalesce(files)
        inside = f"{folder}-{number:06}"
        writer = rows.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
        writer.parquet((path / inside).for_spark)
        with storage_errors(f"{path / inside} cannot be read"):
            written = new_files(path, inside, ())
        written.check_rows(seen.get["rows"] if group.rows is None else group.rows)
        values = group.files[0].values
        return MergedGroup(
            group, tuple(replace(add, partition_values=dict(values), data_change=False) for add in written.adds)
        )

    with sorted_errors(f"merging files of {path}"), view_of(spark, path, table, numbered) as view:
        jobs = min(_JOBS, max(2, spark.sparkContext.defaultParallelism))
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(lambda number: write(number, view), range(len(groups))))
