"""What a lane of the mirror reads before it writes: how far each partition is, and whether a copy is empty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aiokafka import errors
from logferry.gateway.contract.offset_history import Damaged, Place, Progress, Run, place_of
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.kafka.transactional_producer import NotCommitted, Part
from logferry.mirror.copy.coalesce import Written

_FETCH_BYTES: Final = 1 << 18


async def read_progress(kafka: Kafka, topic: str, lane: int) -> dict[Place, Progress]:
    """How far each partition is, by what is committed; complete only after a fence."""
    found = dict[Place, Progress]()
    end = await kafka.offset(topic, lane, LATEST)
    position = await kafka.offset(topic, lane, EARLIEST)
    while position < end:
        fetched = await kafka.fetch(topic, lane, position, max_bytes=_FETCH_BYTES)
        for record in fetched.records:
            try:
                place = place_of(record.key or b"")
                if record.value is None:
                    found.pop(place, None)
                else:
                    found[place] = Progress.decode(record.value)
            except Damaged as error:
                # Going on without it would mirror its partition anew, behind what is there.
                raise errors.KafkaError(f"{topic}-{lane} at {record.offset}: {error}") from None
        position = fetched.next_offset
    return found


async def filled(kafka: Kafka, places: list[Place]) -> set[Place]:
    """Those that hold a committed record, or did; what was aborted counts for nothing."""
    ends, firsts = await kafka.offsets(places, LATEST), await kafka.offsets(places, EARLIEST)
    return {
        place
        for place in places
        if ends[place] > 0 and (firsts[place] > 0 or await _has_record(kafka, place, ends[place]))
    }


async def _has_record(kafka: Kafka, place: Place, end: int) -> bool:
    position = 0
    while position < end:
        fetched = await kafka.fetch(*place, position, max_bytes=_FETCH_BYTES)
        if fetched.records:
            return True
        position = fetched.next_offset
    return False


def runs_of(found: list[Written], part: Part) -> Iterator[Run]:
    """What became of the batches, which were written in this order. Raises NotCommitted."""
    for written, (_, local) in zip(found, part.offsets, strict=True):
        if local < 0:
            raise NotCommitted(f"{part.topic}-{part.number}: the offset of a batch is not known")
        for run in (run for batch in written.batches for run in batch.runs):
            yield Run(run.source, local, run.size)
            local += run.size
