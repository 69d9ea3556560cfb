"""What one transaction of a lane takes of the sources that were silent for their retention."""

from __future__ import annotations

import time
from collections import deque
from unittest.mock import AsyncMock

from logferry.gateway.config import Config
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.lanes.dedup import Source, SourceState
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.metrics import LaneMetrics
from logferry.gateway.topics.catalog import Topics

_SILENT = 5000
_AT_MOST = 200


async def test_many_sources_that_expire_at_once_are_forgotten_a_few_a_transaction() -> None:
    config = Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}})
    kafka = Kafka({"bootstrap_servers": "127.0.0.1:1"}, "test")
    lane = Lane(
        number=0,
        config=config,
        kafka=kafka,
        topics=Topics(kafka, config),
        metrics=LaneMetrics("0"),
        confirm_ownership=AsyncMock(),
    )
    long_ago = int(time.time() * 1000) - config.source_retention_ms - 1
    keys = [Source("dc1.t", None, str(number)).state_key() for number in range(_SILENT)]
    for key in keys:
        lane.table.apply(key, SourceState(b"i" * 16, 0, 1, 0, 0, long_ago).encode())
    lane._expired = deque(keys)
    forgotten: list[bytes] = []
    while lane._expired:
        states = lane._draft().states
        assert 0 < len(states) <= _AT_MOST
        assert set(states.values()) == {None}
        forgotten += states
        for key in states:
            lane.table.apply(key, None)
    assert forgotten == keys
    assert len(lane.table) == 0
