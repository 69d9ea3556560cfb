"""A table that moves between two real data centres, with mirrors both ways: proven by one command after each move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from logferry.gateway.config import KafkaSettings
from logferry.loaders.location import Location
from logferry.ops.audit.compare.report import Report
from logferry.ops.audit.config import CopySettings
from logferry.ops.stack.stack import Stack
from pyspark.sql import SparkSession

from tests.support.audit import audited
from tests.support.clients import Load
from tests.support.loader import stored
from tests.support.mirror import Places, both_ways, loader_at

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("centres"), dcs=("dc1", "dc2"), mirrors=1) as stack:
        yield stack


async def test_a_table_that_moves_there_and_back(
    stack: Stack, spark: SparkSession, topic_name: str, tmp_path: Path
) -> None:
    name = topic_name[-40:].lstrip("-")
    places = Places(stack, name, Location.of(tmp_path / "logs"))
    await both_ways(places, partitions=2)
    here, there = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap

    async def proven(**options: Any) -> Report:
        await places.mirrored()
        copies = [CopySettings(dc="dc2", kafka=KafkaSettings(bootstrap_servers=there), topics=[name])]
        settings: dict[str, Any] = {
            "topics": [name],
            "copies": copies,
            "state_file": tmp_path / "audit.state",
            **options,
        }
        return await audited(here, "dc1", table=Path(places.table), **settings)

    async with Load(name, stack.urls("dc1"), seed=7, sources=4) as load:
        await load.acknowledged(100)
    with ExitStack() as opened:
        one, two = (opened.enter_context(loader_at(spark, stack, dc)) for dc in ("dc1", "dc2"))
        places.load(one, offsets=30)
        first = await proven()
        assert first.exact, [str(finding) for finding in first.findings]
        assert first.table is not None
        assert 0 < first.table.compared < first.lines
        assert places.move(two, wait_s=30)
        places.load(two)
        second = await proven()
        assert second.exact, [str(finding) for finding in second.findings]
        assert second.table is not None
        assert {row["dc"] for row in stored(places.table)} == {"dc1", "dc2"}
        assert (second.table.compared, second.table.not_comparable) == (second.lines, 0)
        assert [copy.exact for copy in second.copies] == [True]
        again = await proven()
        assert again.exact
        assert again.read is not None
        assert again.read.rows == 0
        assert places.move(one, wait_s=30)
        third = await proven()
        assert third.exact, [str(finding) for finding in third.findings]
        assert third.table is not None
        assert third.table.compared == third.lines
        row = stored(places.table)[0]
        where = f"source_id = '{row['source_id']}' and seqno = {row['seqno']} and line = {row['line']}"
        DeltaTable(str(places.table)).delete(where)
        lost = await proven()
        assert dict(lost.findings.refuting) == {"missing-row": 1}
