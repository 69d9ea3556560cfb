"""The Prometheus registry and the gateway's metrics. Labels are few: topic, lane, result; never a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.kafka.transactional_producer import Fenced, NotCommitted, OutcomeUnknown
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY: Final = CollectorRegistry()
_counter = partial(Counter, registry=REGISTRY)
_gauge = partial(Gauge, registry=REGISTRY)
_histogram = partial(Histogram, registry=REGISTRY)
_LATENCY: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_LAG: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)

REQUESTS = _counter("logferry_requests_total", "HTTP requests by route and status", ["route", "status"])
REQUEST_SECONDS = _histogram(
    "logferry_request_seconds", "Time to answer a request, by route", ["route"], buckets=_LATENCY
)
CHUNKS = _counter(
    "logferry_chunks_total",
    "Chunks by topic and result: written, duplicate, or the kind of the refusal",
    ["topic", "result"],
)
CHUNK_BYTES = _counter("logferry_chunk_bytes_total", "Bytes of chunks by topic and result", ["topic", "result"])
READ_BYTES = _counter("logferry_read_bytes_total", "Bytes of chunks read, by topic", ["topic"])
SESSIONS = _gauge("logferry_read_sessions", "Open read sessions")
THROTTLED = _counter("logferry_throttled_total", "Writes rejected by a quota, by token or topic", ["scope", "name"])
THROTTLED_SECONDS = _counter(
    "logferry_throttled_seconds_total", "Seconds of waiting in these answers", ["scope", "name"]
)
CONNECTIONS = _gauge("logferry_connections", "Open connections of callers")
CONNECTIONS_REFUSED = _counter("logferry_connections_refused_total", "Connections closed because of a limit", ["limit"])
IN_FLIGHT = _gauge("logferry_in_flight_bytes", "Bytes of requests that wait for an answer")
FORWARDS = _counter(
    "logferry_forwards_total", "Requests passed to the lane's owner, by redirect or forwarding", ["how"]
)
CLOCK_AHEAD = _gauge("logferry_clock_ahead_seconds", "How far this host's clock is ahead of the brokers' clock")
LOOP_LAG = _histogram("logferry_event_loop_lag_seconds", "Delay of a timer in the event loop", buckets=_LAG)

LANES = _gauge("logferry_lane_open", "1 while this worker serves the lane", ["lane"])
OPENINGS = _counter(
    "logferry_lane_openings_total", "Times that a lane was opened, by reason: taken_over, failure", ["lane", "reason"]
)
REPLAY_SECONDS = _histogram("logferry_replay_seconds", "Time to replay a lane's states when it opens")
COMMIT_SECONDS = _histogram(
    "logferry_transaction_seconds", "Time from the first write of a transaction to its commit", buckets=_LATENCY
)
KAFKA_THROTTLED = _counter(
    "logferry_kafka_throttled_seconds_total", "Seconds that Kafka's quotas delayed the transactions of a lane", ["lane"]
)
FENCES = _counter("logferry_lane_fences_total", "Times that another worker fenced the lane", ["lane"])
TRANSACTIONS = _counter(
    "logferry_transactions_total", "Transactions by result: committed, aborted, unknown", ["result"]
)


def count_chunks(topic: str, result: str, chunks: Sequence[Chunk]) -> None:
    """Counts chunks that were not written: duplicates and refused ones."""
    CHUNKS.labels(topic, result).inc(len(chunks))
    CHUNK_BYTES.labels(topic, result).inc(sum(len(chunk.data) for chunk in chunks))


@dataclass(frozen=True, slots=True)
class LaneMetrics:
    """The metrics of one lane: openings, replay, commit time, fences, and transactions by result."""

    lane: str

    def opened(self, *, first: bool, replay_s: float) -> None:
        LANES.labels(self.lane).set(1)
        OPENINGS.labels(self.lane, "taken_over" if first else "failure").inc()
        REPLAY_SECONDS.observe(replay_s)

    def committed(self, seconds: float, chunks: Mapping[tuple[str, int], Sequence[tuple[bytes, Chunk]]]) -> None:
        COMMIT_SECONDS.observe(seconds)
        TRANSACTIONS.labels("committed").inc()
        for (topic, _), written in chunks.items():
            CHUNKS.labels(topic, "written").inc(len(written))
            CHUNK_BYTES.labels(topic, "written").inc(sum(len(chunk.data) for _, chunk in written))

    def throttled(self, seconds: float) -> None:
        KAFKA_THROTTLED.labels(self.lane).inc(seconds)

    def failed(self, error: BaseException) -> None:
        """The lane failed and opens again."""
        if isinstance(error, Fenced):
            FENCES.labels(self.lane).inc()
        if isinstance(error, NotCommitted | OutcomeUnknown):
            TRANSACTIONS.labels("aborted" if isinstance(error, NotCommitted) else "unknown").inc()

    def closed(self) -> None:
        LANES.labels(self.lane).set(0)
