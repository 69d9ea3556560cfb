"""A source's requests: open a session, write chunks, say how far it is.

Every request may be repeated: a session may be opened again, chunks carry seqno and ``prev``, so that the
gateway takes each once, and a heartbeat says the same twice. One `Pusher` belongs to one thread; the `Cluster`
is shared by all.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from urllib.parse import quote

from logferry.client.files.chunking import Batch
from logferry.client.transport.cluster import Cluster
from logferry.client.transport.connections import Body, NoAnswer, Reply
from logferry.client.transport.redirects import Outcome, Trip
from logferry.gateway.contract.chunk import MSGPACK

USER_AGENT = "logferry-push"


class Exchange(Protocol):
    def __call__(self, url: str, headers: dict[str, str], body: Body | None, method: str = "POST") -> Reply:
        """One request; raises `NoAnswer`."""


class Beat(NamedTuple):
    """What a source says of itself: its file's ``size`` in bytes, and up to which ``position`` it was sent.

    ``watermark_ms``: what was in the file at that time (Unix, milliseconds) was sent. None: not known, or not so.
    """

    position: int
    size: int | None
    watermark_ms: int | None
    finished: bool


class Job(NamedTuple):
    """One request of a source of ``topic``. Without batch and beat it opens a session.

    ``url``: the owner as far as known. ``direct``: redirects are welcome; else the gateway forwards. ``dc``: the
    data centre. ``skips``: what is recorded there ends before the batch, and is meant to: the rest is in another one.
    """

    topic: str
    source_id: str
    url: str | None
    direct: bool
    session: int | None
    batch: Batch | None
    beat: Beat | None = None
    dc: int = 0
    skips: bool = False


class Pusher:
    """Carries out jobs, one at a time. ``clusters``: by the number of their data centre."""

    def __init__(self, clusters: Sequence[Cluster], exchange: Exchange, gzip: bool = True) -> None:
        self.clusters = clusters
        self.exchange = exchange
        self.gzip = gzip

    def perform(self, job: Job) -> Outcome:
        """Never raises for what the network or the gateway does: that is in the outcome."""
        cluster = self.clusters[job.dc]
        source = f"/v1/topics/{quote(job.topic, safe='')}/sources/{quote(job.source_id, safe='')}"
        if job.beat is not None:
            return self._beat(cluster, source, job, job.beat)
        if job.batch is None:
            return self._open(cluster, source)
        headers, body = self._body(job.batch, job.skips)
        if job.direct:
            headers["X-Logferry-Redirect"] = "1"
        base = (job.direct and job.url) or cluster.given()
        trip = Trip(cluster, base, f"{source}/chunks?session={job.session}", opens=False)
        size = sum(len(part) for part in body)
        headers["Content-Length"] = str(size)
        return self._post(trip, headers, body)._replace(sent_bytes=size)

    def probe(self, dc: int) -> bool:
        """Whether one of the data centre's given gateways says that it serves."""
        return any(self._is_ready(url) for url in self.clusters[dc].urls)

    def _is_ready(self, base: str) -> bool:
        try:
            return self.exchange(f"{base}/readyz", {"User-Agent": USER_AGENT}, None, "GET").status == 200
        except NoAnswer:
            return False

    def _open(self, cluster: Cluster, source: str) -> Outcome:
        """Asks a given URL, which forwards to the owner: so the owner's URL comes from one that is trusted."""
        base = cluster.given()
        headers = {"Content-Type": "application/json"}
        outcome = self._post(Trip(cluster, base, f"{source}/session", opens=True), headers, b"")
        owner = (outcome.answer.url or "").rstrip("/")
        cluster.learn(owner, told_by=base)
        return Outcome(outcome.answer, owner) if cluster.may_follow(owner) else outcome

    def _beat(self, cluster: Cluster, source: str, job: Job, beat: Beat) -> Outcome:
        said = {name: value for name, value in beat._asdict().items() if value is not None}
        headers = {"Content-Type": "application/json"}
        trip = Trip(cluster, cluster.given(), f"{source}/heartbeat?session={job.session}", opens=True)
        return self._post(trip, headers, json.dumps(said).encode())

    def _body(self, batch: Batch, skips: bool) -> tuple[dict[str, str], list[bytes | memoryview]]:
        """Its parts may be sent again; those that are not compressed are no copies, so it costs no memory."""
        parts = batch.body(skips)
        if not self.gzip:
            return {"Content-Type": MSGPACK}, list(parts)
        squeeze = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
        small = b"".join([*(squeeze.compress(part) for part in parts), squeeze.flush()])
        return {"Content-Type": MSGPACK, "Content-Encoding": "gzip"}, [small]

    def _post(self, trip: Trip, headers: dict[str, str], body: Body) -> Outcome:
        while True:
            try:
                reply = self.exchange(trip.url, {"User-Agent": USER_AGENT, **headers, **trip.authorization()}, body)
            except NoAnswer as error:
                return trip.unanswered(str(error))
            outcome = trip.answered(reply)
            if outcome is not None:
                return outcome
