"""What `ConsumerGroups` makes of a partition whose committed offset Kafka does not say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors
from logferry.gateway.kafka.consumer_groups import ConsumerGroups

_NO_RIGHT = errors.TopicAuthorizationFailedError


class Kafka:
    """Group ``a`` has offset 5 of one partition, none of the next, and no right on the last."""

    async def send(self, *_: object) -> Any:
        partitions: Any = [(0, 5, -1, "", 0, {}), (1, -1, -1, "", 0, {}), (2, -1, -1, "", _NO_RIGHT.errno, {})]
        return SimpleNamespace(groups=[("a", [("dc1.t", partitions, {})], 0, {}), ("b", None, 16, {})])

    async def with_coordinator(self, _: str, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        return await ask(self.send)


async def test_costs_the_other_positions_of_a_group_nothing_when_many_are_carried() -> None:
    kafka: Any = Kafka()
    found = await ConsumerGroups(kafka).committed_at(1, ["a", "b"])
    assert found["a"] == {("dc1.t", 0): 5}
    assert isinstance(found["b"], errors.NotCoordinatorError)


async def test_is_an_error_of_a_reader_that_begins_there() -> None:
    kafka: Any = Kafka()
    with pytest.raises(_NO_RIGHT):
        await ConsumerGroups(kafka).committed("a")
