"""What the gateway has recorded of each region, asked once: entries below that need not be written again.

Of a large edit, the last one that is recorded may be there in part: it is written again, and only what is below it is
left out.
"""

from __future__ import annotations

from logferry.client.hbase.delivery import recorded_id
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Connections, Dialer

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
            self._found[region] = recorded_id(self._cluster, self._topic, self._connections, table, region)
        return self._found[region]

    def close(self) -> None:
        self._connections.close()
