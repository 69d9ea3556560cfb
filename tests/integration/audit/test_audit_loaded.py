"""The audit of what the loader really writes: rows and quarantine, compared line by line with the log."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from logferry.loaders.batches.execute import Loader
from logferry.loaders.commands.compact import drop_old
from logferry.loaders.commands.repair import reload_table
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.planning.reload_plan import ReloadTarget
from logferry.loaders.planning.segment_states import DROPPED
from logferry.loaders.runs.table_run import load_table, requarantine_table
from logferry.loaders.storage.retention import compact
from logferry.ops.audit.compare.report import Report
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import World

pytestmark = pytest.mark.spark

ODD = [
    b"\n\n\r\n",
    b"no newline at the end",
    b"\xff\xfe\nfine\n\x00\n",
    "näher ✓ 𝄞\u2028x\n".encode(),
    b"",
    b"a" * 70_000,
]


async def test_what_the_loader_wrote_is_exact(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, loader: Callable[..., Loader]
):
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    plan = world.plan(["web1", "api1"], chunks=len(ODD))
    for source_id in ("web1", "api1"):
        for index, data in zip(plan.of(source_id), ODD, strict=True):
            record = plan.records[index]
            plan.records[index] = record._replace(chunk=record.chunk._replace(data=data))
    await world.write(plan, transactional_id=world.name)
    await world.write_foreign(b"not\nours", [])
    job = TableJob(path=Location.of(tmp_path / "t"), topics=[world.topic], max_records=9)
    list(load_table(loader(), job))
    report = await world.audit(table=job.path)
    assert report.table is not None
    assert report.table.batches > 1
    assert report.table.not_loaded == 0
    assert report.table.compared == report.table.rows == report.lines + 1
    assert dict(report.findings.counts) == {"foreign-record": 1}, "and nothing of the table"


async def test_damage_of_what_the_loader_wrote(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, loader: Callable[..., Loader]
):
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    await world.write(world.plan(), transactional_id=world.name)
    job = TableJob(path=Location.of(tmp_path / "t"), topics=[world.topic])
    list(load_table(loader(), job))
    assert (await world.audit(table=job.path)).exact
    victim = DeltaTable(str(job.path)).to_pyarrow_table().to_pylist()[7]
    place = " and ".join(f"{name} = {victim[name]}" for name in ("partition", "offset", "line"))
    DeltaTable(str(job.path)).update(predicate=place, new_values={"text": "forged"})
    report = await world.audit(table=job.path)
    assert dict(report.findings.refuting) == {"changed-row": 1}
    DeltaTable(str(job.path)).delete(place)
    report = await world.audit(table=job.path)
    assert dict(report.findings.refuting) == {"missing-row": 1}


async def test_rows_from_before_a_type_became_wider_and_a_column_came(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, loader: Callable[..., Loader]
):
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    line = '{"n": 7, "f": 0.1, "who": {"id": 1, "name": "x"}, "by": {"b": 1, "a": null}, "new": "y"}\n[]\n'
    old = {"n": "int", "f": "float", "who": "struct<id:int>", "by": "map<string,int>"}
    wider = {"n": "bigint", "f": "double", "who": "struct<id:bigint,name:string>", "by": "map<string,double>"}
    for source_id, columns in (("web1", old), ("api1", {**wider, "new": "string"})):
        await world.write(world.plan([source_id], content=lambda *_: line.encode()), transactional_id=world.name)
        parser = {"format": "json", "columns": columns}
        raw = {"path": tmp_path / "t", "topics": [world.topic], "parser": parser}
        list(load_table(loader(), job := TableJob.model_validate(raw)))
    report = await world.audit(table=job.path)
    assert report.table is not None
    assert report.exact, [str(finding) for finding in report.findings]
    assert (report.table.parsed, report.table.unparsed) == (10, 0)
    DeltaTable(str(job.path)).update(predicate="source_id = 'web1' and seqno < 200", new_values={"new": "'y'"})
    report = await world.audit(table=job.path)
    assert dict(report.findings.refuting) == {"changed-column": 2}


# ---- every kind of batch ---------------------------------------------------------------------------------

TIME = {"column": "at", "formats": ["iso"]}
BROKEN = {"format": "regex", "pattern": r"(?<at>\S+) (?<what>[a-z]+)", "event_time": TIME}
MENDED = {**BROKEN, "pattern": r"(?<at>\S+) (?<what>.*)"}
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def hours_of(source_id: str, number: int) -> bytes:
    """Lines of three hours; each has one that is not UTF-8, and one that only the mended parser reads."""
    times = [NOW - timedelta(hours=hour, minutes=number) for hour in (30, 3, 2)]
    lines = [f"{at.isoformat()} {what}".encode() for at in times for what in ("word", "Two Words")]
    return b"\n".join([*lines, source_id.encode(), b"\xff\xfe"]) + b"\n"


class Kept:
    """A table with segments, audited after each step by what the audits before have proven."""

    def __init__(self, world: World, table: Path) -> None:
        self.world, self.table, self.state_file = world, table, table.with_name("audit.state")

    def job(self, parser: dict[str, Any]) -> TableJob:
        rules = {"late_wait_s": 0, "source_idle_s": 3600}
        raw = {"path": self.table, "topics": [self.world.topic], "max_records": 7, "segments": rules, "parser": parser}
        return TableJob.model_validate(raw)

    async def audit(self, **options: Any) -> Report:
        return await self.world.audit(table=self.table, state_file=self.state_file, **options)

    async def exact(self, *notes: str) -> Report:
        report = await self.audit()
        assert report.exact, [str(finding) for finding in report.findings]
        assert sorted(report.findings.counts) == sorted(notes)
        assert report.table is not None
        assert report.table.not_loaded == report.table.not_comparable == 0
        assert all(segment.equal for segment in report.table.segments)
        return report


@pytest.fixture
async def kept(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> Kept:
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    await world.write(world.plan(["web1", "api1"], content=hours_of), transactional_id=world.name)
    return Kept(world, tmp_path / "t")


@pytest.mark.long
async def test_every_kind_of_batch_leaves_a_table_proven(kept: Kept, loader: Callable[..., Loader]):
    list(load_table(loader(), kept.job(BROKEN)))
    first = await kept.exact()
    assert first.table is not None
    assert (first.table.rows, sum(segment.rows > 0 for segment in first.table.segments)) == (80, 5)
    quarantined = 80 - sum(segment.rows for segment in first.table.segments)
    assert quarantined == 10 * 5, "one of two cannot be read yet, nor two without a time"

    list(requarantine_table(loader(), kept.job(MENDED)))
    second = await kept.exact()
    assert second.table is not None
    assert sum(segment.rows for segment in second.table.segments) == 80 - 10 * 2

    await kept.world.write(kept.world.plan(["web2"], content=hours_of), transactional_id=kept.world.name)
    list(load_table(loader(), kept.job(MENDED)))
    third = await kept.exact()
    assert third.read is not None
    assert third.read.records <= 5 + 2

    list(compact(Location.of(kept.table), timedelta(0)))
    fourth = await kept.exact()
    assert fourth.read is not None
    assert (fourth.read.records, fourth.read.files) == (2, 2), "the merged ones"

    DeltaTable(str(kept.table)).delete("source_id = 'web2' and line = 0")
    damaged = await kept.audit()
    assert dict(damaged.findings.refuting) == {"missing-row": 5, "segment-differs": 2}
    reload_table(loader(), kept.job(MENDED), [ReloadTarget.parse(kept.world.topic)], lambda _: True)
    await kept.exact()

    # A row is at most a day older than its recording: the clock is ahead, so that those of 30 hours ago are too old.
    dropped, _ = drop_old(
        lambda: loader().spark, Location.of(kept.table), timedelta(hours=24), now=datetime.now(UTC) + timedelta(hours=8)
    )
    assert dropped is not None
    fifth = await kept.audit()
    assert fifth.exact, [str(finding) for finding in fifth.findings]
    assert [(one.kind, one.count) for one in fifth.findings] == [("dropped-by-retention", 2 * 15)]
    assert fifth.table is not None
    assert fifth.table.segments[0].state == DROPPED
    await kept.exact()
    whole = await kept.audit(full=True)
    assert whole.exact
    assert [(one.kind, one.count) for one in whole.findings] == [("dropped-by-retention", 2 * 15)]


@pytest.mark.long
@pytest.mark.parametrize("parser", ["chunk", "access", "json", "logfmt"])
async def test_tables_of_each_parser_are_exact(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, loader: Callable[..., Loader], parser: str
):
    """Whatever columns it makes: the line is there, or it is in the quarantine; of whole chunks, each is a row."""
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    lines = [b'h - - [20/Nov/2026:10:00:00 +0000] "GET / HTTP/1.1" 200 5', b'{"a": 1}', b"a=1 b=2", b"\xff", b"{", b""]
    data = [b"\n".join(lines), b"", b"\x00\xff" * 50, b"\n".join(reversed(lines)) + b"\n", b"x"]
    plan = world.plan(["web1"], content=lambda _, number: data[number] or b"?")
    plan.records[1] = plan.records[1]._replace(chunk=plan.records[1].chunk._replace(data=b""))
    await world.write(plan, transactional_id=world.name)
    columns = {"columns": {"a": "int"}} if parser in ("json", "logfmt") else {}
    raw = {"path": tmp_path / "t", "topics": [world.topic], "max_records": 3, "parser": {"format": parser, **columns}}
    job = TableJob.model_validate(raw)
    list(load_table(loader(), job))
    report = await world.audit(table=job.path, state_file=tmp_path / "audit.state")
    assert report.exact, [str(finding) for finding in report.findings]
    assert report.table is not None
    assert report.table.compared == report.table.rows == (5 if parser == "chunk" else report.lines)
    DeltaTable(str(job.path)).delete("seqno >= 0")
    again = await world.audit(table=job.path, state_file=tmp_path / "audit.state")
    assert set(again.findings.refuting) == {"missing-row"}
