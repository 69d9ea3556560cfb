"""What the gateway counts, for Prometheus. Labels are few: topic, lane, result; never a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.kafka.transactional_producer import Fenced, NotCommitted, OutcomeUnknown
from logferry.gateway.lanes.transaction import Record
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY: Final = CollectorRegistry()

_LATENCY_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

REQUESTS = Counter(
    "logferry_requests_total", "HTTP requests by route and status", ["route", "status"], registry=REGISTRY
)
REQUEST_SECONDS = Histogram(
    "logferry_request_seconds", "Time to answer", ["route"], buckets=_LATENCY_BUCKETS, registry=REGISTRY
)
CHUNKS = Counter("logferry_chunks_total", "Chunks by topic and result", ["topic", "result"], registry=REGISTRY)
CHUNK_BYTES = Counter(
    "logferry_chunk_bytes_total", "Bytes of chunks by topic and result", ["topic", "result"], registry=REGISTRY
)
READ_BYTES = Counter("logferry_read_bytes_total", "Bytes of chunks read", ["topic"], registry=REGISTRY)
SESSIONS = Gauge("logferry_read_sessions", "Read sessions that are open", registry=REGISTRY)
THROTTLED = Counter(
    "logferry_throttled_total", "Writes refused by a quota, by token or topic", ["scope", "name"], registry=REGISTRY
)
THROTTLED_SECONDS = Counter(
    "logferry_throttled_seconds_total", "Time that callers were told to wait", ["scope", "name"], registry=REGISTRY
)
CONNECTIONS = Gauge("logferry_connections", "Connections of callers that are open", registry=REGISTRY)
CONNECTIONS_REFUSED = Counter(
    "logferry_connections_refused_total", "Connections closed over a limit", ["limit"], registry=REGISTRY
)
IN_FLIGHT = Gauge("logferry_in_flight_bytes", "Bytes of requests that wait for an answer", registry=REGISTRY)
FORWARDS = Counter("logferry_forwards_total", "Requests handed to the lane's owner", ["how"], registry=REGISTRY)
LANES = Gauge("logferry_lane_open", "1 while this worker serves the lane", ["lane"], registry=REGISTRY)
OPENINGS = Counter("logferry_lane_openings_total", "Openings by reason", ["lane", "reason"], registry=REGISTRY)
REPLAY_SECONDS = Histogram("logferry_replay_seconds", "Replay of a lane's states", registry=REGISTRY)
COMMIT_SECONDS = Histogram(
    "logferry_transaction_seconds", "Transactions, from begin to commit", buckets=_LATENCY_BUCKETS, registry=REGISTRY
)
FENCES = Counter("logferry_lane_fences_total", "Times that another worker shut a lane out", ["lane"], registry=REGISTRY)
LOOP_LAG = Histogram(
    "logferry_event_loop_lag_seconds", "By how much a timer came late", buckets=_LATENCY_BUCKETS, registry=REGISTRY
)
TRANSACTIONS = Counter(
    "logferry_transactions_total", "Transactions: committed, aborted, unknown", ["result"], registry=REGISTRY
)


def count_chunks(topic: str, result: str, chunks: Sequence[Chunk]) -> None:
    """Chunks that were not written: duplicates and refused ones."""
    CHUNKS.labels(topic, result).inc(len(chunks))
    CHUNK_BYTES.labels(topic, result).inc(sum(len(chunk.data) for chunk in chunks))


@dataclass(frozen=True, slots=True)
class LaneMetrics:
    """What one lane reports."""

    lane: str

    def opened(self, *, first: bool, replay_s: float) -> None:
        LANES.labels(self.lane).set(1)
        OPENINGS.labels(self.lane, "taken_over" if first else "failure").inc()
        REPLAY_SECONDS.observe(replay_s)

    def committed(self, seconds: float, records: Mapping[tuple[str, int], Sequence[Record]]) -> None:
        COMMIT_SECONDS.observe(seconds)
        TRANSACTIONS.labels("committed").inc()
        for (topic, _), written in records.items():
            CHUNKS.labels(topic, "written").inc(len(written))
            CHUNK_BYTES.labels(topic, "written").inc(sum(len(value or b"") for _, value, _ in written))

    def failed(self, error: BaseException) -> None:
        """The lane could not go on and opens again."""
        if isinstance(error, Fenced):
            FENCES.labels(self.lane).inc()
        if isinstance(error, NotCommitted | OutcomeUnknown):
            TRANSACTIONS.labels("aborted" if isinstance(error, NotCommitted) else "unknown").inc()

    def closed(self) -> None:
        LANES.labels(self.lane).set(0)
