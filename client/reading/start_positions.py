"""A reader's topics and start → partitions and offsets.

Generators without I/O: each yields the paths of requests, is sent their replies, and returns its result.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from datetime import datetime
from typing import Any

from logferry.client.errors import Rejected
from logferry.client.reading.decode import ReceivedChunk, best_decoder, decode_chunk
from logferry.client.reading.partition_scheduler import PageRequest, PartitionScheduler
from logferry.client.reading.position import Cursors, Partition, Position, ReadOffset
from logferry.client.reading.requests import RetryLater, content_of, document_of
from logferry.client.reading.subscription import ReaderOptions, is_pattern
from logferry.client.transport.connections import Reply

LOOK_INTERVAL_S = 30.0


def resolve_cursors(wanted: ReaderOptions) -> Generator[str, Reply, ReaderOptions]:
    """The options, their cursors resolved to a position in the data centre that is read. Waits for the mirror."""
    if not isinstance(wanted.start, Cursors):
        return wanted
    found = {}
    for partition, at in sorted(wanted.start.items()):
        found[partition] = ReadOffset((yield from _translated(wanted, partition, f"offset={at.offset}")), at.lines)
    return replace(wanted, start=Position(found))


def cursors_of(wanted: ReaderOptions, position: Position) -> Generator[str, Reply, Cursors]:
    """A position in the data centre that is read → cursors for all data centres."""
    found = {}
    for partition, at in sorted(position.items()):
        query = f"offset={at.offset}&to={partition[0].partition('.')[0]}"
        found[partition] = ReadOffset((yield from _translated(wanted, partition, query)), at.lines)
    return Cursors(found)


def translated_offset(
    wanted: ReaderOptions, partition: Partition, offset: int, from_dc: str, to_dc: str
) -> Generator[str, Reply, int]:
    """The offset of the same record in another data centre."""
    return _translated(wanted, partition, f"offset={offset}&from={from_dc}&to={to_dc}")


def _translated(wanted: ReaderOptions, partition: Partition, query: str) -> Generator[str, Reply, int]:
    return int(document_of((yield wanted.translate_path(partition, query)))["translated"])


def full_topics(wanted: ReaderOptions) -> Generator[str, Reply, list[str]]:
    """The topics of a consumer, in full; patterns unchanged."""
    found = []
    for topic in wanted.topics:
        found.append(topic if is_pattern(topic) else str(document_of((yield wanted.topic_path(topic)))["topic"]))
    return found


def start_positions(
    wanted: ReaderOptions,
) -> Generator[str, Reply, list[tuple[Partition, ReadOffset, int | None]]]:
    """Every partition to read, with its start; without ``follow`` also with its end, else with None."""
    found = []
    for topic in wanted.topics:
        document = document_of((yield wanted.topic_path(topic)))
        full, offsets = str(document["topic"]), document["offsets"]
        for one in offsets:
            if wanted.reads(one["partition"]):
                partition = full, int(one["partition"])
                at = yield from _start(wanted, partition, one)
                found.append((partition, at, None if wanted.follow else int(one["next"])))
    stored = wanted.stored()
    known = {partition for partition, _, _ in found}
    strange = [f"{topic}:{number}" for topic, number in sorted(stored) if (topic, number) not in known]
    if strange and len(strange) == len(stored):
        raise Rejected(f"start: the position is of {', '.join(strange)}, which is not what is read")
    return found


def _start(wanted: ReaderOptions, partition: Partition, offsets: dict[str, Any]) -> Generator[str, Reply, ReadOffset]:
    if isinstance(wanted.start, Position):
        return wanted.start.get(partition, ReadOffset(int(offsets["first"])))
    if isinstance(wanted.start, datetime):
        at_ms = max(int(wanted.start.timestamp() * 1000), 0)
        reply = yield wanted.page_path(partition, f"time_ms={at_ms}", 1, 0, filtered=False)
        chunks, next_offset = page_of(reply)
        return ReadOffset(chunks[0].offset if chunks else next_offset)
    return ReadOffset(int(offsets["next" if wanted.start == "latest" else "first"]))


def new_partitions(wanted: ReaderOptions, rotation: PartitionScheduler) -> Generator[str, Reply, None]:
    """Adds partitions that the topics have gained, from their beginnings."""
    for topic in wanted.topics:
        document = document_of((yield wanted.topic_path(topic)))
        for one in document["offsets"]:
            partition = str(document["topic"]), int(one["partition"])
            if wanted.reads(partition[1]):
                rotation.add(partition, ReadOffset(int(one["first"])), None)


def page_path(wanted: ReaderOptions, ask: PageRequest) -> str:
    return wanted.page_path(ask.partition, f"offset={ask.offset}", wanted.page_bytes, ask.wait_ms)


def page_of(reply: Reply) -> tuple[list[ReceivedChunk], int]:
    """The chunks of a page, and the offset of the next one. Raises `RetryLater`, or an error for the caller."""
    content = content_of(reply)
    try:
        return [decode_chunk(row) for row in best_decoder().feed(content)], int(reply.headers["x-next-offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise RetryLater(f"not a gateway's answer: {error!r}") from None
