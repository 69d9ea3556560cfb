"""Models of the answers about subscriptions."""

from __future__ import annotations

from typing import Annotated

from logferry.gateway.contract.names import MAX_SEQNO
from logferry.gateway.subscriptions import PushSubscription
from pydantic import BaseModel, ConfigDict, Field

_Number = Annotated[int, Field(ge=0, le=MAX_SEQNO)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class DeliveryStopStatus(_Answer):
    """Why nothing is delivered until an operator acts."""

    kind: str
    detail: str
    at_ms: _Number


class DeliveryErrorStatus(_Answer):
    """Why the last attempts failed; it is retried."""

    detail: str
    at_ms: _Number
    attempts: _Number


class DeliveryPartition(_Answer):
    """One partition of a subscription, or one of its shards, as the workers recorded it. ``next``: the topic's end."""

    topic: str
    partition: _Number
    shard: _Number
    position: _Number
    next: _Number | None
    lag_records: _Number | None
    epoch: _Number
    stop: DeliveryStopStatus | None
    error: DeliveryErrorStatus | None


class SubscriptionSummary(PushSubscription):
    """``is_configured``: it stands in the configuration of the workers, or did; ``left_configuration``: a worker has
    started since without it, and nothing is sent. ``owner``: the token that made, changed or resumed it last."""

    name: str
    created_ms: _Number
    owner: str | None
    is_paused: bool
    is_configured: bool
    left_configuration: bool


class SubscriptionDetails(SubscriptionSummary):
    partitions: list[DeliveryPartition]


class SubscriptionsList(_Answer):
    subscriptions: list[SubscriptionSummary]
