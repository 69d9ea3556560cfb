"""What a commit says of a file: the bounds by which readers pass over it must hold everything that is in it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.storage.commit import DataFiles, statistics


def of(tmp_path: Path, columns: dict[str, Any], rows_a_group: int = 2) -> dict[str, Any]:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), file, row_group_size=rows_a_group)
    return statistics(pq.read_metadata(file))


def test_bounds_over_all_groups(tmp_path: Path):
    said = of(tmp_path, {"topic": ["b", "a", "d", None, None], "seqno": [5, 6, 2**62, -1, 3], "text": ["x"] * 5})
    assert said == {
        "numRecords": 5,
        "minValues": {"topic": "a", "seqno": -1},
        "maxValues": {"topic": "d", "seqno": 2**62},
        "nullCount": {"topic": 2, "seqno": 0},
    }


def test_times_are_rounded_outwards(tmp_path: Path):
    times = [datetime(2026, 1, 1, 0, 0, 0, 1, UTC), datetime(2026, 12, 31, 23, 59, 59, 999_999, UTC)]
    said = of(tmp_path, {"event_time": pa.array(times, pa.timestamp("us", "UTC"))})
    assert said["minValues"] == {"event_time": "2026-01-01T00:00:00.000Z"}
    assert said["maxValues"] == {"event_time": "2027-01-01T00:00:00.000Z"}


def test_nothing_but_nulls_has_no_bounds(tmp_path: Path):
    said = of(tmp_path, {"source_id": pa.array([None, None], pa.string()), "seqno": [1, 2]})
    assert (said["minValues"], said["nullCount"]) == ({"seqno": 1}, {"source_id": 2, "seqno": 0})


def test_bounds_that_are_not_usable_are_left_out(tmp_path: Path):
    """A long text, and a column of which one part of the file tells nothing."""
    said = of(tmp_path, {"source_id": ["a", "b" * 300]})
    assert (said["minValues"], said["maxValues"]) == ({"source_id": "a"}, {})
    file = tmp_path / "b.parquet"
    pq.write_table(pa.table({"seqno": [1, 2]}), file, write_statistics=False)
    assert statistics(pq.read_metadata(file)) == {"numRecords": 2, "minValues": {}, "maxValues": {}, "nullCount": {}}


def test_a_file_that_a_stale_listing_lacks_is_noticed_before_the_commit(tmp_path: Path):
    written = DataFiles(Location.of(tmp_path), (), 7)
    assert written.check_rows(7) is written
    with pytest.raises(StorageUnavailable, match="9 rows were written, but its files hold 7"):
        written.check_rows(9)
