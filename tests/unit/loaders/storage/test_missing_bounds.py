"""A file is passed over only by what the table's log says of it: a bound that is not said skips no file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.schema import Schema
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.batches.dedup import near
from logferry.loaders.location import Location
from logferry.loaders.storage.files import dataset
from logferry.loaders.storage.ledger import read_rows

MORNING, NOON = "2026-11-20T08:00:00.000Z", "2026-11-20T12:00:00.000Z"
SCHEMA = pa.schema([("day", pa.string()), ("source_id", pa.string()), ("seqno", pa.int64())])
TOLD = {
    "numRecords": 2,
    "minValues": {"seqno": 1},
    "maxValues": {"seqno": 2},
    "nullCount": {"source_id": 0, "seqno": 0},
}
WHOLE = {
    "numRecords": 2,
    "minValues": {"source_id": "a", "seqno": 1},
    "maxValues": {"source_id": "b", "seqno": 2},
    "nullCount": {"source_id": 0, "seqno": 0},
}


def table_of(folder: Path, *files: tuple[str | None, str, Mapping[str, Any], list[str | None]]) -> ds.Dataset:
    """The table with files of (value of the partition column, name, statistics, sources)."""
    schema = Schema.from_arrow(SCHEMA)
    adds: list[AddAction | RemoveAction] = []
    for day, name, said, sources in files:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        columns = {
            "source_id": pa.array(sources, pa.string()),
            "seqno": pa.array(range(1, len(sources) + 1), pa.int64()),
        }
        pq.write_table(pa.table(columns), file)
        adds.append(AddAction(name, file.stat().st_size, {"day": day}, 0, True, json.dumps(said)))
    made = DeltaTable.create(folder, schema, partition_by=["day"])
    made.create_write_transaction(adds, "append", schema, partition_by=["day"])
    return dataset(Location.of(folder), DeltaTable(folder))


def without(*missing: tuple[str, str]) -> dict[str, Any]:
    return {
        kind: {name: value for name, value in said.items() if (kind, name) not in missing}
        if isinstance(said, dict)
        else said
        for kind, said in WHOLE.items()
    }


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(without(("minValues", "source_id"), ("maxValues", "source_id")), id="no bounds of one column"),
        pytest.param(without(("maxValues", "source_id")), id="no upper bound"),
        pytest.param(without(("minValues", "source_id")), id="no lower bound"),
        pytest.param({**WHOLE, "minValues": {}, "maxValues": {}}, id="nulls are counted only"),
        pytest.param({**WHOLE, "minValues": {}, "maxValues": {}, "nullCount": {}}, id="nothing said of any column"),
        pytest.param({"numRecords": 2}, id="rows are counted only"),
        pytest.param({**TOLD, "nullCount": {}}, id="nulls are not counted"),
    ],
)
def test_a_missing_bound_skips_no_file(tmp_path: Path, said: Mapping[str, Any]):
    rows = table_of(
        tmp_path,
        ("1", "day=1/a.parquet", said, ["a", "b"]),
        ("1", "day=1/b.parquet", WHOLE, ["a", "b"]),
    )
    assert rows.count_rows(filter=ds.field("source_id") == "b") == 2
    assert rows.to_table(filter=ds.field("seqno") == 1)["source_id"].to_pylist() == ["a", "a"]
    assert rows.count_rows(filter=ds.field("source_id") == "c") == 0
    assert len(read_rows(Location.of(tmp_path), [("source_id", "=", "b")])) == 2


def test_nulls_that_are_not_counted_are_found(tmp_path: Path):
    rows = table_of(tmp_path, ("1", "day=1/a.parquet", without(("nullCount", "source_id")), ["a", None]))
    assert rows.count_rows(filter=ds.field("source_id").is_null()) == 1


@pytest.mark.parametrize(
    ("day", "name"), [("v", "day=v"), (None, "day=none"), ("a b%/ü", "day=a b%25%2Fü"), ("%20", "%20")]
)
def test_files_without_bounds_keep_their_partition_values(tmp_path: Path, day: str | None, name: str):
    rows = table_of(
        tmp_path, (day, f"{name}/a 1.parquet", TOLD, ["a", "b"]), ("other", "day=other/b.parquet", WHOLE, ["a", "b"])
    )
    of_day = ds.field("day").is_null() if day is None else ds.field("day") == day
    assert rows.to_table(filter=of_day & (ds.field("source_id") == "b")).to_pylist() == [
        {"day": day, "source_id": "b", "seqno": 2}
    ]
    (passed,) = rows.get_fragments(filter=ds.field("day") == "other")
    assert passed.path == "day=other/b.parquet"


def test_files_with_bounds_and_with_nulls_only_are_passed_over(tmp_path: Path):
    nulls = {**TOLD, "nullCount": {"source_id": 2, "seqno": 0}}
    rows = table_of(
        tmp_path,
        ("1", "day=1/a.parquet", WHOLE, ["a", "b"]),
        ("1", "day=1/nulls.parquet", nulls, [None, None]),
        ("1", "day=1/some.parquet", TOLD, ["c", "d"]),
    )

    def read(wanted: ds.Expression) -> list[str]:
        return sorted(file.path for file in rows.get_fragments(filter=wanted))

    assert read(ds.field("source_id") == "c") == ["day=1/some.parquet"]
    assert read(ds.field("seqno") == 3) == ["day=1/some.parquet"]
    assert read(ds.field("source_id").is_null()) == ["day=1/nulls.parquet", "day=1/some.parquet"]
    assert rows.count_rows(filter=ds.field("source_id").is_null()) == 2


@pytest.mark.parametrize(
    ("said", "is_read"),
    [
        ({"numRecords": 2}, True),
        ({"numRecords": 2, "minValues": {"seqno": 1}, "maxValues": {"seqno": 2}}, True),
        ({"numRecords": 2, "minValues": {"recorded": NOON}, "maxValues": {"recorded": NOON}}, True),
        ({"numRecords": 2, "minValues": {"seqno": 1, "recorded": NOON}, "maxValues": {}}, True),
        ({"numRecords": 2, "minValues": {"seqno": 1, "recorded": NOON}, "maxValues": {"seqno": 2, "recorded": NOON}},
         True),
        ({"numRecords": 2, "minValues": {"seqno": 1}, "maxValues": {"seqno": 1, "recorded": NOON}}, False),
        ({"numRecords": 2, "minValues": {"seqno": 3}, "maxValues": {"seqno": 4, "recorded": NOON}}, False),
        ({"numRecords": 2, "minValues": {"seqno": 1}, "maxValues": {"seqno": 4, "recorded": MORNING}}, False),
    ],
)  # fmt: skip
def test_files_that_cannot_have_a_copy_are_passed_over_and_no_others(
    tmp_path: Path, said: Mapping[str, Any], is_read: bool
):
    """By the SQL with which the loader looks for copies of a chunk."""
    noon = datetime.fromisoformat(NOON)
    schema = pa.schema([("seqno", pa.int64()), ("recorded", pa.timestamp("us", "UTC"))])
    rows = pa.table({"seqno": [1, 2], "recorded": pa.array([noon, noon], schema.field("recorded").type)})
    adds: list[AddAction | RemoveAction] = []
    for name, stats in (("a.parquet", said), ("b.parquet", {"numRecords": 2})):
        pq.write_table(rows, tmp_path / name)
        adds.append(AddAction(name, (tmp_path / name).stat().st_size, {}, 0, True, json.dumps(stats)))
    made = DeltaTable.create(tmp_path, Schema.from_arrow(schema))
    made.create_write_transaction(adds, "append", Schema.from_arrow(schema))
    found = dataset(Location.of(tmp_path), DeltaTable(tmp_path), near([2], noon))
    assert sorted(file.path for file in found.get_fragments()) == ["a.parquet", "b.parquet"][not is_read :]
    assert found.count_rows(filter=ds.field("seqno") == 2) == 1 + is_read
