"""The filter for the rows of offset ranges, against a plain search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.rewrite import rows_of

TOPICS = ("dc1.a", "dc1.b")
ROWS = st.fixed_dictionaries(
    {
        "topic": st.one_of(st.none(), st.sampled_from(TOPICS)),
        "partition": st.one_of(st.none(), st.integers(0, 1)),
        "offset": st.one_of(st.none(), st.integers(0, 8)),
        "dc": st.one_of(st.none(), st.sampled_from(("dc1", "dc2"))),
    }
)
RANGES = st.builds(
    lambda topic, partition, start, size: Range(topic, partition, "id", start, start + size),
    st.sampled_from(TOPICS),
    st.integers(0, 1),
    st.integers(0, 8),
    st.integers(1, 4),
)
SCHEMA = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("dc", pa.string())])


def is_meant(row: dict[str, Any], ranges: list[Range]) -> bool:
    return row["dc"] == "dc1" and any(
        (row["topic"], row["partition"]) == r.key and row["offset"] is not None and r.start <= row["offset"] < r.end
        for r in ranges
    )


@given(st.lists(ROWS, max_size=40), st.lists(RANGES, max_size=12))
def test_the_filter_selects_the_rows_of_the_ranges(rows: list[dict[str, Any]], ranges: list[Range]):
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    meant = [row for row in rows if is_meant(row, ranges)]
    assert table.filter(rows_of(ranges, "dc1")).to_pylist() == meant
    assert ds.dataset(table).to_table(filter=rows_of(ranges, "dc1")).to_pylist() == meant
    known = [row for row in rows if row["dc"] is not None and row["topic"] is not None and row["offset"] is not None]
    others = pa.Table.from_pylist(known, schema=SCHEMA).filter(~rows_of(ranges, "dc1")).to_pylist()
    assert others == [row for row in known if not is_meant(row, ranges)]


def test_ten_thousand_partitions_are_filtered(tmp_path: Path):
    ranges = [Range("dc1.a", partition, "id", 3, 5 + partition % 2) for partition in range(10_000)]
    ranges += [Range("dc1.a", partition, "id", 8, 9) for partition in range(0, 10_000, 100)]
    rows = [
        {"topic": "dc1.a", "partition": partition, "offset": offset, "dc": "dc1"}
        for partition in (0, 1, 4_999, 9_900, 9_999, 10_000)
        for offset in range(10)
    ]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    meant = [row for row in rows if is_meant(row, ranges)]
    assert len(meant) == 15
    assert table.filter(rows_of(ranges, "dc1")).to_pylist() == meant
    assert ds.dataset(tmp_path / "rows.parquet").to_table(filter=rows_of(ranges, "dc1")).to_pylist() == meant
