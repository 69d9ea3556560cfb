"""The Spark source over HTTP: a batch is what the gateway reads, a stream has each chunk once through restarts."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from logferry.client import Reader, Writer
from logferry.loaders.jvm_errors import collected
from logferry.loaders.query.spark_source import LogferrySource
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.support.checker import committed_records
from tests.support.gateway import Gateway

pytestmark = pytest.mark.spark

Where = tuple[int, int, int, bytes]


@pytest.fixture(scope="module")
def source(spark: SparkSession) -> SparkSession:
    spark.dataSource.register(LogferrySource)
    return spark


@pytest.fixture
def topic(workers: Gateway, topic_name: str) -> str:
    asyncio.run(workers.make_topic(topic_name, 2))
    return topic_name


def write(workers: Gateway, topic: str, start: int, count: int) -> None:
    for source in ("a", "b", "d"):
        with Writer(workers.urls, topic, source) as writer:
            for number in range(start, start + count):
                writer.write(b"%s %d\n\xff" % (source.encode(), number))
    asyncio.run(committed_records(workers.kafka.bootstrap, f"dc1.{topic}"))  # Kafka shows it a moment later


def gateways(workers: Gateway, topic: str) -> list[Where]:
    with Reader(workers.urls, topic, follow=False) as reader:
        return sorted((c.partition, c.offset, c.seqno, c.data) for c in reader)


def sparks(frame: DataFrame) -> list[Where]:
    found: list[dict[str, Any]] = collected(frame.select("partition", "offset", "seqno", "data"))
    return sorted((r["partition"], r["offset"], r["seqno"], base64.b64decode(r["data"])) for r in found)


@pytest.mark.long
def test_a_batch_is_what_the_gateway_reads(source: SparkSession, workers: Gateway, topic: str):
    write(workers, topic, 0, 5)
    options = {"url": workers.urls[0], "topic": topic, "pageBytes": "100"}
    frame = source.read.format("logferry").options(**options).load()
    want = gateways(workers, topic)
    assert sparks(frame) == want
    assert len(want) == 15
    (first,) = collected(frame.where("source_id = 'a'").orderBy("offset").limit(1))
    with Reader(workers.urls, topic, follow=False, source_prefix="a") as reader:
        chunk = next(reader)
    assert (first["topic"], first["dc"], first["prev"], first["attributes"]) == (f"dc1.{topic}", "dc1", None, {})
    assert first["recorded"].startswith("20")
    assert chunk.offset == first["offset"]
    cursors = {
        "startingCursors": f"dc1.{topic}:0:2,dc1.{topic}:1:3",
        "endingCursors": f"dc1.{topic}:0:4,dc1.{topic}:1:6",
    }
    some = source.read.format("logferry").options(**options, **cursors).load()
    assert sparks(some) == [w for w in want if (2, 3)[w[0]] <= w[1] < (4, 6)[w[0]]]
    for wrong, said in (({"topic": "nothing"}, "unknown-topic"), ({"startingOffsets": "1"}, "unknown option")):
        with pytest.raises(PySparkException, match=said):
            source.read.format("logferry").options(**{**options, **wrong}).load().count()


def run(source: SparkSession, workers: Gateway, topic: str, folder: Path) -> StreamingQuery:
    """To the end of what is there; in batches of 4 offsets."""
    options = {"url": workers.urls[0], "topic": topic, "maxChunksPerTrigger": "4"}
    stream = source.readStream.format("logferry").options(**options).load().writeStream.format("parquet")
    query = stream.options(checkpointLocation=str(folder / "checkpoint"), path=str(folder / "rows")).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    return query


def test_a_stream_has_each_chunk_once_through_restarts(
    source: SparkSession, workers: Gateway, topic: str, tmp_path: Path
):
    """One after the last batch was committed, and one before: that batch is run again."""
    write(workers, topic, 0, 2)
    first = run(source, workers, topic, tmp_path)
    assert all(progress["numInputRows"] <= 4 for progress in first.recentProgress)
    write(workers, topic, 2, 1)
    second = run(source, workers, topic, tmp_path)
    assert all(progress["numInputRows"] <= 4 for progress in second.recentProgress)
    commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    assert len(commits) >= 3
    commits[-1].unlink()
    commits[-1].with_name(f".{commits[-1].name}.crc").unlink(missing_ok=True)
    write(workers, topic, 3, 1)
    run(source, workers, topic, tmp_path)
    want = gateways(workers, topic)
    assert sparks(source.read.parquet(str(tmp_path / "rows"))) == want
    assert len(want) == 12
