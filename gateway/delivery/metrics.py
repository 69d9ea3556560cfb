"""The metrics of `logferry deliver`. Labels are few: subscription and result; never a source or partition."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter

REGISTRY: Final = CollectorRegistry()
BATCHES = Counter(
    "logferry_delivery_batches_total",
    "Attempts to deliver a batch, by result: done, again, rejected",
    ["subscription", "result"],
    registry=REGISTRY,
)
CHUNKS = Counter("logferry_delivery_chunks_total", "Delivered chunks", ["subscription"], registry=REGISTRY)
BYTES = Counter(
    "logferry_delivery_bytes_total",
    "Bytes of delivered batches before compression",
    ["subscription"],
    registry=REGISTRY,
)


def forget_subscription(name: str) -> None:
    """Removes its series: names that come and go do not add up."""
    for counter in (BATCHES, CHUNKS, BYTES):
        counter.remove_by_labels({"subscription": name})
