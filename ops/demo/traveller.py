"""A reader that moves between the data centres by its cursor, all the while, and keeps an account of what it got."""

from __future__ import annotations

import http.client
import itertools
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from logferry.gateway.contract.chunk import MSGPACK
from logferry.ops.demo.readers import Reader

_STAY_S: Final = 1.5
_WAIT_MS: Final = 300
_MAX_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 10.0


class Traveller(Reader):
    """``homes``: the workers of each data centre. ``moves``: how often it went on in another one than before."""

    def __init__(self, homes: Sequence[Sequence[str]], topic: str, partitions: int) -> None:
        longest = max(map(len, homes))
        turns = ([home[turn % len(home)] for home in homes] for turn in range(longest))
        super().__init__(list(itertools.chain.from_iterable(turns)), topic, partitions)
        self._cursors = {partition: f"{topic}:{partition}:0" for partition in self.positions}
        self.moves = 0

    def _read_from(self, url: str, partition: int) -> None:
        """For a while, or until the worker cannot answer; then the next one is in the other data centre."""
        link = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
        until, has_moved = time.monotonic() + _STAY_S, False
        try:
            while not self._stopping.is_set() and time.monotonic() < until:
                query = f"cursor={self._cursors[partition]}&wait_ms={_WAIT_MS}&max_bytes={_MAX_BYTES}"
                path = f"/v1/topics/{self._topic}/partitions/{partition}/chunks?{query}"
                link.request("GET", path, headers={"Accept": MSGPACK})
                answer = link.getresponse()
                body = answer.read()
                # Not found: the topic is not mirrored yet.
                if answer.status == http.client.NOT_FOUND or answer.status >= http.client.INTERNAL_SERVER_ERROR:
                    return
                if answer.status != http.client.OK:
                    raise RuntimeError(f"GET {path}: {answer.status}: {body.decode(errors='replace')[:500]}")
                self._take(body, time.time() * 1000)
                self._cursors[partition] = answer.headers["X-Next-Cursor"]
                if body and not has_moved:
                    has_moved = True
                    self.moves += 1
        except (OSError, http.client.HTTPException):
            return
        finally:
            link.close()
