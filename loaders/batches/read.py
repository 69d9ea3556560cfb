"""A batch's records out of Kafka: exactly the offsets of the ledger's entry, committed ones only.

What is guaranteed: evaluating `Batch.frame` gives every committed record of the ranges or raises; nothing outside of
them. It reads Kafka each time; a batch that is looked at more than once is kept on local disk (`Batch.kept`). Whoever
reads asks for the topics' ids after the last time: ids are never used again, so if they are still those of the entry,
all that was read was of those topics.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final, NamedTuple

from logferry.loaders.jvm_errors import released, sorted_errors
from logferry.loaders.parsing import rows as parse
from logferry.loaders.planning.plan import Range, TopicPartition
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

# Of Kafka's source, in every load.
OPTIONS: Final = {
    # Without these two, aborted and open records come along, and what is gone is left out in silence.
    "kafka.isolation.level": "read_committed",
    "failOnDataLoss": "true",
    "includeHeaders": "true",
    # A small read is answered at once instead of waiting for more.
    "kafka.fetch.max.wait.ms": "20",
    # Both bound what a task holds on the heap: what it fetches (compressed), and what it has taken out of that.
    "kafka.max.partition.fetch.bytes": str(4 << 20),
    "kafka.max.poll.records": "32",
    "kafkaConsumer.pollTimeoutMs": "60000",
}


class Counts(NamedTuple):
    """Of a batch. ``flawed``: records that no gateway wrote."""

    records: int
    bytes: int
    flawed: int


@dataclass(frozen=True)
class Batch:
    """The records of a batch. ``counts``: known when the frame was evaluated for the first time; waits for it."""

    frame: DataFrame
    counts: Callable[[], Counts]
    release: Callable[[], None]


def read(spark: SparkSession, bootstrap_servers: str, dc: str, ranges: Sequence[Range]) -> Batch:
    """Reads nothing yet. What evaluates the frame raises when some of the records are gone."""
    seen = Observation()
    watched = parse.records(source(spark, bootstrap_servers, ranges), dc).observe(
        seen,
        F.count(F.lit(1)).alias("records"),
        F.coalesce(F.sum(F.octet_length("value")), F.lit(0)).alias("bytes"),
        F.count_if(F.expr("flaw is not null")).alias("flawed"),
    )
    return Batch(watched, lambda: Counts(**seen.get), lambda: None)


def kept(batch: Batch, ranges: Sequence[Range]) -> Batch:
    """The same on local disk until `Batch.release`. Raises TopicChanged, KafkaAway, StorageAway."""
    with sorted_errors(f"reading {_said(ranges)}"):
        frame = batch.frame.localCheckpoint(eager=True, storageLevel=StorageLevel.DISK_ONLY)
    return replace(batch, frame=frame, release=lambda: _release(frame))


def source(spark: SparkSession, bootstrap_servers: str, ranges: Sequence[Range]) -> DataFrame:
    """Kafka's records of exactly these ranges, committed ones only; reading it fails where some of them are gone."""
    frames = [
        spark.read.format("kafka").options(**OPTIONS, **kafka_options(bootstrap_servers, chosen)).load()
        for chosen in _one_a_partition(ranges)
    ]
    return reduce(DataFrame.unionAll, frames)


def _one_a_partition(ranges: Sequence[Range]) -> list[list[Range]]:
    """Spark takes one range of a partition; of a second one it would forget the first without a word."""
    found: list[dict[TopicPartition, Range]] = []
    for r in ranges:
        free = next((chosen for chosen in found if r.key not in chosen), None)
        if free is None:
            found.append(free := {})
        free[r.key] = r
    return [list(chosen.values()) for chosen in found]


def kafka_options(bootstrap_servers: str, ranges: Sequence[Range]) -> dict[str, str]:
    """The ranges as Spark's Kafka source takes them: one a partition; all of them hold something to read."""
    partitions: dict[str, list[int]] = {}
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for r in ranges:
        partitions.setdefault(r.topic, []).append(r.partition)
        starts.setdefault(r.topic, {})[str(r.partition)] = r.start
        ends.setdefault(r.topic, {})[str(r.partition)] = r.end
    return {
        "kafka.bootstrap.servers": bootstrap_servers,
        "assign": json.dumps(partitions),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
    }


def _release(frame: DataFrame) -> None:
    """Frees the disk now, and not whenever the JVM collects its garbage."""
    with released():
        plan: Any = frame._jdf.queryExecution().logical()
        plan.rdd().unpersist(False)


def _said(ranges: Sequence[Range]) -> str:
    topics = sorted({r.topic for r in ranges})
    return f"{', '.join(topics[:3])}{' and others' if len(topics) > 3 else ''}"
