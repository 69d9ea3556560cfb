"""Requests to a lane, and transactions of them that need no Kafka."""

from __future__ import annotations

from typing import Final

from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.lane_count import LaneCount
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.transaction import Draft, Outcome, Request, WriteChunks
from logferry.gateway.topics.present_lanes import Laned, PresentLanes

NOW: Final = 1_700_000_000_000
LAPSE: Final = 900_000
TOPIC: Final = TopicFacts("dc1.t", bytes(range(16)), 4, 1 << 20)


class FixedLanes(PresentLanes):
    """One lane, whoever asks."""

    def __init__(self, kafka: KafkaClient, config: Laned) -> None:
        super().__init__(kafka, config)
        self.count = LaneCount(1, 1, 0)

    async def read(self) -> LaneCount:
        return self.count

    async def is_changing(self) -> bool:
        return False


def write(
    source: SourceIdentity,
    *places: tuple[int, int | None],
    session: int | None = None,
    topic: TopicFacts = TOPIC,
    token: str | None = None,
) -> WriteChunks:
    """``places``: seqno and prev of each chunk, whose data is its seqno."""
    chunks = [Chunk(seqno, prev, None, {}, b"%d" % seqno) for seqno, prev in places]
    return WriteChunks(topic, source, session, chunks, 100 * len(chunks), token)


def committed(table: SourceTable, *requests: Request, now_ms: int = NOW) -> list[Outcome]:
    """Drafts the requests as one transaction and applies it, as after its commit."""
    draft = Draft(table, now_ms, session_lapse_ms=LAPSE)
    outcomes = [draft.add(request)[0] for request in requests]
    for key, raw in draft.states.items():
        table.apply(key, raw)
    return outcomes
