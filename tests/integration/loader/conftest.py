"""What several modules of this folder share: a topic, a table, and the parser's results by line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.contract.chunk import record_headers
from logferry.loaders.location import Location
from logferry.loaders.parsing.settings import ParserSettings
from logferry.ops.stack.kafka_cluster import KafkaCluster
from pyspark.sql import SparkSession

from tests.support.loader import CREATED_MS, Topic, chunks_of
from tests.support.table_rows import Parser, Records


@pytest.fixture
def topic(kafka: KafkaCluster, topic_name: str) -> Topic:
    """Not created yet."""
    return Topic(kafka.bootstrap, f"dc1.{topic_name}")


@pytest.fixture
def table(warehouse: Location) -> Location:
    return warehouse / "logs"


@pytest.fixture
def read(spark: SparkSession, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Parses lines. Returns the row of each line, or the reason for which it is quarantined."""
    parser = Parser(spark, tmp_path)

    def run(lines: Iterable[bytes], created_ms: int = CREATED_MS, **settings: Any) -> dict[str, Any]:
        given = list(lines)
        (sent,) = chunks_of("web1", b"".join(line + b"\n" for line in given), created_ms=created_ms)
        records: Records = [(b"web1", sent.chunk.data, record_headers(sent.chunk))]
        rows, bad = parser.parsed(records, ParserSettings.model_validate(settings))
        found: dict[str, Any] = {row["text"]: row for row in rows}
        for row in bad:
            text = row["bytes"].decode(errors="replace")
            assert text not in found, "in the table and in the quarantine"
            assert row["parser"].startswith(settings["format"])
            found[text] = row["reason"]
        assert found.keys() == {line.decode(errors="replace") for line in given}
        assert sorted(row["line"] for row in (*rows, *bad)) == list(range(len(given)))
        return found

    return run
