"""The data centres whose logs an audit reads, and the first offsets of a relocated table in the log of its home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.ops.audit.log.partition import PartitionLog
from logferry.ops.audit.tables.ledger_check import LoadedRanges


@dataclass
class Centre:
    """``views``: all topics of its Kafka, ``topics``: those that are read. ``logs``: their partitions."""

    dc: str
    kafka: KafkaClient
    views: Mapping[str, TopicMetadata]
    topics: dict[str, TopicMetadata] = field(default_factory=dict)
    logs: dict[TopicPartition, PartitionLog] = field(default_factory=dict)

    @property
    def places(self) -> list[TopicPartition]:
        return [(topic, p.partition) for topic, view in self.topics.items() for p in view.partitions]


async def start_offsets(
    loaded: Mapping[str, LoadedRanges], centres: Mapping[str, Centre], home: str, prefix: str
) -> tuple[dict[TopicPartition, int], list[TopicPartition]]:
    """The first offset of each partition's rows in the log of the table's home, and the partitions without one.

    ``loaded``: by data centre, the first one of the table first. Raises KafkaError.
    """

    async def here(place: TopicPartition, start: int, dc: str) -> int | None:
        if start == 0 or dc == home:
            return start
        owner = place[0].partition(".")[0]
        try:
            original: int | None = start
            if dc != owner:
                original = None
                if dc in centres:
                    original = await OffsetTranslation(centres[dc].kafka, prefix, dc).to_original(place, start)
            if original is None or home == owner:
                return original
            return await OffsetTranslation(centres[home].kafka, prefix, home).to_here(place, original)
        except Problem as problem:
            # An offset that the history does not have any more is not in the log any more.
            return 0 if problem.kind == "out-of-range" else None

    found: dict[TopicPartition, int | None] = {}
    for dc, there in loaded.items():
        for place, start in there.first.items():
            if place not in found:
                found[place] = await here(place, start, dc)
    begins = {place: begin for place, begin in found.items() if begin is not None}
    return begins, [place for place in found if place not in begins]
