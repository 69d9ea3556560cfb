"""Checkpoints of a mirror whose number of lanes changes: found in the lane that has them, and not missed in between."""

from __future__ import annotations

import asyncio
from typing import Any

from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.contract.mirror_state import MirrorCheckpoint, checkpoint_key, mirror_lane_of
from logferry.gateway.kafka.record_batch import KafkaRecord
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
