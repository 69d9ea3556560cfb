"""`logferry lanes` that kills itself behind a named step, or with a guard switched off.

``python tests/crash/gateway/lane_changer.py STEP --config FILE --to N``, STEP a method of `LaneChange`, or
``no-fence``, or a path: it waits behind `fence` until the file is there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from logferry.gateway.service import lane_change
from logferry.gateway.service.lane_change import LaneChange
from logferry.gateway.service.lane_states import LaneStates
from logferry.ops.cli.main import main


def killed_behind(step: str) -> None:
    found: Callable[..., Awaitable[Any]] = getattr(LaneChange, step)

    async def killed(self: LaneChange, *args: Any) -> Any:
        await found(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(LaneChange, step, killed)


def no_fence() -> None:
    """The lanes are read while they write. What they record meanwhile has no state afterwards."""

    async def read(self: LaneChange, lane: LaneStates) -> None:
        await self._read(lane)
        await asyncio.sleep(1)

    LaneChange._fence = read  # type: ignore[method-assign]


def held(until: Path) -> None:
    """Behind the fence, and without the usual end of its time."""
    fence = LaneChange.fence
    lane_change._TIMEOUT_S = 240.0  # type: ignore[misc]

    async def wait(self: LaneChange) -> None:
        await fence(self)
        while True:
            if until.exists():
                return
            await asyncio.sleep(0.05)

    LaneChange.fence = wait  # type: ignore[method-assign]


if __name__ == "__main__":
    step = sys.argv[1]
    if "/" in step:
        held(Path(step))
    else:
        no_fence() if step == "no-fence" else killed_behind(step)
    sys.exit(main(["lanes", *sys.argv[2:]]))
