"""Models of all bodies and answers: the OpenAPI document is made of them, and tests check the answers against them.

Only the status handler builds its model: validating the answer to a small write would take longer than the write.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from logferry.gateway.api.archive_schemas import PieceStored as PieceStored
from logferry.gateway.api.archive_schemas import UploadCommitted as UploadCommitted
from logferry.gateway.api.archive_schemas import UploadDescription as UploadDescription
from logferry.gateway.api.archive_schemas import UploadRequested as UploadRequested
from logferry.gateway.api.subscription_schemas import SubscriptionDetails as SubscriptionDetails
from logferry.gateway.api.subscription_schemas import SubscriptionsList as SubscriptionsList
from logferry.gateway.api.subscription_schemas import SubscriptionSummary as SubscriptionSummary
from logferry.gateway.contract.names import MAX_SEQNO
from logferry.gateway.subscriptions import PushSubscription as PushSubscription
from logferry.gateway.subscriptions import Replay as Replay
from logferry.gateway.topics.open_transactions import OverdueTransaction
from pydantic import BaseModel, ConfigDict, Field, model_validator

Number = Annotated[int, Field(ge=0, le=MAX_SEQNO)]
_Small = Annotated[int, Field(ge=0, le=2**31 - 1)]
_End = Literal["earliest", "latest"]
_MANY: Final = Field(min_length=1, max_length=10_000, fail_fast=True)  # each further error is costly


class WireModel(BaseModel):
    """Of an answer all of the keys are always there, but for those with a default; nothing else is."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ProblemDocument(BaseModel):
    """RFC 9457. The last segment of ``type`` is stable; some kinds add what the caller needs to continue."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str
    instance: str
    recorded_seqno: Annotated[
        Number | None, Field(description="gap, overlap: the recorded seqno, to continue after")
    ] = None
    limit_bytes: Annotated[Number | None, Field(description="too-large: the limit")] = None
    first: Annotated[Number | None, Field(description="out-of-range: the first offset that is retained")] = None
    next: Annotated[Number | None, Field(description="out-of-range: the offset after the last record")] = None


class ChunksWritten(WireModel):
    """After the commit. ``offsets``: of the first and last record; null: none was written, or they are not known."""

    source_id: str
    topic: str
    partition: Number
    recorded_seqno: Number | None
    written: Number
    duplicates: Number
    offsets: Annotated[list[Number], Field(min_length=2, max_length=2)] | None


class SourceDescription(WireModel):
    """``url``: the worker that owns the source's lane, or that answers for another data centre. Nulls: not known.

    ``mirrored_seqno``, with ``dc``: the seqno up to which the source is mirrored here. ``source_retention_ms``, of
    a new session: a source that is silent for so long is forgotten.
    """

    source_id: str
    topic: str
    session: Number | None
    partition: Number | None
    recorded_seqno: Number | None
    url: str
    mirrored_seqno: Number | None = None
    source_retention_ms: Number | None = None


class SourceForgotten(SourceDescription):
    """The state before it was forgotten."""

    forgotten: bool


class SourceRow(WireModel):
    """A source in the list; values that no heartbeat has set are null."""

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


class SourcesPage(WireModel):
    """In the order of their ids. ``next``: the ``after`` of the next page, null on the last one."""

    sources: list[SourceRow]
    next: str | None


class PartitionRange(WireModel):
    """``first`` is retained, ``next`` follows the last committed record; null: the partition has no leader."""

    partition: Number
    first: Number | None
    next: Number | None


class TopicDescription(WireModel):
    """``topic``: its full name. ``id``: Kafka's; a recreated topic has another. ``retention_ms`` -1: unlimited."""

    topic: str
    id: str
    dc: str
    name: str
    partitions: Annotated[int, Field(ge=1)]
    retention_ms: Annotated[int, Field(ge=-1)]
    offsets: list[PartitionRange]


class TopicsList(WireModel):
    """The topics that the caller may see."""

    topics: list[TopicDescription]


class PartitionPosition(WireModel):
    """``offset``: that of the next record to read."""

    topic: str
    partition: Number
    offset: Number


class PositionsCommitted(WireModel):
    """The committed positions and their generation; ``cursors``: the same for any data centre."""

    consumer: str
    generation: Number
    positions: list[PartitionPosition]
    cursors: list[str]


class PositionsSet(WireModel):
    """The positions at which the consumer continues."""

    consumer: str
    positions: list[PartitionPosition]


class TranslatedOffset(WireModel):
    """``offset`` in the data centre ``from`` and ``translated`` in ``to`` name the same next record."""

    topic: str
    partition: int
    from_: Annotated[str, Field(alias="from")]
    offset: int
    to: str
    translated: int


class PartitionLag(WireModel):
    """``offset`` null: nothing is committed. ``lag_bytes``: of the unread chunks; beyond some 64 KiB an estimate.

    ``lag_seconds``: the age of the oldest unread record. ``next`` null: the partition has no leader.
    """

    topic: str
    partition: Number
    offset: Number | None
    first: Number | None
    next: Number | None
    out_of_range: bool
    lag_records: Number | None
    lag_bytes: Number | None
    lag_seconds: Annotated[float, Field(ge=0)] | None


class ConsumerOffsets(WireModel):
    """The consumer's group as Kafka has it, and its positions in what the caller may read."""

    consumer: str
    state: str
    members: Number
    positions: list[PartitionLag]


class Alive(WireModel):
    """The process answers."""

    status: Literal["alive"]


class Ready(WireModel):
    """The worker serves its lanes: lane → state."""

    status: Literal["ready"]
    lanes: dict[str, str]


# ---- status: times are Unix ms by the clock of the worker that answers -------------------------------------------


class WaitStatus(WireModel):
    """``ended_ms`` null: it still waits."""

    reason: str
    began_ms: Number
    ended_ms: Number | None


class LaneStatus(WireModel):
    """A lane of this worker. ``topic``, ``partition``: of its sources' states.

    ``why``, ``since_ms``: of its state. ``in_flight_bytes``: of requests that wait for an answer. ``transaction_ms``:
    when the running transaction began. ``last_wait``: its last interruption. The last error remains after the lane
    has recovered.
    """

    lane: Number
    topic: str
    partition: Number
    state: Literal["opening", "fencing", "replaying", "serving", "stopped", "closing", "closed"]
    why: str
    since_ms: Number
    sources: Number
    in_flight_bytes: Number
    transaction_ms: Number | None
    committed_ms: Number | None
    last_wait: WaitStatus | None
    last_error: str | None
    last_error_ms: Number | None


class GroupStatus(WireModel):
    """The workers by Kafka's group as of ``seen_ms`` (null: never yet); ``owners``: lane → URL.

    ``error``: why the group could not be read since.
    """

    name: str
    members: list[str]
    owners: dict[str, str]
    seen_ms: Number | None
    error: str | None


class BrokerStatus(WireModel):
    """``error`` null: it answers."""

    id: int
    host: str
    port: Number
    error: str | None


class PartitionsStatus(WireModel):
    """Partitions of the gateway's topics and of Kafka's own. ``examples`` names some, as in ``dc1.nginx-3``."""

    total: Number
    without_leader: Number
    under_replicated: Number
    examples: list[str]


class KafkaStatus(WireModel):
    """``reachable``: some broker answers. ``partitions`` null: not available, see ``error``."""

    cluster_id: str | None
    reachable: bool
    answered_ms: Number | None
    error: str | None
    brokers: list[BrokerStatus]
    partitions: PartitionsStatus | None


class Usage(WireModel):
    """The use of a limit; of ``lane_bytes``: by the fullest lane."""

    used: Number
    limit: Number


class ThrottledStatus(WireModel):
    """Writes that a quota rejected since the start. ``wait_s``: the sum of the waits in these answers."""

    scope: Literal["token", "topic"]
    name: str
    count: Number
    wait_s: Annotated[float, Field(ge=0)]
    last_ms: Number


class RefusedStatus(WireModel):
    """A partition, or a whole topic (``partition`` null), that the worker writes nothing to now, and why."""

    topic: str
    partition: Number | None
    why: str
    since_ms: Number | None


class Status(WireModel):
    """One worker, and its view of the others: for the whole query each of ``group.members``.

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
    refused: list[RefusedStatus] = []
    open_transactions: list[OverdueTransaction] = []
    warnings: list[str] = []


# ---- bodies of requests ------------------------------------------------------------------------------------------


class TopicBody(WireModel):
    """The body of ``PUT /v1/topics/{topic}``."""

    partitions: Annotated[int, Field(ge=1, le=10_000)]
    retention_ms: Annotated[int, Field(ge=-1)] | None = None


class HeartbeatBody(WireModel):
    """The body of ``POST …/heartbeat``; a field left out keeps its previous value."""

    watermark_ms: Number | None = None
    position: Number | None = None
    size: Number | None = None
    finished: bool | None = None


class CommitPosition(WireModel):
    """``offset``: that of the next record to read."""

    topic: str
    partition: _Small
    offset: Number


class CommitBody(WireModel):
    """The body of ``POST …/commit``."""

    generation: _Small
    positions: Annotated[list[CommitPosition], _MANY]


class PositionSetting(WireModel):
    """Topic and partition with one of ``offset`` and ``time_ms``, or a ``cursor``, which names them.

    A time means the first record that is as late.
    """

    topic: str | None = None
    partition: _Small | None = None
    offset: Number | _End | None = None
    time_ms: Number | None = None
    cursor: str | None = None

    @model_validator(mode="after")
    def _one(self) -> PositionSetting:
        if sum(given is not None for given in (self.offset, self.time_ms, self.cursor)) != 1:
            raise ValueError("exactly one of offset, time_ms and cursor is needed")
        if {self.topic is None, self.partition is None} != {self.cursor is not None}:
            raise ValueError("topic and partition are needed, except with a cursor, which names them")
        return self


class PositionsBody(WireModel):
    """The body of ``PUT …/offsets``: positions one by one, or a whole topic ``to`` an end or a time in ms."""

    positions: Annotated[list[PositionSetting], _MANY] | None = None
    topic: str | None = None
    to: Number | _End | None = None

    @model_validator(mode="after")
    def _one(self) -> PositionsBody:
        if (self.positions is None) == (self.topic is None) or (self.topic is None) != (self.to is None):
            raise ValueError("either positions, or topic and to")
        return self
