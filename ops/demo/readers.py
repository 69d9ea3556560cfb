"""A reader that knows nothing of the writers: it long-polls every partition over HTTP, from its first chunk on.

It measures what a user of the data would: how long it takes from the making of a chunk at its source until a reader
has it, kills included. And it keeps an account of its own of what came, with the order of every source, to be held
against the audit's at the end. A worker that breaks off is left for the next one; the offset is all that is needed to
go on.
"""

from __future__ import annotations

import http.client
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import msgpack
from logferry.gateway.contract.chunk import MSGPACK

_WAIT_MS: Final = 500
_MAX_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 10.0
_PAUSE_S: Final = 0.1


@dataclass
class Seen:
    """One source as the reader saw it. ``arrivals``: seqno and time of each chunk, in ms; ``breaks``: chunks that did
    not follow the one before."""

    path: str
    bytes: int = 0
    breaks: int = 0
    arrivals: list[tuple[int, float]] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        return len(self.arrivals)


@dataclass
class Account:
    """What came, of all partitions. Pure; one thread at a time takes."""

    sources: dict[str, Seen] = field(default_factory=dict)
    ages_ms: list[float] = field(default_factory=list)
    bytes: int = 0
    first_created_ms: int | None = None
    last_at_ms: float = 0.0

    def take(self, source_id: str, chunk: Chunk, now_ms: float) -> None:
        seen = self.sources.get(source_id)
        if seen is None:
            seen = self.sources[source_id] = Seen(chunk.path)
        elif chunk.prev != seen.arrivals[-1][0]:
            seen.breaks += 1
        seen.arrivals.append((chunk.seqno, now_ms))
        seen.bytes += chunk.size
        self.bytes += chunk.size
        self.ages_ms.append(now_ms - chunk.created_ms)
        if self.first_created_ms is None or chunk.created_ms < self.first_created_ms:
            self.first_created_ms = chunk.created_ms
        self.last_at_ms = now_ms

    @property
    def chunks(self) -> int:
        return len(self.ages_ms)

    @property
    def breaks(self) -> int:
        return sum(seen.breaks for seen in self.sources.values())

    @property
    def seconds(self) -> float:
        """From the making of the first chunk until the last one was read."""
        return max(0.0, (self.last_at_ms - (self.first_created_ms or self.last_at_ms)) / 1000)


@dataclass(frozen=True)
class Chunk:
    """A row of the read interface without the data."""

    seqno: int
    prev: int | None
    created_ms: int
    path: str
    size: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; ``ordered`` holds some."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


class Reader:
    """Reads in threads of its own from `__enter__` until `__exit__`."""

    def __init__(self, urls: Sequence[str], topic: str, partitions: int) -> None:
        self.account = Account()
        self.positions = dict.fromkeys(range(partitions), 0)
        self.failed: BaseException | None = None
        self._urls, self._topic = list(urls), topic
        self._taking = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(partition,), name=f"reads-{partition}", daemon=True)
            for partition in self.positions
        ]

    def __enter__(self) -> Reader:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def ages_ms(self) -> list[float]:
        """Of all chunks so far, in order of size."""
        with self._taking:
            return sorted(self.account.ages_ms)

    def _follow(self, partition: int) -> None:
        turn = partition
        try:
            while not self._stopping.is_set():
                self._read_from(self._urls[turn % len(self._urls)], partition)
                turn += 1
                self._stopping.wait(_PAUSE_S)
        except BaseException as error:  # noqa: BLE001  (the story raises it)
            self.failed = error

    def _read_from(self, url: str, partition: int) -> None:
        """Until told to stop, or the worker goes away or says that it cannot just now."""
        link = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
        try:
            while not self._stopping.is_set():
                query = f"offset={self.positions[partition]}&wait_ms={_WAIT_MS}&max_bytes={_MAX_BYTES}"
                path = f"/v1/topics/{self._topic}/partitions/{partition}/chunks?{query}"
                link.request("GET", path, headers={"Accept": MSGPACK})
                answer = link.getresponse()
                body = answer.read()
                if answer.status >= http.client.INTERNAL_SERVER_ERROR:
                    return
                if answer.status != http.client.OK:
                    raise RuntimeError(f"GET {path}: {answer.status}: {body.decode(errors='replace')[:500]}")
                self._take(body, time.time() * 1000)
                self.positions[partition] = int(answer.headers["X-Next-Offset"])
        except (OSError, http.client.HTTPException):
            return
        finally:
            link.close()

    def _take(self, body: bytes, now_ms: float) -> None:
        rows = msgpack.Unpacker(max_buffer_size=len(body) or 1)
        rows.feed(body)
        with self._taking:
            for row in rows:
                self.account.take(row[4], _chunk(row), now_ms)


def _chunk(row: list[Any]) -> Chunk:
    _, _, _, _, source_id, seqno, prev, created_ms, _, attributes, data = row
    return Chunk(seqno, prev, created_ms, attributes.get("path", source_id), len(data))
