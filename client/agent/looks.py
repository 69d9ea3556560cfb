"""When each followed file is looked at: after an event of inotify, and by time.

A busy file is looked at in every round. A quiet one is armed, so that its next change is an event, and looked at
every `ARMED_LOOK_S` all the same: an event that never came costs time and no bytes. A file that changed so without an
event shows that its folder has none, and the files there are polled from then on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

from logferry.client.agent.schedule import TimeQueue
from logferry.client.agent.source import FileSource
from logferry.client.events import log_event
from logferry.client.files.discover import FileKey
from logferry.client.files.inotify import Hints
from logferry.client.files.tail import FileTail

ARMED_LOOK_S = 15.0
DOUBT_S = 1.0  # so long an event may take that is no more than late


class Looks:
    def __init__(self, is_hinted: bool) -> None:
        self.hints = Hints(is_hinted)
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
    """Sources whose file is deleted and open. Deleted logs should free space, so there is a limit of their bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sources: dict[FileSource, None] = {}

    def add(self, source: FileSource) -> None:
        self._sources[source] = None

    def too_many(self) -> Iterable[tuple[FileSource, FileTail]]:
        """Those to close, beyond the limit: first those that were sent, then the oldest."""
        deleted = [(s, s.tail) for s in self._sources if s.tail is not None and s.tail.deleted_bytes]
        self._sources = dict.fromkeys(source for source, _ in deleted)
        too_many = sum(tail.deleted_bytes for _, tail in deleted) - self._max_bytes
        deleted.sort(key=lambda pair: (pair[1].position < pair[1].size, pair[1].away_since or pair[1].looked_at))
        for source, tail in deleted:
            if too_many <= 0:
                return
            too_many -= tail.deleted_bytes
            yield source, tail
