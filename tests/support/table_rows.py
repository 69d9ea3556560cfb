"""For the tests of parsers: records into Spark, rows out of it.

For the tests of what shows the newest rows: what Kafka itself holds, read without Spark, as rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import TopicPartition
from logferry.gateway.contract.chunk import Headers, chunk_of_record
from logferry.loaders.parsing import rows as parsing_rows
from logferry.loaders.parsing.settings import LINES, ParserSettings
from logferry.loaders.storage.tables import QUARANTINE_COLUMNS
from pyspark.sql import DataFrame, SparkSession

KAFKA = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    }
)
RECORDED = datetime(2026, 11, 21, 10, 0, 0, 123_000, tzinfo=UTC)

Records = list[tuple[bytes | None, bytes | None, Headers | None]]


class Parser:
    """Records in, rows out, both by way of Parquet files: nothing of PySpark touches the bytes."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder

    def parsed(
        self, records: Records, settings: ParserSettings = LINES
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(rows of the table, rows of the quarantine)"""
        rows, bad = self.tables(records, settings)
        return rows.to_pylist(maps_as_pydicts="strict"), bad.to_pylist(maps_as_pydicts="strict")

    def tables(self, records: Records, settings: ParserSettings = LINES) -> tuple[pa.Table, pa.Table]:
        """As `parsed`, in Arrow."""
        rows = [
            {
                "key": key,
                "value": value,
                "topic": "dc1.a",
                "partition": 3,
                "offset": 100 + i,
                "timestamp": RECORDED,
                "headers": None if headers is None else [{"key": name, "value": raw} for name, raw in headers],
            }
            for i, (key, value, headers) in enumerate(records)
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=KAFKA), self._folder / "records.parquet")
        frame = parsing_rows.kafka_records(self._spark.read.parquet(str(self._folder / "records.parquet")), "dc2")
        return (
            self._through_parquet(parsing_rows.table_rows(parsing_rows.parse_records(frame, settings), settings)),
            self._through_parquet(parsing_rows.quarantined_rows(frame, QUARANTINE_COLUMNS, settings)),
        )

    def _through_parquet(self, frame: DataFrame) -> pa.Table:
        out = self._folder / "out"
        frame.coalesce(1).write.mode("overwrite").parquet(str(out))
        return pq.read_table(out, coerce_int96_timestamp_unit="us")


class Row(NamedTuple):
    """What of a row must be exact."""

    topic: str
    source_id: str
    seqno: int
    line: int
    text: str


class Record(NamedTuple):
    topic: str
    partition: int
    offset: int
    rows: tuple[Row, ...]


async def committed_records(bootstrap: str, topics: Iterable[str]) -> list[Record]:
    """All that readers of committed records see now."""
    # From the start by the setting: a seek after `assign` can lose to the reset to the end that is under way.
    options = {"isolation_level": "read_committed", "auto_offset_reset": "earliest"}
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, **options)
    await consumer.start()
    try:
        topics = list(topics)
        async with asyncio.timeout(60):
            while not all(map(consumer.partitions_for_topic, topics)):
                await consumer._client.force_metadata_update()
        places = [TopicPartition(topic, n) for topic in topics for n in consumer.partitions_for_topic(topic)]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        found = []
        while any([await consumer.position(place) < ends[place] for place in places]):
            for place, records in (await consumer.getmany(timeout_ms=200)).items():
                for r in records:
                    rows = _rows(place.topic, r.key, r.value, r.headers)
                    found.append(Record(place.topic, place.partition, r.offset, rows))
        return found
    finally:
        await consumer.stop()


def _rows(topic: str, key: bytes, value: bytes, headers: Iterable[tuple[str, bytes]]) -> tuple[Row, ...]:
    seqno = chunk_of_record(value, headers).seqno
    *whole, rest = value.decode().split("\n")
    lines = [*whole, rest] if rest else whole
    return tuple(Row(topic, key.decode(), seqno, number, text) for number, text in enumerate(lines))


def truth(records: Iterable[Record], ends: Mapping[Any, int]) -> list[Row]:
    """The rows of the records before the ends, sorted. ``ends``: by (topic, partition), of whichever named tuple."""
    return sorted(row for r in records if r.offset < ends.get((r.topic, r.partition), 0) for row in r.rows)
