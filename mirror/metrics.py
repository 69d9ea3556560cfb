"""The mirror's Prometheus metrics. Labels are few: data centre, lane, result; never a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from logferry.gateway.metrics import LaneMetrics
from logferry.mirror.copy.batch_rewrite import CopiedBatch
from logferry.mirror.copy.partition import MirroredPartition
from prometheus_client import CollectorRegistry, Counter

REGISTRY: Final = CollectorRegistry()
RECORDS = Counter("logferry_mirror_records_total", "Mirrored records, by remote data centre", ["dc"], registry=REGISTRY)
BYTES = Counter("logferry_mirror_bytes_total", "Bytes of the mirrored batches as stored", ["dc"], registry=REGISTRY)
LANES: Final = LaneMetrics("logferry_mirror", REGISTRY)


def count_copied(moved: Mapping[MirroredPartition, Sequence[CopiedBatch]]) -> None:
    """Counts the batches of a committed transaction."""
    for partition, batches in moved.items():
        RECORDS.labels(partition.dc).inc(sum(batch.size for batch in batches))
        BYTES.labels(partition.dc).inc(sum(batch.size_bytes for batch in batches))
