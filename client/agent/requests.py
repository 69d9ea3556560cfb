"""The requests of a source: open a session, write chunks, send a heartbeat.

Every request may be repeated: a session may be opened again, chunks carry seqno and ``prev``, so that the gateway
records each once, and a heartbeat is idempotent. A `Pusher` belongs to one thread; all share the `GatewayCluster`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from urllib.parse import quote

from logferry.client.agent.heartbeat import HeartbeatReport
from logferry.client.files.chunking import FileBatch
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Body, NoResponse, Reply, gzipped
from logferry.client.transport.redirects import Outcome, RedirectFollower, with_owner
from logferry.gateway.contract.chunk import MSGPACK

USER_AGENT = "logferry-push"


class Exchange(Protocol):
    def __call__(self, url: str, headers: dict[str, str], body: Body | None, method: str = "POST") -> Reply:
        """One request; raises `NoResponse`."""


class PushJob(NamedTuple):
    """One request of a source of ``topic``. Without batch and beat it opens a session.

    ``url``: the owner, if known. ``direct``: the gateway may redirect; else it forwards. ``dc``: the number of the data
    centre. ``skips``: the data centre has recorded less than lies before the batch, because the rest is in another one.
    """

    topic: str
    source_id: str
    url: str | None
    direct: bool
    session: int | None
    batch: FileBatch | None
    beat: HeartbeatReport | None = None
    dc: int = 0
    skips: bool = False


class Pusher:
    """Carries out jobs, one at a time. ``clusters``: by the number of their data centre."""

    def __init__(self, clusters: Sequence[GatewayCluster], exchange: Exchange, gzip: bool = True) -> None:
        self.clusters = clusters
        self.exchange = exchange
        self.gzip = gzip

    def perform(self, job: PushJob) -> Outcome:
        """Never raises for faults of the network or the gateway: the outcome holds them."""
        cluster = self.clusters[job.dc]
        source = f"/v1/topics/{quote(job.topic, safe='')}/sources/{quote(job.source_id, safe='')}"
        headers = {"User-Agent": USER_AGENT, "Content-Type": "application/json" if job.batch is None else MSGPACK}
        owner: str | None = None
        body: Body = b""
        sent_bytes = 0
        if job.batch is not None:
            # They may be sent again; uncompressed ones are views of the batch and take no memory.
            parts: list[bytes | memoryview] = list(job.batch.body(job.skips))
            if self.gzip:
                headers["Content-Encoding"], parts = "gzip", [gzipped(parts)]
            if job.direct:
                headers["X-Logferry-Redirect"], owner = "1", job.url
            path, body, sent_bytes = f"chunks?session={job.session}", parts, sum(map(len, parts))
            headers["Content-Length"] = str(sent_bytes)
        elif job.beat is not None:
            said = {name: value for name, value in job.beat._asdict().items() if value is not None}
            path, body = f"heartbeat?session={job.session}", json.dumps(said).encode()
        else:
            path = "session"
        follower = RedirectFollower(cluster, owner or cluster.current_url(), f"{source}/{path}", job.batch is None)
        outcome = follower.follow(lambda url, token: self.exchange(url, {**headers, **token}, body))
        if path == "session":
            # A given URL was asked, which forwards: so the owner's URL comes from a trusted gateway.
            outcome = with_owner(cluster, outcome)
        return outcome._replace(sent_bytes=sent_bytes)

    def probe(self, dc: int) -> bool:
        """Whether one of the given gateways of the data centre is ready."""
        return any(self._is_ready(url) for url in self.clusters[dc].urls)

    def _is_ready(self, base: str) -> bool:
        try:
            return self.exchange(f"{base}/readyz", {"User-Agent": USER_AGENT}, None, "GET").status == 200
        except NoResponse:
            return False
