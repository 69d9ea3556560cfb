"""From a reader's topics and start to partitions and offsets. No I/O: a generator that asks, and is sent what answered.

steps = opening(wanted)
path = next(steps), then path = steps.send(reply) … until StopIteration, whose value is the result
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from logferry.client.errors import Rejected
from logferry.client.reading.decode import Chunk, chunk_of, decoder
from logferry.client.reading.partition_scheduler import Ask, Rotation
from logferry.client.reading.position import At, Cursors, Partition, Position
from logferry.client.reading.requests import Again, content_of, document_of
from logferry.client.reading.subscription import Wanted, is_pattern
from logferry.client.transport.connections import Reply

LOOK_INTERVAL_S = 30.0


class Start(NamedTuple):
    """``end``: where it stops, None: never."""

    partition: Partition
    at: At
    end: int | None


Steps = Generator[str, Reply, Any]


def placed(wanted: Wanted) -> Generator[str, Reply, Wanted]:
    """The same, its cursors as a position in the data centre that is read; what is not mirrored yet is waited for."""
    if not isinstance(wanted.start, Cursors):
        return wanted
    found = {}
    for partition, at in sorted(wanted.start.items()):
        document = document_of((yield wanted.translate_path(partition, f"offset={at.offset}")))
        found[partition] = At(int(document["translated"]), at.lines)
    return replace(wanted, start=Position(found))


def cursors_of(wanted: Wanted, position: Position) -> Generator[str, Reply, Cursors]:
    """A position in the data centre that is read, for all of them."""
    found = {}
    for partition, at in sorted(position.items()):
        original = partition[0].partition(".")[0]
        document = document_of((yield wanted.translate_path(partition, f"offset={at.offset}&to={original}")))
        found[partition] = At(int(document["translated"]), at.lines)
    return Cursors(found)


def translated(
    wanted: Wanted, partition: Partition, offset: int, from_dc: str, to_dc: str
) -> Generator[str, Reply, int]:
    """The offset of the same record in another data centre."""
    document = document_of((yield wanted.translate_path(partition, f"offset={offset}&from={from_dc}&to={to_dc}")))
    return int(document["translated"])


def names(wanted: Wanted) -> Generator[str, Reply, list[str]]:
    """The topics of a consumer, in full; patterns as they are."""
    found = []
    for topic in wanted.topics:
        found.append(topic if is_pattern(topic) else str(document_of((yield wanted.topic_path(topic)))["topic"]))
    return found


def starts(wanted: Wanted) -> Generator[str, Reply, list[Start]]:
    """Every partition to read, and where it begins; ends where reading shall not go on."""
    found = []
    for topic in wanted.topics:
        document = document_of((yield wanted.topic_path(topic)))
        full, offsets = str(document["topic"]), document["offsets"]
        for one in offsets:
            if wanted.reads(one["partition"]):
                partition = full, int(one["partition"])
                at = yield from _start(wanted, partition, one)
                found.append(Start(partition, at, None if wanted.follow else int(one["next"])))
    stored = wanted.stored()
    known = {start.partition for start in found}
    strange = [f"{topic}:{number}" for topic, number in sorted(stored) if (topic, number) not in known]
    if strange and len(strange) == len(stored):
        raise Rejected(f"start: the position is of {', '.join(strange)}, which is not what is read")
    return found


def _start(wanted: Wanted, partition: Partition, offsets: dict[str, Any]) -> Generator[str, Reply, At]:
    if isinstance(wanted.start, Position):
        return wanted.start.get(partition, At(int(offsets["first"])))
    if isinstance(wanted.start, datetime):
        at_ms = max(int(wanted.start.timestamp() * 1000), 0)
        reply = yield wanted.page_path(partition, f"time_ms={at_ms}", 1, 0, filtered=False)
        chunks, next_offset = page_of(reply)
        return At(chunks[0].offset if chunks else next_offset)
    return At(int(offsets["next" if wanted.start == "latest" else "first"]))


def grown(wanted: Wanted, rotation: Rotation) -> Generator[str, Reply, None]:
    """Adds the partitions that the topics got since, from their beginnings."""
    for topic in wanted.topics:
        document = document_of((yield wanted.topic_path(topic)))
        for one in document["offsets"]:
            partition = str(document["topic"]), int(one["partition"])
            if wanted.reads(partition[1]):
                rotation.add(partition, At(int(one["first"])), None)


def page_path(wanted: Wanted, ask: Ask) -> str:
    return wanted.page_path(ask.partition, f"offset={ask.offset}", wanted.page_bytes, ask.wait_ms)


def page_of(reply: Reply) -> tuple[list[Chunk], int]:
    """The chunks of a page, and where the next one begins. Raises `Again`, or what the caller must hear of."""
    content = content_of(reply)
    try:
        return [chunk_of(row) for row in decoder().feed(content)], int(reply.headers["x-next-offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise Again(f"not a gateway's answer: {error!r}") from None
