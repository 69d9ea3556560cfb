"""The keeper under faults: a broker that hangs, a plan that is stopped in the midst, two keepers, guards removed."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.ops.keeper.journal import Journal, NotActing

from tests.support.keeper_disks import (
    DiskCluster,
    KeeperProcess,
    acts,
    client,
    commit,
    create,
    disk_cluster,
    fill,
    keeper,
    may_mount,
    running_load,
    until,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not may_mount(), reason="mounting small disks needs root, and a container that allows it"),
]
_SLOW = 128 * 1024


def retired(cluster: DiskCluster, broker: int, disk: int) -> list[dict[str, Any]]:
    return [{"broker": broker, "dir": str(cluster.disks[broker][disk])}]


def is_left(process: KeeperProcess) -> bool:
    """Nothing is left to move, nor in a directory that is retired."""
    status = process.status
    is_empty = not any(one["replicas"] for one in status["dirs"] if one["retired"])
    return is_empty and not status["moves"] and not status["under_way"] and status["looked_ms"] > 0


async def kept_acting(process: KeeperProcess) -> None:
    await until(lambda: process.status.get("acting") == process.url, f"{process.url} acts")


async def test_a_broker_that_hangs_is_named_and_nothing_moves_for_balance(tmp_path: Path) -> None:
    """It answers nothing and its port takes connections. When it runs again, the finding is over."""
    with disk_cluster(tmp_path, brokers=4) as cluster:
        async with client(cluster) as kafka:
            await create(kafka, "dc1.load", 4, 3, min_insync_replicas="2")
            moves = {"balance_dirs": True, "balance_brokers": True, "balance_percent": 1, "preferred_leaders": True}
            with keeper(cluster, tmp_path, moves=moves) as keeping:
                async with running_load(cluster, kafka, "dc1.load", 4) as load:
                    await kept_acting(keeping)
                    cluster.kafka.kill(4, signal.SIGSTOP)
                    try:
                        await until(lambda: ("broker-silent", "broker 4") in keeping.findings(), "it is named")
                        [why] = [o["why"] for o in keeping.status["findings"] if o["what"] == "broker 4"]
                        assert "its port takes connections" in why
                        assert not [m for m in keeping.status["moves"] if "balance" in m["why"]]
                        await until(lambda: any(kind == "under-replicated" for kind, _ in keeping.findings()))
                        assert load.fewest_in_sync >= 2
                    finally:
                        cluster.kafka.kill(4, signal.SIGCONT)
                    await until(lambda: not {kind for kind, _ in keeping.findings()} - {"dir-fills"}, "it is over")


async def test_a_plan_whose_keeper_is_killed_goes_to_its_end_by_another_one(tmp_path: Path) -> None:
    """SIGKILL while replicas are copied: what was begun continues, the rest is moved, and the throttles go."""
    with disk_cluster(tmp_path, brokers=4) as cluster:
        async with client(cluster) as kafka:
            await create(kafka, "dc1.load", 6, 3, min_insync_replicas="2")
            for number in range(6):
                await fill(cluster, "dc1.load", number, 3, first=-1000)  # before the numbers of the load
            moves = {"throttle_bytes_per_s": _SLOW, "partitions_at_once": 2}
            settings: dict[str, Any] = {"retire": retired(cluster, 1, 0), "moves": moves}
            with keeper(cluster, tmp_path, "one", **settings) as one:
                await kept_acting(one)
                await until(lambda: one.status["under_way"], "moves are under way")
                found = (await kafka.broker_settings())[1]
                assert found["replica.alter.log.dirs.io.max.bytes.per.second"] == str(_SLOW)
                one.child.send(signal.SIGKILL)
            begun = [o for o in await acts(kafka) if o["kind"] == "move"]
            assert begun
            settings["moves"] = {"throttle_bytes_per_s": 64 << 20, "partitions_at_once": 4}
            with keeper(cluster, tmp_path, "two", **settings) as two:
                async with running_load(cluster, kafka, "dc1.load", 6) as load:
                    await kept_acting(two)
                    await until(lambda: is_left(two), "the directory is left", 180)
                    assert load.fewest_in_sync >= 2
                await until(lambda: not two.status["under_way"], "the last move is over")
            ended = {o["replica"]: o["how"] for o in await acts(kafka) if o["kind"] == "move-ended"}
            assert {f"{o['move']['tp'][0]}-{o['move']['tp'][1]}@1" for o in begun} <= ended.keys()
            assert set(ended.values()) == {"done"}
            found = (await kafka.broker_settings())[1]
            assert not [name for name in found if "throttled" in name or "alter.log.dirs.io" in name]


async def test_pausing_cancels_what_is_under_way_and_resuming_begins_again(tmp_path: Path) -> None:
    from logferry.ops.keeper.command import main

    with disk_cluster(tmp_path, brokers=3, count=1) as cluster:
        async with client(cluster) as kafka:
            await create(kafka, "dc1.load", 2, 2, min_insync_replicas="1")
            for number in range(2):
                await fill(cluster, "dc1.load", number, 8)
            moves = {"throttle_bytes_per_s": _SLOW, "partitions_at_once": 2}
            settings: dict[str, Any] = {
                "accept_weak_kafka": ["replication", "min-isr"],
                "retire": retired(cluster, 1, 0),
            }
            with keeper(cluster, tmp_path, moves=moves, **settings) as keeping:
                await kept_acting(keeping)
                await until(lambda: keeping.status["under_way"], "moves are under way")
                await asyncio.to_thread(main, ["pause", "--url", keeping.url, "--why", "a test"])
                await until(lambda: not keeping.status["under_way"], "they are cancelled")
                assert keeping.status["paused"] == "a test"
                view = (await kafka.describe(["dc1.load"])).topics["dc1.load"]
                assert all(len(p.replicas) == 2 for p in view.partitions)
                await asyncio.to_thread(main, ["resume", "--url", keeping.url])
                await until(lambda: keeping.status["under_way"], "they begin again")


async def test_one_keeper_acts_and_a_late_one_is_fenced(tmp_path: Path) -> None:
    """The acting one is frozen for longer than its session: the other takes over, and the first one stands by."""
    with disk_cluster(tmp_path, brokers=3, count=2) as cluster:
        async with client(cluster) as kafka:
            await create(kafka, "dc1.debug", 1, 1, min_insync_replicas="1")
            weak: dict[str, Any] = {"accept_weak_kafka": ["replication", "min-isr"]}
            deletion: dict[str, Any] = {
                "below_free_percent": 40,
                "until_free_percent": 60,
                "policies": [{"topics": ["debug"], "keep_s": 0}],
            }
            with keeper(cluster, tmp_path, "one", deletion=deletion, **weak) as one:
                await kept_acting(one)
                with keeper(cluster, tmp_path, "two", deletion=deletion, **weak) as two:
                    await until(lambda: two.status.get("acting") == one.url, "two stands by")
                    assert one.child.pid is not None
                    os.kill(one.child.pid, signal.SIGSTOP)
                    await kept_acting(two)
                    await fill(cluster, "dc1.debug", 0, 70)
                    os.kill(one.child.pid, signal.SIGCONT)
                    await until(lambda: one.status.get("acting") == two.url, "one stands by")
                    await until(lambda: any(o["kind"] == "deleted" for o in two.status["log"]), "two deletes")
            records = await acts(kafka)
            second = next(n for n, o in enumerate(records) if o["kind"] == "began" and o["keeper"] == two.url)
            of_one = [o["kind"] for o in records[second:] if o["keeper"] == one.url]
            # It may act again only after the other one has left.
            assert of_one == [] or of_one[0] == "began"
            assert [o for o in records if o["kind"] == "delete"]


async def test_the_fence_of_the_log_keeps_a_late_keeper_from_acting(tmp_path: Path) -> None:
    """With the same transactional id the second one fences the first; with two ids, both act: the guard off."""
    with disk_cluster(tmp_path, brokers=1, count=1) as cluster:
        async with client(cluster) as kafka:
            assert await _acts_of_two(kafka, "fenced", same=True) == ["second"]
            assert await _acts_of_two(kafka, "unfenced", same=False) == ["first", "second"]


async def _acts_of_two(kafka: KafkaClient, topic: str, *, same: bool) -> list[str]:
    done: list[str] = []

    async def act(name: str) -> None:
        done.append(name)

    journals = [Journal(kafka, topic, lambda: True) for _ in range(2)]
    await journals[0].create(["replication", "min-isr"], 1)
    await journals[0].open()
    if not same:
        journals[1].transactional_id += "-other"
    await journals[1].open()
    for name, journal in zip(("first", "second"), journals, strict=True):
        try:
            await journal.carry_out({"kind": "test"}, partial(act, name))
        except NotActing:
            continue
    for journal in journals:
        await journal.close()
    return done


async def test_an_act_whose_record_took_too_long_is_not_carried_out(tmp_path: Path) -> None:
    """A keeper that is frozen between the record and the act: another one may act meanwhile."""
    with disk_cluster(tmp_path, brokers=1, count=1) as cluster:
        async with client(cluster) as kafka:
            times = iter((0.0, 2.5, 10.0, 10.1))
            journal = Journal(kafka, "late", lambda: True, clock_s=lambda: next(times))
            await journal.create(["replication", "min-isr"], 1)
            await journal.open()
            done: list[int] = []

            async def act() -> None:
                done.append(1)

            with pytest.raises(NotActing):
                await journal.carry_out({"kind": "test"}, act)
            assert done == []
            await journal.carry_out({"kind": "test"}, act)
            assert done == [1]
            await journal.close()


async def test_directories_and_brokers_are_balanced_under_load(tmp_path: Path) -> None:
    with disk_cluster(tmp_path, brokers=4) as cluster:
        async with client(cluster) as kafka:
            await create(kafka, "dc1.load", 4, 3, min_insync_replicas="2")
            await create(kafka, "dc1.large", 16, 1, min_insync_replicas="1")
            await until(lambda: sum(map(len, _large(cluster))) == 16, "all partitions are made")
            for number in max(_large(cluster), key=len)[:2]:
                await fill(cluster, "dc1.large", number, 20)
            assert _spread(cluster) > 25
            moves = {"balance_dirs": True, "balance_brokers": True, "balance_percent": 15}
            with keeper(cluster, tmp_path, moves=moves) as keeping:
                async with running_load(cluster, kafka, "dc1.load", 4, pause_s=0.05) as load:
                    await kept_acting(keeping)
                    await until(lambda: is_left(keeping) and _spread(cluster) <= 25, "balance", 180)
                    assert load.fewest_in_sync >= 2


def _large(cluster: DiskCluster) -> list[list[int]]:
    """The partitions in each directory."""
    places = [disk for disks in cluster.disks.values() for disk in disks]
    return [[n for n in range(16) if (disk / f"dc1.large-{n}").exists()] for disk in places]


def _spread(cluster: DiskCluster) -> float:
    found = [cluster.free_percent(broker, d) for broker, disks in cluster.disks.items() for d in range(len(disks))]
    return max(found) - min(found)


async def test_without_act_nothing_in_kafka_is_changed_and_the_plan_is_shown(tmp_path: Path) -> None:
    with disk_cluster(tmp_path, brokers=3) as cluster:
        async with client(cluster) as kafka:
            await create(kafka, "dc1.debug", 1, 1, min_insync_replicas="1")
            await fill(cluster, "dc1.debug", 0, 70)
            deletion: dict[str, Any] = {
                "below_free_percent": 40,
                "until_free_percent": 60,
                "policies": [{"topics": ["debug"], "keep_s": 0}],
            }
            everything = [{"broker": b, "dir": str(disks[0])} for b, disks in cluster.disks.items()]
            with keeper(cluster, tmp_path, act=False, deletion=deletion, retire=everything) as keeping:
                status = await until(lambda: (s := keeping.status).get("deletions") and s["moves"] and s, "a plan")
                assert not status["acts"]
            assert await kafka.offset("dc1.debug", 0, EARLIEST) == 0
            assert "logferry.keeper.dc1.log" not in (await kafka.describe()).topics


async def test_below_the_last_threshold_a_reader_is_not_waited_for_and_that_is_written_down(tmp_path: Path) -> None:
    with disk_cluster(tmp_path, brokers=1, count=1) as cluster:
        async with client(cluster) as kafka:
            await create(kafka, "dc1.debug", 1, 1, min_insync_replicas="1")
            last = await fill(cluster, "dc1.debug", 0, 70)
            await commit(cluster, "slow", "dc1.debug", 0, 10)
            deletion: dict[str, Any] = {
                "below_free_percent": 40,
                "until_free_percent": 60,
                "last_free_percent": 39,
                "policies": [{"topics": ["debug"], "keep_s": 0}],
            }
            settings: dict[str, Any] = {"readers": [{"topics": ["debug"], "consumer": "slow"}], "deletion": deletion}
            with keeper(cluster, tmp_path, accept_weak_kafka=["replication", "min-isr"], **settings) as keeping:
                await kept_acting(keeping)
                await until(lambda: any(o["kind"] == "deleted" for o in keeping.status["log"]), "records are deleted")
            assert 10 < await kafka.offset("dc1.debug", 0, EARLIEST) < last
            deleted = [o for o in await acts(kafka) if o["kind"] == "delete"]
            assert deleted[0]["still_needed_by"] == ["consumer slow"]
