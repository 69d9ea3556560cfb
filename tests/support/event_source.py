"""A reader of Server-Sent Events as the HTML standard describes it: what a browser does, without one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass
class Event:
    """``kind``: ``message`` where the stream names none."""

    kind: str
    data: str
    last_id: str

    @property
    def row(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.data)
        return found


class EventSource:
    """``last_id``, ``retry_ms``: what the stream has set; they outlive a connection."""

    def __init__(self, url: str, **query: Any) -> None:
        self.url, self.query = url, query
        self.last_id, self.retry_ms = "", 3000
        self.comments = 0

    async def connection(self, headers: dict[str, str] | None = None) -> AsyncIterator[Event]:
        """The events of one connection, until it ends. An event that is not complete is not one."""
        sent = {"Accept": "text/event-stream", **({"Last-Event-ID": self.last_id} if self.last_id else {})}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 24) as session,
            session.get(self.url, params=self.query, headers={**sent, **(headers or {})}) as answer,
        ):
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            kind, data, next_id = "", list[str](), self.last_id
            async for raw in answer.content:
                line = raw.decode().rstrip("\n")
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if not line:
                    self.last_id = next_id
                    if data:
                        yield Event(kind or "message", "\n".join(data), self.last_id)
                    kind, data = "", []
                elif not field:
                    self.comments += 1
                elif field == "event":
                    kind = value
                elif field == "data":
                    data.append(value)
                elif field == "id":
                    next_id = value
                elif field == "retry":
                    self.retry_ms = int(value)

    async def take(self, count: int) -> list[Event]:
        """So many events of one connection, which is cut then."""
        found: list[Event] = []
        stream = self.connection()
        try:
            async for event in stream:
                found.append(event)
                if len(found) == count:
                    break
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        return found
