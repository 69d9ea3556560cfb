"""Models of all bodies and answers: the OpenAPI document is made of them, and tests check the answers against them.

Only the status handler builds its model: validating the answer to a small write would take longer than the write.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from logferry.gateway.admin_log.records import AdminLogPage as AdminLogPage
from logferry.gateway.api.archive_schemas import BytesStored as BytesStored
from logferry.gateway.api.archive_schemas import PieceStored as PieceStored
from logferry.gateway.api.archive_schemas import SizeConfirmed as SizeConfirmed
from logferry.gateway.api.archive_schemas import TransactionDescription as TransactionDescription
from logferry.gateway.api.archive_schemas import UploadCommitted as UploadCommitted
from logferry.gateway.api.archive_schemas import UploadDescription as UploadDescription
from logferry.gateway.api.archive_schemas import UploadRequested as UploadRequested
from logferry.gateway.api.status_schemas import AllWorkersStatus as AllWorkersStatus
from logferry.gateway.api.status_schemas import CallerRights as CallerRights
from logferry.gateway.api.status_schemas import Number, WireModel
from logferry.gateway.api.status_schemas import ServiceWorkers as ServiceWorkers
from logferry.gateway.api.status_schemas import Status as Status
from logferry.gateway.api.subscription_schemas import SubscriptionDetails as SubscriptionDetails
from logferry.gateway.api.subscription_schemas import SubscriptionsList as SubscriptionsList
from logferry.gateway.api.subscription_schemas import SubscriptionSummary as SubscriptionSummary
from logferry.gateway.reports.hbase import HBaseDescription as HBaseDescription
from logferry.gateway.reports.hbase import HBaseList as HBaseList
from logferry.gateway.reports.hbase import HBaseReport as HBaseReport
from logferry.gateway.reports.hbase import HBaseSummary as HBaseSummary
from logferry.gateway.reports.tables import TableDescription as TableDescription
from logferry.gateway.reports.tables import TableReport as TableReport
from logferry.gateway.reports.tables import TablesList as TablesList
from logferry.gateway.reports.tables import TableSummary as TableSummary
from logferry.gateway.subscriptions import PushSubscription as PushSubscription
from logferry.gateway.subscriptions import Replay as Replay
from pydantic import BaseModel, ConfigDict, Field, model_validator

_Small = Annotated[int, Field(ge=0, le=2**31 - 1)]
_End = Literal["earliest", "latest"]
_MANY: Final = Field(min_length=1, max_length=10_000, fail_fast=True)  # each further error is costly


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
    """``first`` is retained, ``next`` follows the last committed record; null: the partition has no leader.

    ``at``, with ``at_ms``: of the first record recorded at or after that time; null: there is none so late.
    ``size_bytes``, with ``sizes``: of the leader's log in Kafka; null: the broker does not say it.
    """

    partition: Number
    first: Number | None
    next: Number | None
    at: Number | None = None
    size_bytes: Number | None = None


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
    """The positions at which the consumer continues, or with ``dry_run`` would continue."""

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


class ConsumerSummary(WireModel):
    """``topics``: those with a position that the caller may read; the other figures are of these.

    ``lag_records`` counts offsets; null: a partition has no leader. ``out_of_range``: partitions whose position is
    not retained any more.
    """

    consumer: str
    state: str
    topics: list[str]
    partitions: Number
    lag_records: Number | None
    out_of_range: Number


class ConsumersList(WireModel):
    """``complete`` false: a broker did not answer, whose consumers are missing."""

    consumers: list[ConsumerSummary]
    complete: bool


class Alive(WireModel):
    """The process answers."""

    status: Literal["alive"]


class Ready(WireModel):
    """The worker serves its lanes: lane → state."""

    status: Literal["ready"]
    lanes: dict[str, str]


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
