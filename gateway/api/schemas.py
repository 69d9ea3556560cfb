"""What the gateway answers, as models: the interface's document is made from them, and tests hold answers against them.

The handlers do not build these, but for the status: an answer to a small write must not take longer to check than to
write.
"""

from __future__ import annotations

from typing import Annotated, Literal

from logferry.gateway.contract.chunk import MAX_SEQNO
from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[int, Field(ge=0, le=MAX_SEQNO)]


class Answer(BaseModel):
    """All of the keys are always there, but for those with a default; nothing else is."""

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
    """``url``: the worker that owns the source's lane, or that answers for another data centre. Nulls: not known.

    ``mirrored_seqno``, with ``dc``: how much of what was acknowledged there is here.
    """

    source_id: str
    topic: str
    session: Number | None
    partition: Number | None
    recorded_seqno: Number | None
    url: str
    mirrored_seqno: Number | None = None


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
    """What was committed, in the name of which generation; ``cursors``: the same for any data centre."""

    consumer: str
    generation: Number
    positions: list[PartitionPosition]
    cursors: list[str]


class PositionsSet(Answer):
    """Where the consumer goes on."""

    consumer: str
    positions: list[PartitionPosition]


class Translated(Answer):
    """``offset`` in the data centre ``from`` and ``translated`` in ``to`` name the same next record."""

    topic: str
    partition: int
    from_: Annotated[str, Field(alias="from")]
    offset: int
    to: str
    translated: int


class PartitionLag(Answer):
    """``offset`` null: nothing is committed. ``lag_bytes``: of the unread chunks; beyond some 64 KiB an estimate.

    ``lag_seconds``: the age of the oldest unread record.
    """

    topic: str
    partition: Number
    offset: Number | None
    first: Number
    next: Number
    out_of_range: bool
    lag_records: Number
    lag_bytes: Number
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


# ---- status: times are Unix ms by the clock of the worker that answers -------------------------------------------


class WaitStatus(Answer):
    """``ended_ms`` null: it lasts."""

    reason: str
    began_ms: Number
    ended_ms: Number | None


class LaneStatus(Answer):
    """A lane of this worker. ``topic``, ``partition``: of its sources' states.

    ``why``, ``since_ms``: of its state. ``in_flight_bytes``: of requests that wait for an answer. ``transaction_ms``:
    when the running transaction began. ``last_wait``: when it last could not go on, and why. The last error stays
    when the lane has mended.
    """

    lane: Number
    topic: str
    partition: Number
    state: Literal["opening", "fencing", "replaying", "serving", "closing", "closed"]
    why: str
    since_ms: Number
    sources: Number
    in_flight_bytes: Number
    transaction_ms: Number | None
    committed_ms: Number | None
    last_wait: WaitStatus | None
    last_error: str | None
    last_error_ms: Number | None


class GroupStatus(Answer):
    """The workers as Kafka's group had them at ``seen_ms`` (null: never yet); ``owners``: lane → URL.

    ``error``: why it could not be seen since.
    """

    name: str
    members: list[str]
    owners: dict[str, str]
    seen_ms: Number | None
    error: str | None


class BrokerStatus(Answer):
    """``error`` null: it answers."""

    id: int
    host: str
    port: Number
    error: str | None


class PartitionsStatus(Answer):
    """Partitions of the gateway's topics and of Kafka's own. ``examples`` names some, as in ``dc1.nginx-3``."""

    total: Number
    without_leader: Number
    under_replicated: Number
    examples: list[str]


class KafkaStatus(Answer):
    """``reachable``: some broker answers. ``partitions`` null: that could not be looked at, see ``error``."""

    cluster_id: str | None
    reachable: bool
    answered_ms: Number | None
    error: str | None
    brokers: list[BrokerStatus]
    partitions: PartitionsStatus | None


class Usage(Answer):
    """What is used of a limit; of ``lane_bytes``: by the fullest lane."""

    used: Number
    limit: Number


class ThrottledStatus(Answer):
    """Writes that a quota refused since the start. ``wait_s``: what callers were told to wait, in all."""

    scope: Literal["token", "topic"]
    name: str
    count: Number
    wait_s: Annotated[float, Field(ge=0)]
    last_ms: Number


class Status(Answer):
    """One worker, and what it knows of the others: for the whole ask each of ``group.members``.

    ``lanes`` are its own, of ``lanes_total`` in the data centre.
    """

    version: str
    dc: str
    url: str
    now_ms: Number
    started_ms: Number
    lanes_total: Number
    lanes: list[LaneStatus]
    group: GroupStatus
    kafka: KafkaStatus
    limits: dict[str, Usage]
    throttled: list[ThrottledStatus]
