"""The keeper beside push delivery on a real broker with a small disk: what a receiver did not take stays."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.kafka.client import EARLIEST

from tests.support.delivery import PushReceiver, Received, deliver, receiver, subscribe
from tests.support.gateway import Gateway, gateway, write
from tests.support.keeper_disks import acts, client, create, disk_cluster, keeper, may_mount, until

pytestmark = pytest.mark.skipif(
    not may_mount(), reason="mounting small disks needs root, and a container that allows it"
)
DELETION = {
    "below_free_percent": 40,
    "until_free_percent": 60,
    "policies": [{"topics": ["debug"], "priority": 1, "keep_s": 0}],
}
WEAK = ["replication", "min-isr"]


async def fill(writing: Gateway, mib: int) -> list[tuple[str, int]]:
    """Writes chunks that compression makes a quarter smaller; returns what was acknowledged."""
    for seqno in range(1, mib * 20 + 1):
        data = base64.b64encode(os.urandom(39_000))
        await write(writing, "debug", "a", f"seqno={seqno}", data + b"\n")
    return [("a", seqno) for seqno in range(1, mib * 20 + 1)]


@pytest.mark.timeout(600)
async def test_what_a_receiver_did_not_take_stays_until_it_does(tmp_path: Path) -> None:
    """The disk is low all the time. Afterwards every chunk came once, and what was delivered could go."""
    may_take = asyncio.Event()
    count = 0

    async def behave(got: Received) -> None:
        nonlocal count
        count += 1
        if count > 3:
            await may_take.wait()

    with disk_cluster(tmp_path, brokers=1, mib=64, count=1) as cluster, gateway(
        cluster.kafka, tmp_path, "small", workers=1
    ) as writing, deliver(cluster.kafka, tmp_path / "deliver", "small") as pushing:  # fmt: skip
        async with client(cluster) as kafka, receiver(PushReceiver(behave)) as got:
            await create(kafka, "dc1.debug", 1, 1, min_insync_replicas="1")
            await subscribe(writing, "shop", "dc1.debug", got.url, max_bytes=100_000, timeout_s=600)
            written = await fill(writing, 60)
            await got.until(lambda: count > 3, "the receiver is slow")
            [unit] = await pushing.units()
            settings: dict[str, Any] = {"deletion": DELETION, "accept_weak_kafka": WEAK, "prefix": "small"}
            readers = [{"topics": ["*"], "deliver": "*"}]
            with keeper(cluster, tmp_path, readers=readers, **settings) as keeping:
                await until(lambda: any(one["missing_bytes"] for one in keeping.status["deletions"]), "it is held")
                assert [one["held_by"] for one in keeping.status["deletions"]] == [["deliver shop"]]
                assert cluster.least_free_percent() < 40
                assert await kafka.offset("dc1.debug", 0, EARLIEST) <= unit["position"] < 100
                assert not [text for kind, text in keeping.findings() if kind == "reader-unknown"]

                may_take.set()
                await until(lambda: not keeping.status["deletions"] and cluster.least_free_percent() > 40, "enough")
            await got.until(lambda: len(got.rows) >= len(written), "all chunks")
            assert got.problems(written) == []
            assert unit["position"] < await kafka.offset("dc1.debug", 0, EARLIEST)
            deleted = [one for one in await acts(kafka, "small.keeper.dc1.log") if one["kind"] == "delete"]
            assert deleted
            assert all(one["still_needed_by"] == [] for one in deleted)
