"""The audit of what the loader really writes: rows and quarantine, compared line by line with the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from logferry.loaders.config import TableJob
from logferry.loaders.load import Loader, load_table
from logferry.ops.kafka import Cluster

from tests.planting import World

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
    kafka: Cluster, topic_name: str, tmp_path: Path, loader: Callable[..., Loader]
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
    job = TableJob(path=tmp_path / "t", topics=[world.topic], max_records=9)
    list(load_table(loader(), job))
    report = await world.audit(table=job.path)
    assert report.table is not None
    assert report.table.batches > 1
    assert report.table.not_loaded == 0
    assert report.table.compared == report.table.rows == report.lines + 1
    assert dict(report.findings.counts) == {"foreign-record": 1}, "and nothing of the table"


async def test_damage_of_what_the_loader_wrote(
    kafka: Cluster, topic_name: str, tmp_path: Path, loader: Callable[..., Loader]
):
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    await world.write(world.plan(), transactional_id=world.name)
    job = TableJob(path=tmp_path / "t", topics=[world.topic])
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
