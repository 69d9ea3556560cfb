"""Long work on the event loop in turns, so that nothing waits for it for more than some milliseconds."""

from __future__ import annotations

import asyncio
import time
from typing import Final

_TURN_S: Final = 0.003


class Turns:
    """One piece of work. Call `over` often; where it is true, `give` before what comes next."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.monotonic() + _TURN_S

    @property
    def over(self) -> bool:
        """Whether others should run now."""
        return time.monotonic() > self._until

    async def give(self) -> None:
        """Others run; then the next turn begins."""
        await asyncio.sleep(0)
        self._until = time.monotonic() + _TURN_S
