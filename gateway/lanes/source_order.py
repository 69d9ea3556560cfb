"""The order of a lane's sources in lists: by topic, then by source id and partition key, each escaped as in paths.

It is made for the first list, in turns, and kept: then a page costs what it returns, however many sources there
are. Sources that are forgotten stay in it until it is made again, so who reads it looks into the table, too.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator
from heapq import merge
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.turns import Turns

# So many are sorted at once, which takes some milliseconds.
_PIECE: Final = 1000
# Maps bytes so that their order is that of their escaped forms: what is escaped comes before what is not.
_BY_ESCAPED: Final = bytes(sorted(range(256), key=lambda byte: quote(bytes([byte]), safe="")))
_RANKS: Final = bytes.maketrans(_BY_ESCAPED, bytes(range(256)))


def sort_key(source_id: str, partition_key: str | None) -> str:
    """Of a source among those of its topic; escaped, so that the two cannot run together."""
    return quote(source_id, safe="") + ("" if partition_key is None else " " + quote(partition_key, safe=""))


def _place(key: bytes) -> bytes:
    """Of a state key, in the order of topics and sort keys: quoting costs ten times as much."""
    topic, *names = key[1:].split(b"\0")
    return b"\0".join((topic, *(name.translate(_RANKS) for name in reversed(names))))


def _start(topic: str, after: str) -> bytes:
    names = [unquote_to_bytes(name).translate(_RANKS) for name in after.split(" ", 1)]
    return b"\0".join((topic.encode(), *names))


class SourceOrder:
    def __init__(self, table: SourceTable) -> None:
        self.table = table
        self._keys: list[bytes] = []
        self._lock = asyncio.Lock()

    async def walk(self, topic: str, start: str) -> AsyncIterator[bytes]:
        """The state keys of the topic's sources from a sort key on, whoever comes and goes meanwhile."""
        await self._settle()
        turns = Turns()
        at = bisect_left(self._keys, _start(topic, start), key=_place)
        while at < len(self._keys):
            key = self._keys[at]
            if not key[1:].startswith(topic.encode() + b"\0"):
                return
            yield key
            at += 1
            if turns.over:
                await turns.give()
                at = bisect_right(self._keys, _place(key), key=_place)

    async def _settle(self) -> None:
        """Takes over the sources that are new."""
        table, turns = self.table, Turns()
        async with self._lock:
            if table.added is None or len(self._keys) > 2 * len(table) + _PIECE:
                table.added = []
                self._keys = await _sorted(table.state_keys(), turns)
            while table.added:
                key = table.added.pop()
                at = bisect_left(self._keys, _place(key), key=_place)
                if at == len(self._keys) or self._keys[at] != key:
                    self._keys.insert(at, key)
                if turns.over:
                    await turns.give()


async def _sorted(keys: list[bytes], turns: Turns) -> list[bytes]:
    pieces, found = list[list[bytes]](), list[bytes]()
    for at in range(0, len(keys), _PIECE):
        pieces.append(sorted(keys[at : at + _PIECE], key=_place))
        if turns.over:
            await turns.give()
    for key in merge(*pieces, key=_place):
        found.append(key)
        if turns.over:
            await turns.give()
    return found
