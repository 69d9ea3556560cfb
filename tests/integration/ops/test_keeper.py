"""The keeper on real brokers with small disks: one that fails, one that fills, while programs write and read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.kafka.client import EARLIEST, KafkaClient

from tests.support.keeper_disks import (
    acts,
    client,
    commit,
    create,
    disk_cluster,
    fill,
    keeper,
    may_mount,
    running_load,
    stored_numbers,
    until,
)

pytestmark = pytest.mark.skipif(
    not may_mount(), reason="mounting small disks needs root, and a container that allows it"
)
DELETION = {
    "below_free_percent": 40,
    "until_free_percent": 60,
    "policies": [{"topics": ["debug"], "priority": 1, "keep_s": 0}],
}


async def test_a_disk_that_fails_is_left_and_one_that_fills_is_freed(tmp_path: Path) -> None:
    """Nothing that is acknowledged is lost, no partition is below min.insync.replicas, and a reader's records stay."""
    with disk_cluster(tmp_path, brokers=4, mib=64) as cluster:
        async with client(cluster) as kafka:
            await create(kafka, "dc1.load", 4, 3, min_insync_replicas="2")
            readers = [{"topics": ["debug"], "consumer": "slow"}]
            with keeper(cluster, tmp_path, deletion=DELETION, readers=readers) as keeping:
                async with running_load(cluster, kafka, "dc1.load", 4) as load:
                    await until(lambda: keeping.status.get("acting") == keeping.url, "the keeper acts")

                    # A disk fails: its replicas are made on other brokers.
                    failed = f"1:{cluster.fail(1, 0)}"
                    await until(lambda: ("dir-failed", failed) in keeping.findings(), "the failed directory is seen")
                    await until(lambda: _is_left(keeping.status), "its replicas are elsewhere")
                    assert load.fewest_in_sync >= 2

                    # A disk fills: the oldest records of a topic that may lose some go, up to what a reader needs.
                    await create(kafka, "dc1.debug", 1, 1, min_insync_replicas="1")
                    await fill(cluster, "dc1.debug", 0, 45)
                    await commit(cluster, "slow", "dc1.debug", 0, 50)
                    await until(lambda: any(one["missing_bytes"] for one in keeping.status["deletions"]), "it is held")
                    assert await kafka.offset("dc1.debug", 0, EARLIEST) <= 50
                    await commit(cluster, "slow", "dc1.debug", 0, 900)
                    await until(lambda: not keeping.status["deletions"] and cluster.least_free_percent() > 40, "enough")
                # Its replicas may have waited for a broker that was in trouble.
                await until(
                    lambda: keeping.findings() <= {("dir-failed", failed)} and _is_left(keeping.status),
                    "all is well but the disk",
                )
                async with asyncio.timeout(60):
                    while await _throttled(kafka, "dc1.load"):  # noqa: ASYNC110  Kafka says nothing of it
                        await asyncio.sleep(0.1)
            first = await kafka.offset("dc1.debug", 0, EARLIEST)
            assert 50 < first <= 900
            assert (await stored_numbers(kafka, "dc1.debug", 0))[0] == first + 1
            records = await acts(kafka)
            deleted = [one for one in records if one["kind"] == "delete"]
            assert deleted[-1]["before"] == first
            assert all(one["still_needed_by"] == [] and one["seen"]["total"] > 0 for one in deleted)
            moved = [one for one in records if one["kind"] == "move"]
            assert {tuple(one["move"]["source"]) for one in moved} == {(1, failed.partition(":")[2])}
            assert all(one["seen"]["isr"] for one in moved)
            assert [one["kind"] for one in records][:: len(records) - 1] == ["began", "left"]
            assert await _throttled(kafka, "dc1.load") == ""


async def _throttled(kafka: KafkaClient, topic: str) -> str:
    return (await kafka.configs([topic]))[topic]["leader.replication.throttled.replicas"]


def _is_left(status: dict[str, Any]) -> bool:
    kinds = {one["kind"] for one in status["findings"]}
    return kinds <= {"dir-failed"} and not status["moves"] and not status["under_way"]
