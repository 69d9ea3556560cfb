"""``logferry table state`` with Kafka: how far a table is behind each of its topics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logferry.loaders.batches.execute import Loader
from logferry.loaders.commands.table import main
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.runs.table_run import load_table
from logferry.ops.stack.processes import free_ports

from tests.support.loader import Topic, chunks_of

pytestmark = pytest.mark.spark


class State:
    """Runs the command and reads its JSON."""

    def __init__(self, table: Location, capsys: pytest.CaptureFixture[str]) -> None:
        self.table, self.capsys = table, capsys

    async def __call__(self, *options: str) -> dict[str, Any]:
        (facts,) = json.loads(await self.text("--json", *options))
        assert isinstance(facts, dict)
        return facts

    async def text(self, *options: str) -> str:
        assert await asyncio.to_thread(main, ["state", str(self.table), *options]) == 0
        return self.capsys.readouterr().out


async def test_the_lag_is_that_of_each_topic(
    loader: Callable[..., Loader], topic: Topic, table: Location, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    other = Topic(topic.bootstrap, topic.name.replace("dc1.", "dc2."))
    pattern = topic.name.replace("dc1.", "*.")
    hour_ago = int((time.time() - 3600) * 1000)
    for one in (topic, other):
        await one.create(partitions=2)
        earlier = chunks_of("a", b"1\n") + chunks_of("b", b"2\n")
        await one.write(earlier, partitions=2, recorded_ms=hour_ago - 3_600_000)
    list(load_table(loader(), TableJob.model_validate({"path": table, "topics": [pattern]})))
    state = State(table, capsys)
    kafka = ["--bootstrap", topic.bootstrap]
    assert "lag" not in await state(), "Kafka is not asked"
    done = {"records": 0, "seconds": 0.0, "stopped": None}
    assert (await state(*kafka))["lag"] == [{"topic": topic.name, **done}, {"topic": other.name, **done}]
    await topic.write(chunks_of("a", b"3\n"), partitions=2, recorded_ms=hour_ago)
    await topic.write(chunks_of("b", b"4\n"), partitions=2)
    await other.delete()
    file = tmp_path / "load.toml"
    tables = f'[[tables]]\npath = "{table}"\ntopics = ["{pattern}"]\n'
    file.write_text(f'kafka.bootstrap_servers = "{topic.bootstrap}"\n{tables}')
    behind, gone = (await state("--config", str(file)))["lag"]
    assert behind["records"] == 4, "two chunks, and the markers of their transactions"
    assert 3600 <= behind["seconds"] <= (3600 + 400) * 1.06
    assert gone == {"topic": other.name, "records": None, "seconds": None, "stopped": f"{other.name} no longer exists"}
    said = await state.text(*kafka)
    assert f"{topic.name}: 4 offsets behind, the oldest is 3," in said
    assert f"{other.name}: stopped: {other.name} no longer exists" in said


async def test_kafka_away_hides_nothing_else(
    loader: Callable[..., Loader], topic: Topic, table: Location, capsys: pytest.CaptureFixture[str]
):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    list(load_table(loader(), TableJob.model_validate({"path": table, "topics": [topic.name]})))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    facts = await State(table, capsys)("--bootstrap", address)
    assert address in facts["lag_unknown"]
    assert facts["last"]["batch"] == 0
