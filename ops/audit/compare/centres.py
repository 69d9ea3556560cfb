"""The data centres whose logs an audit reads, and where the part of a table that moved begins in another's log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.metadata_request import TopicView
from logferry.gateway.topics.offset_translation import Translation
from logferry.ops.audit.compare.resume import Resumed
from logferry.ops.audit.log.partition import PartitionLog
from logferry.ops.audit.tables.ledger_check import Loaded, Place


@dataclass
class Centre:
    """``views``: all topics of its Kafka, ``topics``: those that are read. ``logs``: their partitions."""

    dc: str
    kafka: Kafka
    views: Mapping[str, TopicView]
    topics: dict[str, TopicView] = field(default_factory=dict)
    logs: dict[Place, PartitionLog] = field(default_factory=dict)
    resumed: dict[Place, Resumed] = field(default_factory=dict)

    @property
    def places(self) -> list[Place]:
        return [(topic, p.partition) for topic, view in self.topics.items() for p in view.partitions]


async def begins_of(
    loaded: Mapping[str, Loaded], centres: Mapping[str, Centre], home: str, prefix: str
) -> tuple[dict[Place, int], list[Place]]:
    """Where the rows of a table that moved begin in the log of its home, and of which partitions nobody knows it.

    ``loaded``: by the data centres, the first one of the table first. Raises KafkaError.
    """
    found: dict[Place, int] = {}
    unknown: list[Place] = []
    for dc, there in loaded.items():
        for place, start in there.first.items():
            if place in found or place in unknown:
                continue
            begin = await _here(place, start, dc, home, centres, prefix)
            if begin is None:
                unknown.append(place)
            else:
                found[place] = begin
    return found, unknown


async def _here(place: Place, start: int, dc: str, home: str, centres: Mapping[str, Centre], prefix: str) -> int | None:
    if start == 0 or dc == home:
        return start
    owner = place[0].partition(".")[0]
    try:
        original: int | None = start
        if dc != owner:
            original = None
            if dc in centres:
                original = await Translation(centres[dc].kafka, prefix, dc).to_original(place, start)
        if original is None or home == owner:
            return original
        return await Translation(centres[home].kafka, prefix, home).to_here(place, original)
    except Problem as problem:
        # What the books have no more, the log has no more.
        return 0 if problem.kind == "out-of-range" else None
