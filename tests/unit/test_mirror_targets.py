"""The topics here that others are mirrored into: what was just made is looked for until it is seen."""

from __future__ import annotations

from typing import Any, cast

import pytest
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.metadata_request import ClusterView, PartitionView, TopicView
from logferry.mirror.lanes import target_topics as targets
from logferry.mirror.lanes.target_topics import Targets

SETTINGS = {**dict.fromkeys(targets._ALIKE, "1"), "cleanup.policy": "delete"}


def topic(name: str, partitions: int) -> TopicView:
    views = tuple(PartitionView(number, 1, 0, (1,), (1,)) for number in range(partitions))
    return TopicView(name, name.encode().ljust(16), False, views)


class Slow:
    """A cluster whose brokers hear of what was made only when they were asked so often after it."""

    cluster_id = "here"

    def __init__(self, hears_after: int) -> None:
        self._hears_after = hears_after
        self._topics: dict[str, TopicView] = {}
        self._made: dict[str, TopicView] = {}
        self.created: list[str] = []
        self.looks = 0

    async def describe(self, names: list[str] | None = None) -> ClusterView:
        self.looks += 1
        if self._made:
            self._hears_after -= 1
            if self._hears_after < 0:
                self._topics |= self._made
        found = {name: view for name, view in self._topics.items() if names is None or name in names}
        return ClusterView("here", {1: ("k", 9092)}, found, {})

    async def configs(self, names: list[str]) -> dict[str, dict[str, str]]:
        return dict.fromkeys(names, SETTINGS)

    async def create_topic(self, name: str, partitions: int, *_: Any) -> None:
        self.created.append(name)
        self._made[name] = topic(name, partitions)

    async def grow_topic(self, name: str, partitions: int) -> None:
        self._made[name] = topic(name, partitions)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_LOOK_AGAIN_S", 0)


async def test_what_was_made_is_known_though_a_broker_hears_of_it_late() -> None:
    here, wanted = Slow(hears_after=3), {"dc1.t": topic("dc1.t", 2)}
    made = Targets(cast(Kafka, here))
    await made.ensure(cast(Kafka, here), wanted)
    assert len(made.known["dc1.t"].partitions) == 2
    looks = here.looks
    await made.ensure(cast(Kafka, here), wanted)
    assert (here.looks, here.created) == (looks, ["dc1.t"])


async def test_what_is_not_seen_yet_is_looked_for_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_APPEAR_S", -1.0)
    here, wanted = Slow(hears_after=3), {"dc1.t": topic("dc1.t", 2)}
    made = Targets(cast(Kafka, here))
    for _ in range(4):
        await made.ensure(cast(Kafka, here), wanted)
    assert len(made.known["dc1.t"].partitions) == 2
    wanted["dc1.t"] = topic("dc1.t", 5)
    await made.ensure(cast(Kafka, here), wanted)
    assert len(made.known["dc1.t"].partitions) == 5
