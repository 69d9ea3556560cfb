"""The peer of the loader: plain Spark Structured Streaming, Kafka → Delta, all records present at the start.

It uses the loader's session settings, Kafka options and table (with the same columns indexed). EXPRESSIONS: ``plain``,
as a job is usually written, or ``ours``, the loader's. Exactly-once is that of Spark's checkpoint and Delta's
transactions. Lines that do not parse are dropped. Prints one line of JSON: duration of the query and of each batch.

    python -m logferry.ops.bench.harness.structured_streaming BOOTSTRAP TOPIC TABLE FORMAT OFFSETS EXPRESSIONS SCRATCH
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Final

from logferry.loaders.batches.records import OPTIONS
from logferry.loaders.config import SparkSettings
from logferry.loaders.parsing.rows import kafka_records, parse_records, row_schema, table_rows
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import prepare
from logferry.loaders.spark.session import spark_session
from logferry.ops.runtime.jars import spark_jars
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

_ACCESS: Final = r'^(\S+) (\S+) (\S+) \[([^\]]+)\] "(\S+) (\S+) (\S+)" (\d{3}) (\S+) "([^"]*)" "([^"]*)"'
_FIELDS: Final = (
    *("remote_host", "ident", "user", "time", "method", "path", "protocol", "status", "body_bytes", "referer"),
    "user_agent",
)


def _plain_access(lines: DataFrame) -> DataFrame:
    """The columns of access logs, a `regexp_extract` each."""
    parts = {name: F.regexp_extract("text", _ACCESS, number) for number, name in enumerate(_FIELDS, 1)}
    made = {
        "request": F.concat_ws(" ", "method", "path", "protocol"),
        "status": F.col("status").try_cast("int"),
        "body_bytes": F.col("body_bytes").try_cast("bigint"),
        "event_time": F.to_timestamp("time", "dd/MMM/yyyy:HH:mm:ss Z"),
    }
    return lines.withColumns(parts).where("remote_host != ''").withColumns(made)


def main(bootstrap: str, topic: str, table: str, form: str, offsets: str, expressions: str, scratch: str) -> None:
    """``offsets``: maximum per batch; 0: all in one batch."""
    parser = ParserSettings.model_validate({"format": form})
    prepare(TablePaths.of(Path(table)), parser)
    Path(scratch).mkdir(parents=True, exist_ok=True)
    with spark_session(SparkSettings(), spark_jars(), Path(scratch)) as spark:
        options = {**OPTIONS, "kafka.bootstrap.servers": bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
        if offsets != "0":
            options["maxOffsetsPerTrigger"] = offsets
        began = time.monotonic()
        source = spark.readStream.format("kafka").options(**options).load()
        records = kafka_records(source, "dc1")
        if expressions == "plain" and form == "access":
            rows = _plain_access(parse_records(records)).select(*row_schema(parser).fieldNames())
        else:
            # As in the loader: `observe` between parsing and selection keeps Spark from parsing lines several times.
            parsed = parse_records(records, parser).observe("lines", F.count(F.lit(1)).alias("lines"))
            rows = table_rows(parsed, parser)
        writer = rows.writeStream.format("delta").option("checkpointLocation", f"{scratch}/checkpoint")
        query = writer.trigger(availableNow=True).start(table)
        query.awaitTermination()
        took = time.monotonic() - began
        batches = [p["durationMs"]["triggerExecution"] / 1e3 for p in query.recentProgress if p["numInputRows"]]
    print(json.dumps({"seconds": took, "batches": batches}))


if __name__ == "__main__":
    main(*sys.argv[1:])
