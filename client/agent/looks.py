"""When each followed file is looked at: after an event of inotify, and by time.

A busy file is looked at in every round. A quiet one is armed, so that its next change is an event, and looked at
every `ARMED_LOOK_S` all the same: an event that never came costs time and no bytes. A file that changed so without an
event shows that its folder has none, and the files there are polled from then on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from logferry.client.agent.config import Config
from logferry.client.agent.schedule import TimeQueue
from logferry.client.agent.search import Layers
from logferry.client.agent.source import FileSource
from logferry.client.events import log_event
from logferry.client.files.discover import FileKey
from logferry.client.files.inotify import Hints
from logferry.client.files.tail import FileTail
from logferry.client.inputs.inputs import Inputs
from logferry.client.transport.failover import FailoverPolicy

ARMED_LOOK_S = 10.0
DOUBT_S = 1.0  # so long an event may take that is no more than late


class Looks:
    """``layers``: so many of these there are."""

    def __init__(self, is_hinted: bool, layers: int = 1) -> None:
        self.hints = Hints(is_hinted, layers)
        self._queue: TimeQueue[FileSource] = TimeQueue()
        self._doubted: set[FileKey] = set()

    def put(self, source: FileSource, due: float) -> None:
        self._queue.put(source, due)

    def due(self, now: float) -> list[FileSource]:
        return list(iter(lambda: self._queue.pop(now), None))

    def look(self, tail: FileTail, now: float) -> tuple[bool, float]:
        """Whether the file changed, and when to look again. Raises as `FileTail.look`."""
        was_armed = self.hints.is_armed(tail.key)
        is_changed = tail.look(now)
        if was_armed:
            folder = os.path.dirname(tail.path)  # noqa: PTH120
            if tail.key in self._doubted:
                self._doubted.discard(tail.key)
                self.hints.missed(tail.key, folder)
                log_event("folder-polled", folder=folder, reason="a change came without an event")
            elif is_changed:
                self._doubted.add(tail.key)
                return True, now + DOUBT_S
        else:
            self._doubted.discard(tail.key)
        return is_changed, tail.next_look

    def arm(self, tail: FileTail, now: float) -> bool:
        """Whether the file has to be looked at once more: it may have changed before the event was asked for."""
        if not tail.may_be_armed or self.hints.is_armed(tail.key):
            return False
        return self.hints.arm(tail.fileno(), tail.key, os.path.dirname(tail.path), now)  # noqa: PTH120

    def next_look(self, tail: FileTail, due: float, now: float) -> float:
        if self.hints.is_armed(tail.key) and tail.key not in self._doubted:
            return now + ARMED_LOOK_S * random.uniform(0.75, 1.0)
        return due

    def forget(self, tail: FileTail) -> None:
        """It is closed."""
        self.hints.disarm(tail.key)
        self._doubted.discard(tail.key)


class DeletedFiles:
    """Sources whose file is deleted and open. Deleted logs should free space, so there is a limit of their bytes.

    A file with several topics counts once, and is closed for all of them together: else nothing would be freed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sources: dict[FileSource, Callable[[FileSource, FileTail], None]] = {}

    def add(self, source: FileSource, close: Callable[[FileSource, FileTail], None]) -> None:
        self._sources[source] = close

    def close_too_many(self) -> None:
        """Closes those beyond the limit: first those that were sent, then the oldest."""
        deleted = [(s, s.tail, close) for s, close in self._sources.items() if s.tail and s.tail.deleted_bytes]
        self._sources = {source: close for source, _, close in deleted}
        too_many = sum({tail.key: tail.deleted_bytes for _, tail, _ in deleted}.values()) - self._max_bytes
        ranks: dict[FileKey, tuple[bool, float]] = {}
        for _, tail, _ in deleted:
            rank = tail.position < tail.size, tail.away_since or tail.looked_at
            ranks[tail.key] = max(ranks.get(tail.key, rank), rank)
        for key in sorted(ranks, key=lambda each: ranks[each]):
            if too_many <= 0:
                return
            for source, tail, close in deleted:
                if tail.key == key:
                    freed = tail.deleted_bytes
                    close(source, tail)
                    if source.reading.end < tail.size:
                        log_event("deleted-dropped", source=source.name, sent_to=source.reading.end, size=tail.size)
            too_many -= freed


class Shared:
    """What the watches of all layers have in common. ``ready``: sources, by the time at which to ask for a request."""

    def __init__(self, config: Config, centres: FailoverPolicy, inputs: Inputs, layers: int) -> None:
        self.centres = centres
        self.inputs = inputs
        self.count = layers
        self.ready: TimeQueue[FileSource] = TimeQueue()
        self.deleted = DeletedFiles(config.max_deleted_bytes)
        self.layers = Layers()
