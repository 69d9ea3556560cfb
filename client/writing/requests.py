"""Which source is written, and the requests for it. No I/O."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote

from logferry.client.gateways import USER_AGENT
from logferry.client.transport.cluster import Cluster
from logferry.client.transport.redirects import Outcome, Trip
from logferry.client.writing.send_window import Job
from logferry.gateway.contract.chunk import MSGPACK, check_attributes, check_source_id, check_topic


class Request(NamedTuple):
    """``headers`` without the token, which is the trip's."""

    trip: Trip
    headers: dict[str, str]
    body: bytes


class Target(NamedTuple):
    """``topic`` without its data centre."""

    cluster: Cluster
    topic: str
    source_id: str
    partition_key: str | None
    gzip: bool

    def request(self, job: Job) -> Request:
        path = f"/v1/topics/{quote(self.topic, safe='')}/sources/{quote(self.source_id, safe='')}/"
        key = [] if self.partition_key is None else [f"partition_key={quote(self.partition_key, safe='')}"]
        headers = {"User-Agent": USER_AGENT}
        base = (job.direct and job.url) or self.cluster.given()
        if job.batch is None:
            query = f"?{key[0]}" if key else ""
            return Request(Trip(self.cluster, base, f"{path}session{query}", opens=True), headers, b"")
        body = job.batch.body()
        headers["Content-Type"] = MSGPACK
        if self.gzip:
            squeeze = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
            body = squeeze.compress(body) + squeeze.flush()
            headers["Content-Encoding"] = "gzip"
        if job.direct:
            headers["X-Logferry-Redirect"] = "1"
        query = "&".join([f"session={job.session}", *key])
        return Request(Trip(self.cluster, base, f"{path}chunks?{query}", opens=False), headers, body)

    def learned(self, job: Job, outcome: Outcome) -> Outcome:
        """An opening's answer names the owner; its URL is followed, and sees the token, if the one that told it may."""
        owner = (outcome.answer.url or "").rstrip("/")
        if job.batch is not None or not owner or outcome.url is None:
            return outcome
        self.cluster.learn(owner, told_by=outcome.url)
        return Outcome(outcome.answer, owner) if self.cluster.may_follow(owner) else outcome


def target(
    cluster: Cluster, topic: str, source_id: str, partition_key: str | None, gzip: bool, attributes: Mapping[str, str]
) -> Target:
    """Raises ValueError for names that the gateway would refuse."""
    check_topic(topic)
    check_source_id(source_id, "source_id")
    if partition_key is not None:
        check_source_id(partition_key, "partition_key")
    check_attributes(dict(attributes))
    return Target(cluster, topic, source_id, partition_key, gzip)
