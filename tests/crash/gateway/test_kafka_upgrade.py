"""Kafka upgraded broker by broker under load, from the oldest version that is supported to the newest, data kept."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest
from logferry.ops.runtime.jars import KAFKA_VERSIONS
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.stack import Stack

from tests.support.checker import read_back, violations
from tests.support.clients import ALL_KINDS, Load
from tests.support.faults import wait_all_lanes
from tests.support.kafka import make_topic

_NEWEST, *_, _OLDEST = KAFKA_VERSIONS


def started_versions(cluster: KafkaCluster, node: int) -> list[str]:
    """Of each start of the node, by its own log."""
    return re.findall(r"Kafka version: (\d+\.\d+)", cluster.log(node).read_text())


async def feature_level(cluster: KafkaCluster, *arguments: str) -> str:
    command = cluster.tool("org.apache.kafka.tools.FeatureCommand", *arguments)
    return (await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, text=True)).stdout


@pytest.mark.long
async def test_brokers_are_upgraded_one_by_one_under_load(
    tmp_path: Path, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the features of the cluster, which only the newest brokers know, while the load continues."""
    monkeypatch.setenv("LOGFERRY_KAFKA_VERSION", _OLDEST)
    with Stack(tmp_path / "stack", brokers=3, workers=2) as stack:
        topic, cluster = await make_topic(stack.urls()[0], topic_name), stack.cluster()
        async with Load(topic_name, stack.urls(), seed=41, sources=32, kinds=ALL_KINDS) as load:
            await load.acknowledged(500)
            upgrade = cluster.upgrade(_NEWEST)
            while (node := await asyncio.to_thread(next, upgrade, None)) is not None:
                print(f"broker {node} has Kafka {_NEWEST}, {load.history.acknowledged()} chunks are acknowledged")
                await load.acknowledged(500)
            await feature_level(cluster, "upgrade", "--release-version", _NEWEST)
            assert f"{_NEWEST}-IV" in await feature_level(cluster, "describe")
            await load.acknowledged(500)
            for node in (1, 2, 3):
                await asyncio.to_thread(cluster.restart, node)
                await load.acknowledged(300)
            await wait_all_lanes(stack.urls())
        stored = await read_back(cluster.bootstrap, topic)
        assert violations(load.history, stored) == []
        assert load.history.acknowledged() > 3000
        for node in (1, 2, 3):
            assert started_versions(cluster, node)[:2] == [_OLDEST, _NEWEST]
