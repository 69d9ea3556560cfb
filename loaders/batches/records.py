"""Reads a batch from Kafka, exactly the committed records of the ledger's entry, and writes its rows as Parquet files.

Guaranteed: evaluating `BatchRecords.frame` yields every committed record of the ranges and nothing else, or raises.
Each evaluation reads Kafka; a batch that is evaluated several times is kept on local disk (`kept_on_disk`). The caller
checks the topics' ids after the last evaluation: ids are never reused, so if they are still those of the entry, all
records were of those topics.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final, NamedTuple

from logferry.loaders.jvm_errors import released, sorted_errors
from logferry.loaders.location import Location
from logferry.loaders.parsing.rows import kafka_records
from logferry.loaders.planning.column_changes import column_types
from logferry.loaders.planning.plan import Range, one_a_partition
from logferry.loaders.spark.kafka_access import listed
from logferry.loaders.storage.commit import FOLDER, DataFiles, new_files
from logferry.loaders.storage.files import storage_errors
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

# Options of Spark's Kafka source, in every load.
OPTIONS: Final = {
    # Without these two, aborted and open records are included, and missing ones are skipped silently.
    "kafka.isolation.level": "read_committed",
    "failOnDataLoss": "true",
    "includeHeaders": "true",
    # A small read is answered at once instead of waiting for more.
    "kafka.fetch.max.wait.ms": "20",
    # Both bound the heap of a task: the compressed bytes fetched, and the records taken out of them.
    "kafka.max.partition.fetch.bytes": str(4 << 20),
    "kafka.max.poll.records": "32",
    "kafkaConsumer.pollTimeoutMs": "60000",
}


_PARTS_A_CORE: Final = 2
# Each part has a consumer of its own, which fetches more than it needs.
_FEWEST_OFFSETS: Final = 32


class Counts(NamedTuple):
    """The counts of a batch. ``flawed``: records that no gateway wrote."""

    records: int
    bytes: int
    flawed: int


@dataclass(frozen=True)
class BatchRecords:
    """The records of a batch. ``counts``: waits for the first evaluation of the frame."""

    frame: DataFrame
    counts: Callable[[], Counts]
    release: Callable[[], None]


def read(spark: SparkSession, kafka: Mapping[str, str], dc: str, ranges: Sequence[Range]) -> BatchRecords:
    """Reads nothing yet. The evaluation of the frame raises when some of the records are gone. ``kafka``: options of
    its clients in the JVM.
    """
    seen = Observation()
    watched = kafka_records(source(spark, kafka, ranges), dc).observe(
        seen,
        F.count(F.lit(1)).alias("records"),
        F.coalesce(F.sum(F.octet_length("value")), F.lit(0)).alias("bytes"),
        F.count_if(F.expr("flaw is not null")).alias("flawed"),
    )
    return BatchRecords(watched, lambda: Counts(**seen.get), lambda: None)


def kept_on_disk(batch: BatchRecords, ranges: Sequence[Range]) -> BatchRecords:
    """The batch on local disk until `BatchRecords.release`. Raises LoadError."""
    with sorted_errors(f"reading {listed({r.topic for r in ranges})}"):
        frame = batch.frame.localCheckpoint(eager=True, storageLevel=StorageLevel.DISK_ONLY)
    return replace(batch, frame=frame, release=lambda: _release(frame))


def source(spark: SparkSession, kafka: Mapping[str, str], ranges: Sequence[Range]) -> DataFrame:
    """The committed records of exactly these ranges; reading them fails where some are gone."""
    connection = {f"kafka.{name}": value for name, value in kafka.items()}
    at_once = {"maxRecordsPerPartition": str(offsets_at_once(ranges, spark.sparkContext.defaultParallelism))}
    frames = [
        spark.read.format("kafka").options(**OPTIONS, **connection, **at_once, **range_options(chosen)).load()
        # Spark takes one range per partition; of two it silently drops the first.
        for chosen in one_a_partition(ranges)
    ]
    return reduce(DataFrame.unionAll, frames)


def offsets_at_once(ranges: Sequence[Range], cores: int) -> int:
    """The offsets of a part of the read: longer ranges are split, so that few or unequal partitions use all cores.

    Files are as many as cores, and each takes the same number of parts: two at least, of about the same size.
    """
    return max(_FEWEST_OFFSETS, -(-sum(r.size for r in ranges) // (_PARTS_A_CORE * cores)))


def range_options(ranges: Sequence[Range]) -> dict[str, str]:
    """The ranges as options of Spark's Kafka source: one per partition, none of them empty."""
    topics: dict[str, list[Range]] = {}
    for r in ranges:
        topics.setdefault(r.topic, []).append(r)
    return {
        "assign": json.dumps({topic: [r.partition for r in its] for topic, its in topics.items()}),
        "startingOffsets": json.dumps({topic: {r.partition: r.start for r in its} for topic, its in topics.items()}),
        "endingOffsets": json.dumps({topic: {r.partition: r.end for r in its} for topic, its in topics.items()}),
    }


def _release(frame: DataFrame) -> None:
    """Frees the disk now, without waiting for the JVM's garbage collection."""
    with released():
        plan: Any = frame._jdf.queryExecution().logical()
        plan.rdd().unpersist(False)


def write_files(rows: DataFrame, path: Location, batch: int, partition_by: Sequence[str] = ()) -> DataFiles:
    """Writes the rows. Raises the errors of reading them, and StorageUnavailable; the files are unused then."""
    folder = f"{FOLDER}{batch:08}-{uuid.uuid4().hex[:12]}"
    parallel = rows.sparkSession.sparkContext.defaultParallelism
    writer = rows.coalesce(parallel).write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    writer.parquet((path / folder).for_spark)
    with storage_errors(f"{path / folder} cannot be read"):
        return new_files(path, folder, partition_by)._replace(types=column_types(rows.schema.json()))
