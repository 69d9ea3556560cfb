"""A plain consumer that moves to and fro between data centres by its committed positions: never a gap.

Positions are carried from the original to the copy. Back at the original it continues where it left that, so it reads
some records again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from logferry.ops.stack.stack import Stack

from tests.support.clients import Load, chunks_of
from tests.support.kafka import committed
from tests.support.mirror import differences_in_the_end, make_topic, read_log

_GROUP = "mover"
_STINTS = 3
_PER_STINT = 120


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2"), mirrors=1) as stack:
        yield stack


class Mover:
    """Reads partition 0 in one data centre, commits what it has, leaves the group, and continues in the other one."""

    def __init__(self, stack: Stack, topic: str) -> None:
        self._stack, self._topic = stack, topic
        self.stints: list[list[tuple[str, int]]] = []

    async def stint(self, dc: str, least: int, *, to_end: bool = False) -> None:
        """At least so many records, or all that there are."""
        found: list[tuple[str, int]] = []
        place = TopicPartition(self._topic, 0)
        async with AIOKafkaConsumer(
            self._topic,
            bootstrap_servers=self._stack.cluster(dc).bootstrap,
            group_id=_GROUP,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer:
            async with asyncio.timeout(60):
                while len(found) < least or (to_end and not await self._is_at_end(consumer, place)):
                    for record in (await consumer.getmany(timeout_ms=100, max_records=40)).get(place, []):
                        headers = dict(record.headers)
                        found.append(((record.key or b"").decode(), int.from_bytes(headers["seqno"])))
            await consumer.commit()
        self.stints.append(found)

    async def _is_at_end(self, consumer: AIOKafkaConsumer, place: TopicPartition) -> bool:
        if place not in consumer.assignment():
            return False
        return bool(await consumer.position(place) >= (await consumer.end_offsets([place]))[place])


async def carried_beyond(stack: Stack, topic: str, offset: int) -> int:
    """Waits until the group's position in dc2 is further than the offset, and returns it."""
    async with asyncio.timeout(60):
        while (now := await committed(stack.cluster("dc2"), _GROUP, topic) or 0) <= offset:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return now


@pytest.mark.long
async def test_each_record_at_least_once_and_never_a_gap(stack: Stack) -> None:
    topic = await make_topic(stack, "moved", 1)
    mover, carried = Mover(stack, topic), [0]
    async with Load("moved", stack.urls("dc1"), seed=61, sources=8) as load:
        for number in range(_STINTS):
            await load.acknowledged(_PER_STINT)
            await mover.stint("dc1", _PER_STINT + 40 * number, to_end=True)
            if number == 1:
                stack.kill("dc2/mirror-0")
            carried.append(await carried_beyond(stack, topic, carried[-1]))
            await mover.stint("dc2", 20)
            carried[-1] = await committed(stack.cluster("dc2"), _GROUP, topic) or 0
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    assert await differences_in_the_end((there, topic), (here, topic)) == []
    await mover.stint("dc2", 0, to_end=True)
    log = chunks_of(await read_log(there, topic), 0)
    at = {chunk: index for index, chunk in enumerate(log)}
    assert len(at) == len(log)
    reached, again = 0, 0
    for stint in mover.stints:
        places = [at[chunk] for chunk in stint]
        assert places == list(range(places[0], places[0] + len(places))) if places else True
        if places:
            assert places[0] <= reached, "a gap"
            again += max(0, reached - places[0])
            reached = max(reached, places[-1] + 1)
    assert reached == len(log)
    # Each time it came to dc2 for the first time it did not start again there.
    assert all(at[stint[0]] > 0 for stint in mover.stints[1:] if stint)
    print(f"{len(log)} records, {again} again")
