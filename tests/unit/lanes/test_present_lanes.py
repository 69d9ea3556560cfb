"""The number of lanes as a lane and a worker see it, while it changes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from logferry.gateway.api.sources import SourcesApi
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import FENCE_KEY, SourceIdentity, SourceState
from logferry.gateway.errors import LaneLost, LaneMoved
from logferry.gateway.kafka.record_batch import FetchedRecords, KafkaRecord
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes import lifecycle
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.transaction import SessionOutcome, WriteChunks, WriteOutcome
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.gateway.topics.present_lanes import PresentLanes

from tests.support.lane_requests import FixedLanes

CONFIG = Config.model_validate({"dc": "dc1", "lanes": 4, "kafka": {"bootstrap_servers": "127.0.0.1:1"}})
TOPIC = TopicFacts("dc1.t", b"i" * 16, 2, 1 << 20)
SOURCES = [SourceIdentity("dc1.t", None, f"s{number}") for number in range(40)]
MINE = next(source for source in SOURCES if lane_of(source.key, 2) == 0)
MOVED = next(source for source in SOURCES if lane_of(source.key, 2) == 1)
# Before the first record, the number is what one lane knows of itself in these tests.
TWO = LaneCount(2, 1, 2)


class CountTopic:
    """The topic of the number, and the coordinator of a change, as a Kafka client shows them."""

    def __init__(self, *counts: LaneCount | None) -> None:
        self.counts, self.clock, self.is_there = list(counts), BrokerClock(), bool(counts)
        self.state, self.start_ms, self.timeout_ms = "Empty", 1, 60_000

    async def describe(self, topics: list[str]) -> Any:
        return SimpleNamespace(topics=dict.fromkeys(topics) if self.is_there else {}, errors={})

    async def offset(self, topic: str, partition: int, time_ms: int) -> int:
        return 0

    async def fetch(self, topic: str, partition: int, position: int, *, max_bytes: int) -> FetchedRecords:
        records = [
            KafkaRecord(at, 0, FENCE_KEY if count is None else COUNT_KEY, count and count.encode(), [])
            for at, count in enumerate(self.counts)
        ]
        return FetchedRecords(records[position:], len(records), len(records))

    async def with_coordinator(self, name: str, ask: Any, kind: Any) -> Any:
        async def send(request: Any) -> Any:
            return SimpleNamespace(states=[(0, name, self.state, self.timeout_ms, self.start_ms, 1, 1, [], {})])

        return await ask(send)


async def test_it_is_that_of_the_configuration_until_there_is_a_record_and_then_the_newest() -> None:
    kafka: Any = CountTopic()
    lanes = PresentLanes(kafka, CONFIG)
    assert await lanes.read() == LaneCount(4, 4, 0)
    kafka.is_there, kafka.counts = True, [None, LaneCount(4, 4, 1), LaneCount(7, 4, 2)]
    assert await lanes.read() == LaneCount(7, 4, 2)
    kafka.counts.append(LaneCount(3, 7, 3))
    assert (await lanes.read()).lanes == lanes.number() == 3
    lanes.take(LaneCount(7, 4, 2))
    assert lanes.number() == 3


async def test_a_change_is_news_and_the_first_record_is_none() -> None:
    kafka: Any = CountTopic()
    lanes, changes = PresentLanes(kafka, CONFIG), list[int]()
    heard = asyncio.Event()

    def changed() -> None:
        changes.append(lanes.number())
        heard.set()

    watching = asyncio.create_task(lanes.watch(changed))
    lanes.take(LaneCount(4, 4, 1))
    await asyncio.sleep(0.05)
    lanes.take(LaneCount(9, 4, 2))
    await asyncio.wait_for(heard.wait(), 60)
    watching.cancel()
    assert changes == [9]


async def test_a_change_is_waited_for_no_longer_than_it_may_take() -> None:
    kafka: Any = CountTopic()
    lanes = PresentLanes(kafka, CONFIG)
    assert not await lanes.is_changing()
    kafka.state = "Ongoing"
    assert await lanes.is_changing()
    kafka.start_ms, kafka.timeout_ms = 2, 1
    await lanes.is_changing()
    await asyncio.sleep(0.01)
    assert not await lanes.is_changing()
    kafka.start_ms, kafka.timeout_ms = 3, 60_000
    assert await lanes.is_changing()


def lane_of_one(lanes: type[PresentLanes] = FixedLanes) -> Lane:
    kafka: Any = SimpleNamespace(clock=BrokerClock())

    async def ours(_: int) -> None:
        return

    topics = TopicCatalog(kafka, CONFIG)
    made = Lane(number=0, config=CONFIG, kafka=kafka, topics=topics, lanes=lanes(kafka, CONFIG), confirm_ownership=ours)
    for state in ("fencing", "replaying", "serving"):
        made.lane_state.enter(state)
    return made


def write(source: SourceIdentity) -> WriteChunks:
    return WriteChunks(TOPIC, source, None, [Chunk(5, None, None, {}, b"x")], 10)


async def test_a_lane_writes_no_source_that_its_replay_gives_to_another_lane() -> None:
    lane = lane_of_one()
    mine, moved = lane.submit(write(MINE)), lane.submit(write(MOVED))
    lane.table.apply(COUNT_KEY, TWO.encode())
    draft = await lane._draft()
    assert (draft.touches(MINE), draft.touches(MOVED)) == (True, False)
    with pytest.raises(LaneMoved, match="not-owner-yet"):
        await moved
    assert not mine.done()


async def test_what_was_under_way_for_a_source_that_moved_is_unknown_here() -> None:
    """Its state is in another lane now. Not to find it says nothing."""
    lane = lane_of_one()
    mine, moved = lane.submit(write(MINE)), lane.submit(write(MOVED))
    draft = await lane._draft()
    assert draft.touches(MOVED)
    replayed = SourceTable()
    replayed.apply(COUNT_KEY, TWO.encode())
    replayed.apply(MINE.state_key(), SourceState(TOPIC.id, 0, 5, None, 0, draft.now_ms).encode())
    lane.table = replayed
    lane.opened()
    assert isinstance((await mine).outcome, WriteOutcome | SessionOutcome)
    with pytest.raises(LaneMoved, match="outcome-unknown"):
        await moved
    assert lane.lanes.count == TWO


async def test_a_lane_that_missed_the_change_refuses_nothing_by_what_it_knew() -> None:
    class Changed(FixedLanes):
        async def read(self) -> LaneCount:
            self.take(TWO)
            return self.count

    lane = lane_of_one(Changed)
    with pytest.raises(LaneMoved):
        await lane.confirm(lane.table, MINE.key)


async def test_a_lane_says_nothing_of_a_source_that_its_replay_gives_to_another_lane() -> None:
    """The request was on its way here before. That there is nothing here does not mean that there is nothing."""
    lane = lane_of_one()
    lane.table.apply(COUNT_KEY, TWO.encode())
    lane.lanes.take(TWO)
    await lane.confirm(lane.table, MINE.key)
    with pytest.raises(LaneMoved, match="another lane"):
        await lane.confirm(lane.table, MOVED.key)
    worker: Any = Mock(spec=SourcesApi, topics=Mock(facts=AsyncMock(return_value=TOPIC)), ownership=Mock(url="w"))
    assert (await SourcesApi._get(worker, Mock(), MINE, lane)).status == 200
    with pytest.raises(LaneMoved, match="another lane"):
        await SourcesApi._get(worker, Mock(), MOVED, lane)


async def test_a_lane_is_not_opened_while_the_number_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "CHANGING_S", 0.001)

    class Changing(FixedLanes):
        left = 5

        async def is_changing(self) -> bool:
            self.left -= 1
            return self.left > 0

    lane = lane_of_one(Changing)
    await lane.may_open()
    assert isinstance(lane.lanes, Changing)
    assert (lane.lanes.left, lane.state, lane.why) == (0, "opening", "the number of lanes is being changed")
    lane.lanes.left = 5
    lane.close()
    with pytest.raises(LaneLost):
        await lane.may_open()


def test_the_first_record_moves_nothing_and_each_later_one_does() -> None:
    counts = [LaneCount(4, 4, 0), LaneCount(4, 4, 1), LaneCount(8, 4, 2), LaneCount(4, 8, 3)]
    alike = {(a.epoch, b.epoch) for a in counts for b in counts if a.is_as(b)}
    assert alike == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (3, 3)}
