"""Segments against rows, and tables of whole chunks: exact where they are, and each kind of damage named."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import ACTIVE, READY, Segment, SegmentRules
from logferry.loaders.storage.side_tables import create_segments, put_segments
from logferry.ops.audit.compare.report import Report
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import CHUNKS, TIMED, Load, World

HOUR = datetime(2026, 11, 20, 10, tzinfo=UTC)
NEXT = HOUR + timedelta(hours=1)


@pytest.fixture
async def world(kafka: KafkaCluster, topic_name: str) -> World:
    found = World(kafka.bootstrap, topic_name)
    await found.create()
    await found.write(found.plan())
    return found


def timed(load: Load) -> Load:
    """Lines 0 and 1 of each chunk are of one hour, the others of the next, by a parser that only Spark has."""
    load.entries = [entry._replace(parser="regex/1:0123456789ab") for entry in load.entries]
    for row in load.rows:
        row["event_time"] = HOUR + timedelta(minutes=35 * row["line"])
    return load


def segments_of(given: list[dict[str, Any]], **changes: Any) -> list[Segment]:
    """As a loader keeps them. ``changes``: of the first one."""
    found = []
    for start in (HOUR, NEXT):
        there = [row for row in given if start <= row["event_time"] < start + timedelta(hours=1)]
        size = sum(len(row["text"].encode()) for row in there)
        times = [row["event_time"] for row in there]
        facts = (len(there), size, min(times), max(times), 0, None, HOUR, None, 1)
        found.append(Segment(start, 1, ACTIVE, *facts))
    found[0] = found[0]._replace(state=READY, **changes)
    return found


def write(load: Load, table: Path, segments: list[Segment]) -> Path:
    load.write(table, main=TIMED)
    create_segments(TablePaths.of(table).segments, SegmentRules(window_s=3600))
    put_segments(TablePaths.of(table).segments, 1, "run", segments)
    return table


def refuting(report: Report) -> list[str]:
    return [f"{finding.kind}: {finding.detail}" for finding in report.findings if finding.refutes]


async def test_segments_are_what_the_rows_are(world: World, tmp_path: Path):
    load = timed(world.load())
    segments = segments_of(load.rows)
    report = await world.audit(table=write(load, tmp_path / "t", segments))
    assert report.exact
    assert report.table is not None
    first, second = report.table.segments
    assert (first.start, first.state, first.rows, first.said_rows) == ("2026-11-20T10:00:00Z", READY, 30, 30)
    assert (second.rows, second.size_bytes) == (30, segments[1].bytes)
    assert first.equal
    assert len({first.hash, second.hash, report.table.hash}) == 3
    total = (int(first.hash, 16) + int(second.hash, 16)) % (1 << 128)
    assert f"{total:032x}" == report.table.hash, "each row is in one of them"


async def test_damage_of_segments_is_named(world: World, tmp_path: Path):
    right = segments_of(timed(world.load()).rows)

    load = timed(world.load())
    load.rows[0]["event_time"] = NEXT
    size = len(load.rows[0]["text"].encode())
    found = refuting(await world.audit(table=write(load, tmp_path / "moved", right)))
    assert found == [
        f"segment-differs: segment 2026-11-20T10:00:00Z: the table has 29 rows of {right[0].bytes - size} bytes, the "
        f"segment table states 30 of {right[0].bytes}",
        f"segment-differs: segment 2026-11-20T11:00:00Z: the table has 31 rows of {right[1].bytes + size} bytes, the "
        f"segment table states 30 of {right[1].bytes}",
    ]

    wrong = segments_of(timed(world.load()).rows, rows=31)
    found = refuting(await world.audit(table=write(timed(world.load()), tmp_path / "wrong", wrong)))
    assert len(found) == 1
    assert "2026-11-20T10:00:00Z: the table has 30 rows" in found[0]
    assert "states 31" in found[0]

    found = refuting(await world.audit(table=write(timed(world.load()), tmp_path / "missing", right[:1])))
    assert found == [
        "segment-missing: segment 2026-11-20T11:00:00Z: 30 rows, but the segment table does not list the segment"
    ]

    late = [*right, right[0]._replace(rows=99, batch=2)]
    report = await world.audit(table=write(timed(world.load()), tmp_path / "late", late))
    assert report.exact, "what is planned for the next batch does not count"


@pytest.mark.long
async def test_segments_are_kept_by_file(world: World, tmp_path: Path):
    """A later audit reads no row again, and yet compares all segments; rows that moved by a rewrite are found."""
    load = timed(world.load())
    table, state_file = write(load, tmp_path / "t", segments_of(load.rows)), tmp_path / "audit.state"
    assert (await world.audit(table=table, state_file=state_file)).exact
    again = await world.audit(table=table, state_file=state_file)
    assert again.read is not None
    assert (again.read.rows, again.exact) == (0, True)
    assert again.table is not None
    assert [segment.rows for segment in again.table.segments] == [30, 30]
    place = f"source_id = '{load.rows[0]['source_id']}' and seqno = {load.rows[0]['seqno']} and line = 0"
    DeltaTable(str(table)).update(predicate=place, new_values={"event_time": NEXT})
    moved = refuting(await world.audit(table=table, state_file=state_file))
    assert [text.split(":")[0] for text in moved] == ["segment-differs"] * 2, "rows and lines are the same"


# ---- tables of whole chunks ------------------------------------------------------------------------------


def whole(world: World) -> Load:
    load = world.load()
    kept = ("topic", "dc", "partition", "offset", "recorded", "source_id", "seqno", "prev", "created", "attributes")
    rows = {(row["partition"], row["offset"]): {name: row[name] for name in kept} for row in load.rows}
    for one in world.stored:
        rows[one.partition, one.offset]["data"] = one.chunk.data
    load.rows = list(rows.values())
    return load


async def test_a_table_of_whole_chunks(world: World, tmp_path: Path):
    report = await world.audit(table=whole(world).write(tmp_path / "t", main=CHUNKS))
    assert report.exact
    assert report.table is not None
    assert (report.table.rows, report.table.compared) == (15, 15)
    load = whole(world)
    gone, twice, changed = load.rows[2], load.rows[5], load.rows[9]
    changed["data"] = changed["data"][:-1] + b"?"
    load.rows = [row for row in load.rows if row is not gone] + [twice]
    report = await world.audit(table=load.write(tmp_path / "damaged", main=CHUNKS))
    found = {finding.kind: finding for finding in report.findings}
    assert {kind: (one.source_id, one.first) for kind, one in found.items()} == {
        "missing-row": (gone["source_id"], gone["offset"]),
        "doubled-row": (twice["source_id"], twice["offset"]),
        "changed-row": (changed["source_id"], changed["offset"]),
    }
    last = len(changed["data"]) - 1
    assert found["changed-row"].detail.endswith(f"the whole chunk: differs from the log at byte {last} of {last + 1}")
