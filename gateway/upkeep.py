"""What is done to all lanes now and then: requests that wait too long, and sources that were silent too long."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.ownership import Ownership

_EXPIRE_INTERVAL_S: Final = 0.25
_RETIRE_INTERVAL_S: Final = 600.0


async def expire_requests(ownership: Ownership[Lane]) -> None:
    """One clock for all requests costs less than one for each."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_EXPIRE_INTERVAL_S)
        for lane in ownership.held():
            lane.expire(loop.time())


async def retire_sources(ownership: Ownership[Lane], retention_ms: int) -> None:
    """Sources that were silent for the retention are forgotten; looked for some times in a retention."""
    interval_s = min(_RETIRE_INTERVAL_S, retention_ms / 4000)
    while True:
        await asyncio.sleep(interval_s)
        for lane in list(ownership.lanes.values()):
            await lane.find_expired(int(time.time() * 1000))
