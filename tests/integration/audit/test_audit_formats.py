"""Tables of the formats other than access logs: a changed column of a row, with the right text, is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from logferry.loaders.parsing.settings import ParserSettings
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import MAIN, World

FORMATS: dict[str, tuple[dict[str, Any], str, dict[str, Any], Any]] = {
    "json": (
        {"format": "json", "columns": {"n": "int", "who": "struct<id:bigint>"}},
        '{{"n": {n}, "who": {{"id": {n}}}}}',
        {"n": pa.int32(), "who": pa.struct([("id", pa.int64())])},
        lambda n: {"n": n, "who": {"id": n}},
    ),
    "logfmt": (
        {"format": "logfmt", "columns": {"n": "int"}},
        "n={n} more=x",
        {"n": pa.int32(), "fields": pa.map_(pa.string(), pa.string())},
        lambda n: {"n": n, "fields": [("more", "x")]},
    ),
    "regex": (
        {"format": "regex", "pattern": r"(?<n>\d+) (?<rest>.*)", "columns": {"n": "int"}},
        "{n} näher",
        {"n": pa.int32(), "rest": pa.string()},
        lambda n: {"n": n, "rest": "näher"},
    ),
    "delimited": (
        {"format": "delimited", "separator": ";", "columns": {"n": "int", "rest": "string"}},
        "{n};näher",
        {"n": pa.int32(), "rest": pa.string()},
        lambda n: {"n": n, "rest": "näher"},
    ),
}


@pytest.mark.parametrize("name", FORMATS)
async def test_a_changed_column_of_each_format_is_named(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, name: str
):
    said, line, columns, made = FORMATS[name]
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    await world.write(world.plan(content=lambda _, number: f"{line.format(n=number)}\n".encode() * 2))
    settings = ParserSettings.model_validate(said)
    load = world.load()
    load.entries = [one._replace(parser=settings.name, settings=settings.as_json) for one in load.entries]
    number = {line.format(n=number): number for number in range(5)}
    load.rows = [{**row, **made(number[row["text"]])} for row in load.rows]
    main = pa.schema([*MAIN, *columns.items()])
    report = await world.audit(table=load.write(tmp_path / "t", main=main))
    assert report.exact
    assert not len(report.findings)
    assert report.table is not None
    assert (report.table.parsed, report.table.unparsed) == (30, 0)
    for column in columns:
        at = next(at for at, row in enumerate(load.rows) if row["line"] == 1 and at > 12)
        row = load.rows[at]
        load.rows[at] = {**row, column: made(9)[column] if column in ("n", "who") else None}
        report = await world.audit(table=load.write(tmp_path / column, main=main))
        load.rows[at] = row
        (found,) = report.findings
        assert found.refutes
        assert found.kind == "changed-column"
        assert (found.first, found.source_id) == (row["offset"], row["source_id"])
        assert found.detail.startswith(f"seqno {row['seqno']}, line 1: {column} is ")
