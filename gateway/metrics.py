"""The Prometheus registry and the gateway's metrics. Labels are few: topic, lane, result; never a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
REQUESTS_REFUSED = _counter(
    "logferry_requests_refused_total", "Requests answered with a problem, by its kind: bad-request, quota, …", ["kind"]
)
REQUEST_SECONDS = _histogram(
    "logferry_request_seconds", "Time to answer a request, by route", ["route"], buckets=_LATENCY
)
CHUNKS = _counter(
    "logferry_chunks_total",
    "Chunks by topic and result: written, duplicate, or the kind of the refusal",
    ["topic", "result"],
)
CHUNK_BYTES = _counter("logferry_chunk_bytes_total", "Bytes of chunks by topic and result", ["topic", "result"])
RECEIVED = _counter(
    "logferry_received_total",
    "Lines and events that receivers took, by receiver and result: recorded, duplicate, or the kind of the refusal",
    ["receiver", "result"],
)
READ_BYTES = _counter("logferry_read_bytes_total", "Bytes of chunks read, by topic", ["topic"])
SESSIONS = _gauge("logferry_read_sessions", "Open read sessions")
THROTTLED = _counter("logferry_throttled_total", "Requests refused by a quota, by token or topic", ["scope", "name"])
THROTTLED_SECONDS = _counter(
    "logferry_throttled_seconds_total", "Seconds of waiting in these answers", ["scope", "name"]
)
CONNECTIONS = _gauge("logferry_connections", "Open connections of callers")
CONNECTIONS_REFUSED = _counter("logferry_connections_refused_total", "Connections closed because of a limit", ["limit"])
CERTIFICATES_REFUSED = _counter(
    "logferry_certificates_refused_total", "Connections refused since the caller's certificate is missing or not valid"
)
IN_FLIGHT = _gauge("logferry_in_flight_bytes", "Bytes of requests that wait for an answer")
FORWARDS = _counter(
    "logferry_forwards_total", "Requests passed to the lane's owner, by redirect or forwarding", ["how"]
)
ADMIN_LOG = _counter(
    "logferry_admin_log_records_total",
    "Administrative acts and refusals by kind and result: written to their topic, or lost",
    ["kind", "result"],
)
ISSUER_FETCHES = _counter(
    "logferry_issuer_fetches_total", "Fetches of the keys of an OpenID Connect issuer by result", ["issuer", "result"]
)
CLOCK_AHEAD = _gauge("logferry_clock_ahead_seconds", "How far this host's clock is ahead of the brokers' clock")
OLDEST_OPEN = _gauge(
    "logferry_oldest_open_transaction_seconds",
    "Age of the oldest transaction that is open in this worker's share of the partitions; 0: none is",
)
LOOP_LAG = _histogram("logferry_event_loop_lag_seconds", "Delay of a timer in the event loop", buckets=_LAG)


class LaneMetrics:
    """The metrics of a service's lanes: openings, replay, commit time, fences, and transactions by result."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        """``service``: how the names of its metrics begin."""
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._open = Gauge(f"{service}_lane_open", "1 while this worker serves the lane", ["lane"], registry=registry)
        self._openings = counter(
            f"{service}_lane_openings_total",
            "Times that a lane was opened, by reason: taken_over, failure",
            ["lane", "reason"],
        )
        self._replay_s = histogram(f"{service}_replay_seconds", "Time to read what a lane recorded when it opens")
        self._commit_s = histogram(
            f"{service}_transaction_seconds",
            "Time from the first write of a transaction to its commit",
            buckets=_LATENCY,
        )
        self._fences = counter(f"{service}_lane_fences_total", "Times that another worker fenced the lane", ["lane"])
        self._transactions = counter(
            f"{service}_transactions_total", "Transactions by result: committed, aborted, unknown", ["result"]
        )
        self._throttled_s = counter(
            f"{service}_kafka_throttled_seconds_total",
            "Seconds that Kafka's quotas delayed the transactions of a lane",
            ["lane"],
        )

    def opened(self, lane: int, *, first: bool, replay_s: float) -> None:
        self._open.labels(str(lane)).set(1)
        self._openings.labels(str(lane), "taken_over" if first else "failure").inc()
        self._replay_s.observe(replay_s)

    def committed(self, lane: int, seconds: float, throttled_s: float) -> None:
        self._commit_s.observe(seconds)
        self._throttled_s.labels(str(lane)).inc(throttled_s)
        self._transactions.labels("committed").inc()

    def failed(self, lane: int, error: BaseException) -> None:
        """The lane failed and opens again."""
        if isinstance(error, Fenced):
            self._fences.labels(str(lane)).inc()
        if isinstance(error, NotCommitted | OutcomeUnknown):
            self._transactions.labels("aborted" if isinstance(error, NotCommitted) else "unknown").inc()

    def closed(self, lane: int) -> None:
        self._open.labels(str(lane)).set(0)


LANES: Final = LaneMetrics("logferry", REGISTRY)


def count_chunks(topic: str, result: str, chunks: Sequence[Chunk]) -> None:
    """Counts chunks that were not written: duplicates and refused ones."""
    CHUNKS.labels(topic, result).inc(len(chunks))
    CHUNK_BYTES.labels(topic, result).inc(sum(len(chunk.data) for chunk in chunks))


def count_written(chunks: Mapping[tuple[str, int], Sequence[tuple[bytes, Chunk]]]) -> None:
    """Counts the chunks of a committed transaction, by topic and partition."""
    for (topic, _), written in chunks.items():
        CHUNKS.labels(topic, "written").inc(len(written))
        CHUNK_BYTES.labels(topic, "written").inc(sum(len(chunk.data) for _, chunk in written))
