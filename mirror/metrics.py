"""The mirror's Prometheus metrics. Labels are few: data centre, lane, result; never a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from logferry.gateway.kafka.transactional_producer import Fenced, NotCommitted, OutcomeUnknown
from logferry.mirror.copy.batch_rewrite import CopiedBatch
from logferry.mirror.copy.partition import MirroredPartition
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY: Final = CollectorRegistry()

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

counter = partial(Counter, registry=REGISTRY)
histogram = partial(Histogram, registry=REGISTRY)

RECORDS = counter("logferry_mirror_records_total", "Mirrored records, by remote data centre", ["dc"])
BYTES = counter("logferry_mirror_bytes_total", "Bytes of the mirrored batches as stored", ["dc"])
LANES = Gauge("logferry_mirror_lane_open", "1 while this worker serves the lane", ["lane"], registry=REGISTRY)
OPENINGS = counter("logferry_mirror_lane_openings_total", "Times that a lane was opened, by reason", ["lane", "reason"])
FENCES = counter("logferry_mirror_lane_fences_total", "Times that another worker fenced the lane", ["lane"])
TRANSACTIONS = counter(
    "logferry_mirror_transactions_total", "Transactions by result: committed, aborted, unknown", ["result"]
)
COMMIT_SECONDS = histogram(
    "logferry_mirror_transaction_seconds",
    "Time from the first write of a transaction to its commit",
    buckets=_SECONDS,
)
REPLAY_SECONDS = histogram("logferry_mirror_replay_seconds", "Time to read a lane's checkpoints when it opens")


def opened(lane: int, *, first: bool, replay_s: float) -> None:
    LANES.labels(str(lane)).set(1)
    OPENINGS.labels(str(lane), "taken_over" if first else "failure").inc()
    REPLAY_SECONDS.observe(replay_s)


def closed(lane: int) -> None:
    LANES.labels(str(lane)).set(0)


def committed(seconds: float, moved: Mapping[MirroredPartition, Sequence[CopiedBatch]]) -> None:
    TRANSACTIONS.labels("committed").inc()
    COMMIT_SECONDS.observe(seconds)
    for partition, batches in moved.items():
        RECORDS.labels(partition.dc).inc(sum(batch.size for batch in batches))
        BYTES.labels(partition.dc).inc(sum(batch.size_bytes for batch in batches))


def failed(lane: int, error: BaseException) -> None:
    if isinstance(error, Fenced):
        FENCES.labels(str(lane)).inc()
    if isinstance(error, NotCommitted | OutcomeUnknown):
        TRANSACTIONS.labels("aborted" if isinstance(error, NotCommitted) else "unknown").inc()
