"""A keeper on a Kafka with an authorizer: with the documented rights it does every act, with fewer it says which fail.

The brokers have two log directories each on the file system of the tests, of which nothing needs to fill: the bounds of
deletion are such that every disk is low.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from aiokafka.errors import KafkaError
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.ops.keeper.admin_requests import ReassignRequest
from logferry.ops.keeper.cluster_admin import ClusterAdmin

from tests.support.kafka_rights import deny, deny_no_more, documented, grant
from tests.support.keeper_disks import (
    DISK_SETTINGS,
    DiskCluster,
    FormattedDisks,
    KeeperProcess,
    acts,
    client,
    commit,
    create,
    fill,
    keeper,
    until,
)
from tests.support.secured_kafka import Right, SecuredKafka

RIGHTS: Final = documented("Keeper of `dc1`")
# What `weaker` lacks: moves, elections and deletion.
ACTS: Final[set[Right]] = {
    ("CLUSTER", "kafka-cluster", "LITERAL", "ALTER"),
    ("TOPIC", "dc1.", "PREFIXED", "DELETE"),
}
BROKERS: Final = (1, 2, 3)


class _SecuredDisks(FormattedDisks, SecuredKafka):
    """With users, and brokers of two directories each."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DiskCluster]:
    disks = {node: [tmp_path / f"disk-{node}-{d}" / "log" for d in range(2)] for node in BROKERS}
    for path in (path for found in disks.values() for path in found):
        path.mkdir(parents=True)

    def settings_of(node: int, _broker: int, _controller: int) -> dict[str, str]:
        meta = tmp_path / "secured" / "kafka" / f"kafka-{node}" / "meta"
        return {"metadata.log.dir": str(meta), "log.dirs": ",".join(map(str, disks[node]))}

    kafka = _SecuredDisks(
        tmp_path / "secured", ("keeper", "weaker"), DISK_SETTINGS, len(BROKERS), heap="192m", settings_of=settings_of
    )
    kafka.disks = disks
    with kafka:
        yield DiskCluster(kafka, disks)


def denied(cluster: DiskCluster, user: str) -> set[tuple[str, str]]:
    """What the authorizers have refused the user."""
    said = "".join(cluster.kafka.log(node).read_text(encoding="utf-8") for node in BROKERS)
    pattern = rf"Principal = User:{user} is Denied operation = (\S+) from host = \S+ on resource = (\S+)"
    return set(re.findall(pattern, said))


async def replicas(kafka: KafkaClient, topic: str) -> list[tuple[int, ...]]:
    found = (await kafka.describe([topic])).topics[topic]
    return [tuple(partition.replicas) for partition in found.partitions]


async def test_the_documented_rights_are_enough_for_every_act_and_needed(cluster: DiskCluster, tmp_path: Path) -> None:
    secured = cluster.kafka
    assert isinstance(secured, SecuredKafka)
    assert set(RIGHTS) > ACTS
    await grant(secured.bootstrap, "keeper", RIGHTS)
    await grant(secured.bootstrap, "weaker", [right for right in RIGHTS if right not in ACTS])
    settings: dict[str, Any] = {
        # All of broker 1, and one directory of broker 2: moves between brokers, and between directories.
        "retire": [{"broker": b, "dir": str(cluster.disks[b][d])} for b, d in ((1, 0), (1, 1), (2, 0))],
        "moves": {"preferred_leaders": True, "fill_percent": 100},
        "deletion": {
            "below_free_percent": 100,
            "until_free_percent": 100,
            "policies": [{"topics": ["debug"], "priority": 1, "keep_s": 0}],
        },
        "readers": [{"topics": ["debug"], "consumer": "alerts"}],
    }
    async with client(cluster) as kafka:
        await create(kafka, "dc1.load", 8, 2, min_insync_replicas="1")
        await create(kafka, "dc1.debug", 1, 1, min_insync_replicas="1")
        await fill(cluster, "dc1.debug", 0, 6)
        await commit(cluster, "alerts", "dc1.debug", 0, 60)
        before = await replicas(kafka, "dc1.load")
        assert any(1 in found for found in before)

        def kafka_of(user: str) -> dict[str, Any]:
            return {"kafka": secured.plain_settings(user, "PLAIN")}

        with keeper(cluster, tmp_path, "weaker", **settings, **kafka_of("weaker")) as weaker:
            await until(lambda: _failed(weaker.status) >= {"move", "delete"}, "both acts are refused")
        assert await replicas(kafka, "dc1.load") == before
        assert await kafka.offset("dc1.debug", 0, EARLIEST) == 0
        assert {operation for operation, _ in denied(cluster, "weaker")} == {"ALTER", "DELETE"}

        with keeper(cluster, tmp_path, "keeper", **settings, **kafka_of("keeper")) as keeping:
            await until(lambda: keeping.status.get("acting") == keeping.url, "it acts")
            await until(
                lambda: _is_left(keeping.status, cluster), "the directories are left by all that can leave", 120
            )
            assert not any(1 in found for found in await replicas(kafka, "dc1.load"))
            async with asyncio.timeout(60):
                while await kafka.offset("dc1.debug", 0, EARLIEST) != 60:  # noqa: ASYNC110  Kafka says nothing of it
                    await asyncio.sleep(0.1)
            tp = ("dc1.load", 0)
            first = await _turned_round(kafka, tp)
            await _is_led(kafka, tp, first)
            await until(lambda: not keeping.status["under_way"], "the last move is over")
        own = [one for one in await acts(kafka) if one["keeper"] == keeping.url]
        assert {one["kind"] for one in own} >= {"began", "move", "move-ended", "throttle", "delete", "deleted", "elect"}
        assert [one for one in own if one["kind"] == "failed"] == []
        moved = {one["move"]["kind"] for one in own if one["kind"] == "move"}
        assert moved == {"broker", "dir"}
        elected = [tuple(name) for one in own if one["kind"] == "elect" for name in one["partitions"]]
        assert tp in elected
        assert denied(cluster, "keeper") == set()
        assert not [name for name in (await kafka.broker_settings())[1] if "throttled" in name]


def _failed(status: dict[str, Any]) -> set[str]:
    found = {one["act"] for one in status.get("log", ()) if one["kind"] == "failed"}
    assert all("Authorization" in one["error"] for one in status.get("log", ()) if one["kind"] == "failed")
    return found


def _is_left(status: dict[str, Any], cluster: DiskCluster) -> bool:
    """By the topics that have a broker to go to: those of Kafka and of logferry have a replica on each."""
    place = (2, str(cluster.disks[2][0]))
    replicas = [one["replicas"] for one in status["dirs"] if (one["broker"], one["dir"]) == place]
    return not status["moves"] and not status["under_way"] and replicas == [0]


async def _leader(kafka: KafkaClient, tp: TopicPartition) -> int:
    found = (await kafka.describe([tp[0]])).topics[tp[0]]
    return int(found.partitions[tp[1]].leader)


async def _is_led(kafka: KafkaClient, tp: TopicPartition, leader: int) -> None:
    """Waits for it: the broker that is asked may not have the newest metadata yet."""
    async with asyncio.timeout(90):
        while await _leader(kafka, tp) != leader:  # noqa: ASYNC110  Kafka says nothing of it
            await asyncio.sleep(0.1)


async def _turned_round(kafka: KafkaClient, tp: TopicPartition) -> int:
    """Gives the partition the same replicas in another order, as Kafka's own tool does: its first one does not lead."""
    leader = await _leader(kafka, tp)
    [first] = [broker for broker in (await replicas(kafka, tp[0]))[tp[1]] if broker != leader]
    answer = await ClusterAdmin(kafka, 10.0).ask_any(ReassignRequest({tp: (first, leader)}))
    assert answer.error_code == 0, answer
    return first


async def test_a_keeper_that_may_not_use_its_group_for_a_while_acts_again(cluster: DiskCluster, tmp_path: Path) -> None:
    """Longer than Kafka takes it for a member. It is not restarted."""
    secured = cluster.kafka
    assert isinstance(secured, SecuredKafka)
    await grant(secured.bootstrap, "keeper", RIGHTS)
    group = "logferry.keeper.dc1"
    async with client(cluster) as kafka:

        async def wait_until(has_member: bool) -> None:
            async with asyncio.timeout(60):
                while True:
                    with suppress(KafkaError):  # before the group's first member
                        found = await kafka.group_assignment(group, f"{group}.log")
                        if found is not None and any(found.values()) == has_member:
                            return
                    await asyncio.sleep(0.1)

        settings: dict[str, Any] = {"kafka": secured.plain_settings("keeper", "PLAIN"), "watch": {"every_s": 1}}
        with keeper(cluster, tmp_path, **settings) as running:
            await wait_until(True)
            await deny(secured.bootstrap, "keeper", [("GROUP", group, "LITERAL", "READ")])
            await wait_until(False)
            await deny_no_more(secured.bootstrap, "keeper", [("GROUP", group, "LITERAL", "READ")])
            await wait_until(True)
            # While it plans nothing, only an operator's pause is written to its log.
            lacking: list[Right] = [
                ("TRANSACTIONAL_ID", f"{group}.log.act", "LITERAL", "WRITE"),
                ("TOPIC", f"{group}.log", "LITERAL", "WRITE"),
            ]
            for right in lacking:
                await until(partial(is_paused, running, "before"), "it acts again")
                await deny(secured.bootstrap, "keeper", [right])
                await until(lambda: "AuthorizationFailed" in pause(running, "meanwhile"), "the refusal is named")
                await deny_no_more(secured.bootstrap, "keeper", [right])
                await until(partial(is_paused, running, f"after {right}"), "it acts again")
                assert running.status["paused"] == f"after {right}"
            assert running.child.running
        began = [one for one in await acts(kafka) if one["kind"] == "paused"]
    assert [one["why"] for one in began if one["why"].startswith("after")] == [f"after {right}" for right in lacking]


def is_paused(keeping: KeeperProcess, why: str) -> bool:
    return pause(keeping, why) == ""


def pause(keeping: KeeperProcess, why: str) -> str:
    """What is wrong; nothing: it is paused."""
    body, head = json.dumps({"why": why}).encode(), {"Content-Type": "application/json"}
    try:
        with urlopen(Request(f"{keeping.url}/v1/pause", body, head), timeout=60):
            return ""
    except HTTPError as error:
        return error.read().decode()


async def test_an_election_that_is_not_needed_or_not_possible(cluster: DiskCluster) -> None:
    """Kafka's answers: the one is as good as done, the other is an error."""
    async with client(cluster) as kafka:
        await create(kafka, "dc1.load", 1, 2, min_insync_replicas="1")
        admin, tp = ClusterAdmin(kafka, 10.0), ("dc1.load", 0)
        await admin.elect([tp])
        first, second = (await replicas(kafka, "dc1.load"))[0]
        await _is_led(kafka, tp, first)
        cluster.kafka.kill(first)
        await _is_led(kafka, tp, second)
        with pytest.raises(KafkaError):
            await admin.elect([tp])
        assert await _leader(kafka, tp) == second
        await asyncio.to_thread(cluster.kafka.restart, first)
        async with asyncio.timeout(60):
            while len((await kafka.describe([tp[0]])).topics[tp[0]].partitions[0].isr) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await admin.elect([tp])
        await _is_led(kafka, tp, first)
