"""The demo's independent readers, and the delay from a line in a file to a reader.

* `IndependentReader` knows nothing of the writers: it reads the whole topic with the library's `Reader` from the first
  chunk on, in one data centre, or by its cursors in several by turns. It counts all chunks with the order of every
  source, and measures the time from the creation of a chunk to its arrival, kills included.
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
from logferry.client.files.identity import printable

_WAIT_S: Final = 0.3
_STAY_S: Final = 1.5
_ANSWER_S: Final = 5.0
_PAUSE_S: Final = 0.1


class FileGrowth:
    """Times at which the files reached their sizes. A file is identified by its inode: it may be renamed.

    ``sizes``: the last ones, by path as in source ids.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._reached: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def note(self, paths: Iterable[Path], now_ms: float) -> None:
        self.sizes = {}
        for path in paths:
            try:
                facts = path.stat()
            except FileNotFoundError:  # it is just being renamed
                continue
            self.sizes[printable(str(path))] = facts.st_size
            reached = self._reached.setdefault(_key(facts), [])
            if not reached or facts.st_size > reached[-1][0]:
                reached.append((facts.st_size, now_ms))

    def waits_ms(self, path: Path, seen: SeenSource) -> list[float]:
        """For each chunk of the file's source: time from its last byte in the file to its arrival.

        Too short by at most the time between two calls of `note`. Chunks after the last call are left out.
        """
        reached = self._reached.get(_key(path.stat()), [])
        found = ((bisect_left(reached, (position,)), read_ms) for position, read_ms in seen.arrivals)
        return [max(0.0, read_ms - reached[index][1]) for index, read_ms in found if index < len(reached)]


def _key(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


@dataclass
class SeenSource:
    """One source. ``arrivals``: seqno and time in ms of each chunk."""

    path: str
    bytes: int = 0
    arrivals: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class ReaderAccount:
    """All chunks received, of all partitions. ``breaks``: chunks that did not follow the previous one of their source.

    One thread calls `take`.
    """

    sources: dict[str, SeenSource] = field(default_factory=dict)
    ages_ms: list[float] = field(default_factory=list)
    bytes: int = 0
    breaks: int = 0
    first_created_ms: float = math.inf
    last_at_ms: float = 0.0

    def take(self, chunk: Chunk, now_ms: float) -> None:
        created_ms, source_id = chunk.created_ms or int(now_ms), chunk.source_id
        seen = self.sources.get(source_id)
        if seen is None:
            seen = self.sources[source_id] = SeenSource(chunk.attributes.get("path", source_id))
        elif chunk.prev != seen.arrivals[-1][0]:
            self.breaks += 1
        seen.arrivals.append((chunk.seqno, now_ms))
        seen.bytes += len(chunk.data)
        self.bytes += len(chunk.data)
        self.ages_ms.append(now_ms - created_ms)
        self.first_created_ms = min(created_ms, self.first_created_ms)
        self.last_at_ms = now_ms

    @property
    def chunks(self) -> int:
        return len(self.ages_ms)

    @property
    def seconds(self) -> float:
        """From the creation of the first chunk to the arrival of the last one."""
        return max(0.0, (self.last_at_ms - self.first_created_ms) / 1000)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; ``ordered`` is not empty."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


class IndependentReader(threading.Thread):
    """Reads in a thread of its own from `__enter__` until `__exit__`.

    ``homes``: URLs of the workers per data centre; of several it moves to the next one all the time. ``moves``: how
    often it read in one of several. ``positions``: the next offset of each partition. ``failed``: the error that ended
    it.
    """

    def __init__(self, homes: Sequence[Sequence[str]], topic: str) -> None:
        super().__init__(name="reads", daemon=True)
        self.account = ReaderAccount()
        self.positions: Position = Position({})
        self.moves = 0
        self.failed: BaseException | None = None
        self._homes, self._topic = homes, topic
        self._stay_s = _STAY_S if len(homes) > 1 else math.inf
        self._stopping = threading.Event()

    def __enter__(self) -> IndependentReader:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        start: str | Position = "earliest"
        try:
            for urls in itertools.cycle(self._homes):
                if self._stopping.wait(_PAUSE_S):
                    return
                with closing(Reader(urls, self._topic, start=start)) as reader:
                    try:
                        reader.open(_ANSWER_S)
                    except Unknown:  # no worker answers now
                        continue
                    except Rejected as rejected:
                        if rejected.status == HTTPStatus.NOT_FOUND:  # not mirrored yet
                            continue
                        raise
                    start = self._stay(reader) or start
        except BaseException as error:  # noqa: BLE001  (the story raises it)
            self.failed = error

    def _stay(self, reader: Reader) -> Position | None:
        """Counts chunks for a while. Returns where to continue elsewhere; None at the end of all reading."""
        until, has_chunks = time.monotonic() + self._stay_s, False
        while not self._stopping.is_set() and time.monotonic() < until:
            chunk = reader.read(_WAIT_S)
            if chunk is not None:
                self.account.take(chunk, time.time() * 1000)
                has_chunks = True
            self.positions = reader.position
        self.moves += has_chunks
        # What was read is counted: it must not come again elsewhere.
        while not self._stopping.is_set():
            with suppress(Unknown):
                return reader.cursors(_ANSWER_S)
        return None
