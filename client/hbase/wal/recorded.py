"""What the gateway has recorded of each region, asked once: entries below that need not be written again.

Of a large edit, the last one that is recorded may be there in part: it is written again, and only what is below it is
left out.
"""

from __future__ import annotations

import json
from urllib.parse import quote

from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Connections, Dialer, NoResponse

_ANSWER_TIMEOUT_S = 30.0


class RecordedIds:
    """For one thread."""

    def __init__(self, cluster: GatewayCluster, topic: str, dialer: Dialer) -> None:
        self._cluster, self._topic = cluster, topic
        self._connections = Connections(_ANSWER_TIMEOUT_S, dialer)
        self._found: dict[str, int] = {}

    def of(self, table: str, region: str) -> int:
        """The last sequence id, as it was when it was first asked for; 0: unknown, or nothing is recorded."""
        if region not in self._found:
            self._found[region] = self._ask(table, region)
        return self._found[region]

    def close(self) -> None:
        self._connections.close()

    def _ask(self, table: str, region: str) -> int:
        base = self._cluster.current_url()
        path = f"/v1/topics/{quote(self._topic, safe='')}/sources/{region}?partition_key={quote(table, safe='')}"
        url = base + path
        headers = {"User-Agent": "logferry-hbase", **self._cluster.authorization(url)}
        try:
            reply = self._connections.exchange(url, headers, None, "GET")
            return int(json.loads(reply.body)["recorded_seqno"] or 0) if reply.status == 200 else 0
        except NoResponse:
            self._cluster.failed(base)
        except (ValueError, KeyError, TypeError):
            pass
        return 0
