"""Which source is written, and the requests for it. No I/O."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

from logferry.client.transport.cluster import USER_AGENT, GatewayCluster
from logferry.client.transport.connections import gzipped
from logferry.client.transport.redirects import Outcome, RedirectFollower, with_owner
from logferry.client.writing.send_window import SendJob
from logferry.gateway.contract.chunk import MSGPACK


class WriteTarget(NamedTuple):
    """``topic`` without its data centre."""

    cluster: GatewayCluster
    topic: str
    source_id: str
    partition_key: str | None
    gzip: bool

    def request(self, job: SendJob) -> tuple[RedirectFollower, dict[str, str], bytes]:
        """The headers are without the token, which is the follower's; then the body."""
        path = f"/v1/topics/{quote(self.topic, safe='')}/sources/{quote(self.source_id, safe='')}/"
        key = [] if self.partition_key is None else [f"partition_key={quote(self.partition_key, safe='')}"]
        headers = {"User-Agent": USER_AGENT}
        base = (job.direct and job.url) or self.cluster.current_url()
        if job.batch is None:
            query = f"?{key[0]}" if key else ""
            return RedirectFollower(self.cluster, base, f"{path}session{query}", True), headers, b""
        body = job.batch.body()
        headers["Content-Type"] = MSGPACK
        if self.gzip:
            body = gzipped([body])
            headers["Content-Encoding"] = "gzip"
        if job.direct:
            headers["X-Logferry-Redirect"] = "1"
        query = "&".join([f"session={job.session}", *key])
        return RedirectFollower(self.cluster, base, f"{path}chunks?{query}", False), headers, body

    def learned(self, job: SendJob, outcome: Outcome) -> Outcome:
        """The outcome; that of an opening with the owner which it names."""
        return outcome if job.batch is not None else with_owner(self.cluster, outcome)
