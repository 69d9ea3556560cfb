"""Checkpoints of a mirror whose number of lanes changes: found in the lane that has them, and not missed in between."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.contract.mirror_state import (
    BlockPointer,
    HistoryBlock,
    MirrorCheckpoint,
    OffsetRange,
    checkpoint_key,
    mirror_lane_of,
)
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.record_batch import FetchedRecords, KafkaRecord
from logferry.gateway.topics import copies
from logferry.gateway.topics.copies import OffsetTranslation

from tests.support.mirror_lane import MemoryCluster, topic

STATE, PAIRS = "logferry.mirror.dc2.state", "logferry.mirror.dc2.pairs"
# In lane 1 of two, and in lane 2 of three.
TP = next(("dc1.t", n) for n in range(9) if (mirror_lane_of("dc1.t", n, 2), mirror_lane_of("dc1.t", n, 3)) == (1, 2))
DONE = MirrorCheckpoint(b"1" * 16, b"2" * 16, 100, 50, 40, 0, 0, 0, 0, ())


class Growing(MemoryCluster):
    def write(self, lane: int, *records: tuple[bytes, bytes | None]) -> None:
        log = self.records.setdefault((STATE, lane), [])
        log += [KafkaRecord(len(log) + at, 0, key, value, []) for at, (key, value) in enumerate(records)]


def number(lanes: int, before: int, epoch: int) -> tuple[bytes, bytes]:
    return COUNT_KEY, LaneCount(lanes, before, epoch).encode()


async def test_a_checkpoint_is_waited_for_while_its_new_lane_does_not_show_the_change() -> None:
    """Kafka ends a transaction in each partition by itself."""
    cluster = Growing("here", topic(STATE, 2), topic(PAIRS, 2))
    cluster.write(0)
    cluster.write(1, (checkpoint_key(*TP), DONE.encode()))
    kafka: Any = cluster
    translation = OffsetTranslation(kafka, "logferry", "dc2")
    assert await translation.to_here(TP, 100) == 50
    for lane in (0, 1):
        cluster.write(lane, number(2, 2, 1))
    cluster.topics[STATE] = topic(STATE, 3)
    cluster.write(2)
    # The command was killed: there is a partition that is no lane.
    assert await OffsetTranslation(kafka, "logferry", "dc2").to_here(TP, 100) == 50
    cluster.write(1, number(3, 2, 2), (checkpoint_key(*TP), None))
    asking = asyncio.create_task(translation.to_here(TP, 100))
    await asyncio.sleep(0.2)
    assert not asking.done()
    cluster.write(0, number(3, 2, 2))
    cluster.write(2, number(3, 2, 2), (checkpoint_key(*TP), DONE.encode()))
    assert await asking == 50
    assert await translation.mirrored(mirror_lane_of(*TP, 2)) == [TP]
    assert await OffsetTranslation(kafka, "logferry", "dc2").to_here(TP, 100) == 50


class Shared(Growing):
    """``open_at``: an open transaction begins there in the history; behind it Kafka shows nothing."""

    open_at: int | None = None

    async def fetch(self, name: str, number: int, position: int, *, max_bytes: int) -> FetchedRecords:
        if name != PAIRS or self.open_at is None:
            return await super().fetch(name, number, position, max_bytes=max_bytes)
        found = self.records[name, number][position : self.open_at]
        return FetchedRecords(found, max(position, self.open_at), self.open_at)


async def test_a_history_block_behind_the_open_transaction_of_another_lane_is_waited_for() -> None:
    """Several lanes write to one partition of the history: its checkpoint is there, and it is not to be seen yet."""
    cluster, key = Shared("here", topic(STATE, 2), topic(PAIRS, 2)), checkpoint_key(*TP)
    block = HistoryBlock(DONE.source_id, 0, (), (OffsetRange(90, 40, 10),))
    done = replace(DONE, blocks=1, pointers=(BlockPointer(1, 90, 40),))
    cluster.write(0)
    cluster.write(1, (key, done.encode()))
    cluster.records[PAIRS, 1] = [
        KafkaRecord(0, 0, b"of another lane", b"", []),
        KafkaRecord(1, 0, key, block.encode(), []),
    ]
    cluster.open_at = 0
    kafka: Any = cluster
    asking = asyncio.create_task(OffsetTranslation(kafka, "logferry", "dc2").to_here(TP, 95))
    await asyncio.sleep(0.1)
    assert not asking.done()
    cluster.open_at = None
    assert await asking == 45


async def test_a_history_block_that_is_not_there_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Shared("here", topic(STATE, 2), topic(PAIRS, 2))
    done = replace(DONE, blocks=1, pointers=(BlockPointer(1, 90, 40),))
    cluster.write(0)
    cluster.write(1, (checkpoint_key(*TP), done.encode()))
    kafka: Any = cluster
    translation = OffsetTranslation(kafka, "logferry", "dc2")
    cluster.records[PAIRS, 1] = [KafkaRecord(at, 0, b"another", b"", []) for at in range(2)]
    with pytest.raises(Problem, match="no history block"):
        await translation.to_here(TP, 95)
    cluster.open_at = 0
    monkeypatch.setattr(copies, "_WAIT_S", 0.1)
    with pytest.raises(Problem, match="no history block"):
        await translation.to_here(TP, 95)
