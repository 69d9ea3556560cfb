"""A reset that the operator accepts by name does not refute; any other loss beside it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from logferry.loaders.batches.execute import Loader
from logferry.loaders.commands.repair import reload_table, reset_table
from logferry.loaders.config import TableJob
from logferry.loaders.planning.position_plan import ResetTarget
from logferry.loaders.planning.reload_plan import ReloadTarget
from logferry.loaders.runs.table_run import load_table
from logferry.ops.audit.compare.report import Report
from logferry.ops.cli.problems import UsageError
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import World

pytestmark = pytest.mark.spark


@dataclass
class Loaded:
    """A table that a real loader writes, and its audits."""

    world: World
    job: TableJob
    state_file: Path
    loader: Callable[..., Loader]

    async def write(self, source_id: str) -> None:
        await self.world.write(self.world.plan([source_id]))

    def load(self) -> None:
        list(load_table(self.loader(), self.job))

    def reset(self, to: str) -> str:
        """Resets partition 0. Returns the name of the reset."""
        done = reset_table(
            self.loader(), self.job, [ResetTarget.parse(f"{self.world.topic}:0={to}")], lambda moves: True
        )
        assert done is not None
        return f"{self.job.path}:{done.batch}"

    async def audit(self, *, remembered: bool = False, **options: Any) -> Report:
        state_file = {"state_file": self.state_file} if remembered else {}
        return await self.world.audit(table=Path(str(self.job.path)), **state_file, **options)

    async def refuted(self, **options: Any) -> dict[str, int]:
        return dict((await self.audit(**options)).findings.refuting)


@pytest.fixture
async def loaded(kafka: KafkaCluster, topic_name: str, tmp_path: Path, loader: Callable[..., Loader]) -> Loaded:
    """Loaded: one source of partition 0."""
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    job = TableJob.model_validate({"path": tmp_path / "t", "topics": [world.topic]})
    found = Loaded(world, job, tmp_path / "audit.state", loader)
    await found.write(SOURCES[0])
    found.load()
    return found


# Each of partition 0.
SOURCES = ("api1", "api2", "web4")


async def test_an_accepted_reset_covers_what_it_skipped_and_nothing_else(loaded: Loaded):
    await loaded.write(SOURCES[1])
    name = loaded.reset("latest")
    await loaded.write(SOURCES[2])
    loaded.load()
    assert await loaded.refuted() == {"ledger-gap": 1}

    report = await loaded.audit(accept=[name], remembered=True)
    assert report.exact, [str(one) for one in report.findings]
    (note,) = [one for one in report.findings if one.kind == "reset-accepted"]
    assert (note.first, note.last, note.count) == (5, 9, 5)
    assert (await loaded.audit(remembered=True)).exact, "it is remembered"
    assert (await loaded.audit(remembered=True, full=True)).exact, "also when everything is read again"
    assert (await loaded.audit(remembered=True)).exact
    assert await loaded.refuted() == {"ledger-gap": 1}, "where it is not remembered, it is not accepted"

    for wrong in (f"{loaded.job.path}:0", f"{loaded.job.path}:99", f"{loaded.job.path}_other:1", f"{name}0"):
        with pytest.raises(UsageError, match="--accept-reset"):
            await loaded.audit(accept=[wrong])

    await loaded.write("web5")
    other = loaded.reset("latest")
    assert await loaded.refuted(remembered=True) == {"ledger-gap": 1}, "another reset"
    assert (await loaded.audit(remembered=True, accept=[other])).exact
    DeltaTable(str(loaded.job.path)).delete(f"source_id = '{SOURCES[2]}' and line = 0")
    assert await loaded.refuted(remembered=True) == {"missing-row": 5}, "another loss"
    assert await loaded.refuted(accept=[name, other]) == {"missing-row": 5}


@pytest.mark.long
async def test_rows_that_an_accepted_reset_doubled_still_refute_until_they_are_reloaded(loaded: Loaded):
    name = loaded.reset("2")
    loaded.load()
    assert (await loaded.refuted()).keys() == {"ledger-overlap", "doubled-row"}
    assert (await loaded.refuted(accept=[name])).keys() == {"doubled-row"}
    reload_table(loaded.loader(), loaded.job, [ReloadTarget.parse(loaded.world.topic)], lambda _: True)
    assert await loaded.refuted() == {"ledger-overlap": 1}
    report = await loaded.audit(accept=[name])
    assert report.exact
    assert [(one.first, one.last, one.count) for one in report.findings if one.kind == "reset-accepted"] == [(2, 4, 3)]
