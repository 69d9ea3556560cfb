"""When each followed file is looked at: after an event of inotify, and by time.

A busy file is looked at in every round. A quiet one is armed, so that its next change is an event, and looked at
every `ARMED_LOOK_S` all the same: an event that never came costs time and no bytes. A file that changed so without an
event shows that its folder has none, and the files there are polled from then on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from logferry.client.agent.config import Config
from logferry.client.agent.schedule import TimeQueue
from logferry.client.agent.search import Layers
from logferry.client.agent.source import FileSource
from logferry.client.events import log_event
from logferry.client.files.checkpoint import CheckpointEntry
from logferry.client.files.discover import FileKey, inodes_in
from logferry.client.files.inotify import Found, Hints
from logferry.client.files.rotation import KnownFiles, original_paths
from logferry.client.files.tail import FileTail
from logferry.client.inputs.inputs import Inputs
from logferry.client.transport.failover import FailoverPolicy

ARMED_LOOK_S = 15.0
DOUBT_S = 1.0  # so long an event may take that is no more than late


class Looks:
    """``layers``: so many of these there are."""

    def __init__(self, is_hinted: bool, layers: int = 1) -> None:
        self.hints = Hints(is_hinted, layers)
        self._may_close = is_hinted
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
        due = tail.next_look
        if not is_changed and self._arm(tail, now):
            tail.next_look = now
            is_changed = tail.look(now)
        return is_changed, due

    def _arm(self, tail: FileTail, now: float) -> bool:
        """Whether the file has to be looked at once more: it may have changed before the event was asked for."""
        if not tail.may_be_armed or self.hints.is_armed(tail.key):
            return False
        return self.hints.arm(tail.watch_path, tail.key, os.path.dirname(tail.path), now)  # noqa: PTH120

    def is_over(self, source: FileSource, tail: FileTail, now: float) -> bool:
        """Closes a file that is inactive until it changes. True for a deleted one: nothing could open it again."""
        if not self._may_close or not tail.is_inactive(now, source.files.close_inactive_s):
            return False
        if source.entry.position == tail.position and not (source.unsaved or tail.is_deleted):
            tail.give_up()
        return tail.is_deleted

    def next_look(self, tail: FileTail, due: float, now: float) -> float:
        if self.hints.is_armed(tail.key) and tail.key not in self._doubted:
            return now + ARMED_LOOK_S * random.uniform(0.75, 1.0)
        return due

    def forget(self, tail: FileTail) -> None:
        """It is closed."""
        self.hints.disarm(tail.key)
        self._doubted.discard(tail.key)


class LiveFiles(dict[FileKey, FileSource]):
    """The sources whose file is followed, by its device and inode.

    While a file is closed another one may get its inode. ``went``: called with a source whose file was removed
    meanwhile, its file, the time, and whether another file has the inode.
    """

    def __init__(self, went: Callable[[FileSource, FileTail, float, bool], None], missing_s: float) -> None:
        super().__init__()
        self._went = went
        self._missing_s = missing_s
        self._at: dict[str, FileSource] = {}  # the last one under each path
        self._beside: dict[FileSource, None] = {}  # those whose path another one has now

    def __setitem__(self, key: FileKey, source: FileSource) -> None:
        before = self.get(key)
        if before is not None and before.tail is None:
            self._beside.pop(before, None)
        super().__setitem__(key, source)
        self._note(source)

    def _note(self, source: FileSource) -> None:
        if source.tail is not None:
            before = self._at.get(source.tail.path, source)
            if before is not source and before.tail is not None:
                self._beside[before] = None
            self._at[source.tail.path] = source

    def shown(self, source: FileSource, tail: FileTail, path: str) -> None:
        """A pattern shows its file under this path."""
        self._leaves(source, tail)
        tail.path, tail.away_since = path, None
        self._note(source)

    def _leaves(self, source: FileSource, tail: FileTail) -> None:
        if self._at.get(tail.path) is source:
            del self._at[tail.path]

    def forget(self, tail: FileTail) -> None:
        """It is followed no longer."""
        source = self.pop(tail.key, None)
        if source is not None:
            self._leaves(source, tail)
            self._beside.pop(source, None)

    def under(self, paths: Sequence[str]) -> list[FileSource]:
        """The sources whose files are under one of these paths, or were when they were shown last. With thousands of
        files, asking each of them takes longest."""
        likely = dict.fromkeys((*(self._at[path] for path in paths if path in self._at), *self._beside))
        return [source for source in likely if source.tail is not None and source.tail.path in paths]

    def entry_of(self, tail: FileTail, known: KnownFiles, lost: KnownFiles) -> CheckpointEntry | None:
        """That of the file or, while it is unknown, of the one that rotation may have copied to it: both are to be in
        the same layer, for what the copy has alone."""
        if (source := self.get(tail.key)) is not None:
            return source.entry
        similar = (each.entry for each in self.under(original_paths(tail.path)))
        return known.candidate(tail) or lost.candidate(tail) or next(similar, None)

    def tails_like(self, tail: FileTail, similar: Iterable[FileTail]) -> list[FileTail]:
        """Those from whose name its own comes, by rotation, and those of ``similar``, which have been such before."""
        found = [source.tail for source in self.under(original_paths(tail.path)) if source.tail is not None]
        live = (each for each in similar if (source := self.get(each.key)) is not None and source.tail is each)
        return [*dict.fromkeys((*found, *live))]

    def owner(self, key: FileKey, path: str, now: float) -> FileSource | None:
        """Whose file this is, which was found at ``path``. A closed one is opened unless it was known there."""
        source = self.get(key)
        tail = None if source is None else source.tail
        if source is None or tail is None or tail.is_open:
            return source
        if (tail.path, tail.away_since, tail.is_missing) == (path, None, False):
            return source
        with suppress(OSError):
            is_its = tail.take(path)
            if is_its:
                source.retry(now)
            elif is_its is False:
                self._went(source, tail, now, True)
        return self.get(key)

    def noted(self, events: Found) -> Found:
        """If a file that was not written is gone now, nothing of it is lost."""
        for tail in (self[key].tail for key in events.unwritten if key in self):
            if tail is not None:
                tail.is_unwritten = True
        return events

    def continued_in(self, found: FileTail, lost: KnownFiles) -> FileSource | None:
        """The source whose file this is, or whose file was copied to it; then it is at its position.

        Its file system may have been mounted again, under another number: ``lost`` has the files that no pattern shows.
        Or the file was copied, and then removed while it was closed.
        """
        entry, paths = lost.candidate(found), original_paths(found.path)
        if entry is not None:
            source = self.get((entry.device, entry.inode))
            tail = None if source is None or source.entry is not entry else source.tail
            return source if source and tail and source.wanted(tail).is_in(found) else None
        for source in self.under(paths):
            tail = source.tail
            if tail is None or tail.is_open or not tail.head.length:
                continue
            if not tail.is_there() and tail.is_missing and source.wanted(tail).is_in(found):
                return source
        return None

    def hidden(self, found: Container[FileKey], now: float, changed: set[str]) -> None:
        """Looks for the files that a search did not find: one that is closed may have another name in its folder.
        ``changed``: gets the names of sources that were not hidden before.

        One that is gone may have been moved to where a later search shows it. So it is waited for, as for the writer of
        one that is open; unless its file system is not mounted, which may be again.
        """
        inodes = lru_cache(maxsize=None)(inodes_in)
        for key, source in [*self.items()]:
            tail = source.tail
            if key in found or tail is None:
                continue
            if tail.away_since is None:
                tail.away_since = now
                changed.add(source.name)
                log_event("source-away", source=source.name, size=tail.size)
            if tail.is_open:
                continue
            misses = tail.misses(inodes(os.path.dirname(tail.real_path())).get(key[1]))  # noqa: PTH120
            if misses > 1 and now - tail.away_since >= self._missing_s:
                self._went(source, tail, now, False)


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
                        sent_to = source.reading.end
                        log_event("deleted-dropped", **source.entry.where, sent_to=sent_to, size=tail.size)
            too_many -= freed


class ReadyQueues:
    """Sources by the time at which to ask for a request. No topic gets all threads while there are others: its requests
    may hang. Nor do all slow ones together."""

    def __init__(self) -> None:
        self._of: dict[str, TimeQueue[FileSource]] = {}  # by topic, the one whose turn is next first

    def put(self, source: FileSource, due: float) -> None:
        self._of.setdefault(source.entry.topic, TimeQueue()).put(source, due)

    def pop(self, now: float, busy: Mapping[str, int], threads: int, slow: Container[str] = ()) -> FileSource | None:
        """``busy``: how many of the threads, by topic. ``slow``: topics of which a request took long."""
        most = threads if len(self._of) == 1 else max(threads - 1, 1)
        held = sum(count for topic, count in busy.items() if topic in slow)
        full = slow if held >= most and any(topic not in slow for topic in self._of) else ()
        for topic in [topic for topic in self._of if busy.get(topic, 0) < most and topic not in full]:
            source = self._of[topic].pop(now)
            if source is not None:
                self._of[topic] = self._of.pop(topic)
                return source
        return None


class Shared:
    """What the watches of all layers have in common."""

    def __init__(self, config: Config, centres: FailoverPolicy, inputs: Inputs, layers: int) -> None:
        self.centres = centres
        self.inputs = inputs
        self.count = layers
        self.ready = ReadyQueues()
        self.deleted = DeletedFiles(config.max_deleted_bytes)
        self.layers = Layers()
