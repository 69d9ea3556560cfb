"""Server-Sent Events: the chunks of one partition without end, for browsers (HTML standard, "Server-sent events").

* The id of an event is the cursor behind its chunk. A browser that connects again sends the last one, so it gets every
  chunk once and in order, whatever was killed: an event counts when its empty line has arrived, with its id.
* An id without data moves the cursor alone: to the start, and past chunks that the filters exclude.
* A browser that gets another status than 200 gives up, and its program sees neither status nor body. So a problem is an
  event, and the end of the stream; ``retry`` says after how many ms the browser connects again.
* Nothing is kept here: another worker continues at any id.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from logferry.gateway import log
from logferry.gateway.contract.names import Cursor
from logferry.gateway.reading import formats
from logferry.gateway.reading.stream import FrameStream, ReaderGone

_TICK_S: Final = 0.5
# After a read that found nothing: its wait may be configured as none.
_PAUSE_S: Final = 0.1
# Of all browsers that a worker had, so that they do not come back together.
_RETRY_MS: Final = (500, 1500)


@dataclass(frozen=True, slots=True)
class EventPage:
    """``body``: the events, each with its id. ``cursor``: behind all that was read for it."""

    body: bytes
    cursor: Cursor


class EventStream:
    """``read``: waits for chunks at a cursor, as long as a read may; its page may be empty."""

    def __init__(self, out: FrameStream, read: Callable[[Cursor], Awaitable[EventPage]]) -> None:
        self.out, self._read = out, read
        self._stopping = False

    def stop(self) -> None:
        """Ends the stream within a moment, between two events."""
        self._stopping = True

    async def run(self, page: EventPage | None) -> None:
        """From that page on. Returns when the reader is gone or the worker stops. Raises what ``read`` raises."""
        try:
            await self.out.write(f"retry: {random.randint(*_RETRY_MS)}\n\n".encode())
            while page is not None:
                # Its last id may be behind the cursor, if it has one at all.
                await self.out.write(page.body + formats.event_position(page.cursor))
                was, page = page.cursor, await self._next(page.cursor)
                if page is not None and page.cursor == was:
                    await asyncio.sleep(_PAUSE_S)
        except ReaderGone as error:
            log.event("session_reader_gone", session="events", reason=str(error))

    async def _next(self, cursor: Cursor) -> EventPage | None:
        """None: the worker stops."""
        reading = asyncio.ensure_future(self._read(cursor))
        try:
            while not self._stopping:
                if (await asyncio.wait({reading}, timeout=_TICK_S))[0]:
                    return reading.result()
                await self.out.keep_alive()
            return None
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
