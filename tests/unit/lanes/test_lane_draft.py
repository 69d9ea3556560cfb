"""What one transaction of a lane takes of the sources that were silent for their retention."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from unittest.mock import AsyncMock

import pytest
from logferry.gateway.config import Config
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.lifecycle import now_ms
from logferry.gateway.topics.catalog import TopicCatalog

from tests.support.lane_requests import FixedLanes

_SILENT = 5000
_AT_MOST = 200


LONG_AGO_MS = int(time.time() * 1000) - 15 * 86_400_000


def serving_lane() -> Lane:
    config = Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}})
    kafka = KafkaClient({"bootstrap_servers": "127.0.0.1:1"}, "test")
    lane = Lane(
        number=0,
        config=config,
        kafka=kafka,
        topics=TopicCatalog(kafka, config),
        lanes=FixedLanes(kafka, config),
        confirm_ownership=AsyncMock(),
    )
    for state_name in ("fencing", "replaying", "serving"):
        lane.lane_state.enter(state_name)
    return lane


def lane_with(silent: int, alive: int = 0) -> Lane:
    """A lane with sources that were silent for longer than the retention, and others."""
    lane = serving_lane()
    for number in range(silent + alive):
        written_ms = LONG_AGO_MS if number < silent else now_ms()
        state = SourceState(b"i" * 16, 0, 1, 0, 0, written_ms)
        lane.table.apply(SourceIdentity("dc1.t", None, str(number)).state_key(), state.encode())
    return lane


@pytest.mark.parametrize(
    ("silent", "alive", "forgotten"), [(7, 0, 7), (100, 3, 100), (900, 100, 100), (900, 4100, 500)]
)
async def test_a_tenth_of_the_sources_is_forgotten_at_once(silent: int, alive: int, forgotten: int) -> None:
    """A host whose clock is a month ahead would forget all of them."""
    lane = lane_with(silent, alive)
    await lane.find_expired(now_ms())
    assert len(lane._expired) == forgotten


async def test_many_sources_that_expire_at_once_are_forgotten_a_few_a_transaction() -> None:
    lane = lane_with(_SILENT)
    keys = lane.table.state_keys()
    lane._expired = deque(keys)
    forgotten: list[bytes] = []
    while lane._expired:
        states = (await lane._draft()).states
        assert 0 < len(states) <= _AT_MOST
        assert set(states.values()) == {None}
        forgotten += states
        for key in states:
            lane.table.apply(key, None)
    assert forgotten == keys
    assert len(lane.table) == 0


@pytest.mark.parametrize("scan", ["sources", "expired"])
async def test_others_run_while_the_sources_are_searched(monkeypatch: pytest.MonkeyPatch, scan: str) -> None:
    """By time, not by number: ids of 512 bytes take longer to decode."""
    lane, turns = lane_with(10, 2000), 0
    monkeypatch.setattr("logferry.gateway.turns._TURN_S", 0.0)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    if scan == "sources":
        assert len([source async for source in lane.sources("dc1.t", "")]) == 2010
    else:
        await lane.find_expired(now_ms())
    task.cancel()
    assert turns > 20
