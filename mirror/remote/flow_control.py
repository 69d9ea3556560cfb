"""Flow control of fetches: a budget of memory for uncommitted batches."""

from __future__ import annotations

import asyncio


class MemoryBudget:
    """Bytes fetched and not committed. May exceed the limit by the fetches in flight when it was reached."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    def take(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        if self.used_bytes >= self.limit_bytes:
            self._room.clear()

    def give(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        if self.used_bytes < self.limit_bytes:
            self._room.set()

    async def room(self) -> None:
        """Returns when there is room."""
        await self._room.wait()

    @property
    def is_full(self) -> bool:
        return not self._room.is_set()
