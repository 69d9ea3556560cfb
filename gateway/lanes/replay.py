"""Replay: reads the states of a lane, of gateway or mirror, from its partition of a compacted topic.

A state that cannot be decoded stops the lane alone, unless a later record of its key replaced it: continuing without a
state would record or copy again what it stands for.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from aiokafka import errors
from logferry.gateway.errors import LaneUnreadable
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.kafka.record_batch import CorruptBatch, FetchedRecords
from logferry.gateway.turns import Turns

# Decoded in a thread, while the next ones are on their way. Each lane that a worker takes over has two under way.
_FETCH_BYTES: Final = 1 << 20
# Whether others should run is asked after so many states.
_LOOK: Final = 64
_DEADLINE_S: Final = 15.0
_PAUSE_S: Final = 0.01


async def replay_states(
    kafka: KafkaClient,
    topic: str,
    partition: int,
    apply: Callable[[bytes, bytes | None], None],
    up_to: int = 0,
    command: str = "logferry lanes",
    start: int | None = None,
) -> int:
    """Gives every committed state up to the partition's end to ``apply``.

    Complete only after a fence, with ``up_to`` behind the record that it wrote: a broker that was frozen may still take
    itself for the leader, and have less. It is not believed: the replay waits for one that has the record.

    ``apply``: takes key and value, and raises ValueError for what it cannot decode. ``command``: by which an operator
    forgets a record. ``start``: what is before was applied. Returns the offset up to which it read.

    Raises KafkaError and LaneUnreadable.
    """
    unreadable: dict[bytes, tuple[int, Exception]] = {}
    end = await _end(kafka, topic, partition, up_to)
    position = await kafka.offset(topic, partition, EARLIEST) if start is None else start
    turns = Turns()
    async with aclosing(_fetched(kafka, topic, partition, position, end)) as parts:
        async for fetched in parts:
            for count, record in enumerate(fetched.records):
                key = record.key or b""
                try:
                    apply(key, record.value)
                    unreadable.pop(key, None)
                except (ValueError, struct.error) as error:
                    if record.value is None:
                        unreadable.pop(key, None)  # an operator forgot it
                    else:
                        unreadable[key] = (record.offset, error)
                if count % _LOOK == 0 and turns.over:
                    await turns.give()
            position = fetched.next_offset
    if unreadable:
        offset, reason = next(iter(unreadable.values()))
        more = f", and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
        raise LaneUnreadable(
            f"{topic}-{partition}: the record at offset {offset} cannot be decoded: {reason}{more}. Upgrade this "
            f"worker if a newer one wrote it; else: {command} --config FILE --forget {partition}:{offset}"
        )
    return position


async def _fetched(
    kafka: KafkaClient, topic: str, partition: int, position: int, end: int
) -> AsyncGenerator[FetchedRecords, None]:
    """What is committed from the position to the end; the next part is fetched while one is used."""
    following: asyncio.Task[FetchedRecords] | None = None
    try:
        while position < end:
            asked = following or _fetch(kafka, topic, partition, position)
            following = None
            try:
                fetched = await asked
            except CorruptBatch as error:
                detail = f"{topic}-{partition}: {error}. Make an intact replica the leader, or restore the partition"
                raise LaneUnreadable(detail) from error
            if fetched.next_offset == position:
                await _ask_again(kafka, topic, partition)
            position = fetched.next_offset
            if position < end:
                following = _fetch(kafka, topic, partition, position)
            yield fetched
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def _fetch(kafka: KafkaClient, topic: str, partition: int, position: int) -> asyncio.Task[FetchedRecords]:
    return asyncio.create_task(kafka.fetch(topic, partition, position, max_bytes=_FETCH_BYTES))


async def _end(kafka: KafkaClient, topic: str, partition: int, up_to: int) -> int:
    """The end of what is committed. Raises LeaderNotAvailableError where it stays before ``up_to``."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            while (end := await kafka.offset(topic, partition, LATEST)) < up_to:
                await _ask_again(kafka, topic, partition)
            return end
    except TimeoutError:
        detail = f"the leader of {topic}-{partition} does not have the offset {up_to - 1}, which is committed"
        raise errors.LeaderNotAvailableError(detail) from None


async def _ask_again(kafka: KafkaClient, topic: str, partition: int) -> None:
    """Asks who leads the partition, after a moment: its leader may not have the last marker yet, or be another one."""
    kafka.forget_leader(topic, partition)
    await asyncio.sleep(_PAUSE_S)
