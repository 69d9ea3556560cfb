"""The chunks of one call, written to the gateway in order. Each is recorded when `GatewayDelivery.deliver` returns.

* A request holds chunks of one source and is sent when the one before it is acknowledged: nothing is recorded while
  something before it in the call may not be.
* Chunks are written outside of sessions and without ``prev``. Two connectors, or two calls of one, may write the same
  edits at a time: HBase ships a call again that took too long, while the first one is still carried out. The gateway
  records each edit once, and each writer begins at or below the last recorded edit, so that none overtakes another.
* A request whose outcome is unknown is sent again as it is, until the deadline; then HBase ships the call again.
* What the gateway names as recorded is not sent again within a call. So a call that HBase ships again after its
  deadline is carried on where the gateway is, and comes to its end however large it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from logferry.client.hbase.changes import RegionChunk
from logferry.client.transport.cluster import RETRY_S, GatewayCluster, pause_s
from logferry.client.transport.connections import Connections, Dialer
from logferry.client.transport.source_request import (
    FORWARDED_S,
    NextStep,
    Outcome,
    SourceAddress,
    SourceRequest,
    next_step,
)
from logferry.gateway.contract.chunk import pack_chunk

_USER_AGENT = "logferry-hbase"
_BATCH_BYTES = 1 << 20
_BATCH_CHUNKS = 5000
_ANSWER_TIMEOUT_S = 30.0
_SHORTEST_S = 1.0


class NotDelivered(Exception):
    """Not everything is recorded: HBase must ship the call again. ``kind``: the problem kind, empty while the gateway
    does not answer or asks for patience; otherwise a retry will not help before its cause is removed.
    """

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


class Delivered(NamedTuple):
    """Duplicates are counted, too."""

    chunks: int
    bytes: int


class SourceBatch(NamedTuple):
    """What one request carries: the chunks of one source, each as its seqno and its packed bytes."""

    table: str
    source_id: str
    chunks: list[tuple[int, bytes]]


def batches_of(chunks: Iterable[RegionChunk]) -> Iterator[SourceBatch]:
    """The chunks in their order, cut where the source changes and where a request is full."""
    batch: SourceBatch | None = None
    size = 0
    for table, source_id, chunk in chunks:
        wire = pack_chunk(chunk)
        if batch is not None:
            is_full = size + len(wire) > _BATCH_BYTES or len(batch.chunks) >= _BATCH_CHUNKS
            if is_full or batch.source_id != source_id:
                yield batch
                batch = None
        if batch is None:
            batch, size = SourceBatch(table, source_id, []), 0
        batch.chunks.append((chunk.seqno, wire))
        size += len(wire)
    if batch is not None:
        yield batch


class GatewayDelivery:
    """Thread-safe: each thread has connections of its own. ``stop``: set it, and no request is repeated."""

    def __init__(self, cluster: GatewayCluster, topic: str, dialer: Dialer, stop: threading.Event) -> None:
        self._cluster, self._topic, self._dialer, self._stop = cluster, topic, dialer, stop
        self._threads = threading.local()
        self._owners: dict[str, str | None] = {}
        self._direct_from = 0.0

    def deliver(self, chunks: Iterable[RegionChunk], deadline: float) -> Delivered:
        """Returns when all are recorded. Raises NotDelivered, and what ``chunks`` raises."""
        count = size = 0
        recorded: dict[str, int] = {}  # by source, as the gateway says in this call
        for batch in batches_of(one for one in chunks if one.chunk.seqno > recorded.get(one.source_id, -1)):
            if time.monotonic() > deadline:
                raise NotDelivered(
                    f"not recorded in time: {count} chunks are, and the rest is when HBase ships it again"
                )
            if self._stop.is_set():
                raise NotDelivered("the connector stops")
            recorded[batch.source_id] = self._write(batch, deadline)
            count += len(batch.chunks)
            size += sum(len(wire) for _, wire in batch.chunks)
        return Delivered(count, size)

    def _write(self, batch: SourceBatch, deadline: float) -> int:
        """What the gateway has then recorded of the source, at least the batch."""
        failures = 0
        while True:
            outcome = self._request(batch, deadline)
            answer, do = outcome.answer, next_step(outcome.answer)
            recorded = -1 if answer.recorded_seqno is None else answer.recorded_seqno
            if do is NextStep.ADVANCE and recorded >= batch.chunks[-1][0]:
                self._owners[batch.table] = outcome.url
                return recorded
            if do is NextStep.SMALLER and len(batch.chunks) > 1:
                half = len(batch.chunks) // 2
                self._write(batch._replace(chunks=batch.chunks[:half]), deadline)
                return self._write(batch._replace(chunks=batch.chunks[half:]), deadline)
            if do is NextStep.ASK:
                self._direct_from = time.monotonic() + FORWARDED_S
            elif do not in (NextStep.WAIT, NextStep.AGAIN, NextStep.ADVANCE):
                raise NotDelivered(f"the gateway refuses {batch.source_id} of {batch.table}: {answer}", answer.type)
            self._owners[batch.table] = None
            failures += 1
            pause = pause_s(failures, RETRY_S, answer.retry_after_s)
            if time.monotonic() + pause > deadline:
                raise NotDelivered(f"not recorded in time; the last problem: {answer}")
            if self._stop.wait(pause):
                raise NotDelivered("the connector stops")

    def _request(self, batch: SourceBatch, deadline: float) -> Outcome:
        address = SourceAddress(self._cluster, _USER_AGENT, self._topic, batch.source_id, batch.table)
        direct = time.monotonic() >= self._direct_from
        body: list[bytes | memoryview] = [b"".join(wire for _, wire in batch.chunks)]
        owner = self._owners.get(batch.table)
        connections = self._own()
        connections.answer_timeout_s = min(max(deadline - time.monotonic(), _SHORTEST_S), _ANSWER_TIMEOUT_S)
        return SourceRequest(address, "chunks", None, body, direct=direct, owner=owner).follow(connections.exchange)

    def _own(self) -> Connections:
        found: Connections | None = getattr(self._threads, "connections", None)
        if found is None:
            found = self._threads.connections = Connections(_ANSWER_TIMEOUT_S, self._dialer)
        return found
