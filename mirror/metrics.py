"""What the mirror counts, for Prometheus. Labels are few: data centre, lane, result; never a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from logferry.gateway.kafka.transactional_producer import Fenced, NotCommitted, OutcomeUnknown
from logferry.mirror.copy.batch_rewrite import MovedBatch
from logferry.mirror.copy.partition import MirroredPartition
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY: Final = CollectorRegistry()

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

RECORDS = Counter("logferry_mirror_records_total", "Records that were mirrored", ["dc"], registry=REGISTRY)
BYTES = Counter("logferry_mirror_bytes_total", "Bytes of their batches, as they are stored", ["dc"], registry=REGISTRY)
LANES = Gauge("logferry_mirror_lane_open", "1 while this worker serves the lane", ["lane"], registry=REGISTRY)
OPENINGS = Counter("logferry_mirror_lane_openings_total", "Openings by reason", ["lane", "reason"], registry=REGISTRY)
FENCES = Counter("logferry_mirror_lane_fences_total", "Times that it was shut out", ["lane"], registry=REGISTRY)
TRANSACTIONS = Counter(
    "logferry_mirror_transactions_total", "Transactions: committed, aborted, unknown", ["result"], registry=REGISTRY
)
COMMIT_SECONDS = Histogram(
    "logferry_mirror_transaction_seconds", "Transactions, from begin to commit", buckets=_SECONDS, registry=REGISTRY
)
REPLAY_SECONDS = Histogram("logferry_mirror_replay_seconds", "Replay of a lane's progress", registry=REGISTRY)


def opened(lane: int, *, first: bool, replay_s: float) -> None:
    LANES.labels(str(lane)).set(1)
    OPENINGS.labels(str(lane), "taken_over" if first else "failure").inc()
    REPLAY_SECONDS.observe(replay_s)


def closed(lane: int) -> None:
    LANES.labels(str(lane)).set(0)


def committed(seconds: float, moved: Mapping[MirroredPartition, Sequence[MovedBatch]]) -> None:
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
