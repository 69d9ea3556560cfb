"""The chunks of one call, written to the gateway in order. Each is recorded when `GatewayDelivery.deliver` returns.

* A request holds chunks of one source and is sent when the one before it is acknowledged: nothing is recorded while
  something before it in the call may not be.
* Chunks are written outside of sessions and without ``prev``. Two connectors, or two calls of one, may write the same
  edits at a time: HBase ships a call again that took too long, while the first one is still carried out. The gateway
  records each edit once, and each writer begins at or below the last recorded edit, so that none overtakes another.
* A request whose outcome is unknown is sent again as it is, until the deadline; then HBase ships the call again.
* What the gateway names as recorded is not sent again within a call. So a call that HBase ships again after its
  deadline is carried on where the gateway is, and comes to its end however large it is.
* A region that came out of others waits for their last edits: `ParentOrder`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote

from logferry.client.events import log_event
from logferry.client.hbase.changes import RegionChunk
from logferry.client.hbase.frames import CallFailed
from logferry.client.hbase.master import ParentRegion
from logferry.client.hbase.zookeeper import Unanswered
from logferry.client.transport.cluster import RETRY_S, GatewayCluster, pause_s
from logferry.client.transport.connections import Connections, Dialer, NoResponse
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
# A region waits within a call for so long, of so many calls; then HBase ships them again, so that threads are free.
_WAIT_S = 3.0
_LOOK_S = 0.1
_MOST_WAITING = 4
# After so long it waits no more: HBase may ship both in one piece, and counts the parent when the child is recorded.
LONGEST_S = 120.0
_MOST_REGIONS = 100_000
# Sequence ids from the last edit of a region that is closed to the barrier behind it: HBase takes one for the flush,
# and one each for the marks of its begin, its end and of the close.
_CLOSE_IDS = 5


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

    def deliver(
        self,
        chunks: Iterable[RegionChunk],
        deadline: float,
        check: Callable[[str, str], None] = lambda table, region: None,
    ) -> Delivered:
        """Returns when all are recorded. ``check`` is called with table and region before edits of it are written.
        Raises NotDelivered, and what ``chunks`` and ``check`` raise.
        """
        count = size = 0
        recorded: dict[str, int] = {}  # by source, as the gateway says in this call
        for batch in batches_of(one for one in chunks if one.chunk.seqno > recorded.get(one.source_id, -1)):
            if time.monotonic() > deadline:
                raise NotDelivered(
                    f"not recorded in time: {count} chunks are, and the rest is when HBase ships it again"
                )
            if self._stop.is_set():
                raise NotDelivered("the connector stops")
            check(batch.table, batch.source_id.partition("/")[0])
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

    def recorded(self, table: str, region: str) -> int:
        """The highest sequence id of the region that is recorded; 0: none, or the gateway does not say."""
        return recorded_id(self._cluster, self._topic, self._own(), table, region)

    def _own(self) -> Connections:
        found: Connections | None = getattr(self._threads, "connections", None)
        if found is None:
            found = self._threads.connections = Connections(_ANSWER_TIMEOUT_S, self._dialer)
        return found


def recorded_id(cluster: GatewayCluster, topic: str, connections: Connections, table: str, region: str) -> int:
    """As `GatewayDelivery.recorded`."""
    base = cluster.current_url()
    path = f"/v1/topics/{quote(topic, safe='')}/sources/{region}?partition_key={quote(table, safe='')}"
    headers = {"User-Agent": _USER_AGENT, **cluster.authorization(base + path)}
    try:
        reply = connections.exchange(base + path, headers, None, "GET")
        return int(json.loads(reply.body)["recorded_seqno"] or 0) if reply.status == 200 else 0
    except NoResponse:
        cluster.failed(base)
    except (ValueError, KeyError, TypeError):
        pass
    return 0


# ---- the order between regions --------------------------------------------------------------------------------------


class ParentOrder:
    """No edit of a region is recorded before the last ones of the regions that it was split from or merged of.

    HBase's serial peers ship in this order, but not always. The opening of a region is in the log before its first
    barrier is in hbase:meta: a server that reads it in between ships it, and what follows without a gap in the sequence
    ids, and does not look at the parents.

    A parent is finished when HBase has shipped it to its last barrier; or, before HBase knows, when the gateway has
    recorded the last edit before it was closed. So must be the parents of the parent: marks of HBase alone may have
    moved the parent's id. Thread-safe. No I/O.
    """

    def __init__(
        self,
        parents: Callable[[str], Mapping[str, tuple[ParentRegion, ...]]],
        pushed: Callable[[str], int | None],
        recorded: Callable[[str, str], int],
        pause: Callable[[float], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``parents``: of the regions of a table, as `HBaseMeta.parents`. ``pushed``: as `pushed_of` a region.
        ``recorded``: as `GatewayDelivery.recorded`. ``pause``: waits, and says whether the connector stops.
        """
        self._ask, self._pushed, self._recorded, self._pause, self._now = parents, pushed, recorded, pause, now
        self._settled: set[str] = set()
        self._parents: dict[str, tuple[ParentRegion, ...]] = {}  # and theirs, of regions that have any
        self._asked: dict[str, float] = {}  # when a table was last asked for
        self._since: dict[str, float] = {}  # when a region was refused first
        self._silent: tuple[float, str] | None = None  # when it was last asked for without an answer, and why
        self._asking = threading.Lock()
        self._waiting = threading.Semaphore(_MOST_WAITING)

    def check(self, table: str, region: str) -> None:
        """Returns when edits of the region may be recorded. Raises NotDelivered."""
        if region in self._settled:
            return
        try:
            why = self._reason(table, region)
        except Unanswered as error:
            why = f"region {region} waits to know its parents: {error}"
        except CallFailed as error:
            log_event("hbase-order-unknown", table=table, region=region, reason=f"hbase:meta cannot be read: {error}")
            why = ""
        if why:
            if len(self._since) >= _MOST_REGIONS:
                self._since.clear()
            if self._now() - self._since.setdefault(region, self._now()) < LONGEST_S:
                raise NotDelivered(why)
            log_event("hbase-order-unknown", table=table, region=region, reason=why)
        self._since.pop(region, None)
        self._settle(region)

    def _settle(self, region: str) -> None:
        if len(self._settled) >= _MOST_REGIONS:
            self._settled.clear()
        self._settled.add(region)
        self._parents.pop(region, None)

    def _reason(self, table: str, region: str) -> str:
        """Why the region has to wait, after a wait; empty: it has not. Raises Unanswered, CallFailed."""
        began = self._now()
        parents = self._parents.get(region)
        if parents is None or self._unfinished(table, region, parents):
            # Known ones again: HBase clears the barriers of those that it has shipped.
            parents = self._known(table, region, began)
        why = self._unfinished(table, region, parents)
        if not why or not self._waiting.acquire(blocking=False):
            return why
        try:
            until = self._now() + _WAIT_S
            while why and self._now() < until and not self._pause(_LOOK_S):
                why = self._unfinished(table, region, parents)
        finally:
            self._waiting.release()
        return why

    def _known(self, table: str, region: str, began: float) -> tuple[ParentRegion, ...]:
        """Its parents, as hbase:meta has them since ``began``; what it says of other regions is kept, too."""
        with self._asking:
            if self._silent and self._silent[0] >= began:  # others waited for the same answer, and had none
                raise Unanswered(self._silent[1])
            if self._asked.get(table, began - 1) < began:
                now = self._now()
                try:
                    found = self._ask(table)
                except Unanswered as error:
                    self._silent = self._now(), str(error)
                    raise
                self._asked[table] = now
                if len(self._parents) >= _MOST_REGIONS:
                    self._parents.clear()
                for other in found:
                    if other in self._settled:
                        continue
                    if ancestors := _ancestors(found, other):
                        self._parents[other] = ancestors
                    else:
                        self._settle(other)
            return self._parents.get(region, ())

    def _unfinished(self, table: str, region: str, parents: tuple[ParentRegion, ...]) -> str:
        """Which parent is not, and how far it is; empty: all are."""
        for parent in parents:
            pushed = self._pushed(parent.region)
            if pushed is None or pushed >= parent.end - 1:
                continue
            if self._recorded(table, parent.region) >= max(parent.end - _CLOSE_IDS, parent.opened):
                continue
            shipped = f"shipped to {pushed} of {parent.end - 1}"
            return f"region {region} waits for its parent {parent.region}, {shipped}"
        return ""


def _ancestors(parents: Mapping[str, tuple[ParentRegion, ...]], region: str) -> tuple[ParentRegion, ...]:
    found: dict[str, ParentRegion] = {}
    left = [*parents[region]]
    while left:
        one = left.pop()
        if one.region not in found:
            found[one.region] = one
            left += parents.get(one.region, ())
    return tuple(found.values())
