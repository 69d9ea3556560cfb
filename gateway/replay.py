"""From the state topic to what a lane knows of its sources: read once when it opens, looked through now and then.

A table may hold a million sources, so nothing here keeps the loop for long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.lanes.dedup import Source, SourceState, SourceTable

_FETCH_BYTES: Final = 1 << 18
_SLICE: Final = 5000


async def replay(kafka: Kafka, topic: str, partition: int) -> SourceTable:
    """Every committed state in the partition up to its end. Complete only after a fence. Raises KafkaError."""
    table = SourceTable()
    end = await kafka.offset(topic, partition, LATEST)
    position = await kafka.offset(topic, partition, EARLIEST)
    while position < end:
        fetched = await kafka.fetch(topic, partition, position, max_bytes=_FETCH_BYTES)
        for record in fetched.records:
            table.apply(record.key or b"", record.value)
        position = fetched.next_offset
    return table


async def silent_since(table: SourceTable, before_ms: int) -> deque[bytes]:
    """The keys of the sources that were not heard of since."""
    found = deque[bytes]()
    for count, key in enumerate(table.state_keys()):
        state = table.read(key)
        if state is not None and state.alive_ms < before_ms:
            found.append(key)
        if count % _SLICE == 0:
            await asyncio.sleep(0)
    return found


async def sources_of(table: SourceTable, topic: str, wants: Callable[[str], bool]) -> list[tuple[Source, SourceState]]:
    """The sources of a topic whose id is wanted, in no order."""
    found = []
    prefixes = (b"s%s\0" % topic.encode(), b"k%s\0" % topic.encode())
    for count, key in enumerate(table.state_keys()):
        if key.startswith(prefixes):
            source = Source.of_state_key(key)
            state = table.read(key) if wants(source.source_id) else None
            if state is not None:
                found.append((source, state))
        if count % _SLICE == 0:
            await asyncio.sleep(0)
    return found
