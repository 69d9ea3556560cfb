"""The states of sources of other data centres, as the mirror brought them here."""

from __future__ import annotations

from typing import Any

import pytest
from logferry.gateway.contract.lane_count import COUNT_KEY, MOVED, LaneCount
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.gateway.topics.remote_sources import RemoteSources

from tests.support.mirror_lane import MemoryCluster, topic


async def test_a_state_that_cannot_be_decoded_is_named_until_a_later_one_replaces_it() -> None:
    states = "logferry.gateway.dc1.state"
    kafka: Any = MemoryCluster(
        "here", topic(states, 1), topic("logferry.mirror.dc2.state", 1), topic("logferry.mirror.dc2.pairs", 1)
    )
    kafka.records["logferry.mirror.dc2.state", 0] = []
    source, state = SourceIdentity("dc1.t", None, "web"), SourceState(b"i" * 16, 0, 5, None, 0, 1)
    records = kafka.records[states, 0] = [KafkaRecord(0, 0, source.state_key(), b"\x09" + state.encode()[1:], [])]
    remote = RemoteSources(kafka, "logferry", OffsetTranslation(kafka, "logferry", "dc2"))
    with pytest.raises(Problem, match=rf"kafka-unavailable: {states}-0: .*web.* decoded: state of version 09"):
        await remote.find("dc1", source)
    records.append(KafkaRecord(1, 0, source.state_key(), state.encode(), []))
    assert await remote.find("dc1", source) == (state, None)


MOVED_TO_ONE = [(MOVED, b"1")]


@pytest.mark.parametrize(
    ("new_lane", "expected"),
    [
        pytest.param([], 5, id="the copy of the new lane is behind"),
        pytest.param(["count", 7], 7, id="it moved"),
        pytest.param(["count", 7, None], None, id="it was forgotten since"),
    ],
)
async def test_a_source_whose_lane_has_changed_is_found(new_lane: list[Any], expected: int | None) -> None:
    """From one lane to two; its copies are partitions that arrive one by one."""
    states = "logferry.gateway.dc1.state"
    source = next(one for n in range(9) if lane_of((one := SourceIdentity("dc1.t", None, f"s{n}")).key, 2) == 1)
    key, count = source.state_key(), LaneCount(2, 1, 2).encode()

    def state(recorded: int) -> SourceState:
        return SourceState(b"i" * 16, 0, recorded, None, 0, 1)

    def record(offset: int, what: Any) -> KafkaRecord:
        if what == "count":
            return KafkaRecord(offset, 0, COUNT_KEY, count, [])
        return KafkaRecord(offset, 0, key, None if what is None else state(what).encode(), [])

    kafka: Any = MemoryCluster(
        "here", topic(states, 2), topic("logferry.mirror.dc2.state", 1), topic("logferry.mirror.dc2.pairs", 1)
    )
    kafka.records["logferry.mirror.dc2.state", 0] = []
    kafka.records[states, 0] = [record(0, 5), record(1, "count"), KafkaRecord(2, 0, key, None, MOVED_TO_ONE)]
    kafka.records[states, 1] = [record(*place) for place in enumerate(new_lane)]
    found = await RemoteSources(kafka, "logferry", OffsetTranslation(kafka, "logferry", "dc2")).find("dc1", source)
    assert found == (None if expected is None else (state(expected), None))


async def copies_of_a_move(partitions: int, *kept: tuple[int, list[KafkaRecord]]) -> Any:
    """What is found of a source that moved from lane 0 of one to lane 1 of two, where the copies have these records."""
    states = "logferry.gateway.dc1.state"
    kafka: Any = MemoryCluster(
        "here", topic(states, partitions), topic("logferry.mirror.dc2.state", 1), topic("logferry.mirror.dc2.pairs", 1)
    )
    kafka.records["logferry.mirror.dc2.state", 0] = []
    for number in range(partitions):
        kafka.records[states, number] = dict(kept).get(number, [])
    return await RemoteSources(kafka, "logferry", OffsetTranslation(kafka, "logferry", "dc2")).find("dc1", IN_ONE)


IN_ONE = next(one for n in range(9) if lane_of((one := SourceIdentity("dc1.t", None, f"s{n}")).key, 2) == 1)
COUNT = KafkaRecord(1, 0, COUNT_KEY, LaneCount(2, 1, 2).encode(), [])
# Compaction has removed the state before it.
LEFT = KafkaRecord(2, 0, IN_ONE.state_key(), None, MOVED_TO_ONE)


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_state_that_is_in_no_copy_yet_is_not_called_unknown(partitions: int) -> None:
    with pytest.raises(Problem, match="behind"):
        await copies_of_a_move(partitions, (0, [COUNT, LEFT]))


async def test_a_source_that_was_forgotten_after_its_move_is_unknown() -> None:
    assert await copies_of_a_move(2, (0, [COUNT, LEFT]), (1, [COUNT])) is None


async def test_a_source_that_nobody_wrote_is_unknown_while_copies_are_behind() -> None:
    assert await copies_of_a_move(2, (0, [COUNT])) is None
