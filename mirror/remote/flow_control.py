"""How much may wait in memory, and how fast a link may be: what a fetch waits for before it is sent."""

from __future__ import annotations

import asyncio
import time

from logferry.gateway.http.quotas import BURST_S, Bucket


class Budget:
    """Bytes that were fetched and are not committed. More than the limit by what was under way when it was reached."""

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
        """Returns when there is some."""
        await self._room.wait()

    @property
    def is_full(self) -> bool:
        return not self._room.is_set()


class Pace:
    """At most so many bytes a second, None: as fast as it goes."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bucket = None if bytes_per_s is None else Bucket(bytes_per_s, bytes_per_s * BURST_S, time.monotonic())

    def wait_s(self) -> float:
        """How long until something may come."""
        return 0.0 if self._bucket is None else self._bucket.wait_s(time.monotonic())

    def take(self, size_bytes: int) -> None:
        if self._bucket is not None:
            self._bucket.take(size_bytes)
