"""Lines parsed without Spark against those that Spark parses: every column of every row, and every line left out."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from logferry.gateway.contract.chunk import record_headers
from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.query.parsed_lines import parse_lines
from logferry.loaders.runs.table_run import load_table
from logferry.ops.cli import main
from logferry.ops.stack.kafka_cluster import KafkaCluster
from pyspark.sql import SparkSession

from tests.integration.loader.test_load_formats import odd_access_lines
from tests.support.awkward_lines import EVERY, settings_and_lines
from tests.support.loader import CREATED_MS, Topic, chunks_of, quarantine
from tests.support.table_rows import Parser

pytestmark = pytest.mark.spark

CASES = {**settings_and_lines(), "access": ({"format": "access"}, [*EVERY, *odd_access_lines(3000)])}


def by_spark(spark: SparkSession, folder: Path, settings: ParserSettings, lines: list[bytes]) -> list[Any]:
    """For each line its columns, or the reason for which it is quarantined."""
    (sent,) = chunks_of("web1", b"".join(line + b"\n" for line in lines))
    tables = Parser(spark, folder).tables([(b"web1", sent.chunk.data, record_headers(sent.chunk))], settings)
    rows, bad = (numbers(table) for table in tables)
    beside = {"fields": settings.format == "logfmt", "rescued": settings.rescued, "event_time": settings.time}
    names = [*settings.kinds, *(name for name, is_there in beside.items() if is_there)]
    found: dict[int, Any] = {row["line"]: {name: row[name] for name in names} for row in rows}
    found |= {row["line"]: row["reason"] for row in bad}
    assert len(found) == len(rows) + len(bad) == len(lines)
    return [found[number] for number in range(len(lines))]


def numbers(table: pa.Table) -> list[dict[str, Any]]:
    """The rows with days and microseconds for dates and times, of which Python has those of the years 1 to 9999."""
    rows = table.cast(pa.schema([(field.name, number_type(field.type)) for field in table.schema]))
    return rows.to_pylist(maps_as_pydicts="strict")  # type: ignore[no-any-return]


def number_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, number_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, number_type(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(number_type(kind.value_type))
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.int32() if kind == pa.date32() else kind


def without_spark(settings: ParserSettings, lines: list[bytes]) -> list[Any]:
    made = pa.array([CREATED_MS * 1000] * len(lines), pa.int64())
    table, reasons = parse_lines(pa.array(lines, pa.binary()), settings, made)
    rows = numbers(table) or [{}] * len(lines)
    return [row if reason is None else reason for row, reason in zip(rows, reasons.to_pylist(), strict=True)]


def same(one: Any, other: Any) -> bool:
    """NaN is equal to itself; a negative zero is not zero."""
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


MAIN = ("json", "json rescued", "json nested", "json times", "logfmt", "regex 0", "delimited quoted", "access")


@pytest.mark.parametrize(
    "case", [name if name in MAIN else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_rows_are_those_that_spark_makes(spark: SparkSession, tmp_path: Path, case: str):
    raw, lines = CASES[case]
    settings = ParserSettings.model_validate(raw)
    lines = [line for line in dict.fromkeys(lines) if b"\n" not in line]
    want, have = by_spark(spark, tmp_path, settings, lines), without_spark(settings, lines)
    different = [(line[:120], w, h) for line, w, h in zip(lines, want, have, strict=True) if not same(w, h)]
    assert not different, f"{len(different)} of {len(lines)}: " + "\n".join(map(repr, different[:12]))
    assert sum(isinstance(row, dict) for row in want) >= 3


LOADED = ("access", "json", "json rescued", "logfmt", "regex 0", "delimited", "chunk")


@pytest.mark.parametrize("name", ["lines", *(pytest.param(name, marks=pytest.mark.long) for name in LOADED)])
async def test_a_tail_has_the_rows_that_the_loader_then_loads(
    name: str,
    loader: Callable[..., Loader],
    kafka: KafkaCluster,
    topic_name: str,
    warehouse: Location,
    capfd: pytest.CaptureFixture[str],
):
    """All columns, in each format, over Kafka; lines of the quarantine, one chunk by two data centres, a split line."""

    def rows_of(path: Location, *options: str) -> list[dict[str, Any]]:
        sql = "SELECT * FROM logs ORDER BY topic, source_id, seqno" + (", line" if "chunk" not in str(path) else "")
        status = main.main(["query", sql, "--table", str(path), "--format", "json", *options])
        output, said = capfd.readouterr()
        assert status == 0, said
        found: list[dict[str, Any]] = json.loads(output)
        return found

    raw, lines = ({"format": "chunk"}, EVERY) if name == "chunk" else (CASES[name][0], CASES[name][1][:400])
    one, two = (Topic(kafka.bootstrap, f"{dc}.{topic_name}") for dc in ("dc1", "dc2"))
    await one.create()
    await two.create()
    parser = ParserSettings.model_validate(raw)
    topics = [f"*.{topic_name}"]
    job = TableJob(path=warehouse / "t", topics=topics, parser=parser, partition_by=["recorded_date"])
    good = next((line for line in lines if line.isascii() and line.strip()), b"x")
    await one.write(chunks_of("s", good + b"\n"))
    list(load_table(loader(), job))
    parts = [line + b"\n" for line in lines[:200]] + [
        b"".join(line + b"\n" for line in lines),
        b"a split",
        b" line\n",
        b"",
    ]
    await one.write(chunks_of("s", *parts, start=len(good) + 1))
    await two.write(chunks_of("s", good + b"\n", *parts[:50], good))
    before = await asyncio.to_thread(rows_of, job.path, "--bootstrap", kafka.bootstrap)
    list(load_table(loader(), job))
    after = await asyncio.to_thread(rows_of, job.path, "--no-tail")
    assert len(after) > 10, name
    assert before == after, name
    if name != "chunk":
        have = {(row["source_id"], row["seqno"], row["line"]) for row in before}
        assert not have & {(row["source_id"], row["seqno"], row["line"]) for row in quarantine(job.path)}
