"""Models of the answers about workers, and what the models of all answers have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from logferry.gateway.contract.names import MAX_SEQNO
from logferry.gateway.topics.open_transactions import OverdueTransaction
from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[int, Field(ge=0, le=MAX_SEQNO)]


class WireModel(BaseModel):
    """Of an answer all of the keys are always there, but for those with a default; nothing else is."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
    """Requests that a quota refused since the start. ``wait_s``: the sum of the waits in these answers."""

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


class StatusFinding(WireModel):
    """``wrong``: an operator has to act. ``for_s``: its duration, or the time since it was over; null: unknown."""

    wrong: bool
    what: str
    reason: str
    for_s: Annotated[float, Field(ge=0)] | None


class WorkerAway(WireModel):
    """A worker that does not answer."""

    error: str


class AllWorkersStatus(WireModel):
    """All workers of the data centre by URL, and what is wrong now, the worst first. ``well``: nothing is."""

    at_ms: Number
    well: bool
    findings: list[StatusFinding]
    workers: dict[str, Status | WorkerAway]


class ServiceWorkers(WireModel):
    """The status documents of the workers of another service by URL, or ``error``; none: it does not run here."""

    group: str
    workers: dict[str, dict[str, Any]]


class CallerRights(WireModel):
    """Who calls (``name`` null: there are no tokens), where, and whether it has a right to any topic.

    ``everything``: the caller may administer every topic, and see the workers.
    """

    name: str | None
    dc: str
    data_centres: list[str]
    version: str
    write: bool
    read: bool
    admin: bool
    everything: bool
