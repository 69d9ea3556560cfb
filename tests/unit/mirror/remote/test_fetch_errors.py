"""Errors of one partition in the answer of a fetch: it stops by name, and is asked for again after a pause."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors
from logferry.gateway.kafka import error_codes
from logferry.gateway.kafka.client import EARLIEST, LATEST
from logferry.gateway.kafka.record_requests import FetchedPartition, FetchRequest, FetchResponse
from logferry.gateway.kafka.requests import ClusterMetadata, PartitionMetadata, TopicMetadata
from logferry.gateway.kafka.types import TopicIdPartition
from logferry.mirror import remote
from logferry.mirror.config import Limits, Remote
from logferry.mirror.copy.partition import MirroredPartition, StopReason
from logferry.mirror.lanes.stops import RetriedStops
from logferry.mirror.remote import MemoryBudget, RemoteCluster

from tests.support.mirror_lane import until
from tests.unit.mirror.remote.test_quiet_partitions import _ID, Broker, follow, running

# As brokers answer while a leader moves, or before they have heard of the topic.
_PASSING = {
    "unknown topic": 3,
    "no leader": 5,
    "another leader": 6,
    "no replica": 9,
    "storage": 56,
    "an older epoch": 74,
    "a newer epoch": 75,
    "no end yet": 78,
    "unknown topic id": 100,
    "another topic id": 103,
}
# Nothing that a later answer or another broker changes by itself.
_REJECTED = {"damaged": 2, "no right": error_codes.TOPIC_AUTHORIZATION_FAILED, "codec": 76, "unheard of": 999}


@pytest.fixture
def link() -> RemoteCluster:
    broker: Any = Broker()
    remote = Remote.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}})

    async def on_topics(*_: object) -> None: ...

    return RemoteCluster(remote, broker, Limits(), MemoryBudget(1 << 20), frozenset(), on_topics)


def answers(link: RemoteCluster, number: int, code: int) -> None:
    broker: Any = link.kafka
    found = FetchedPartition(_ID, number, code, -1, -1, -1, [], memoryview(b""), None)
    broker.answers[""].put_nowait(FetchResponse(0, 7, [found]))


@pytest.mark.parametrize("code", _REJECTED.values(), ids=_REJECTED)
async def test_an_error_of_a_partition_stops_it_alone(link: RemoteCluster, code: int) -> None:
    broker: Any = link.kafka
    with running(link):
        first, second = follow(link, 2)
        await until(lambda: link._fetchers)
        answers(link, 0, code)
        await until(lambda: first.stop is not None)
        assert first.stop is not None
        assert (first.stop.kind, second.stop) == ("fetch-rejected", None)
        assert f"error code {code}" in first.stop.detail
        wanted = link._fetchers[1, False]._session.wanted
        assert (TopicIdPartition(_ID, 0) in wanted, TopicIdPartition(_ID, 1) in wanted) == (False, True)
        assert link.fault is None
        broker.has("", 1, 0)
        await until(lambda: second.position == 1)


@pytest.mark.parametrize("code", _PASSING.values(), ids=_PASSING)
async def test_an_error_that_passes_moves_the_partition_to_its_leader(link: RemoteCluster, code: int) -> None:
    """It is asked for again when the topics were described again, and not before; the others are fetched meanwhile."""
    broker: Any = link.kafka
    may_look, leaders, asked = asyncio.Event(), {0: 1, 1: 1}, list[int]()

    async def describe() -> ClusterMetadata:
        if broker.looks:
            await may_look.wait()
        broker.looks += 1
        views = tuple(PartitionMetadata(number, leader, 0, (1, 2), (1, 2)) for number, leader in leaders.items())
        return ClusterMetadata("there", {}, {"dc1.t": TopicMetadata("dc1.t", _ID, False, views)}, {})

    async def ask(node: int, request: FetchRequest, line: str) -> FetchResponse:
        asked.append(node)
        if node == 2:
            line = "second"
        return await Broker.ask(broker, 1, request, line)

    broker.describe, broker.ask = describe, ask
    broker.answers["second"] = asyncio.Queue()
    with running(link):
        first, second = follow(link, 2)
        await until(lambda: link._fetchers)
        broker.has("", 0, 0)
        await until(lambda: first.position == 1)
        answers(link, 0, code)
        old = link._fetchers[1, False]
        await until(lambda: set(old.partitions) == {second.key})
        assert first.key not in old._session.wanted
        broker.has("", 1, 0)
        await until(lambda: second.position == 1)
        assert set(link._fetchers) == {(1, False)}
        leaders[0] = 2
        may_look.set()
        broker.has("second", 0, 1)
        await until(lambda: first.position == 2)
        assert (first.stop, second.stop, link.fault) == (None, None, None)
        assert [batch.base for batch in first.waiting] == [0, 1]
        assert 2 in asked


async def test_topics_are_described_less_and_less_often_while_brokers_name_other_leaders(
    link: RemoteCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Describing all topics is costly, and the answer to each fetch asks for it: counted by a clock of the test."""
    broker: Any = link.kafka
    pauses: list[float] = []

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        await asyncio.sleep(0)

    async def ask(*_: object) -> FetchResponse:
        await asyncio.sleep(0)
        code = error_codes.NOT_LEADER_OR_FOLLOWER
        return FetchResponse(0, 7, [FetchedPartition(_ID, 0, code, -1, -1, -1, [], memoryview(b""), None)])

    broker.ask = ask
    monkeypatch.setattr(remote, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    with running(link):
        follow(link, 1)
        await until(lambda: sum(pauses) >= 20 or broker.looks > 100)
    assert pauses[:7] == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert broker.looks <= len(pauses) + 1


def test_a_stop_that_comes_again_keeps_its_time() -> None:
    now_ms = 1_000
    stops = RetriedStops(lambda: now_ms)
    tp = ("dc1.t", 0)
    stops.add(tp, StopReason("fetch-rejected", "denied", now_ms))
    for _ in range(3):
        now_ms += 5_001
        assert list(stops.due(lambda _: True, {})) == [tp]
        assert list(stops.due(lambda _: True, {})) == []
        assert stops.add(tp, StopReason("fetch-rejected", "denied", now_ms)).since_ms == 1_000
    now_ms += 5_001
    assert list(stops.due(lambda _: True, {})) == [tp]
    stops.committed(tp)
    assert stops.add(tp, StopReason("fetch-rejected", "denied", now_ms)).since_ms == now_ms


async def test_an_error_of_the_whole_answer_is_asked_again_with_pauses_and_named(link: RemoteCluster) -> None:
    """A session that the broker forgot is opened again at once; what comes again and again is an error."""
    broker: Any = link.kafka
    asked: list[float] = []

    async def ask(*_: object) -> FetchResponse:
        asked.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        return FetchResponse(error_codes.KAFKA_STORAGE_ERROR, 0, [])

    broker.ask = ask
    with running(link):
        follow(link, 1)
        await until(lambda: len(asked) >= 4)
    assert link.fault is not None
    assert "error code 56, KafkaStorageError" in link.fault.reason
    assert asked[1] - asked[0] < 0.1
    assert asked[3] - asked[1] > 0.5


async def test_offsets_that_are_refused_stop_the_partition_instead_of_asking_on_and_on(link: RemoteCluster) -> None:
    broker: Any = link.kafka

    async def offset(*_: object) -> int:
        raise errors.TopicAuthorizationFailedError("dc1.t")

    broker.offset = offset
    with running(link):
        first, second = follow(link, 2)
        await until(lambda: link._fetchers)
        answers(link, 0, error_codes.OFFSET_OUT_OF_RANGE)
        await until(lambda: first.stop is not None)
        assert first.stop is not None
        assert (first.stop.kind, "TopicAuthorizationFailed" in first.stop.detail) == ("fetch-rejected", True)
        assert (second.stop, link.fault) == (None, None)


async def test_an_offset_that_one_broker_alone_does_not_have_is_asked_for_after_a_pause(link: RemoteCluster) -> None:
    """A leader that was deposed, or has not caught up, says so while the leader has the offset."""
    broker: Any = link.kafka
    looked: list[float] = []

    async def offset(_topic: str, _number: int, time_ms: int) -> int:
        looked.append(asyncio.get_running_loop().time())
        return 0 if time_ms == -2 else 9

    broker.offset = offset
    with running(link):
        [first] = follow(link, 1)
        await until(lambda: link._fetchers)
        looks = broker.looks
        for _ in range(2):
            answers(link, 0, error_codes.OFFSET_OUT_OF_RANGE)
        await until(lambda: len(looked) == 4)
        assert looked[2] - looked[1] > 0.15
        assert broker.looks > looks
        assert first.stop is None


async def test_a_broker_that_does_not_answer_is_not_forgotten_when_another_one_does(link: RemoteCluster) -> None:
    broker: Any = link.kafka
    views = tuple(PartitionMetadata(number, number + 1, 0, (1,), (1,)) for number in range(2))
    topics = {"dc1.t": TopicMetadata("dc1.t", _ID, False, views)}
    answered: Counter[int] = Counter()

    async def describe() -> ClusterMetadata:
        return ClusterMetadata("there", {}, dict(topics), {})

    async def ask(node: int, *_: object) -> FetchResponse:
        answered[node] += 1
        if node == 2:
            raise errors.NodeNotReadyError("2")
        await asyncio.sleep(0.01)
        return FetchResponse(0, 7, [])

    broker.describe, broker.ask = describe, ask
    with running(link):
        follow(link, 2)
        await until(lambda: answered[2] > 1 and answered[1] > 20)
        fault = link.fault
        assert fault is not None
        assert (fault.ended_ms, "broker 2" in fault.reason) == (None, True)
        # The broker does not return: its partition has another leader.
        topics["dc1.t"] = TopicMetadata("dc1.t", _ID, False, tuple(view._replace(leader=1) for view in views))
        link.refresh_soon()
        await until(lambda: fault.ended_ms is not None)
        assert link.fault is fault
        assert link._fetchers[2, False].asked_at is None


async def test_where_a_copy_begins_is_reported_if_the_remote_removed_earlier_records(
    link: RemoteCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    broker: Any = link.kafka
    ranges = {EARLIEST: 5, LATEST: 9}

    async def offset(topic: str, number: int, time_ms: int) -> int:
        return ranges[time_ms]

    broker.offset = offset
    with running(link):
        (partition,) = follow(link, 1)
        await until(lambda: link._fetchers)
        answers(link, 0, error_codes.OFFSET_OUT_OF_RANGE)
        await until(lambda: partition.position == 5)
    assert partition.stop is None
    (said,) = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert link.begun_later == {("dc1.t", 0): 5}
    facts = {"topic": "dc1.t", "partition": 0, "dc": "dc1", "first": 5}
    assert said == {"time": said["time"], "level": "warning", "event": "copy_begins_later", **facts}


def replaced(partition: MirroredPartition) -> MirroredPartition:
    """The object of the same partition that takes its place when its copy here was recreated."""
    return MirroredPartition(partition.topic, partition.number, "dc1", _ID, b"m" * 16, 1 << 20, None, int)


async def test_what_was_asked_for_another_object_goes_to_no_partition_that_stopped(link: RemoteCluster) -> None:
    """Both stand at the same offset: a copy that was recreated would begin with records behind those it lacks."""
    broker: Any = link.kafka
    with running(link):
        first, other = follow(link, 2)
        await until(lambda: link._fetchers[1, False]._session.asked if link._fetchers else None)
        link.unfollow(first)
        second = replaced(first)
        second.halt("target-recreated", "it was recreated here")
        link.follow(second)
        broker.has("", 0, 0)
        broker.has("", 1, 0)
        await until(lambda: other.position == 1)
        assert (second.position, second.waiting_bytes, list(second.waiting)) == (0, 0, [])
        # Resumed, it begins where it should.
        second.stop = None
        second.on_change(second)
        await until(lambda: TopicIdPartition(_ID, 0) in link._fetchers[1, False]._session.asked)
        broker.has("", 0, 0)
        await until(lambda: second.position == 1)


async def test_a_partition_that_takes_the_place_of_one_that_is_looked_up_is_fetched(link: RemoteCluster) -> None:
    broker: Any = link.kafka
    may_answer, looks = asyncio.Event(), 0

    async def offset(*_: object) -> int:
        nonlocal looks
        looks += 1
        await may_answer.wait()
        return 5

    broker.offset = offset
    with running(link):
        first, _ = follow(link, 2)
        await until(lambda: link._fetchers)
        answers(link, 0, error_codes.OFFSET_OUT_OF_RANGE)
        await until(lambda: looks)
        await until(lambda: TopicIdPartition(_ID, 0) not in link._fetchers[1, False]._session.asked)
        stops: list[StopReason | None] = []
        first.on_stop = lambda one: stops.append(one.stop)
        link.unfollow(first)
        second = replaced(first)
        link.follow(second)
        may_answer.set()
        await until(lambda: TopicIdPartition(_ID, 0) in link._fetchers[1, False]._session.asked)
        assert (first.position, stops, second.stop) == (0, [], None)
        broker.has("", 0, 0)
        await until(lambda: second.position == 1)
