"""The peer of the loader: plain Spark Structured Streaming, Kafka → Delta, all records present at the start.

It uses the loader's session settings, Kafka options, parser expressions and table (with the same columns indexed).
Exactly-once is that of Spark's checkpoint and Delta's transactions. Lines that do not parse are dropped. Prints one
line of JSON: duration of the query and of each batch.

    python -m logferry.ops.bench.harness.structured_streaming BOOTSTRAP TOPIC TABLE FORMAT OFFSETS_A_BATCH SCRATCH
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from logferry.loaders.batches.records import OPTIONS
from logferry.loaders.config import SparkSettings
from logferry.loaders.location import Location, S3Access
from logferry.loaders.parsing.rows import kafka_records, parse_records, table_rows
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import prepare
from logferry.loaders.spark.session import spark_session
from logferry.ops.runtime.jars import spark_jars
from pyspark.sql import functions as F


def main(bootstrap: str, topic: str, table: str, form: str, offsets: str, scratch: str) -> None:
    """``offsets``: maximum per batch; 0: all in one batch."""
    parser = ParserSettings.model_validate({"format": form})
    place = Location.of(table)
    prepare(TablePaths.of(place), parser)
    is_s3 = place.scheme == "s3"
    stores = S3Access().hadoop_options() if is_s3 else {}
    with spark_session(SparkSettings(), spark_jars(s3=is_s3), Path(scratch), stores) as spark:
        options = {**OPTIONS, "kafka.bootstrap.servers": bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
        if offsets != "0":
            options["maxOffsetsPerTrigger"] = offsets
        began = time.monotonic()
        source = spark.readStream.format("kafka").options(**options).load()
        # As in the loader: `observe` between parsing and selection keeps Spark from parsing each line several times.
        parsed = parse_records(kafka_records(source, "dc1"), parser).observe("lines", F.count(F.lit(1)).alias("lines"))
        rows = table_rows(parsed, parser)
        # Beside the table: what is on a disk of this host is lost with it, and all rows would come again.
        checkpoint = f"{place.for_spark}-checkpoint" if is_s3 else f"{scratch}/checkpoint"
        writer = rows.writeStream.format("delta").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start(place.for_spark)
        query.awaitTermination()
        took = time.monotonic() - began
        batches = [p["durationMs"]["triggerExecution"] / 1e3 for p in query.recentProgress if p["numInputRows"]]
    print(json.dumps({"seconds": took, "batches": batches}))


if __name__ == "__main__":
    main(*sys.argv[1:])
