"""The rule of the latest state, run by DuckDB, against a model of HBase's scan; Spark runs the same text in
`test_load_hbase.py`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logferry.loaders.planning.latest_cells import DROPPED, rule

from tests.support.hbase_state import CellChange, scan

KINDS = ("put", "put", "put", "delete", "delete_column", "delete_family", "delete_family_version")
_COLUMNS = "t VARCHAR, r VARCHAR, f VARCHAR, q VARCHAR, kind VARCHAR, ts BIGINT, seq BIGINT, place BIGINT, body VARCHAR"
_NAMES = "t, r, f, q, kind, ts, seq, place, body"
_FIELDS = ["r", "f", "q", "kind", "ts", "seq", "place", "body"]
_TYPES = [*[pa.string()] * 4, *[pa.int64()] * 3, pa.string()]


class LatestTable:
    """What the rule keeps of the batches that it was given."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._db = duckdb.connect()
        self._db.execute("SET threads = 1")
        self._db.execute(f"CREATE TABLE kept ({_COLUMNS})")

    def load(self, changes: Sequence[CellChange]) -> None:
        columns: list[Sequence[Any]] = [*zip(*changes, strict=True)] or [[] for _ in CellChange._fields]
        fresh = pa.table([pa.array(column, kind) for column, kind in zip(columns, _TYPES, strict=True)], names=_FIELDS)
        self._db.register("fresh", fresh)
        cells = f"SELECT {_NAMES} FROM kept UNION ALL SELECT 't', * FROM fresh"
        self._db.execute(
            f"CREATE OR REPLACE TABLE kept AS WITH cells AS ({cells}) SELECT * FROM ({rule(self._versions, 'cells')})"
        )

    def rows(self, where: str = "true") -> list[CellChange]:
        found = self._db.execute(f"SELECT r, f, q, kind, ts, seq, place, body FROM kept WHERE {where}").fetchall()
        return [CellChange._make((*row[:7], row[7] or "")) for row in found]

    def latest(self) -> dict[tuple[str, str, str], CellChange]:
        found = {(one.row, one.family, one.qualifier): one for one in self.rows("latest")}
        assert len(found) == len(self.rows("latest")), "a column has two latest rows"
        return found


@st.composite
def histories(draw: st.DrawFn) -> list[CellChange]:
    """Few rows, columns and timestamps, so that changes meet. Several changes may be of one edit."""
    found: list[CellChange] = []
    seq = place = 0
    for number in range(draw(st.integers(1, 25))):
        if draw(st.booleans()):
            seq, place = seq + draw(st.integers(1, 3)), 0
        kind = draw(st.sampled_from(KINDS))
        is_whole = kind.startswith("delete_family")
        qualifier = "" if is_whole else draw(st.sampled_from(["", "a"]))
        row, family = draw(st.sampled_from("xy")), draw(st.sampled_from("de"))
        value = f"v{number}" if kind == "put" else ""
        found.append(CellChange(row, family, qualifier, kind, draw(st.integers(0, 6)), seq, place, value))
        place += 1
    return found


def loaded(history: Sequence[CellChange], cuts: Sequence[int], versions: int) -> LatestTable:
    table = LatestTable(versions)
    places = [0, *sorted(min(cut, len(history)) for cut in cuts), len(history)]
    for start, end in itertools.pairwise(places):
        table.load(history[start:end])
    return table


_cuts = st.lists(st.integers(0, 25), max_size=4)


@settings(deadline=None, max_examples=60)
@given(histories(), _cuts, st.data())
def test_in_any_batches_in_any_order_and_again(history: list[CellChange], cuts: list[int], data: st.DataObject):
    again = data.draw(st.lists(st.sampled_from(history), max_size=8))
    shuffled = data.draw(st.permutations([*history, *again]))
    want = {key: shown[0] for key, shown in scan(history).items()}
    for order in (history, shuffled):
        table = loaded(order, cuts, versions=1000)
        assert table.latest() == want
        # What is kept is the same, too, so that what comes later cannot differ.
        assert sorted(table.rows()) == sorted(loaded(history, [], versions=1000).rows())


@settings(deadline=None, max_examples=60)
@given(histories(), _cuts, st.integers(1, 2), st.data())
def test_with_few_versions_it_is_right_or_says_that_it_does_not_know(
    history: list[CellChange], cuts: list[int], versions: int, data: st.DataObject
):
    again = data.draw(st.lists(st.sampled_from(history), max_size=8))
    orders: list[list[CellChange]] = [history, data.draw(st.permutations([*history, *again]))]
    want = {key: shown[0] for key, shown in scan(history).items()}
    for order in orders:
        latest = loaded(order, cuts, versions).latest()
        known = {key: one for key, one in latest.items() if one.kind != DROPPED}
        assert known.items() <= want.items()
        assert want.keys() <= latest.keys()


@settings(deadline=None, max_examples=40)
@given(histories(), _cuts)
def test_without_deletes_of_single_versions_one_version_is_enough(history: list[CellChange], cuts: list[int]):
    some = [one for one in history if one.kind not in ("delete", "delete_family_version")]
    assert loaded(some, cuts, versions=1).latest() == {key: shown[0] for key, shown in scan(some).items()}


class Region:
    """Its rows, the sequence id of its last edit, and the partition that its source is pinned to."""

    def __init__(self, rows: str, seq: int, partition: int) -> None:
        self.rows, self.seq, self.partition = rows, seq, partition


_ROWS = "wxyz"


@st.composite
def partitions_of_regions(draw: st.DrawFn) -> tuple[list[CellChange], list[list[CellChange]]]:
    """Changes as HBase carried them out, numbered in this order; and as they are in each partition, with the sequence
    ids of their regions. Regions split and merge: the new ones begin above the last edits of the old ones.
    """
    done: list[CellChange] = []
    parts: list[list[CellChange]] = [[], [], []]
    some_part = st.integers(0, len(parts) - 1)
    regions = [Region(_ROWS, draw(st.integers(0, 50)), draw(some_part))]
    for _ in range(draw(st.integers(1, 20))):
        step = draw(st.sampled_from(["edit"] * 6 + ["split", "merge"]))
        region = draw(st.sampled_from(regions))
        if step == "split" and len(region.rows) > 1:
            at, place = draw(st.integers(1, len(region.rows) - 1)), regions.index(region)
            halves = [Region(rows, region.seq, draw(some_part)) for rows in (region.rows[:at], region.rows[at:])]
            regions[place : place + 1] = halves
        elif step == "merge" and region is not regions[-1]:
            place = regions.index(region)
            other = regions[place + 1]
            merged = Region(region.rows + other.rows, max(region.seq, other.seq), draw(some_part))
            regions[place : place + 2] = [merged]
        elif step == "edit":
            region.seq += draw(st.integers(1, 3))
            for place in range(draw(st.integers(1, 3))):
                kind = draw(st.sampled_from(KINDS))
                qualifier = "" if kind.startswith("delete_family") else draw(st.sampled_from(["", "a"]))
                row, ts = draw(st.sampled_from(region.rows)), draw(st.integers(0, 3))
                value = f"v{len(done)}" if kind == "put" else ""
                change = CellChange(row, "d", qualifier, kind, ts, region.seq, place, value)
                parts[region.partition].append(change)
                done.append(change._replace(seq=len(done), place=0))
    return done, parts


@settings(deadline=None, max_examples=60)
@given(partitions_of_regions(), st.data())
def test_regions_that_split_and_merge_in_partitions(
    history: tuple[list[CellChange], list[list[CellChange]]], data: st.DataObject
):
    """The batches read some of each partition: what a daughter wrote may come before what its parent wrote."""
    done, parts = history
    table = LatestTable(versions=1000)
    positions = [0] * len(parts)
    for rest in range(data.draw(st.integers(0, 4)), -1, -1):
        batch: list[CellChange] = []
        for number, part in enumerate(parts):
            # Sometimes the partition is read again from an earlier position.
            start = data.draw(st.integers(0, positions[number])) if data.draw(st.booleans()) else positions[number]
            positions[number] = data.draw(st.integers(positions[number], len(part))) if rest else len(part)
            batch += part[start : positions[number]]
        table.load(batch)
    shown = {key: one[0].value for key, one in scan(done).items()}
    assert {key: one.value for key, one in table.latest().items()} == shown


def put(ts: int, seq: int, value: str = "v", place: int = 0) -> CellChange:
    return CellChange("x", "d", "a", "put", ts, seq, place, value)


def delete(kind: str, ts: int, seq: int) -> CellChange:
    return CellChange("x", "d", "" if kind.startswith("delete_family") else "a", kind, ts, seq, 0)


# Changes, and the value that the column shows.
CASES: dict[str, tuple[list[CellChange], str | None]] = {
    "the timestamp counts": ([put(5, 1, "new"), put(4, 2, "old")], "new"),
    "of the same timestamp, the sequence id": ([put(5, 2, "new"), put(5, 1, "old")], "new"),
    "of the same edit, the place": ([put(5, 1, "new", 1), put(5, 1, "old", 0)], "new"),
    "a version deleted shows the one before": ([put(4, 1, "old"), put(5, 2), delete("delete", 5, 3)], "old"),
    "a version of the family deleted": ([put(4, 1, "old"), put(5, 2), delete("delete_family_version", 5, 3)], "old"),
    "a delete of another version": ([put(5, 1, "new"), delete("delete", 4, 2)], "new"),
    "a column deleted": ([put(4, 1), put(5, 2), delete("delete_column", 5, 3)], None),
    "a column deleted up to an older version": ([put(4, 1), put(5, 2, "new"), delete("delete_column", 4, 3)], "new"),
    "a family deleted": ([put(4, 1), put(5, 2), delete("delete_family", 6, 3)], None),
    "a delete hides what is written later": ([delete("delete_family", 5, 1), put(5, 2)], None),
    "and a version": ([delete("delete", 5, 1), put(5, 2)], None),
    "but not what is newer": ([delete("delete_column", 5, 1), put(6, 2, "new")], "new"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_single", [True, False])
def test_cases(name: str, is_single: bool):
    changes, value = CASES[name]
    table = loaded(changes, range(len(changes)) if is_single else [], versions=3)
    assert [one.value for one in table.latest().values()] == ([] if value is None else [value])
    assert [shown[0].value for shown in scan(changes).values()] == ([] if value is None else [value])


def test_a_value_that_is_not_known():
    """Of three versions one is kept: its delete leaves a column that has a value, but not here."""
    table = loaded([put(1, 1), put(2, 2, "shown"), put(3, 3), delete("delete", 3, 4)], [1, 2, 3, 4], versions=1)
    assert [one.kind for one in table.latest().values()] == [DROPPED]
    table.load([put(4, 5, "new")])
    assert [one.value for one in table.latest().values()] == ["new"]
    table.load([delete("delete_column", 4, 6)])
    assert table.latest() == {}
