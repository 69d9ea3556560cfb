"""What the gateway answers, as models: the interface's document is made from them, and tests hold answers against them.

The handlers do not build these: an answer to a small write must not take longer to check than to write.
"""

from __future__ import annotations

from typing import Annotated, Literal

from logferry.gateway.contract import MAX_SEQNO
from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[int, Field(ge=0, le=MAX_SEQNO)]


class Answer(BaseModel):
    """All of the keys are always there; nothing else is."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ProblemDocument(BaseModel):
    """RFC 9457. The last segment of ``type`` is stable; some types add what the caller needs to go on."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str
    instance: str
    recorded_seqno: Annotated[Number | None, Field(description="gap, overlap: where to go on")] = None
    limit_bytes: Annotated[Number | None, Field(description="too-large: the limit")] = None
    first: Annotated[Number | None, Field(description="out-of-range: the first offset that is retained")] = None
    next: Annotated[Number | None, Field(description="out-of-range: the offset after the last record")] = None


class ChunksWritten(Answer):
    """After the commit. ``offsets``: of the first and last record; null: nothing was written, or it is not known."""

    source_id: str
    topic: str
    partition: Number
    recorded_seqno: Number | None
    written: Number
    duplicates: Number
    offsets: Annotated[list[Number], Field(min_length=2, max_length=2)] | None


class SourceFacts(Answer):
    """``url``: the worker that owns the source's lane. Nulls: not known."""

    source_id: str
    topic: str
    session: Number | None
    partition: Number | None
    recorded_seqno: Number | None
    url: str


class SourceForgotten(SourceFacts):
    """The facts as they were before."""

    forgotten: bool


class SourceRow(Answer):
    """A source as it is listed; what a heartbeat never said is null."""

    source_id: str
    partition_key: str | None
    partition: Number
    recorded_seqno: Number | None
    session: Number | None
    written_ms: Number
    heartbeat_ms: Number | None
    watermark_ms: Number | None
    position: Number | None
    size: Number | None
    finished: bool


class SourcesPage(Answer):
    """In the order of their ids. ``next``: the ``after`` of the next page, null on the last one."""

    sources: list[SourceRow]
    next: str | None


class PartitionOffsets(Answer):
    """``first`` is retained, ``next`` follows the last committed record."""

    partition: Number
    first: Number
    next: Number


class TopicDescription(Answer):
    """``topic``: its full name. ``retention_ms`` -1: for ever."""

    topic: str
    dc: str
    name: str
    partitions: Annotated[int, Field(ge=1)]
    retention_ms: Annotated[int, Field(ge=-1)]
    offsets: list[PartitionOffsets]


class TopicsList(Answer):
    """The topics that the caller may know of."""

    topics: list[TopicDescription]


class PartitionPosition(Answer):
    """``offset``: that of the next record to read."""

    topic: str
    partition: Number
    offset: Number


class Committed(Answer):
    """What was committed, in the name of which generation."""

    consumer: str
    generation: Number
    positions: list[PartitionPosition]


class PositionsSet(Answer):
    """Where the consumer goes on."""

    consumer: str
    positions: list[PartitionPosition]


class PartitionLag(Answer):
    """``offset`` null: nothing is committed. ``lag_seconds``: the age of the oldest unread record."""

    topic: str
    partition: Number
    offset: Number | None
    first: Number
    next: Number
    out_of_range: bool
    lag_records: Number
    lag_bytes: Number | None
    lag_seconds: Annotated[float, Field(ge=0)] | None


class ConsumerOffsets(Answer):
    """The consumer's group as Kafka has it, and its positions in what the caller may read."""

    consumer: str
    state: str
    members: Number
    positions: list[PartitionLag]


class Alive(Answer):
    """The process answers."""

    status: Literal["alive"]


class Ready(Answer):
    """The worker serves its lanes: lane → state."""

    status: Literal["ready"]
    lanes: dict[str, str]
