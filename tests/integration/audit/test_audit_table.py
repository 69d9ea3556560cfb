"""The audit of a table against a real Kafka: exact where it is, and each kind of damage found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from logferry.gateway.contract.chunk import Chunk
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import Ledger, new_entry
from logferry.loaders.storage.side_tables import LeftOutChunk, left_out_rows
from logferry.ops.audit.compare.report import Report
from logferry.ops.cli.problems import Unavailable
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import DC, QUARANTINE, Load, World, commit


@pytest.fixture
async def world(kafka: KafkaCluster, topic_name: str) -> World:
    """Stored: three sources with five chunks of four lines, one of which is not UTF-8."""
    found = World(kafka.bootstrap, topic_name)
    await found.create()
    plan = found.plan()
    record = plan.records[10]
    data = record.chunk.data[:-5] + b"\xff\xfe\r\n\n"
    plan.records[10] = record._replace(chunk=record.chunk._replace(data=data))
    await found.write(plan)
    return found


def refuting(report: Report) -> list[str]:
    return sorted(finding.kind for finding in report.findings if finding.refutes)


async def test_a_whole_table_is_proven(world: World, tmp_path: Path):
    load = world.load()
    assert load.quarantine, "the line that is not UTF-8"
    report = await world.audit(table=load.write(tmp_path / "t"))
    assert report.exact
    assert not len(report.findings)
    assert report.table is not None
    rows = len(load.rows) + len(load.quarantine)
    assert (report.table.rows, report.table.compared, report.table.not_comparable) == (rows, rows, 0)
    assert (report.table.batches, report.table.not_loaded) == (2, 0)
    assert sum(source.rows or 0 for source in report.sources) == report.lines == rows


async def test_a_table_that_lags_is_proven(world: World, tmp_path: Path):
    load = world.load()
    table = load.write(tmp_path / "t")
    late = world.plan(["web7"])
    await world.write(late)
    report = await world.audit(table=table)
    assert report.exact
    assert report.table is not None
    assert report.table.not_loaded == 5


async def test_a_record_that_no_gateway_wrote_is_a_row_of_the_quarantine(world: World, tmp_path: Path):
    await world.write_foreign(b"hello\nworld\n", [])
    load = world.load()
    assert refuting(await world.audit(table=load.write(tmp_path / "t"))) == ["foreign-record"]
    load.quarantine = [row for row in load.quarantine if row["bytes"] != b"hello\nworld\n"]
    table = load.write(tmp_path / "u")
    assert refuting(await world.audit(table=table)) == ["foreign-record", "missing-row"]


# ---- damage ----------------------------------------------------------------------------------------------


def miss(load: Load) -> None:
    del load.rows[5]


def miss_in_quarantine(load: Load) -> None:
    load.quarantine.clear()


def miss_chunk(load: Load) -> None:
    seqno = load.rows[8]["seqno"]
    load.rows = [row for row in load.rows if (row["source_id"], row["seqno"]) != (load.rows[8]["source_id"], seqno)]


def double(load: Load) -> None:
    load.rows.append(load.rows[5])


def double_in_quarantine(load: Load) -> None:
    row = load.rows[5]
    load.quarantine.append({**row, "bytes": row["text"].encode(), "reason": "?"})


def change_text(load: Load) -> None:
    load.rows[5] = {**load.rows[5], "text": "forged"}


def change_newline(load: Load) -> None:
    load.rows[5] = {**load.rows[5], "newline": False}


def swap_lines(load: Load) -> None:
    one, other = load.rows[4], load.rows[5]
    load.rows[4], load.rows[5] = {**one, "text": other["text"]}, {**other, "text": one["text"]}


def change_source(load: Load) -> None:
    load.rows[5] = {**load.rows[5], "source_id": "stranger"}


def change_seqno(load: Load) -> None:
    load.rows[5] = {**load.rows[5], "seqno": 4}


def invent_line(load: Load) -> None:
    load.rows.append({**load.rows[5], "line": 77})


def invent_record(load: Load) -> None:
    load.rows.append({**load.rows[5], "offset": 10_000})


def invent_partition(load: Load) -> None:
    load.rows.append({**load.rows[5], "partition": 9})


def invent_dc(load: Load) -> None:
    load.rows.append({**load.rows[5], "dc": "dc9"})


def gap(load: Load) -> None:
    load.move(1, partition=0, start=1)


def overlap(load: Load) -> None:
    load.move(1, partition=0, start=-1)


def beyond(load: Load) -> None:
    load.move(1, partition=0, end=5)


def no_entry(load: Load) -> None:
    del load.entries[0]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (miss, {"missing-row"}),
        (miss_in_quarantine, {"missing-row"}),
        (miss_chunk, {"missing-row"}),
        (double, {"doubled-row"}),
        (double_in_quarantine, {"doubled-row"}),
        (change_text, {"changed-row"}),
        (change_newline, {"changed-row"}),
        (swap_lines, {"changed-row"}),
        (change_source, {"missing-row", "row-of-another-chunk"}),
        (change_seqno, {"missing-row", "row-of-another-chunk"}),
        (invent_line, {"row-without-line"}),
        (invent_record, {"rows-outside-ledger"}),
        (invent_partition, {"rows-outside-ledger"}),
        (invent_dc, {"rows-outside-ledger"}),
        (gap, {"ledger-gap", "rows-outside-ledger"}),
        (overlap, {"ledger-overlap"}),
        (beyond, {"ledger-beyond-log"}),
        (no_entry, {"ledger-missing", "rows-outside-ledger"}),
    ],
)
async def test_damage_is_found(world: World, tmp_path: Path, damage: Callable[[Load], None], expected: set[str]):
    load = world.load()
    damage(load)
    report = await world.audit(table=load.write(tmp_path / "t"))
    assert set(refuting(report)) == expected
    assert not report.exact


async def test_damage_is_named_line_by_line(world: World, tmp_path: Path):
    load = world.load()
    row = load.rows.pop(5)
    (found,) = (await world.audit(table=load.write(tmp_path / "t"))).findings
    assert (found.where, found.first, found.source_id) == (
        f"{world.topic}-{row['partition']}",
        row["offset"],
        row["source_id"],
    )
    assert found.detail == f"seqno {row['seqno']}, line {row['line']} of 4 rows are missing"


async def test_a_table_that_lost_everything(world: World, tmp_path: Path):
    load = world.load()
    count = len(world.stored)
    load.rows.clear()
    load.quarantine.clear()
    report = await world.audit(table=load.write(tmp_path / "t"))
    assert report.findings.refuting == {"missing-row": count}


async def test_rows_of_a_compacted_table_in_another_order(world: World, tmp_path: Path):
    table = world.load(batches=3).write(tmp_path / "t")
    DeltaTable(str(table)).optimize.z_order(["line", "text"])
    assert (await world.audit(table=table)).exact


async def test_a_record_that_stands_in_the_log_twice_is_not_the_tables_fault(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
):
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    plan = world.plan(["web1"])
    plan.records.append(plan.records[1])
    await world.write(plan)
    assert refuting(await world.audit(table=world.load().write(tmp_path / "t"))) == ["double"]


async def test_a_chunk_of_which_the_table_has_the_copy(world: World, tmp_path: Path):
    """Its rows are not missing; a note of what the log has not is found."""
    load = world.load()
    row = load.rows[5]
    load.rows = [
        other for other in load.rows if other["offset"] != row["offset"] or other["partition"] != row["partition"]
    ]
    table = load.write(tmp_path / "t")
    assert refuting(await world.audit(table=table)) == ["missing-row"]
    notes = TablePaths.of(table).left_out
    note = LeftOutChunk(0, row["topic"], row["partition"], row["offset"], row["source_id"], row["seqno"], "dc9.other")
    write_deltalake(str(notes), left_out_rows([note, note._replace(batch=99, offset=77)]))
    assert (await world.audit(table=table)).exact
    write_deltalake(str(notes), left_out_rows([note._replace(offset=note.offset + 1)]), mode="append")
    assert refuting(await world.audit(table=table)) == ["left-out-without-record"]


@pytest.mark.parametrize("resolved", [1, 2, None])
async def test_a_line_that_a_batch_brought_into_the_table(world: World, tmp_path: Path, resolved: int | None):
    """It stands in the quarantine until the table holds that batch; the last one of this table is 1."""
    load = world.load()
    (bad,) = load.quarantine
    if resolved == 1:
        load.rows.append({**{k: v for k, v in bad.items() if k != "bytes"}, "text": "read after all"})
    table = load.write(tmp_path / "t")
    marked = pa.Table.from_pylist([bad], schema=QUARANTINE).append_column("resolved", pa.array([resolved], pa.int64()))
    path = str(TablePaths.of(table).quarantine)
    write_deltalake(path, marked, mode="overwrite", schema_mode="overwrite")
    # What was read after all is other bytes here, for these can be no text; but it is one row, and not two.
    assert refuting(await world.audit(table=table)) == (["changed-row"] if resolved == 1 else [])


# ---- what cannot be compared -----------------------------------------------------------------------------


async def test_rows_whose_records_retention_removed(world: World, tmp_path: Path):
    load = world.load()
    table = load.write(tmp_path / "t")
    await world.remove_before(0, 2)
    report = await world.audit(table=table)
    assert report.exact
    assert report.table is not None
    removed = sum(one.partition == 0 and one.offset < 2 for one in world.stored) * 4
    assert report.table.not_comparable == removed
    assert report.table.compared == len(load.rows) + len(load.quarantine) - removed


async def test_a_batch_that_a_loader_has_begun(world: World, tmp_path: Path):
    """Its entry and its quarantined rows are there, its rows are not: it counts as not loaded."""
    load = world.load()
    planned = load.entries.pop()
    table = load.write(tmp_path / "t", strays=False)
    paths = TablePaths.of(table)
    Ledger(paths.ledger).put(planned)
    begun = pa.Table.from_pylist(load.quarantine, schema=QUARANTINE)
    assert begun.num_rows == 1
    commit(Path(paths.quarantine), planned.batch, begun)
    report = await world.audit(table=table)
    assert report.exact
    assert not len(report.findings)
    assert report.table is not None
    assert report.table.batches == 1
    assert report.table.not_loaded == sum(r.size for r in planned.ranges)


async def test_a_table_that_was_put_back_behind_its_ledger(world: World, tmp_path: Path):
    load = world.load(batches=3)
    table = load.write(tmp_path / "t")
    paths = TablePaths.of(table)
    for name in sorted(Path(paths.main / "_delta_log").glob("*.json"))[2:]:
        name.unlink()
    assert "ledger-ahead" in refuting(await world.audit(table=table))


async def test_a_recreated_topic_cannot_be_compared(world: World, tmp_path: Path):
    load = world.load()
    load.entries = [
        entry._replace(ranges=tuple(r._replace(topic_id="older") for r in entry.ranges)) for entry in load.entries
    ]
    report = await world.audit(table=load.write(tmp_path / "t"))
    assert report.exact
    assert [finding.kind for finding in report.findings] == ["loaded-from-older-topic"]
    assert report.table is not None
    assert report.table.compared == 0
    assert report.table.not_comparable == len(load.rows) + len(load.quarantine)


async def test_an_entry_that_was_written_twice(world: World, tmp_path: Path):
    table = world.load().write(tmp_path / "t")
    ledger = TablePaths.of(table).ledger
    rows = DeltaTable(str(ledger)).to_pyarrow_table()
    commit(Path(ledger), 7, rows)
    assert refuting(await world.audit(table=table)) == ["ledger-broken"]


async def test_rows_of_another_data_centres_offsets(world: World, tmp_path: Path):
    load = world.load()
    rest = [Range(world.topic, 0, "other cluster", 0, 4)]
    load.entries.append(new_entry(2, "dc2", "lines/1", "run", rest))
    load.rows.append({**load.rows[5], "dc": "dc2", "seqno": 999_999})
    report = await world.audit(table=load.write(tmp_path / "t"))
    assert report.exact
    assert report.table is not None
    assert report.table.not_comparable == 1
    assert report.dc == DC


async def test_no_table(world: World, tmp_path: Path):
    with pytest.raises(Unavailable, match="no Delta table; check --table"):
        await world.audit(table=tmp_path / "nothing")


async def test_a_table_that_lost_a_file(world: World, tmp_path: Path):
    table = world.load().write(tmp_path / "t")
    next(table.glob("*.parquet")).unlink()
    with pytest.raises(Unavailable, match=r"/t/? cannot be read: .*parquet"):
        await world.audit(table=table)


async def test_an_empty_chunk_has_no_rows(kafka: KafkaCluster, topic_name: str, tmp_path: Path):
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    plan = world.plan(["web1"])
    record = plan.records[2]
    plan.records[2] = record._replace(chunk=Chunk(record.chunk.seqno, record.chunk.prev, 1, {}, b""))
    await world.write(plan)
    assert (await world.audit(table=world.load().write(tmp_path / "t"))).exact
