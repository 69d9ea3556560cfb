"""A round of carried positions: one group or one broker that does not answer costs the others nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from aiokafka import errors
from logferry.gateway.contract.mirror_state import BlockPointer, MirrorCheckpoint, checkpoint_key
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.consumer_groups import CommitRefused, GroupState
from logferry.gateway.kafka.record_batch import CorruptBatch, KafkaRecord
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.gateway.topics.present_lanes import PresentLanes
from logferry.mirror.config import MirrorConfig
from logferry.mirror.lanes import consumer_offsets
from logferry.mirror.lanes.chain import ChainHistories
from logferry.mirror.lanes.consumer_offsets import ConsumerOffsetSync
from logferry.mirror.worker import _carries

from tests.support.mirror_lane import MemoryCluster, topic

TP = ("dc1.t", 0)


class Groups:
    """Both clusters' groups: each read to 5 there, and not at all here."""

    done: ClassVar[dict[str, int]] = {}
    asked: ClassVar[list[list[str]]] = []
    looked_at: ClassVar[list[str]] = []
    positions: ClassVar[dict[TopicPartition, int]] = {}
    broken: ClassVar[set[str]] = set()

    def __init__(self, kafka: Any) -> None: ...

    async def states_at(self, node: int) -> dict[str, str]:
        """Of three brokers; the second one is down, and the third one never answers."""
        if node == 2:
            raise errors.NodeNotReadyError("2")
        if node == 3:
            await asyncio.Event().wait()
        return dict.fromkeys("abcd", "Empty")

    async def view(self, group: str) -> GroupState:
        self.looked_at.append(group)
        return GroupState("Empty", 0)

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        return {}

    async def committed_at(self, node: int, groups: Sequence[str]) -> dict[str, Any]:
        self.asked.append(list(groups))
        return {
            group: errors.NotCoordinatorError(group) if group in self.broken else dict(self.positions)
            for group in groups
        }

    async def commit(self, group: str, member: Any, offsets: dict[TopicPartition, int]) -> None:
        if group == "b":
            raise CommitRefused("it has members")
        if group == "c":
            raise errors.GroupAuthorizationFailedError("c")
        self.done[group] = offsets.get(TP, 5)


class There:
    def brokers(self) -> list[tuple[int, str, int]]:
        return [(1, "k", 1), (2, "k", 2), (3, "k", 3)]


class History:
    """Of each partition the offsets are the same on both sides, as far as there is a history of it."""

    kinds: ClassVar[dict[TopicPartition, str]] = {}

    async def to_here(self, tp: TopicPartition, offset: int) -> int:
        if tp in self.kinds:
            raise Problem(self.kinds[tp], "why")
        return offset


@pytest.fixture(autouse=True)
def _world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_offsets, "ConsumerGroups", Groups)
    monkeypatch.setattr(consumer_offsets, "_BROKER_S", 0.05)
    for name, empty in (("done", {}), ("asked", []), ("looked_at", []), ("broken", set()), ("positions", {TP: 5})):
        monkeypatch.setattr(Groups, name, empty)
    monkeypatch.setattr(History, "kinds", {})


def link() -> Any:
    remote = SimpleNamespace(dc="dc1", is_chained=lambda topic: False, here=lambda topic: topic)
    return SimpleNamespace(remote=remote, kafka=There(), topics={"dc1.t": object()}, sources=frozenset())


def sync_of(one: Any, owns: Callable[[str], bool] = lambda _: True) -> ConsumerOffsetSync:
    here: Any = "here"
    translation: Any = History()
    return ConsumerOffsetSync(here, {"dc1": one}, translation, ChainHistories({}), owns)


async def test_a_refused_group_and_a_broker_that_is_down_stop_no_other_group() -> None:
    one = link()
    sync = sync_of(one)
    await sync.sync(one)
    assert Groups.done == {"a": 5, "d": 5}
    assert Groups.asked == [["a", "b", "c", "d"]]


async def test_a_group_with_an_error_is_left_alone_for_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(consumer_offsets, "time", clock)
    monkeypatch.setattr(Groups, "broken", {"d"})
    one = link()
    sync = sync_of(one)
    asked: list[float] = []
    for second in range(0, 200, 3):
        clock.now = float(second)
        Groups.asked.clear()
        await sync.sync(one)
        asked += [clock.now for groups in Groups.asked if "d" in groups]
        assert all("a" in groups for groups in Groups.asked)
    assert asked == [0, 3, 9, 21, 45, 93, 153]
    # It answers again: no pause is left from before.
    Groups.broken.clear()
    for clock.now in (213.0, 216.0):
        Groups.asked.clear()
        await sync.sync(one)
        assert "d" in Groups.asked[0]
    assert Groups.done["d"] == 5


async def test_each_group_is_asked_for_by_one_worker_and_by_another_one_when_that_is_dead() -> None:
    kafka = {"bootstrap_servers": "k:1"}
    config = MirrorConfig.model_validate({"dc": "dc2", "kafka": kafka, "remote": [{"dc": "dc1", "kafka": kafka}]})
    workers: list[Any] = [SimpleNamespace(lanes=dict.fromkeys(lanes)) for lanes in ((0, 2), (1, 3))]
    one = link()
    syncs = [sync_of(one, partial(_carries, PresentLanes(one.kafka, config), worker)) for worker in workers]
    for sync in syncs:
        await sync.sync(one)
    assert sorted(group for groups in Groups.asked for group in groups) == ["a", "b", "c", "d"]
    assert len(Groups.asked) == 2
    # Its lanes move, and the groups with them.
    workers[1].lanes.update(workers[0].lanes)
    Groups.asked.clear()
    await syncs[1].sync(one)
    assert Groups.asked == [["a", "d"]]  # the others were refused a moment ago


@pytest.mark.parametrize("kind", ["not-mirrored", "out-of-range"])
async def test_a_partition_without_history_keeps_no_other_one_back(kind: str) -> None:
    History.kinds[("dc1.t", 1)] = kind
    Groups.positions[("dc1.t", 1)] = 7
    one = link()
    await sync_of(one).sync(one)
    assert Groups.done["a"] == 5


async def test_a_damaged_history_keeps_no_other_partition_back_and_is_tried_again_once_mended() -> None:
    History.kinds[("dc1.t", 1)] = "kafka-unavailable"
    Groups.positions[("dc1.t", 1)] = 7
    one = link()
    sync = sync_of(one)
    await sync.sync(one)
    assert Groups.done["a"] == 5
    known = sync._known["dc1", 1]["a"]
    assert (known.seen, known.pause_s > 0) == ({TP: 5}, True)
    History.kinds.clear()
    known.due_at = 0
    await sync.sync(one)
    assert (known.seen, known.pause_s) == (Groups.positions, 0)


async def test_what_was_carried_costs_no_request_here_again() -> None:
    one = link()
    sync = sync_of(one)
    await sync.sync(one)
    Groups.looked_at.clear()
    await sync.sync(one)
    assert Groups.looked_at == []
    Groups.positions[TP] = 6
    await sync.sync(one)
    assert (set(Groups.looked_at), Groups.done["a"]) == ({"a", "d"}, 6)


async def test_a_checkpoint_that_cannot_be_decoded_concerns_its_partition_alone() -> None:
    state, good = "logferry.mirror.dc2.state", MirrorCheckpoint(b"1" * 16, b"2" * 16, 100, 50, 40, 0, 0, 0, 0, ())
    here = MemoryCluster("here", topic(state, 1), topic("logferry.mirror.dc2.pairs", 1))
    here.records[state, 0] = [
        KafkaRecord(offset, 0, key, value, [])
        for offset, (key, value) in enumerate(
            [
                (checkpoint_key(*TP), good.encode()),
                (checkpoint_key("dc1.t", 1), good.encode()),
                (checkpoint_key(*TP), b"\x09 of a newer version"),
                (b"?", b"\x09 of a newer version"),
            ]
        )
    ]
    kafka: Any = here
    translation = OffsetTranslation(kafka, "logferry", "dc2")
    assert await translation.to_here(("dc1.t", 1), 100) == 50
    # What was known of it before is not believed any more.
    with pytest.raises(Problem, match="not-mirrored"):
        await translation.to_here(TP, 100)


async def test_a_damaged_batch_of_the_history_concerns_its_positions_alone() -> None:
    """The others of a commit have their cursors."""
    state, history = "logferry.mirror.dc2.state", "logferry.mirror.dc2.pairs"
    kafka: Any = MemoryCluster("here", topic(state, 1), topic(history, 1))
    copy = MirrorCheckpoint(b"1" * 16, b"2" * 16, 100, 50, 40, 0, 0, 0, 1, (BlockPointer(0, 0, 0),))
    keys = [checkpoint_key("dc1.t", number) for number in (0, 1)]
    kafka.records[state, 0] = [KafkaRecord(at, 0, key, copy.encode(), []) for at, key in enumerate(keys)]
    kafka.records[history, 0] = []
    kafka.unreadable[history, 0] = CorruptBatch("the batch at offset 0 has a wrong checksum")
    translation = OffsetTranslation(kafka, "logferry", "dc2")
    with pytest.raises(Problem, match=r"kafka-unavailable: logferry.mirror.dc2.pairs-0 .* dc1.t-0 .* wrong checksum"):
        await translation.to_here(TP, 5)
    assert await translation.cursors_of({TP: 5, ("dc1.t", 1): 50}) == ["dc1.t:1:100"]
