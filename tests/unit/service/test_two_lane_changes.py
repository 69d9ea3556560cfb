"""Two operators change the number of lanes at the same time: neither undoes the change of the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.config import Config
from logferry.gateway.kafka.transactional_producer import Fenced, NotCommitted
from logferry.gateway.service import lane_change
from logferry.gateway.service.lane_change import LaneChange

CONFIG = Config.model_validate({"dc": "dc1", "lanes": 4, "kafka": {"bootstrap_servers": "127.0.0.1:1"}})


class FailingProducer:
    """In the place of that of the change: its writes fail."""

    made: ClassVar[list[FailingProducer]] = []
    failure: ClassVar[Exception]

    def __init__(self, *_: Any) -> None:
        self.is_fencing = False
        self.made.append(self)

    async def fence(self) -> None:
        self.is_fencing = True

    async def settled(self) -> None: ...

    async def discard(self) -> None: ...

    async def write(self, _: Any) -> None:
        raise self.failure


@pytest.mark.parametrize(
    ("failure", "fences"),
    [
        pytest.param(Fenced("by another command, or by a worker that opens a lane"), 0, id="it is over already"),
        pytest.param(NotCommitted("a broker is away"), 1, id="it is ended at once, so that the lanes continue"),
    ],
)
async def test_a_change_that_fails_ends_its_transaction_and_no_other(
    failure: Exception, fences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_change, "TransactionalProducer", FailingProducer)
    monkeypatch.setattr(FailingProducer, "made", [])
    monkeypatch.setattr(FailingProducer, "failure", failure, raising=False)

    async def describe_topic(_: str) -> Any:
        return SimpleNamespace(id=b"i" * 16)

    kafka: Any = SimpleNamespace(clock=BrokerClock(), describe_topic=describe_topic)
    change: Any = LaneChange(kafka, CONFIG, 8, lambda _: None)
    change._producer = FailingProducer()
    with pytest.raises(type(failure)):
        await change.begin()
    await change._end(is_committed=False)
    assert [one.is_fencing for one in FailingProducer.made[1:]] == [True] * fences


async def test_a_change_waits_for_the_end_of_another_one() -> None:
    change: Any = LaneChange(SimpleNamespace(), CONFIG, 8, (said := list[str]()).append)  # type: ignore[arg-type]
    answers = [True, True, False]

    async def is_changing() -> bool:
        return answers.pop(0)

    change._present = SimpleNamespace(is_changing=is_changing)
    await change._wait_for_another()
    assert (answers, len(said)) == ([], 1)
