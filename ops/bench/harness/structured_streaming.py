"""The peer of the loader's benchmarks: plain Spark Structured Streaming, Kafka → Delta, all that is there and no more.

The loader's own settings of the session, its options of the Kafka source, its parser's expressions and its table (with
the same columns indexed); what it does for exactly once are Spark's checkpoint and Delta's transactions. Lines that do
not parse are dropped. Prints one line of JSON: how long the query ran, and each batch.

    python -m logferry.ops.bench.structured BOOTSTRAP TOPIC TABLE FORMAT OFFSETS_A_BATCH SCRATCH
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from logferry.loaders.batches.create_tables import prepare
from logferry.loaders.batches.read import OPTIONS
from logferry.loaders.config import SparkSettings
from logferry.loaders.parsing import rows as parse
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.spark.session import spark_session
from logferry.loaders.storage.ledger import TablePaths
from logferry.ops.runtime.jars import spark_jars
from pyspark.sql import functions as F


def main(bootstrap: str, topic: str, table: Path, parser: ParserSettings, offsets: int, scratch: Path) -> None:
    """``offsets``: of a batch at most; 0: one batch."""
    prepare(TablePaths.of(table), parser)
    with spark_session(SparkSettings(), spark_jars(), scratch) as spark:
        options = {**OPTIONS, "kafka.bootstrap.servers": bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
        if offsets:
            options["maxOffsetsPerTrigger"] = str(offsets)
        began = time.monotonic()
        source = spark.readStream.format("kafka").options(**options).load()
        # As in the loader: what stands between parsing and choosing keeps a line from being parsed for each of them.
        parsed = parse.parsed(parse.records(source, "dc1"), parser).observe("lines", F.count(F.lit(1)).alias("lines"))
        rows = parse.rows(parsed, parser)
        writer = rows.writeStream.format("delta").option("checkpointLocation", str(scratch / "checkpoint"))
        query = writer.trigger(availableNow=True).start(str(table))
        query.awaitTermination()
        took = time.monotonic() - began
        batches = [p["durationMs"]["triggerExecution"] / 1e3 for p in query.recentProgress if p["numInputRows"]]
    print(json.dumps({"seconds": took, "batches": batches}))


if __name__ == "__main__":
    bootstrap, topic, table, form, offsets, scratch = sys.argv[1:]
    Path(scratch).mkdir(parents=True, exist_ok=True)
    settings = ParserSettings.model_validate({"format": form})
    main(bootstrap, topic, Path(table), settings, int(offsets), Path(scratch))
