"""Readers that move between data centres by their cursor, a page in each."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from logferry.ops.stack.stack import Stack

from tests.mirrored import Log


class MovingReader:
    """Reads one partition, a page in each data centre in turn; ``seen``: (source, seqno), in order."""

    def __init__(
        self,
        stack: Stack,
        topic: str,
        partition: int,
        session: aiohttp.ClientSession,
        dcs: tuple[str, ...] = ("dc1", "dc2"),
    ) -> None:
        self._stack, self._session = stack, session
        self._path = f"/v1/topics/{topic}/partitions/{partition}/chunks"
        self.cursor = f"{topic}:{partition}:0"
        self.seen: list[tuple[str, int]] = []
        self.pages = dict.fromkeys(dcs, 0)

    async def page(self, dc: str) -> int:
        """How many chunks it held; -1: the data centre could not answer."""
        # Small steps where everything is there at once, so that something is left for the other.
        max_bytes = 2_000 if dc == "dc1" else 60_000
        parameters: dict[str, Any] = {"cursor": self.cursor, "max_bytes": max_bytes, "wait_ms": 300}
        headers = {"Accept": "application/x-ndjson"}
        url = self._stack.urls(dc)[0] + self._path
        try:
            async with self._session.get(url, params=parameters, headers=headers) as answer:
                body = await answer.read()
                if answer.status in (404, 503):
                    return -1  # it is not mirrored yet, or Kafka is away
                assert answer.status == 200, body
                self.cursor = answer.headers["X-Next-Cursor"]
        except aiohttp.ClientError:
            return -1
        rows = [json.loads(line) for line in body.splitlines()]
        self.seen += [(row["source_id"], row["seqno"]) for row in rows]
        self.pages[dc] += bool(rows)
        return len(rows)

    async def to_and_fro(self, is_over: asyncio.Event) -> None:
        """Until it is over and no data centre has anything more."""
        while True:
            was_over = is_over.is_set()
            found = [await self.page(dc) for dc in self.pages]
            if was_over and not any(found):
                return


async def have_moved(readers: list[MovingReader], more: int = 2) -> None:
    """Returns when each has got so many more pages in either data centre: the faults meet readers that move."""
    wanted = [{dc: pages + more for dc, pages in reader.pages.items()} for reader in readers]
    async with asyncio.timeout(90):
        while any(  # noqa: ASYNC110
            r.pages[dc] < least[dc] for r, least in zip(readers, wanted, strict=True) for dc in least
        ):
            await asyncio.sleep(0.05)


def chunks_of(log: Log, partition: int) -> list[tuple[str, int]]:
    """(source, seqno) of the records of a partition, in order."""
    return [
        ((record.key or b"").decode(), int.from_bytes(dict(record.headers)["seqno"])) for _, record in log[partition]
    ]
