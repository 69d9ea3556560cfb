"""For the tests of parsers: records into Spark, rows out of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from logferry.gateway.contract.chunk import Headers
from logferry.loaders.parsing import rows as parse
from logferry.loaders.parsing.settings import ParserSettings
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
        self, records: Records, settings: ParserSettings = parse.LINES
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(rows of the table, rows of the quarantine)"""
        rows = [
            {
                "key": key,
                "value": value,
                "topic": "dc1.a",
                "partition": 3,
                "offset": 100 + i,
                "timestamp": RECORDED,
                "headers": headers and [{"key": name, "value": raw} for name, raw in headers],
            }
            for i, (key, value, headers) in enumerate(records)
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=KAFKA), self._folder / "records.parquet")
        frame = parse.records(self._spark.read.parquet(str(self._folder / "records.parquet")), "dc2")
        return (
            self._through_parquet(parse.rows(parse.parsed(frame, settings), settings)),
            self._through_parquet(parse.quarantined(frame, settings)),
        )

    def _through_parquet(self, frame: DataFrame) -> list[dict[str, Any]]:
        out = self._folder / "out"
        frame.coalesce(1).write.mode("overwrite").parquet(str(out))
        rows: list[dict[str, Any]] = pq.read_table(out).to_pylist(maps_as_pydicts="strict")
        return rows
