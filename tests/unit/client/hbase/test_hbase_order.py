"""A region waits for the last edits of the regions that it came out of, and at most for two minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from logferry.client.hbase import delivery
from logferry.client.hbase.delivery import LONGEST_S, NotDelivered, ParentOrder
from logferry.client.hbase.frames import CallFailed
from logferry.client.hbase.master import ParentRegion
from logferry.client.hbase.zookeeper import Unanswered

GRANDPARENT, PARENT, CHILD, OTHER = "g" * 32, "p" * 32, "c" * 32, "o" * 32
TABLE = "orders"


class World:
    """What HBase and the gateway say; the time passes by waiting alone. ``asked``: how often hbase:meta was."""

    def __init__(self) -> None:
        self.parents: dict[str, tuple[ParentRegion, ...]] = {
            PARENT: (),
            OTHER: (),
            CHILD: (ParentRegion(PARENT, opened=100, end=225),),
        }
        self.pushed: dict[str, int | None] = {}
        self.recorded: dict[str, int] = {}
        self.failure: Exception | None = None
        self.asked = 0
        self.looked = 0
        self.time = 1000.0
        self.at_pause: Callable[[], object] = lambda: None
        self.order = ParentOrder(self._parents, self._pushed, self._recorded, self._pause, self._now)

    def _now(self) -> float:
        self.time += 1e-6  # no two looks at a clock are the same
        return self.time

    def _parents(self, table: str) -> dict[str, tuple[ParentRegion, ...]]:
        assert table == TABLE
        self.asked += 1
        if self.failure:
            raise self.failure
        return dict(self.parents)

    def _pushed(self, region: str) -> int | None:
        self.looked += 1
        return self.pushed.get(region, -1)

    def _recorded(self, table: str, region: str) -> int:
        return self.recorded.get(region, 0)

    def _pause(self, seconds: float) -> bool:
        self.time += seconds
        self.at_pause()
        return False

    def refusal(self, region: str = CHILD) -> str:
        """Empty: it is not refused."""
        try:
            self.order.check(TABLE, region)
        except NotDelivered as error:
            return str(error)
        return ""


@pytest.fixture
def world() -> World:
    return World()


def test_a_region_whose_parent_is_not_shipped_is_refused_after_a_short_wait(world: World) -> None:
    world.pushed[PARENT] = 200
    assert world.refusal() == f"region {CHILD} waits for its parent {PARENT}, shipped to 200 of 224"
    assert 1003 <= world.time < 1004
    world.pushed[PARENT] = 223
    assert world.refusal()
    world.pushed[PARENT] = 224
    assert world.refusal() == ""


def test_a_parent_that_is_shipped_meanwhile_costs_no_refusal(world: World) -> None:
    world.at_pause = lambda: world.pushed.update({PARENT: 224})
    assert world.refusal() == ""


def test_a_parent_is_finished_when_its_last_edit_is_recorded(world: World) -> None:
    """HBase ships both in one piece, and counts the parent as shipped only when the child is, too."""
    world.recorded[PARENT] = 219
    assert world.refusal()
    world.recorded[PARENT] = 220
    assert world.refusal() == ""


def test_what_was_recorded_before_the_last_opening_says_nothing_of_the_end(world: World) -> None:
    """A server that died left 220 in its log; then the region was opened at 222, and closed at once."""
    world.parents[CHILD] = (ParentRegion(PARENT, opened=222, end=225),)
    world.recorded[PARENT] = 220
    assert world.refusal()


def test_all_parents_have_to_be_finished_and_theirs(world: World) -> None:
    world.parents[CHILD] = (ParentRegion(OTHER, 2, 9), ParentRegion(PARENT, 2, 9))
    world.parents[PARENT] = (ParentRegion(GRANDPARENT, 2, 7),)
    world.pushed = {OTHER: 8, PARENT: 8, GRANDPARENT: 5}
    assert f"its parent {GRANDPARENT}, shipped to 5 of 6" in world.refusal()
    world.pushed[GRANDPARENT] = 6
    assert world.refusal() == ""


def test_regions_without_parents_or_without_a_row_are_recorded_at_once(world: World) -> None:
    assert [world.refusal(region) for region in (OTHER, PARENT, "n" * 32)] == ["", "", ""]
    assert (world.asked, world.looked) == (2, 0), "PARENT was known from the answer for OTHER"
    assert world.time < 1000.1


def test_a_settled_region_costs_nothing(world: World) -> None:
    world.pushed[PARENT] = 224
    world.order.check(TABLE, CHILD)
    before = world.asked, world.looked
    for region in (CHILD, OTHER) * 5:
        world.order.check(TABLE, region)
    assert (world.asked, world.looked) == before


def test_barriers_that_hbase_has_cleared_are_waited_for_no_more(world: World) -> None:
    """It clears them, and how far it has shipped, when the parent is finished for all peers."""
    assert world.refusal()
    world.parents[CHILD] = ()
    assert world.refusal() == ""


def test_ids_that_hbase_keeps_elsewhere_hold_nothing_back(world: World) -> None:
    world.pushed[PARENT] = None
    assert world.refusal() == ""


def test_a_region_waits_for_a_bounded_time(world: World, caplog: pytest.LogCaptureFixture) -> None:
    assert world.refusal()
    world.time += LONGEST_S - 10
    assert world.refusal()
    assert "hbase-order-unknown" not in caplog.text
    world.time += 10
    assert world.refusal() == ""
    assert f"hbase-order-unknown table=orders region={CHILD}" in caplog.text
    assert f"waits for its parent {PARENT}" in caplog.text
    assert world.refusal() == ""


def test_an_hbase_that_does_not_answer_is_waited_for(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.failure = Unanswered("ZooKeeper is away")
    assert world.refusal() == f"region {CHILD} waits to know its parents: ZooKeeper is away"
    world.time += LONGEST_S
    assert world.refusal() == ""
    assert "hbase-order-unknown" in caplog.text
    world.failure = None
    assert world.refusal(OTHER) == ""


def test_a_meta_that_may_not_be_read_holds_nothing_back(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.failure = CallFailed("AccessDeniedException", "no")
    assert world.refusal() == ""
    assert "hbase-order-unknown" in caplog.text


def test_waiting_regions_leave_threads_for_the_parents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_MOST_WAITING", 2)
    go, waiting = threading.Event(), threading.Semaphore(0)
    children = [str(number) * 32 for number in range(5)]
    found = {child: (ParentRegion(PARENT, 2, 9),) for child in children}

    def pause(seconds: float) -> bool:
        waiting.release()
        return go.wait(60)

    order = ParentOrder(lambda table: found, lambda region: 7, lambda table, region: 0, pause)
    with ThreadPoolExecutor(5) as pool:
        calls = [pool.submit(order.check, TABLE, child) for child in children[:2]]
        assert waiting.acquire(timeout=60)
        assert waiting.acquire(timeout=60)
        for child in children[2:]:  # in this thread: they do not wait
            with pytest.raises(NotDelivered, match="waits for its parent"):
                order.check(TABLE, child)
        assert not any(call.done() for call in calls)
        go.set()
        for call in calls:
            with pytest.raises(NotDelivered):
                call.result(60)


def test_threads_that_ask_at_a_time_share_the_answer_also_a_missing_one(world: World) -> None:
    """Each would wait for the timeout of a dead server, after the others."""
    asked, began, go = [], threading.Event(), threading.Event()

    def parents(table: str) -> dict[str, tuple[ParentRegion, ...]]:
        asked.append(table)
        began.set()
        assert go.wait(60)
        raise Unanswered("dead")

    inside = threading.Semaphore(0)

    def now() -> float:
        inside.release()
        return float(len(asked))

    order = ParentOrder(parents, lambda region: -1, lambda table, region: 0, lambda seconds: True, now)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(order.check, TABLE, CHILD)
        assert began.wait(60)
        while inside.acquire(blocking=False):
            pass
        second = pool.submit(order.check, TABLE, OTHER)
        assert inside.acquire(timeout=60), "it has read the clock, and asks next"
        go.set()
        for call in (first, second):
            with pytest.raises(NotDelivered, match="dead"):
                call.result(60)
    assert asked == [TABLE]


def test_memory_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_MOST_REGIONS", 10)
    for number in range(100):
        world.parents = {f"{number:032}": (), f"child{number:027}": (ParentRegion(f"{number:032}", 2, 9),)}
        assert world.refusal(f"{number:032}") == ""
        assert world.refusal(f"child{number:027}")
    held = (world.order._settled, world.order._parents, world.order._since)
    assert all(len(one) <= 11 for one in held)
