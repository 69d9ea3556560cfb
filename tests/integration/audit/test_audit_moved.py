"""Tables that moved between data centres: whatever offsets their rows name, each chunk of the log is in them once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.contract.names import printed_topic_id
from logferry.loaders.planning.ledger_entry import MOVE
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import new_entry
from logferry.ops.audit.compare.report import Report
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import DC, PARTITIONS, Load, World

# In the other data centre the same records have offsets that are so much higher.
SHIFT = 3


@pytest.fixture
async def world(kafka: KafkaCluster, topic_name: str) -> World:
    found = World(kafka.bootstrap, topic_name)
    await found.create()
    await found.write(found.plan())
    return found


def moved(world: World, skipped: int = 0) -> Load:
    """The first half was loaded in dc9, the other half here. ``skipped``: offsets between both."""
    load = world.load(batches=1)
    (whole,) = load.entries
    cuts = {r.partition: r.end // 2 for r in whole.ranges}
    there = [Range(world.topic, p, "its copy", 0, cut + SHIFT) for p, cut in cuts.items()]
    own = printed_topic_id(world.topic_id)
    begins = {p: cut + skipped for p, cut in cuts.items()}
    load.entries = [
        new_entry(0, "dc9", "lines/1", "run", there),
        new_entry(1, DC, "lines/1", "run", [Range(world.topic, p, own, b, b) for p, b in begins.items()], kind=MOVE),
        new_entry(2, DC, "lines/1", "run", [r._replace(start=begins[r.partition]) for r in whole.ranges]),
    ]
    rows = []
    for row in load.rows:
        if row["offset"] < cuts[row["partition"]]:
            rows.append({**row, "dc": "dc9", "offset": row["offset"] + SHIFT})
        elif row["offset"] >= begins[row["partition"]]:
            rows.append(row)
    load.rows = rows
    return load


def refuting(report: Report) -> dict[str, int]:
    return dict(report.findings.refuting)


async def test_it_is_proven_by_the_log_where_it_is_now(world: World, tmp_path: Path):
    load = moved(world)
    assert {row["dc"] for row in load.rows} == {DC, "dc9"}
    table, state_file = load.write(tmp_path / "t"), tmp_path / "audit.state"
    for _ in range(2):
        report = await world.audit(table=table, state_file=state_file)
        assert report.exact, [str(finding) for finding in report.findings]
        assert report.table is not None
        assert (report.table.rows, report.table.compared, report.table.not_comparable) == (60, 60, 0)


@pytest.mark.long
async def test_nothing_was_loaded_since_it_moved(world: World, tmp_path: Path):
    load = world.load(batches=1)
    (whole,) = load.entries
    there = [Range(world.topic, r.partition, "its copy", 0, r.end + SHIFT) for r in whole.ranges]
    move = new_entry(1, DC, "lines/1", "run", [r._replace(start=r.end) for r in whole.ranges], kind=MOVE)
    load.entries = [new_entry(0, "dc9", "lines/1", "run", there), move]
    load.rows = [{**row, "dc": "dc9", "offset": row["offset"] + SHIFT} for row in load.rows]
    report = await world.audit(table=load.write(tmp_path / "t"))
    assert report.exact, [str(finding) for finding in report.findings]
    assert report.table is not None
    assert (report.table.compared, report.table.not_loaded) == (60, 0)


def lose_there(load: Load) -> None:
    del load.rows[next(i for i, row in enumerate(load.rows) if row["dc"] == "dc9" and row["line"] == 1)]


def double_there(load: Load) -> None:
    load.rows.append(next(row for row in load.rows if row["dc"] == "dc9"))


def again_here(load: Load) -> None:
    """A chunk that was loaded in both: the move went too far back."""
    row = next(row for row in load.rows if row["dc"] == "dc9")
    chunk = [one for one in load.rows if (one["source_id"], one["seqno"]) == (row["source_id"], row["seqno"])]
    end = max(r.start for r in load.entries[2].ranges if r.partition == row["partition"])
    load.rows += [{**one, "dc": DC, "offset": end} for one in chunk]


def forge_there(load: Load) -> None:
    index = next(i for i, row in enumerate(load.rows) if row["dc"] == "dc9")
    load.rows[index] = {**load.rows[index], "text": "forged"}


def invent_there(load: Load) -> None:
    row = next(row for row in load.rows if row["dc"] == "dc9")
    load.rows.append({**row, "offset": 900})


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lose_there, {"missing-row": 1}),
        pytest.param(double_there, {"doubled-row": 1}, marks=pytest.mark.long),
        (again_here, {"doubled-row": 1}),
        pytest.param(forge_there, {"changed-row": 1}, marks=pytest.mark.long),
        pytest.param(invent_there, {"rows-outside-ledger": 1}, marks=pytest.mark.long),
    ],
)
async def test_damage_is_found_wherever_it_was_loaded(
    world: World, tmp_path: Path, damage: Callable[[Load], Any], expected: dict[str, int]
):
    load = moved(world)
    damage(load)
    assert refuting(await world.audit(table=load.write(tmp_path / "t"))) == expected


async def test_records_that_a_move_left_out_are_missing_rows(world: World, tmp_path: Path):
    report = await world.audit(table=moved(world, skipped=1).write(tmp_path / "t"))
    assert refuting(report) == {"missing-row": PARTITIONS}
    found = [finding for finding in report.findings if finding.refutes]
    assert all("all 4 rows are missing" in finding.detail for finding in found)


async def test_what_retention_removed_is_not_blamed(world: World, tmp_path: Path):
    """By its source's first seqno that is left: offsets of the other data centre say nothing of it."""
    load = moved(world)
    table = load.write(tmp_path / "t")
    await world.remove_before(0, 2)
    report = await world.audit(table=table)
    assert report.exact, [str(finding) for finding in report.findings]
    removed = 4 * sum(one.partition == 0 and one.offset < 2 for one in world.stored)
    assert report.table is not None
    assert removed
    assert (report.table.not_comparable, report.table.compared) == (removed, 60 - removed)


async def test_a_batch_that_was_planned_there_and_read_here(world: World, tmp_path: Path):
    """The move's own ranges say so; the planned ones of the other place hold nothing."""
    load = world.load(batches=1)
    (whole,) = load.entries
    planned = [Range(world.topic, r.partition, "its copy", 0, r.end + SHIFT) for r in whole.ranges]
    rest = [r._replace(start=r.end) for r in whole.ranges]
    load.entries = [
        new_entry(0, "dc9", "lines/1", "run", planned),
        new_entry(1, DC, "lines/1", "run", whole.ranges, kind=MOVE),
        new_entry(2, DC, "lines/1", "run", rest),
    ]
    assert (await world.audit(table=load.write(tmp_path / "t"))).exact
    load.rows[0] = {**load.rows[0], "dc": "dc9"}
    assert refuting(await world.audit(table=load.write(tmp_path / "u"))) == {
        "rows-outside-ledger": 1,
        "missing-row": 1,
    }
