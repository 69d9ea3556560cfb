"""Wider types: old and new rows are read alike by every reader without Spark, whatever comes between."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from logferry.loaders.errors import Overtaken, StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.parsing.columns import column_type, schema_field
from logferry.loaders.planning.column_changes import column_types
from logferry.loaders.storage import wider_types
from logferry.loaders.storage.commit import DataFiles, add_action, commit_files
from logferry.loaders.storage.files import file_system
from logferry.loaders.storage.ledger import APP, last_batch
from logferry.loaders.storage.wider_types import widen_columns

NARROW = {
    "day": "date",
    "n": "int",
    "f": "float",
    "i": "int",
    "d": "decimal(6,2)",
    "whole": "bigint",
    "items": "array<struct<n:int,m:map<string,int>>>",
    "in": "struct<a:int>",
    "text": "string",
}
WIDE = NARROW | {
    "n": "bigint",
    "f": "double",
    "i": "double",
    "d": "decimal(12,4)",
    "whole": "decimal(22,2)",
    "items": "array<struct<n:bigint,m:map<string,bigint>,new:string>>",
    "in": "struct<a:bigint,b:array<int>>",
}


def schema(kinds: dict[str, str]) -> Schema:
    fields = [schema_field(name, column_type(kind)) for name, kind in kinds.items()]
    return Schema.from_json(json.dumps({"type": "struct", "fields": fields}))


def row(number: int) -> dict[str, Any]:
    return {
        "day": None if number % 3 == 0 else date(2026, 11, number % 3),
        "n": 2**31 - 1 - number,
        "f": 0.5 * number,
        "i": -(2**31) + number,
        "d": Decimal("-1234.5") + number,
        "whole": 2**63 - 1 - number,
        "items": None if number % 2 else [{"n": number, "m": [("k", number)]}, None],
        "in": {"a": number} if number % 4 else None,
        "text": f"line {number}",
    }


def append(path: Path, kinds: dict[str, str], rows: list[dict[str, Any]], batch: int) -> None:
    table = pa.Table.from_pylist(rows, schema=pa.schema(schema(kinds).to_arrow()))
    properties = CommitProperties(app_transactions=[Transaction(APP, batch)])
    write_deltalake(str(path), table, mode="append", commit_properties=properties)


def written(path: Path, columns: dict[str, Any]) -> DataFiles:
    """A file with these columns alone, as before the others were added; of no day."""
    pq.write_table(pa.table(columns), path / "more.parquet")
    values = dict.fromkeys(DeltaTable(str(path)).metadata().partition_columns)
    add, rows = add_action(
        file_system(Location.of(path)), "more.parquet", (path / "more.parquet").stat().st_size, values
    )
    return DataFiles(Location.of(path), (add,), rows)


def wider(one: dict[str, Any]) -> dict[str, Any]:
    """The row as it is read with the wider types."""
    items = one["items"] and [item and {**item, "new": None} for item in one["items"]]
    return {**one, "items": items, "in": one["in"] and {**one["in"], "b": None}}


@pytest.fixture(params=[[], ["day"]], ids=["plain", "partitioned"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "logs"
    stats: dict[str, str | None] = {"delta.dataSkippingStatsColumns": "text"}
    DeltaTable.create(str(path), schema(NARROW), name="logferry rows", partition_by=request.param, configuration=stats)
    append(path, NARROW, [row(number) for number in range(4)], 0)
    older = written(path, {"n": pa.array([7], pa.int32()), "text": ["older"]})
    commit_files(older, Location.of(path), 1, "run")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(str(path)).to_pyarrow_table().to_pylist()
    return sorted(found, key=lambda one: str(one["text"]))


def test_old_and_new_rows_are_read_alike(table: Path):
    before, files = rows(table), set(DeltaTable(str(table)).file_uris())
    widen_columns(Location.of(table), schema(WIDE))
    after = DeltaTable(str(table))
    assert column_types(after.schema().to_json()) == column_types(schema(WIDE).to_json())
    assert [*map(wider, before)] == rows(table)
    big = {"n": 2**40, "f": 0.1, "i": 2.0**40, "d": Decimal("12345678.1234"), "whole": Decimal(10**19), "text": "new"}
    more = {"day": None, "items": [{"n": 2**40, "m": [], "new": "x"}], "in": {"a": 2**40, "b": [1]}}
    append(table, WIDE, [big | more], 2)
    assert rows(table) == [*map(wider, before[:4]), big | more, wider(before[4])]
    with duckdb.connect() as query:
        query.register("logs", after.to_pyarrow_dataset())
        found = query.sql("SELECT sum(n), sum(d), count(*) FROM logs").fetchall()
    assert found == [(sum(one["n"] for one in before), sum(one["d"] or 0 for one in before), len(before))]
    assert files.isdisjoint(after.file_uris())
    assert (last_batch(after), after.metadata().name) == (1, "logferry rows")
    assert after.metadata().configuration == {"delta.dataSkippingStatsColumns": "text"}
    assert after.metadata().partition_columns == DeltaTable(str(table)).metadata().partition_columns
    version = after.version()
    widen_columns(Location.of(table), schema(WIDE))
    assert DeltaTable(str(table)).version() == version + 1, "only the append"
    old = DeltaTable(str(table), version=1)
    assert old.to_pyarrow_table().schema.field("n").type == pa.int32(), "a pinned version stays readable"


def between(patch: pytest.MonkeyPatch, work: Callable[[], None], times: int = 1) -> None:
    """Does the work right before a commit that widens."""
    plain, left = wider_types._replace, [times]

    def replaced(*given: Any) -> None:
        if left[0]:
            left[0] -= 1
            work()
        plain(*given)

    patch.setattr(wider_types, "_replace", replaced)


def test_a_batch_that_comes_between_is_kept(table: Path, monkeypatch: pytest.MonkeyPatch):
    between(monkeypatch, lambda: append(table, NARROW, [row(9)], 2))
    before = rows(table)
    widen_columns(Location.of(table), schema(WIDE))
    assert rows(table) == [*map(wider, [*before[:4], row(9), before[4]])]
    assert last_batch(DeltaTable(str(table))) == 2


def test_two_loaders_that_widen(table: Path, monkeypatch: pytest.MonkeyPatch):
    """The other one widens other columns."""
    before, other = rows(table), NARROW | {"n": "double", "f": "double"}
    between(monkeypatch, lambda: widen_columns(Location.of(table), schema(other)))
    widen_columns(Location.of(table), schema({**WIDE, "n": "double"}))
    assert [*map(wider, before)] == rows(table)
    types = column_types(DeltaTable(str(table)).schema().to_json())
    assert (types["n"], types["f"], types["d"]) == ("double", "double", "decimal(12,4)")


def test_an_answer_that_is_lost(table: Path, monkeypatch: pytest.MonkeyPatch):
    before, plain = rows(table), DeltaTable.create_write_transaction

    def lost(*given: Any, **named: Any) -> None:
        plain(*given, **named)
        raise OSError("no answer")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", lost)
    widen_columns(Location.of(table), schema(WIDE))
    assert rows(table) == [*map(wider, before)]


def test_a_loader_that_dies_before_the_commit_changes_nothing(table: Path, monkeypatch: pytest.MonkeyPatch):
    before = rows(table)

    def dies() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        between(patch, dies)
        with pytest.raises(KeyboardInterrupt):
            widen_columns(Location.of(table), schema(WIDE))
    assert rows(table) == before
    widen_columns(Location.of(table), schema(WIDE))
    assert rows(table) == [*map(wider, before)]


def test_a_store_that_refuses_each_commit_ends_it(table: Path, monkeypatch: pytest.MonkeyPatch):
    before = rows(table)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", refused)
    with pytest.raises(StorageUnavailable, match="no space"):
        widen_columns(Location.of(table), schema(WIDE))
    assert rows(table) == before


def test_files_written_for_narrow_types_are_not_committed_to_wider_ones(table: Path):
    """Another loader widened the table while the batch was written: its files would not have the table's types."""
    place = Location.of(table)
    late = written(table, {"n": pa.array([1], pa.int32()), "text": ["late"]})
    late = late._replace(types=column_types(schema({"n": "int", "text": "string"}).to_json()))
    widen_columns(place, schema(WIDE))
    with pytest.raises(Overtaken, match="changed the type of n"):
        commit_files(late, place, 2, "run")
    assert last_batch(DeltaTable(str(table))) == 1
