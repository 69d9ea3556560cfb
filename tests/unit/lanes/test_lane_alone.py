"""What one lane does by itself: it stops where its states cannot be read, and asks before it calls a duplicate one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiokafka import errors
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import FENCE_KEY, SourceIdentity, SourceState
from logferry.gateway.errors import LaneLost, LaneMoved, LaneUnreadable, Problem
from logferry.gateway.kafka.record_batch import CorruptBatch, KafkaRecord
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes import lifecycle
from logferry.gateway.lanes.lane import Lane, replay
from logferry.gateway.lanes.transaction import WriteChunks, WriteOutcome
from logferry.gateway.topics.catalog import TopicCatalog

from tests.support.lane_requests import FixedLanes

TOPIC = TopicFacts("dc1.t", b"i" * 16, 2, 1 << 20)
WEB = SourceIdentity("dc1.t", None, "web")
NOW = 1_700_000_000_000
STATE = SourceState(TOPIC.id, 0, 5, None, 0, NOW).encode()


NO_KAFKA: Any = SimpleNamespace(clock=BrokerClock())


class StateTopic:
    """The records of a lane's partition, as a Kafka client reads them."""

    def __init__(self, *records: tuple[bytes, bytes | None], corrupt: bool = False) -> None:
        self.records, self.corrupt = list(records), corrupt

    async def offset(self, topic: str, partition: int, time_ms: int) -> int:
        return 0 if time_ms == -2 else len(self.records)

    def forget_leader(self, topic: str, partition: int) -> None:
        """The next call asks the true leader."""

    async def fetch(self, topic: str, partition: int, position: int, *, max_bytes: int) -> Any:
        if self.corrupt:
            raise CorruptBatch("the batch at offset 0 has a wrong checksum")
        found = [KafkaRecord(number, NOW, key, value, []) for number, (key, value) in enumerate(self.records)]
        return SimpleNamespace(records=found[position:], next_offset=len(found))


NEWER = b"\x09" + STATE[1:]


UNKNOWN_FLAG = b"\x01\x21" + STATE[2:]


@pytest.mark.parametrize(
    "value",
    [NEWER, b"", b"\x01", STATE[:20], STATE + b"tail", b"\x01\x04" + STATE[2:], b"\x01\x09" + STATE[2:], UNKNOWN_FLAG],
    ids=repr,
)
async def test_a_state_that_cannot_be_decoded_stops_the_lane_by_its_offset(value: bytes) -> None:
    with pytest.raises(LaneUnreadable, match=r"state-3: the record at offset 1 .*--forget 3:1"):
        await replay(StateTopic((WEB.state_key(), STATE), (b"sdc1.t\0other", value)), "state", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [b"sdc1.t\0\xff", b"kdc1.t\0\xff\0web", b"s\xff\0web"], ids=repr)
async def test_a_state_key_that_is_not_utf8_stops_the_lane_until_it_is_forgotten(key: bytes) -> None:
    """It would end the worker later, where the source expires or is listed."""
    topic: Any = StateTopic((WEB.state_key(), STATE), (key, STATE))
    with pytest.raises(LaneUnreadable, match=r"state-3: the record at offset 1 .*--forget 3:1"):
        await replay(topic, "state", 3)
    topic.records.append((key, None))
    assert (await replay(topic, "state", 3)).state_keys() == [WEB.state_key()]


class FrozenLeader(StateTopic):
    """Its end is before the last states for so many questions: a broker that was frozen and has not noticed it yet."""

    def __init__(self, *records: tuple[bytes, bytes | None], asked: int) -> None:
        super().__init__(*records)
        self.now, self.records, self.asked = self.records, self.records[:1], asked

    def forget_leader(self, topic: str, partition: int) -> None:
        self.asked -= 1
        if not self.asked:
            self.records = self.now


async def test_a_leader_without_the_record_of_the_fence_is_not_believed() -> None:
    other = SourceIdentity("dc1.t", None, "other")
    records = [(WEB.state_key(), STATE), (other.state_key(), STATE), (FENCE_KEY, None)]
    table = await replay(FrozenLeader(*records, asked=3), "state", 3, up_to=len(records))  # type: ignore[arg-type]
    assert len(table) == 2


@pytest.mark.parametrize("later", [None, STATE])
async def test_a_later_record_of_the_key_mends_it(later: bytes | None) -> None:
    topic = StateTopic((WEB.state_key(), NEWER), (WEB.state_key(), later))
    assert len(await replay(topic, "state", 3)) == (0 if later is None else 1)  # type: ignore[arg-type]


async def test_a_corrupt_batch_stops_the_lane() -> None:
    with pytest.raises(LaneUnreadable, match="wrong checksum"):
        await replay(StateTopic((b"x", b"y"), corrupt=True), "state", 3)  # type: ignore[arg-type]


def make_lane(confirm: Callable[[int], Awaitable[None]], kind: type[Lane] = Lane) -> Lane:
    config = Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}})
    topics: Any = TopicCatalog(NO_KAFKA, config)

    async def is_the_same(partitions: Any) -> dict[str, bytes]:
        return {"dc1.t": TOPIC.id}

    topics.confirm = is_the_same
    return kind(
        number=0,
        config=config,
        kafka=NO_KAFKA,
        topics=topics,
        lanes=FixedLanes(NO_KAFKA, config),
        confirm_ownership=confirm,
    )


def serving_lane(confirm: Callable[[int], Awaitable[None]]) -> Lane:
    lane = make_lane(confirm)
    for state in ("fencing", "replaying", "serving"):
        lane.lane_state.enter(state)
    return lane


async def answer_of_a_duplicate(lane: Lane) -> Any:
    lane.table.apply(WEB.state_key(), STATE)
    answer = lane.submit(WriteChunks(TOPIC, WEB, None, [Chunk(5, None, None, {}, b"x")], 10))
    await lane._draft()
    return await asyncio.wait_for(answer, 60)


async def test_the_owner_acknowledges_a_duplicate() -> None:
    async def ours(_: int) -> None:
        return

    answered = await answer_of_a_duplicate(serving_lane(ours))
    assert isinstance(answered.outcome, WriteOutcome)
    assert answered.outcome.duplicates == 1


@pytest.mark.parametrize(
    ("error", "raised"), [(LaneLost("another worker has it"), LaneMoved), (errors.KafkaConnectionError(), Problem)]
)
async def test_who_may_have_lost_the_lane_acknowledges_no_duplicate(error: Exception, raised: type[Problem]) -> None:
    """Another worker may have forgotten the source meanwhile: the chunk would be lost."""

    async def not_ours(_: int) -> None:
        raise error

    with pytest.raises(raised):
        await answer_of_a_duplicate(serving_lane(not_ours))


async def test_no_token_fills_a_lane_for_the_others() -> None:
    lane = serving_lane(lambda _: asyncio.sleep(0))
    limit, size = lane.config.limits.lane_bytes, 1 << 20

    def write(token: str) -> WriteChunks:
        return WriteChunks(TOPIC, WEB, None, [Chunk(5, None, None, {}, b"x")], size, token)

    for _ in range(limit * 7 // 10 // size):
        lane.submit(write("greedy"))
    for _ in range(limit // 5 // size):
        with suppress(Problem):
            lane.submit(write("greedy"))
    with pytest.raises(Problem, match=r"overloaded: lane 0 has \d+ bytes waiting, \d+ of this token"):
        lane.submit(write("greedy"))
    assert lane.queued_bytes < limit * 0.85
    lane.submit(write("other"))
    await lane._draft()


async def test_many_duplicates_share_one_confirmation() -> None:
    asked, gate = 0, asyncio.Event()

    async def slow(_: int) -> None:
        nonlocal asked
        asked += 1
        await gate.wait()

    lane = serving_lane(slow)
    lane.table.apply(WEB.state_key(), STATE)
    answers = []
    for _ in range(50):
        answers.append(lane.submit(WriteChunks(TOPIC, WEB, None, [Chunk(5, None, None, {}, b"x")], 10)))
        await lane._draft()
        await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(asyncio.gather(*answers), 60)
    assert asked == 2, "one that was under way, and one for all that came meanwhile"


async def test_a_lane_that_cannot_be_read_refuses_and_serves_again_when_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "STOPPED_S", 0.05)
    is_mended, opened = False, asyncio.Event()

    class Alone(Lane):
        def make_producer(self) -> Any:
            return Mock(fence=AsyncMock(), discard=AsyncMock(), producers={})

        async def replay(self, producer: Any) -> None:
            if not is_mended:
                raise LaneUnreadable("state-0: the record at offset 7 cannot be decoded")

        def opened(self) -> dict[str, Any]:
            opened.set()
            return {}

    async def ours(_: int) -> None:
        return

    lane = make_lane(ours, Alone)
    running = asyncio.create_task(lane.run())
    try:
        async with asyncio.timeout(60):
            while True:
                if lane.state == "stopped":
                    break
                await asyncio.sleep(0.01)
        assert lane.lane_state.error == "state-0: the record at offset 7 cannot be decoded"
        with pytest.raises(Problem, match="lane 0 is stopped"):
            lane.submit(WriteChunks(TOPIC, WEB, None, [Chunk(5, None, None, {}, b"x")], 10))
        is_mended = True
        await asyncio.wait_for(opened.wait(), 60)
        assert not running.done()
    finally:
        lane.close()
        await asyncio.wait_for(running, 60)
