"""Two independent readers, and the delay from a line in a file to a reader.

* `IndependentReader` knows nothing of the writers: it reads the whole topic with the library's `Reader` from the first
  chunk on. It measures the time from the creation of a chunk to its arrival, kills included, and counts all chunks with
  the order of every source, for the comparison with the audit.
* `RoamingReader` moves between the data centres by its cursors all the time.
* `FileGrowth`: lines that wait in a file while the push-client is dead have no creation time yet. So the sizes of the
  growing files are recorded, and the position of a chunk shows when its last byte was written.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

from logferry.client import Chunk, Position, Reader, Rejected, Unknown

_WAIT_S: Final = 0.3
_STAY_S: Final = 1.5
_ANSWER_S: Final = 5.0
_PAUSE_S: Final = 0.1

FileKey = tuple[int, int]


class FileGrowth:
    """Times at which the files reached their sizes. A file is identified by its inode: it may be renamed."""

    def __init__(self) -> None:
        self._at_ms: dict[FileKey, list[float]] = {}
        self._sizes: dict[FileKey, list[int]] = {}

    def note(self, paths: Iterable[Path], now_ms: float) -> None:
        for path in paths:
            try:
                facts = path.stat()
            except FileNotFoundError:  # it is just being renamed
                continue
            sizes = self._sizes.setdefault(_key(facts), [])
            if not sizes or facts.st_size > sizes[-1]:
                sizes.append(facts.st_size)
                self._at_ms.setdefault(_key(facts), []).append(now_ms)

    def waits_ms(self, path: Path, seen: SeenSource) -> list[float]:
        """For each chunk of the file's source: time from its last byte in the file to its arrival.

        Too short by at most the time between two calls of `note`. Chunks after the last call are left out.
        """
        key = _key(path.stat())
        sizes, at_ms = self._sizes.get(key, []), self._at_ms.get(key, [])
        found = ((bisect_left(sizes, position), read_ms) for position, read_ms in seen.arrivals)
        return [max(0.0, read_ms - at_ms[index]) for index, read_ms in found if index < len(sizes)]


def _key(facts: os.stat_result) -> FileKey:
    return facts.st_dev, facts.st_ino


@dataclass
class SeenSource:
    """One source. ``arrivals``: seqno and time in ms of each chunk; ``breaks``: chunks that did not follow the previous
    one."""

    path: str
    bytes: int = 0
    breaks: int = 0
    arrivals: list[tuple[int, float]] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        return len(self.arrivals)


@dataclass
class ReaderAccount:
    """All chunks received, of all partitions. One thread calls `take`."""

    sources: dict[str, SeenSource] = field(default_factory=dict)
    ages_ms: list[float] = field(default_factory=list)
    bytes: int = 0
    first_created_ms: int | None = None
    last_at_ms: float = 0.0

    def take(self, chunk: Chunk, now_ms: float) -> None:
        created_ms, source_id = chunk.created_ms or int(now_ms), chunk.source_id
        seen = self.sources.get(source_id)
        if seen is None:
            seen = self.sources[source_id] = SeenSource(chunk.attributes.get("path", source_id))
        elif chunk.prev != seen.arrivals[-1][0]:
            seen.breaks += 1
        seen.arrivals.append((chunk.seqno, now_ms))
        seen.bytes += len(chunk.data)
        self.bytes += len(chunk.data)
        self.ages_ms.append(now_ms - created_ms)
        self.first_created_ms = min(created_ms, self.first_created_ms or created_ms)
        self.last_at_ms = now_ms

    @property
    def chunks(self) -> int:
        return len(self.ages_ms)

    @property
    def breaks(self) -> int:
        return sum(seen.breaks for seen in self.sources.values())

    @property
    def seconds(self) -> float:
        """From the creation of the first chunk to the arrival of the last one."""
        return max(0.0, (self.last_at_ms - (self.first_created_ms or self.last_at_ms)) / 1000)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; ``ordered`` is not empty."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


class IndependentReader:
    """Reads in a thread of its own from `__enter__` until `__exit__`. ``positions``: the next offset of each partition.

    ``failed``: the error that ended it.
    """

    def __init__(self, urls: Sequence[str], topic: str) -> None:
        self.account = ReaderAccount()
        self.positions: Position = Position({})
        self.failed: BaseException | None = None
        self._urls, self._topic = urls, topic
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reads", daemon=True)

    def __enter__(self) -> IndependentReader:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # noqa: BLE001  (the story raises it)
            self.failed = error

    def _follow(self) -> None:
        with closing(Reader(self._urls, self._topic)) as reader:
            while not self._stopping.is_set():
                with suppress(Unknown):  # no worker has answered yet
                    self._take(reader)

    def _take(self, reader: Reader) -> bool:
        """Counts the next chunk. Returns whether there was one."""
        chunk = reader.read(_WAIT_S)
        if chunk is not None:
            self.account.take(chunk, time.time() * 1000)
        self.positions = reader.position
        return chunk is not None


class RoamingReader(IndependentReader):
    """``homes``: URLs of the workers per data centre. ``moves``: how often it continued in the other data centre."""

    def __init__(self, homes: Sequence[Sequence[str]], topic: str) -> None:
        super().__init__(homes[0], topic)
        self._homes = homes
        self.moves = 0

    def _follow(self) -> None:
        """Reads in each data centre for a while. Where the topic is not mirrored yet, or no worker answers now, it goes
        to the next one at once."""
        start: str | Position = "earliest"
        for urls in itertools.cycle(self._homes):
            if self._stopping.wait(_PAUSE_S):
                return
            with closing(Reader(urls, self._topic, start=start)) as reader:
                try:
                    reader.open(_ANSWER_S)
                except Unknown:
                    continue
                except Rejected as rejected:
                    if rejected.status == HTTPStatus.NOT_FOUND:
                        continue
                    raise
                until, has_chunks = time.monotonic() + _STAY_S, False
                while not self._stopping.is_set() and time.monotonic() < until:
                    has_chunks |= self._take(reader)
                self.moves += has_chunks
                # What was read is counted: it must not come again elsewhere.
                while not self._stopping.is_set():
                    with suppress(Unknown):
                        start = reader.cursors(_ANSWER_S)
                        break
