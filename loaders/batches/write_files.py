"""Writes Spark rows as Parquet files that no commit names yet."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from logferry.loaders.storage.data_files import FOLDER, DataFiles, add_action, partition_values
from logferry.loaders.storage.ledger import storage_errors
from pyspark.sql import DataFrame


def write_files(rows: DataFrame, path: Path, batch: int, partition_by: Sequence[str] = ()) -> DataFiles:
    """Writes the rows. Raises the errors of reading them, and StorageUnavailable; the files are unused then."""
    folder = path / f"{FOLDER}{batch:08}-{uuid.uuid4().hex[:12]}"
    parallel = rows.sparkSession.sparkContext.defaultParallelism
    writer = rows.coalesce(parallel).write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    writer.parquet(str(folder))
    adds, counts = [], 0
    with storage_errors(f"{folder} cannot be read"):
        for file in sorted(folder.rglob("*.parquet")):
            add, count = add_action(path, file, partition_values(path, file, partition_by))
            counts += count
            if count:
                adds.append(add)
            else:
                file.unlink()
    return DataFiles(folder, tuple(adds), counts)
