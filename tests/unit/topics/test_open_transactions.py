"""Which transactions count as open for too long: by the worker's own looks, in its share of the partitions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import errors
from logferry.gateway.kafka.hanging_transactions import OpenTransaction
from logferry.gateway.metrics import OLDEST_OPEN
from logferry.gateway.topics import open_transactions
from logferry.gateway.topics.open_transactions import OVERDUE_S, OpenTransactions

TP = ("dc1.nginx", 3)


def found(tp: tuple[str, int] = TP, at: int = 70, last_ms: int = 0) -> OpenTransaction:
    return OpenTransaction(tp, 1, 4711, 5, 2, last_ms, at)


class Brokers:
    """What they answer; an exception is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[OpenTransaction] | Exception = []
        self.missed: dict[tuple[str, int], str] = {}
        self.now_s = 1000.0
        self.is_ours: Callable[[str, int], bool] = lambda *_: True
        self.seen = OpenTransactions(None, lambda *tp: self.is_ours(*tp), lambda: self.now_s)  # type: ignore[arg-type]
        monkeypatch.setattr(open_transactions, "open_transactions", self._answer)

    async def _answer(self, _kafka: Any, wanted: Callable[[str, int], bool]) -> Any:
        if isinstance(self.opened, Exception):
            raise self.opened
        return [one for one in self.opened if wanted(*one.tp)], dict(self.missed)

    async def look(self, after_s: float = 0.0) -> list[tuple[int, float]]:
        self.now_s += after_s
        await self.seen.look()
        return [(one.offset, OLDEST_OPEN._value.get()) for one in self.seen.overdue.values()]


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    return Brokers(monkeypatch)


async def test_one_that_stays_open_is_overdue_until_it_ends(
    brokers: Brokers, capsys: pytest.CaptureFixture[str]
) -> None:
    brokers.opened = [found()]
    assert await brokers.look() == []
    assert await brokers.look(OVERDUE_S - 1) == []
    assert await brokers.look(2) == [(70, OVERDUE_S + 1)]
    assert await brokers.look(9) == [(70, OVERDUE_S + 10)]
    (one,) = brokers.seen.overdue.values()
    assert abs(time.time() * 1000 - one.since_ms - 1000 * (OVERDUE_S + 10)) < 60_000
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in ('"transaction_open"', '"dc1.nginx"', '"producer_id": 4711', '"offset": 70'))
    brokers.opened = []
    assert await brokers.look(9) == []
    assert OLDEST_OPEN._value.get() == 0


async def test_the_times_that_a_producer_writes_count_for_nothing(brokers: Brokers) -> None:
    """Records of last year in a transaction of now."""
    brokers.opened = [found(last_ms=1)]
    await brokers.look()
    assert await brokers.look(10) == []


async def test_another_transaction_in_its_place_starts_at_zero(brokers: Brokers) -> None:
    brokers.opened = [found(at=70)]
    await brokers.look()
    brokers.opened = [found(at=71)]
    assert await brokers.look(OVERDUE_S + 1) == []


async def test_where_no_broker_answers_what_was_seen_remains(brokers: Brokers) -> None:
    brokers.opened = [found()]
    await brokers.look()
    brokers.opened, brokers.missed = [], {TP: "its leader, broker 1, does not answer"}
    assert await brokers.look(OVERDUE_S) == [(70, OVERDUE_S)]
    brokers.opened = errors.KafkaConnectionError("cut")
    assert await brokers.look(5) == [(70, OVERDUE_S + 5)]


async def test_what_is_another_workers_share_by_now_is_its_own_to_report(brokers: Brokers) -> None:
    brokers.opened = [found(), found(("dc1.nginx", 4), 8)]
    await brokers.look()
    brokers.is_ours = lambda _, number: number == 4
    brokers.missed = {TP: "its leader, broker 1, does not answer"}
    assert await brokers.look(OVERDUE_S) == [(8, OVERDUE_S)]
