"""What `KafkaClient` makes of the errors that a leader's move gives its requests for offsets and records."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.protocol.offset import OffsetRequest
from logferry.gateway.kafka.client import LATEST, KafkaClient
from logferry.gateway.kafka.requests import (
    _METADATA,
    ClusterMetadata,
    MetadataRequest,
    PartitionMetadata,
    TopicMetadata,
)

_TP = ("dc1.t", 0)
_PASSING = {"no leader": 5, "another leader": 6, "no replica": 9, "storage": 56}
_FINAL = {"no such topic": 3, "no right": 29}


class Moving:
    """Broker 1 answers with an error, broker 2 with offset 7 and no records; the leader moves from one to the other."""

    def __init__(self, kafka: Any, code: int) -> None:
        self.code, self.looks, self.asked = code, 0, list[int]()
        kafka.describe = self.describe
        kafka._client.send = self.send
        self._kafka = kafka

    async def describe(self, names: list[str]) -> ClusterMetadata:
        self.looks += 1
        leader = min(self.looks, 2)
        self._kafka._leaders[_TP] = leader
        views = (PartitionMetadata(0, leader, 0, (1, 2), (1, 2)),)
        return ClusterMetadata("here", {}, {"dc1.t": TopicMetadata("dc1.t", b"i" * 16, False, views)}, {})

    async def send(self, node: int, request: object, **_: object) -> Any:
        self.asked.append(node)
        code = self.code if node == 1 else 0
        if isinstance(request, MetadataRequest):
            if code:
                raise errors.for_code(code)
            return _METADATA.encode((0, [], "here", 1, [(0, "dc1.t", b"i" * 16, False, [], 0, {})], {}))
        if isinstance(request, OffsetRequest):
            return SimpleNamespace(topics=[("dc1.t", [(0, code, -1, 7)])])
        return SimpleNamespace(throttle_time_ms=0, topics=[("dc1.t", [(0, code, 7, 7, 0, [], -1, b"")])])


async def call(kafka: KafkaClient, what: str) -> object:
    async with asyncio.timeout(60):
        if what == "offset":
            return await kafka.offset(*_TP, LATEST)
        if what == "id":
            return 7 if await kafka.ids_at_leaders([_TP]) == {"dc1.t": b"i" * 16} else None
        if what == "offsets":
            return (await kafka.offsets([_TP], LATEST))[_TP]
        return (await kafka.fetch(*_TP, 7, max_bytes=1 << 20)).last_stable


@pytest.mark.parametrize("what", ["id", "offset", "offsets", "fetch"])
@pytest.mark.parametrize("code", _PASSING.values(), ids=_PASSING)
async def test_an_error_that_passes_is_asked_again_of_the_leader(code: int, what: str) -> None:
    kafka = KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "test")
    moving = Moving(kafka, code)
    try:
        assert await call(kafka, what) == 7
        assert moving.asked == [1, 2]
    finally:
        await kafka.close()


@pytest.mark.parametrize("what", ["id", "offset", "offsets", "fetch"])
@pytest.mark.parametrize("code", _FINAL.values(), ids=_FINAL)
async def test_any_other_error_is_raised_at_once(code: int, what: str) -> None:
    kafka = KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "test")
    moving = Moving(kafka, code)
    try:
        with pytest.raises(errors.for_code(code)):
            await call(kafka, what)
        assert moving.asked == [1]
    finally:
        await kafka.close()


@pytest.mark.parametrize(
    ("known", "expected"),
    [((b"i", b"i"), {"dc1.t": b"i" * 16}), ((b"i", b"j"), {}), ((b"i", b""), {}), ((b"", b""), {})],
)
async def test_a_topic_has_the_id_that_all_its_leaders_know(known: tuple[bytes, bytes], expected: object) -> None:
    kafka: Any = KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "test")
    kafka._leaders |= {("dc1.t", 0): 1, ("dc1.t", 1): 2}

    async def send(node: int, request: object, **_: object) -> bytes:
        letter = known[node - 1]
        topic: Any = (0 if letter else 3, "dc1.t", letter * 16 or bytes(16), False, [], 0, {})
        return bytes(_METADATA.encode((0, [], "here", 1, [topic], {})))

    kafka._client.send = send
    try:
        assert await kafka.ids_at_leaders([("dc1.t", 0), ("dc1.t", 1)]) == expected
    finally:
        await kafka.close()


async def test_each_leader_is_asked_once_for_the_id_of_a_topic_of_many_partitions() -> None:
    kafka: Any = KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "test")
    partitions = [("dc1.t", number) for number in range(1000)]
    kafka._leaders |= {tp: tp[1] % 2 for tp in partitions}
    asked = []

    async def send(node: int, request: object, **_: object) -> bytes:
        asked.append(node)
        return bytes(_METADATA.encode((0, [], "here", 1, [(0, "dc1.t", b"i" * 16, False, [], 0, {})], {})))

    kafka._client.send = send
    try:
        assert await kafka.ids_at_leaders(partitions) == {"dc1.t": b"i" * 16}
        assert sorted(asked) == [0, 1]
    finally:
        await kafka.close()


async def test_an_offset_waits_for_the_leader_of_a_new_topic() -> None:
    kafka = KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "test")
    moving: Any = Moving(kafka, 0)
    views = [ClusterMetadata("here", {}, {}, {"dc1.t": errors.LeaderNotAvailableError.errno})]
    describe, moving._kafka.describe = moving.describe, lambda names: found(names)

    async def found(names: list[str]) -> ClusterMetadata:
        return views.pop() if views else await describe(names)

    try:
        assert await call(kafka, "offset") == 7
    finally:
        await kafka.close()


async def test_the_leader_of_a_topic_that_is_gone_is_not_asked_for_its_offset_for_ever() -> None:
    kafka: Any = KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "test")
    kafka._leaders[_TP] = 1

    async def describe(_: list[str]) -> ClusterMetadata:
        return ClusterMetadata("here", {}, {}, {"dc1.t": errors.UnknownTopicOrPartitionError.errno})

    async def send(*_: object, **__: object) -> None:
        raise errors.KafkaConnectionError("the broker is down")

    kafka.describe, kafka._client.send = describe, send
    try:
        with pytest.raises(errors.UnknownTopicOrPartitionError):
            await call(kafka, "offset")
    finally:
        await kafka.close()


async def test_another_programs_member_hides_no_worker_of_the_group() -> None:
    """Its assignment has bytes of its own."""
    kafka: Any = KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "test")
    ours = ConsumerProtocolMemberAssignment(0, [("state", [1, 2]), ("other", [3])], b"").encode()
    members = [(url, url, "/h", b"", raw) for url, raw in (("a", ours), ("b", b""), ("c", b"\xff" * 8))]

    async def lookup(*_: object) -> int:
        return 1

    async def send(*_: object, **__: object) -> Any:
        return SimpleNamespace(groups=[(0, "g", "Stable", "consumer", "ours", members)])

    kafka._client.coordinator_lookup, kafka._client.send = lookup, send
    try:
        assert await kafka.group_assignment("g", "state") == {"a": [1, 2], "b": [], "c": []}
    finally:
        await kafka.close()


async def test_offsets_of_many_partitions_are_asked_for_side_by_side_and_nothing_waits_behind_them() -> None:
    """Kafka answers the requests of a connection in order, and an offset at a time takes it long."""
    kafka = KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "test")
    partitions = [("dc1.t", number) for number in range(450)]
    kafka._leaders = dict.fromkeys(partitions, 1)
    groups, together = list[object](), asyncio.Event()

    async def send(node: int, request: Any, group: object = None) -> Any:
        groups.append(group)
        if len(groups) == 3:
            together.set()
        await together.wait()
        return SimpleNamespace(topics=[("dc1.t", [(number, 0, -1, 7) for number, _ in request._topics[0][1]])])

    kafka._client.send = send
    try:
        async with asyncio.timeout(60):
            found = await kafka.offsets(partitions, 1_700_000_000_000)
    finally:
        await kafka.close()
    assert found == dict.fromkeys(partitions, 7)
    assert len(set(groups)) == 3
    assert None not in groups
