"""``logferry table state`` with Kafka: how far a table is behind each of its topics."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from logferry.loaders.commands.table import main
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.ledger import add_columns
from logferry.loaders.storage.tables import QUARANTINE
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import free_ports

from tests.support.audit import World

HOUR_MS = 3_600_000


class State:
    """Runs the command for a table of what is stored now."""

    def __init__(self, world: World, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.table, self.capsys = world.load().write(folder / "t"), capsys
        # Those of the audit's tests have no more columns than an audit needs.
        add_columns(TablePaths.of(self.table).quarantine, QUARANTINE)

    async def text(self, *options: str) -> str:
        assert await asyncio.to_thread(main, ["state", str(self.table), *options]) == 0
        return self.capsys.readouterr().out

    async def facts(self, *options: str) -> dict[str, Any]:
        (facts,) = json.loads(await self.text("--json", *options))
        assert isinstance(facts, dict)
        return facts


async def test_the_lag_is_that_of_the_topic(
    kafka: KafkaCluster, topic_name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    hour_ago = int(time.time() * 1000) - HOUR_MS
    world = World(kafka.bootstrap, topic_name, at_ms=hour_ago - HOUR_MS)
    await world.create()
    await world.write(world.plan(["web1", "api1"]))
    state = State(world, tmp_path, capsys)
    asked = ["--bootstrap", kafka.bootstrap]
    assert "lag" not in await state.facts(), "Kafka is not asked"
    done = {"topic": world.topic, "records": 0, "seconds": 0.0, "stopped": None}
    assert (await state.facts(*asked))["lag"] == [done]
    assert f"{world.topic}: up to date" in await state.text(*asked)
    for world.at_ms in (hour_ago, None):
        await world.write(world.plan(["web7"]))
    file = tmp_path / "load.toml"
    job = f'path = "{state.table}"\ntopics = ["{world.topic}"]\n'
    file.write_text(f'kafka.bootstrap_servers = "{kafka.bootstrap}"\n[[tables]]\n{job}')
    (lag,) = (await state.facts("--config", str(file)))["lag"]
    assert (lag["records"], lag["stopped"]) == (10, None)
    assert HOUR_MS / 1000 <= lag["seconds"] <= (HOUR_MS / 1000 + 300) * 1.05, "by the oldest record"
    assert f"{world.topic}: 10 offsets behind, the oldest is 3," in await state.text(*asked)
    partition = world.stored[-1].partition
    await world.remove_before(partition, world.stored[-1].offset)
    (gone,) = (await state.facts(*asked))["lag"]
    assert (gone["records"], gone["seconds"]) == (None, None)
    assert "were removed before they were loaded" in gone["stopped"]
    assert f"{world.topic}: stopped: {gone['stopped']}" in await state.text(*asked)


async def test_kafka_away_hides_nothing_else(
    kafka: KafkaCluster, topic_name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    await world.write(world.plan())
    address = f"127.0.0.1:{free_ports(1)[0]}"
    facts = await State(world, tmp_path, capsys).facts("--bootstrap", address)
    assert address in facts["lag_unknown"]
    assert facts["last"]["batch"] == 1
