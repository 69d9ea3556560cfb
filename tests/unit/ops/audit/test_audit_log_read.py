"""Reading up to an end that was taken before: what retention removes and what stays open meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from aiokafka import errors
from logferry.gateway.kafka.client import KafkaClient
from logferry.ops.audit.log.read import committed
from logferry.ops.audit.records.batches import StoredRecord, StoredRecords
from logferry.ops.cli.problems import Unavailable

PLACE = ("dc1.t", 0)


def fetched(*offsets: int, next_offset: int, last_stable: int) -> StoredRecords:
    records = [StoredRecord(offset, 1, b"s", b"v", []) for offset in offsets]
    return StoredRecords(records, next_offset, last_stable)


class FakeKafka:
    """Answers in turn; an exception is raised. ``asked``: the offsets."""

    def __init__(self, *answers: StoredRecords | Exception, earliest: int = 0) -> None:
        self.answers = list(answers)
        self.earliest = earliest
        self.asked: list[int] = []

    async def answer(self, offset: int) -> StoredRecords:
        self.asked.append(offset)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def offset(self, *_: Any) -> int:
        return self.earliest


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logferry.ops.audit.log.read.fetch", lambda kafka, _place, offset, **_: kafka.answer(offset))


async def read(kafka: FakeKafka, start: int, end: int) -> tuple[list[int], Sequence[tuple[int, int]]]:
    removed: list[tuple[int, int]] = []
    found = committed(cast(KafkaClient, kafka), PLACE, start, end, lambda low, high: removed.append((low, high)))
    return [record.offset async for one in found for record in one.records], removed


async def test_up_to_the_end_past_control_records():
    kafka = FakeKafka(
        fetched(0, 1, next_offset=3, last_stable=9),
        fetched(next_offset=5, last_stable=9),
        fetched(6, next_offset=9, last_stable=9),
    )
    assert await read(kafka, 0, 9) == ([0, 1, 6], [])
    assert kafka.asked == [0, 3, 5]


async def test_an_end_that_nothing_stands_before():
    """A compacted topic may end with nothing: the last stable offset says so."""
    assert await read(FakeKafka(fetched(next_offset=4, last_stable=9)), 4, 9) == ([], [])


async def test_it_waits_while_a_transaction_is_open():
    open_one = fetched(next_offset=2, last_stable=2)
    kafka = FakeKafka(
        fetched(0, next_offset=2, last_stable=2), open_one, open_one, fetched(2, next_offset=4, last_stable=4)
    )
    assert await read(kafka, 0, 4) == ([0, 2], [])


async def test_a_transaction_that_stays_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("logferry.ops.audit.log.read._DECIDED_WITHIN_S", -1.0)
    with pytest.raises(Unavailable, match="a transaction at offset 2 stays open"):
        await read(FakeKafka(fetched(next_offset=2, last_stable=2)), 2, 4)


async def test_retention_may_overtake_the_reading():
    kafka = FakeKafka(
        fetched(0, next_offset=1, last_stable=9),
        errors.OffsetOutOfRangeError(),
        fetched(7, next_offset=9, last_stable=9),
        earliest=6,
    )
    assert await read(kafka, 0, 9) == ([0, 7], [(1, 6)])


async def test_a_log_that_was_cut_back_is_not_read_in_silence():
    with pytest.raises(errors.OffsetOutOfRangeError):
        await read(FakeKafka(errors.OffsetOutOfRangeError(), earliest=0), 5, 9)
