"""The topics here that others are mirrored into: what was just made is looked for until it is seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import errors
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.requests import ClusterMetadata, PartitionMetadata, TopicMetadata
from logferry.mirror.lanes import target_topics
from logferry.mirror.lanes.target_topics import ALIKE, TargetTopics, changes_of_copy, settings_of_copy

from tests.support.mirror_lane import MemoryCluster

SETTINGS = {**dict.fromkeys(ALIKE, "1"), "cleanup.policy": "delete", "min.insync.replicas": "1"}


def topic(name: str, partitions: int) -> TopicMetadata:
    views = tuple(PartitionMetadata(number, 1, 0, (1,), (1,)) for number in range(partitions))
    return TopicMetadata(name, name.encode().ljust(16), False, views)


class Slow:
    """A cluster whose brokers hear of what was made only when they were asked so often after it."""

    cluster_id = "here"

    def __init__(self, hears_after: int) -> None:
        self._hears_after = hears_after
        self._topics: dict[str, TopicMetadata] = {}
        self._made: dict[str, TopicMetadata] = {}
        self.created: list[str] = []
        self.looks = 0

    async def describe(self, names: list[str] | None = None) -> ClusterMetadata:
        self.looks += 1
        if self._made:
            self._hears_after -= 1
            if self._hears_after < 0:
                self._topics |= self._made
        found = {name: view for name, view in self._topics.items() if names is None or name in names}
        return ClusterMetadata("here", {1: ("k", 9092)}, found, {})

    async def configs(self, names: list[str]) -> dict[str, dict[str, str]]:
        return dict.fromkeys(names, SETTINGS)

    async def alter_topic(self, *_: Any) -> None: ...

    async def create_topic(self, name: str, partitions: int, *_: Any) -> None:
        self.created.append(name)
        self._made[name] = topic(name, partitions)

    async def grow_topic(self, name: str, partitions: int) -> None:
        self._made[name] = topic(name, partitions)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_topics, "_POLL_S", 0)


async def test_what_was_made_is_known_though_a_broker_hears_of_it_late() -> None:
    here, wanted = Slow(hears_after=3), {"dc1.t": topic("dc1.t", 2)}
    made = TargetTopics(cast(KafkaClient, here))
    await made.ensure(cast(KafkaClient, here), wanted)
    assert len(made.known["dc1.t"].partitions) == 2
    looks = here.looks
    await made.ensure(cast(KafkaClient, here), wanted)
    assert (here.looks, here.created) == (looks, ["dc1.t"])


async def test_what_is_not_seen_yet_is_looked_for_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_topics, "_APPEAR_S", -1.0)
    here, wanted = Slow(hears_after=3), {"dc1.t": topic("dc1.t", 2)}
    made = TargetTopics(cast(KafkaClient, here))
    for _ in range(4):
        await made.ensure(cast(KafkaClient, here), wanted)
    assert len(made.known["dc1.t"].partitions) == 2
    wanted["dc1.t"] = topic("dc1.t", 5)
    await made.ensure(cast(KafkaClient, here), wanted)
    assert len(made.known["dc1.t"].partitions) == 5


async def test_a_copy_takes_records_of_any_time() -> None:
    """They were accepted by the original: Kafka's default refuses those dated more than an hour ahead."""
    here, settings = Slow(hears_after=0), dict[str, str]()

    async def create_topic(name: str, partitions: int, replicas: int, given: dict[str, str]) -> None:
        settings.update(given)
        await Slow.create_topic(here, name, partitions)

    here.create_topic = create_topic  # type: ignore[method-assign]
    await TargetTopics(cast(KafkaClient, here)).ensure(cast(KafkaClient, here), {"dc1.t": topic("dc1.t", 1)})
    longest = str(2**63 - 1)
    assert settings["message.timestamp.before.max.ms"] == settings["message.timestamp.after.max.ms"] == longest


async def test_a_copy_that_exists_takes_records_of_any_time_from_the_first_look_on(clock: SimpleNamespace) -> None:
    there, here = MemoryCluster("there", topic("dc1.a", 1)), Altered(topic("dc1.a", 1))
    times = ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms")
    assert [here.settings["dc1.a"][name] for name in times] == ["3600000"] * 2
    await TargetTopics(cast(KafkaClient, here)).ensure(cast(KafkaClient, there), there.topics)
    assert [here.settings["dc1.a"][name] for name in times] == [str(2**63 - 1)] * 2


def test_a_copy_may_take_more_than_its_original_and_keeps_what_is_its_own() -> None:
    original = {**SETTINGS, "max.message.bytes": "1000", "retention.ms": "5", "leader.replication.throttled.rate": "9"}
    copy = {**settings_of_copy(original), "min.insync.replicas": "2", "leader.replication.throttled.rate": "1"}
    assert changes_of_copy(original, copy) == {}
    assert changes_of_copy(original, {**copy, "max.message.bytes": "1000000"}) == {}
    wrong = {"max.message.bytes": "1000", "retention.ms": "6", "compression.type": "zstd", "cleanup.policy": "compact"}
    assert changes_of_copy(original, {**copy, **wrong}) == {
        "max.message.bytes": "5096",
        "retention.ms": "5",
        "compression.type": "producer",
        "cleanup.policy": "delete",
    }
    # An older Kafka on either side does not know each of them.
    older = {name: value for name, value in original.items() if name != "max.compaction.lag.ms"}
    assert changes_of_copy(older, copy) == {}
    del copy["message.timestamp.after.max.ms"]
    assert changes_of_copy(original, copy) == {}


class Altered(MemoryCluster):
    """``denied``: the topics whose settings this client may not change."""

    def __init__(self, *topics: TopicMetadata) -> None:
        super().__init__("here", *topics)
        self.denied: set[str] = set()

    async def alter_topic(self, name: str, changes: dict[str, str]) -> None:
        if name in self.denied:
            raise errors.TopicAuthorizationFailedError("no right")
        await super().alter_topic(name, changes)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now=1000.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr(target_topics, "time", found)
    return found


async def test_what_is_changed_there_is_changed_here(clock: SimpleNamespace) -> None:
    names = ("dc1.a", "dc1.b")
    there, here = MemoryCluster("there", *(topic(name, 1) for name in names)), Altered(*(topic(n, 1) for n in names))
    targets, remote = TargetTopics(cast(KafkaClient, here)), cast(KafkaClient, there)
    await targets.ensure(remote, there.topics)
    here.altered.clear()
    there.settings["dc1.a"] |= {"max.message.bytes": "9000000", "cleanup.policy": "compact"}
    there.settings["dc1.b"]["retention.ms"] = "77"
    here.denied = {"dc1.a"}
    await targets.ensure(remote, there.topics)
    assert here.altered == []
    clock.now += 61
    await targets.ensure(remote, there.topics)
    # One that may not be altered is named, and concerns no other; its batches are as large as the original allows.
    assert here.altered == [("dc1.b", {"retention.ms": "77"})]
    assert "no right" in targets.unaltered["dc1.a"]
    assert "max.message.bytes" in targets.unaltered["dc1.a"]
    assert (targets.compacted, targets.batch_bytes["dc1.a"], set(targets.known)) == ({"dc1.a"}, 9000000, set(names))
    assert targets.errors == {}
    here.denied = set()
    targets.reread("dc1.a")
    await targets.ensure(remote, there.topics)
    assert (targets.unaltered, here.settings["dc1.a"]["max.message.bytes"]) == ({}, "9004096")


async def test_settings_here_that_cannot_be_read_are_named(clock: SimpleNamespace) -> None:
    there, here = MemoryCluster("there", topic("dc1.a", 1)), Altered(topic("dc1.a", 1))
    there.settings["dc1.a"]["retention.ms"] = "77"
    here.refuses["dc1.a"] = errors.TopicAuthorizationFailedError("no right to see them")
    targets, remote = TargetTopics(cast(KafkaClient, here)), cast(KafkaClient, there)
    await targets.ensure(remote, there.topics)
    assert "no right to see them" in targets.unaltered["dc1.a"]
    assert (set(targets.known), here.altered) == ({"dc1.a"}, [])
    del here.refuses["dc1.a"]
    clock.now += 61
    await targets.ensure(remote, there.topics)
    assert (targets.unaltered, here.settings["dc1.a"]["retention.ms"]) == ({}, "77")


async def test_a_copy_that_kafka_hides_from_the_mirror_is_named_and_delays_no_other(clock: SimpleNamespace) -> None:
    names = ("dc1.a", "dc1.b")
    there, here = MemoryCluster("there", *(topic(name, 1) for name in names)), Altered(topic("dc1.a", 1))
    here.hidden = {"dc1.a"}
    targets, remote = TargetTopics(cast(KafkaClient, here)), cast(KafkaClient, there)
    await targets.ensure(remote, there.topics)
    assert ("hides it" in targets.errors["dc1.a"], set(targets.known)) == (True, {"dc1.b"})
    here.hidden = set()
    clock.now += 31
    await targets.ensure(remote, there.topics)
    assert (targets.errors, set(targets.known)) == ({}, set(names))


async def test_settings_can_be_left_to_the_operator(clock: SimpleNamespace) -> None:
    there, here = MemoryCluster("there", topic("dc1.a", 1)), Altered(topic("dc1.a", 1))
    there.settings["dc1.a"]["retention.ms"] = "77"
    await TargetTopics(cast(KafkaClient, here), alters=False).ensure(cast(KafkaClient, there), there.topics)
    assert here.altered == []


async def test_each_remote_is_looked_at_in_its_turn(clock: SimpleNamespace) -> None:
    """One that was just looked at does not put off another."""
    dcs = [MemoryCluster(dc, topic(f"{dc}.t", 1)) for dc in ("dc1", "dc3")]
    here = Altered(topic("dc1.t", 1), topic("dc3.t", 1))
    targets = TargetTopics(cast(KafkaClient, here))
    for turn in range(3):
        for there in dcs:
            there.settings[f"{there.cluster_id}.t"]["retention.ms"] = f"{turn}"
            await targets.ensure(cast(KafkaClient, there), there.topics)
        clock.now += 61
    assert here.settings["dc1.t"]["retention.ms"] == here.settings["dc3.t"]["retention.ms"] == "2"


@pytest.mark.parametrize(
    ("wanted", "accepted", "brokers", "made"),
    [
        (3, [], 3, (3, 2)),
        (3, [], 2, (3, 2)),  # a broker that is down for a moment makes no copy weak for good
        (3, ["replication"], 2, (2, 2)),
        (5, [], 3, (5, 2)),
        (5, ["replication"], 4, (4, 2)),
        (2, ["replication"], 3, (2, 2)),
        (2, ["replication", "min-isr"], 3, (2, 1)),
        (1, ["replication"], 3, (1, 1)),
    ],
)
async def test_a_copy_has_the_replicas_that_are_wanted(
    wanted: int, accepted: list[str], brokers: int, made: tuple[int, int]
) -> None:
    class Brokers(MemoryCluster):
        async def describe(self, names: list[str] | None = None) -> ClusterMetadata:
            return (await super().describe(names))._replace(brokers=dict.fromkeys(range(brokers), ("k", 9092)))

        async def create_topic(self, name: str, partitions: int, replicas: int, settings: dict[str, str]) -> None:
            created.append((replicas, int(settings["min.insync.replicas"])))
            await super().create_topic(name, partitions, replicas, settings)

    created: list[tuple[int, int]] = []
    there, here = MemoryCluster("there", topic("dc1.t", 1)), Brokers("here")
    targets = TargetTopics(cast(KafkaClient, here), accepted, replicas=wanted)
    await targets.ensure(cast(KafkaClient, there), there.topics)
    assert created == [made]
