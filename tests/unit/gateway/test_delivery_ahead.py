"""What push delivery does ahead: pages that are fetched before they are read, and commits that wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from aiokafka import errors
from logferry.gateway.contract.delivery_state import DeliveryState, UnitKey
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.delivery.batch import ROW_BYTES, BatchShape
from logferry.gateway.delivery.lane import DeliveryLane
from logferry.gateway.delivery.pages import BatchRoom, PlannedRows, TopicPages, next_batch
from logferry.gateway.delivery.progress import replayed
from logferry.gateway.delivery.unit import DeliveryUnit, UnitServices
from logferry.gateway.kafka.record_batch import FetchedRecords
from logferry.gateway.kafka.transactional_producer import NotCommitted
from logferry.gateway.reading.formats import Row
from logferry.gateway.subscriptions import PushSubscription, StoredSubscription
from logferry.gateway.topics.health import PartitionHealth

TP: TopicPartition = ("dc1.app", 0)


class Fetches:
    """Pages of ten offsets; each fetch ends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ends: dict[int, asyncio.Future[None]] = {}

    async def fetch(self, topic: str, partition: int, offset: int, **limits: int) -> FetchedRecords:
        self.begun.append(offset)
        self.ends[offset] = asyncio.get_running_loop().create_future()
        await self.ends[offset]
        return FetchedRecords([], offset + 10, 1000)

    async def end(self, offset: int) -> None:
        self.ends[offset].set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)


def pages_of(fetches: Fetches, kept_bytes: int = 64 << 20) -> TopicPages:
    pages = TopicPages(fetches, kept_bytes)  # type: ignore[arg-type]
    pages.follow(TP)
    pages.ends[TP] = 1000
    return pages


async def read(pages: TopicPages, fetches: Fetches, offset: int) -> None:
    reading = asyncio.create_task(pages.read(TP, offset))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if not reading.done():
        await fetches.end(offset)
    await reading


async def test_two_pages_are_fetched_ahead_and_no_further() -> None:
    fetches = Fetches()
    pages = pages_of(fetches)
    await read(pages, fetches, 0)
    await asyncio.sleep(0)
    assert fetches.begun == [0, 10]
    await fetches.end(10)
    await fetches.end(20)
    assert fetches.begun == [0, 10, 20]
    await read(pages, fetches, 10)
    await asyncio.sleep(0)
    assert fetches.begun == [0, 10, 20, 30]


async def test_nothing_is_fetched_ahead_at_the_end_or_without_room() -> None:
    fetches = Fetches()
    pages = pages_of(fetches, 1 << 20)
    await read(pages, fetches, 0)
    at_end = pages_of(fetches)
    at_end.ends[TP] = 110
    await read(at_end, fetches, 100)
    await asyncio.sleep(0)
    assert fetches.begun == [0, 100]


async def test_a_page_whose_topic_is_forgotten_meanwhile_is_not_kept() -> None:
    """It may be of the topic before this one."""
    fetches = Fetches()
    pages = pages_of(fetches)
    await read(pages, fetches, 0)
    await asyncio.sleep(0)
    pages.forget(["dc1.app"])
    await fetches.end(10)
    pages.ends[TP] = 1000
    await read(pages, fetches, 10)
    assert fetches.begun[:3] == [0, 10, 10]


def rows_of(size: int) -> list[Row]:
    return [("dc1", *TP, 0, "s", 1, None, 1, 1, {}, bytes(size - ROW_BYTES))]


async def test_a_batch_that_waits_for_memory_gets_it_before_those_behind_it() -> None:
    """Otherwise they hold it, and nothing of the partition is ever sent."""
    room = BatchRoom(1000)
    planned = PlannedRows(room, "name")
    reads = 0

    async def read() -> list[Row]:
        nonlocal reads
        reads += 1
        return rows_of(250)

    assert room.try_take("name", 500)  # of another partition
    assert planned.keep(20, rows_of(250))
    async with asyncio.timeout(60):
        assert await planned.get(10, read) == rows_of(250)
    assert (room.used, reads) == (750, 2)
    planned.give(rows_of(250))
    assert room.try_take("name", 200)
    first = asyncio.create_task(planned.get(20, read))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not planned.has_room(1)
    assert not planned.keep(30, rows_of(110))
    room.give("name", 700)
    async with asyncio.timeout(60):
        assert await first == rows_of(250)
    assert (room.used, reads) == (250, 4)
    assert planned.keep(30, rows_of(110))
    planned.drop()
    assert room.used == 250


async def test_room_is_given_back_when_the_second_read_fails() -> None:
    room = BatchRoom(1000)
    planned, reads = PlannedRows(room, "name"), iter([rows_of(600), None])
    assert room.try_take("name", 500)

    async def read() -> list[Row]:
        if (rows := next(reads)) is None:
            raise ConnectionResetError
        return rows

    first = asyncio.create_task(planned.get(10, read))
    await asyncio.sleep(0)
    room.give("name", 500)
    with pytest.raises(ConnectionResetError):
        await first
    assert room.used == 0


async def test_that_there_is_nothing_to_read_now_is_reported_before_the_wait() -> None:
    fetches, waits = Fetches(), list[int]()
    pages = pages_of(fetches)
    shape = BatchShape(PushSubscription(topics=["dc1.app"], url="https://example.org/").shape, 0)

    def cut(start: int) -> asyncio.Task[Any]:
        return asyncio.create_task(next_batch(pages, TP, start, shape, 1000, 1.0, lambda: waits.append(start)))

    at_end, before = cut(1000), cut(980)
    for _ in range(5):
        await asyncio.sleep(0)
    await fetches.end(980)
    assert waits == [1000]
    await fetches.end(990)
    assert await before == (1000, [])
    at_end.cancel()


STATE = DeliveryState("id", b"t" * 16, 1, 0)
DEFINITION = PushSubscription(topics=["dc1.app"], url="https://example.org/")
STORED = StoredSubscription(id="id", created_ms=1, definition=DEFINITION)


def unit_of(
    wanted: DeliveryState,
    committed: DeliveryState,
    pages: TopicPages,
    mark: Callable[[DeliveryUnit], None],
    kafka: Any = None,
) -> DeliveryUnit:
    """A unit that nobody has started, without a receiver."""
    nothing: Any = None
    return DeliveryUnit(
        key=UnitKey("name", *TP),
        subscription=STORED,
        sender=nothing,
        services=UnitServices(kafka, pages, BatchRoom(1), nothing, nothing),
        topic_id=STATE.topic_id,
        wanted=wanted,
        committed=committed,
        mark=mark,
    )


def test_plans_are_due_when_no_other_follows_at_once() -> None:
    """At the end of the data a batch is not kept back until there are more."""
    marked: list[DeliveryUnit] = []
    nothing: Any = None
    unit = unit_of(STATE._replace(ends=(10,)), STATE, nothing, marked.append)
    unit._is_planning = True
    assert unit.may_wait
    unit._planning_waits()
    assert marked == [unit]
    assert not unit.may_wait


async def test_plans_are_due_when_the_next_one_is_late() -> None:
    """A filter that lets little pass, or a broker that does not answer, keeps no batch back that could be sent."""
    due, pages, shape = asyncio.Event(), pages_of(Fetches()), DEFINITION.shape
    wanted, committed = STATE._replace(ends=(10,), shape=shape), STATE._replace(shape=shape)
    unit = unit_of(wanted, committed, pages, lambda _: due.set())
    planning = asyncio.create_task(unit._plan())
    await asyncio.sleep(0)
    assert unit.may_wait
    async with asyncio.timeout(60):
        await due.wait()
    assert not unit.may_wait
    planning.cancel()


async def test_what_was_cut_before_a_replay_moves_no_position() -> None:
    """It ended in the moment of the replay: what lies between would be passed over."""
    fetches = Fetches()
    pages = pages_of(fetches)
    pages.ends[TP] = 10
    unit = unit_of(STATE, STATE, pages, lambda _: None)

    def replay(_: object) -> None:
        pages.forget([TP[0]])  # what follows is read again, which this test does not wait for
        unit._begin_turn()
        unit.wanted = replayed(unit.wanted, 1, STATE.topic_id, 3)

    planning = asyncio.create_task(unit._plan())
    for _ in range(5):
        await asyncio.sleep(0)
    assert unit._cutting is not None
    unit._cutting.add_done_callback(replay)
    await fetches.end(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (unit.wanted.replay, unit.wanted.position) == (1, 3)
    planning.cancel()


@pytest.mark.parametrize("found", [b"t" * 16, b"u" * 16], ids=["the same", "recreated"])
async def test_a_planned_batch_that_is_read_again_is_of_the_topic_of_its_plan(found: bytes) -> None:
    class Topic(Fetches):
        async def ids_at_leaders(self, tps: object) -> dict[str, bytes]:
            return {TP[0]: found}

    topic = Topic()
    state = STATE._replace(ends=(10,), shape=DEFINITION.shape)
    unit = unit_of(state, state, pages_of(topic), lambda _: None, topic)
    reading = asyncio.create_task(unit._rows(state))
    for _ in range(5):
        await asyncio.sleep(0)
    await topic.end(0)
    if found == STATE.topic_id:
        assert await reading == []
    else:
        with pytest.raises(errors.UnknownTopicOrPartitionError):
            await reading


class Marked:
    """A unit. ``meanwhile``: called when a transaction takes its state."""

    letters: ClassVar[list[Any]] = []
    committed = STATE

    def __init__(self, may_wait: bool, meanwhile: Callable[[Marked], None] = lambda _: None) -> None:
        self.may_wait, self._meanwhile = may_wait, meanwhile

    @property
    def wanted(self) -> DeliveryState:
        self._meanwhile(self)
        return STATE


@pytest.fixture
def lane() -> Any:
    async def confirm(number: int) -> None:
        pass

    nothing: Any = None
    return DeliveryLane(number=0, confirm_ownership=confirm, config=nothing, services=nothing, view=nothing)


async def test_a_commit_that_may_wait_is_made_with_the_next_one_or_in_time(lane: Any) -> None:
    late, soon = Marked(True), Marked(False)
    lane._mark(late)
    assert not lane.has_work
    assert lane._timer.when() - asyncio.get_running_loop().time() <= 1.0
    lane._mark(soon)
    assert lane.has_work
    assert lane._unmark() == [late, soon]
    assert not lane.has_work


async def test_what_was_due_during_a_transaction_may_wait_after_it(lane: Any) -> None:

    def delivers(unit: Marked) -> None:
        lane._mark(unit)
        unit.may_wait = True

    lane._mark(Marked(False, delivers))
    await lane.transact(None)
    assert not lane.has_work
    assert lane._timer is not None
    lane._mark(Marked(False, lane._mark))
    await lane.transact(None)
    assert lane.has_work


async def test_a_lane_that_is_given_away_commits_what_is_done(lane: Any) -> None:
    """The next owner need not send it again."""
    lane._mark(Marked(True))
    lane.close()
    assert lane.has_work
    lane._unmark()
    lane._mark(Marked(False))
    assert not lane.has_work


async def test_the_state_of_a_subscription_that_is_made_again_is_not_forgotten(lane: Any) -> None:
    """Its removal waits for the next transaction: in it the new state would be deleted after it is written."""
    key = UnitKey("name", *TP)
    view = SimpleNamespace(subscriptions={}, is_known=True, sender=lambda _: None, is_gone=lambda _: True)
    view.topics_of = lambda _: [SimpleNamespace(name=TP[0], partitions=[0], id=STATE.topic_id)]
    lane.config, lane.view, lane._states = SimpleNamespace(lanes=1), view, {key: STATE}
    lane.lane_state.state = "serving"
    lane.adopt()
    assert list(lane._forgotten) == [key]
    view.subscriptions = {"name": STORED}
    lane.units[key] = SimpleNamespace(wanted=STATE, change=lambda *_: None)
    lane.adopt()
    assert not lane._forgotten


def test_a_topic_of_dead_letters_that_is_rejected_is_left_out_for_a_while(lane: Any) -> None:
    """Else the lane would fail with it again and again, and so would what it has of all other subscriptions."""
    letters, state = ("dc1.letters", 0), ("state", 0)
    lane.config = SimpleNamespace(state_topic=state[0])
    lane.view = SimpleNamespace(health=PartitionHealth())
    lane.failed(NotCommitted("not authorized", refused=letters))
    lane.failed(NotCommitted("no answer", unavailable={("dc1.letters", 1): "it is away"}))
    lane.failed(NotCommitted("not authorized", refused=state))
    lane.failed(ValueError())
    found = lane.view.health.refused()
    assert {tp: known.why for tp, known in found.items()} == {letters: "not authorized", (letters[0], 1): "it is away"}
