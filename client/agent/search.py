"""Searching for files: all of them from time to time, and at once where inotify says that something appeared.

A file with several topics is followed once for each, by as many layers: watches that do not know of each other's
sources, with a checkpoint each. `Layers` decides which one has which topic.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Callable, Optional

from logferry.client.agent.config import Config, FileGroup
from logferry.client.events import log_event
from logferry.client.files.checkpoint import CheckpointEntry
from logferry.client.files.discover import FileKey, find_by_entry, folders_of, leads_out, missing, rests_of
from logferry.client.files.inotify import Hints
from logferry.client.files.rotation import KnownFiles
from logferry.client.files.tail import FileTail
from logferry.client.inputs.inputs import Inputs

# Searching takes at most this share of the time, however many files there are.
SHARE = 0.02
# Where events tell what appears, all is searched after this time, or later if it takes long.
HINTED_S = (10.0, 60.0)
HINTED_SHARE = 0.0005
_EntryOf = Callable[[FileTail], Optional[CheckpointEntry]]
UNSEEN_NS = 60_000_000_000  # a file may exist for so long, at most, before it is found


class Layers:
    """A layer keeps the topic that its checkpoint has of a file, so the order in the configuration may change. The
    other topics of the file go to the layers that have none of its topics, in order.

    ``entry_of``: of each layer, its entry of an open file, if it has one. Two layers never have one topic of a file,
    and each topic has a layer, since there are at least as many layers as topics.
    """

    def __init__(self) -> None:
        self.entry_of: list[_EntryOf] = []

    def join(self, entry_of: _EntryOf) -> tuple[int, Callable[[FileTail, FileGroup], FileGroup | None]]:
        """The number of a further layer, and its `group_of`."""
        self.entry_of.append(entry_of)
        return len(self.entry_of) - 1, partial(self.group_of, len(self.entry_of) - 1)

    def group_of(self, layer: int, tail: FileTail, files: FileGroup) -> FileGroup | None:
        """The settings with which this layer follows the file; None: the others have all of its topics."""
        if len(self.entry_of) == 1:
            return files
        left, found = files.topics, {}
        for number, entry_of in enumerate(self.entry_of):
            entry = entry_of(tail)
            if entry is not None and (group := left.pop(entry.topic or files.topic, None)) is not None:
                found[number] = group
        free = (number for number in range(len(self.entry_of)) if number not in found)
        return {**dict(zip(free, left.values())), **found}.get(layer)


class Search:
    """``failed``: path → why it could not be read. ``ignored``: paths of files that are older than wanted. ``layer``:
    the number of the one that searches."""

    def __init__(self, config: Config, hints: Hints, inputs: Inputs, layer: int = 0) -> None:
        self._layer = layer
        self._entries = [(files.patterns, files.exclude, files.link_roots) for files in config.files]
        self._config = config
        self._hints = hints
        self._inputs = inputs
        self._next = self._soonest = 0.0
        self.failed: dict[str, str] = {}
        self.ignored: set[str] = set()
        self._folders: set[str] = set()
        self._is_told = False
        self._began_s = 0.0

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def all(self, now: float) -> dict[FileKey, tuple[str, FileGroup]]:
        """Every file that a pattern shows, with its path. What appears meanwhile is an event: the folders are first."""
        self._began_s = time.perf_counter()
        hints = self._hints
        folders = set() if hints.unusable else folders_of(self._config.patterns)
        self._is_told = not hints.unusable and hints.watch_folders(folders, now)
        while folders - self._folders:  # in a new one, others may have appeared before it was watched
            self._folders |= folders
            folders = folders_of(self._config.patterns)
            self._is_told = hints.watch_folders(folders, now)
        self._folders = folders
        return self.below(None)

    def below(self, path: str | None) -> dict[FileKey, tuple[str, FileGroup]]:
        found = find_by_entry(self._entries, self._config.state_dir, path)
        return {key: (name, self._config.files[number]) for key, (name, number) in found.items()}

    def appeared(self, path: str, now: float) -> dict[FileKey, tuple[str, FileGroup]]:
        """What patterns show of a file or folder that was created, or was renamed to this."""
        watched: set[str] = set()
        while new := folders_of(self._config.patterns, path) - watched:
            watched |= new
            are_told = [self._hints.watch_folder(each, now) for each in new]
            if not all(are_told):
                self.soon()
        return self.below(path)

    def gone(self, paths: Sequence[str], is_unsure: bool) -> None:
        """They left. ``is_unsure``: others may have, too, or may have appeared."""
        self._folders.difference_update(paths)
        if is_unsure or any(rests_of(pattern, path) for path in paths for pattern in self._config.patterns):
            self.soon()

    def soon(self) -> None:
        """As soon as its share of the time allows."""
        self._next = min(self._next, self._soonest)

    def done(self, now: float, is_waiting: bool) -> None:
        """What was found is taken up. ``is_waiting``: not all of it could be."""
        took_s = time.perf_counter() - self._began_s
        self._next = self._soonest = now + max(self._config.linger_s, took_s / SHARE)
        if self._is_told and not is_waiting:
            first_s, last_s = HINTED_S
            self._next = now + min(max(first_s, took_s / HINTED_SHARE), last_s)

    def open(self, path: str, files: FileGroup, known: KnownFiles, now: float) -> FileTail | None:
        """None: it may not be read, is gone, or is unknown and was last written too long ago, or has fewer topics."""
        try:
            if self._layer >= len(files.topics) and not known.may_have(path, os.stat(path)):  # noqa: PTH116
                return None
            if files.ignore_older_s and self._is_old(path, os.stat(path), files, known):  # noqa: PTH116
                self.ignored.add(path)
                return None
            tail = self._inputs.open_file(path, now, self._config.once)
        except OSError as error:
            self.fails(path, error)
            return None
        if tail is not None and leads_out(path, tail.real_path(), files.patterns, files.link_roots):
            if path not in self.failed:
                log_event("link-refused", path=path, target=tail.real_path())
            self.failed[path] = f"a symbolic link leads it out to {tail.real_path()}: see --link-root"
            tail.close()
            return None
        self.failed.pop(path, None)
        self.ignored.discard(path)
        return tail

    def fails(self, path: str, error: OSError) -> None:
        if path not in self.failed:
            log_event("file-unreadable", path=path, reason=error.strerror)
        self.failed[path] = error.strerror or "unreadable"

    def _is_old(self, path: str, facts: os.stat_result, files: FileGroup, known: KnownFiles) -> bool:
        return time.time() - facts.st_mtime > files.ignore_older_s and not known.may_have(path, facts)

    def end_of(self, tail: FileTail, saved_ns: int) -> int:
        """Where to begin with a file that was there before the client, if not at its beginning: behind its last line.

        0 for one that may have been made since the client was here: while it was down, or shortly before.
        """
        if saved_ns and not 0 < tail.born_ns < saved_ns - UNSEEN_NS:
            return 0
        begin = max(tail.size - self._config.line_bytes, 0)
        newline = tail.pread(tail.size - begin, begin).rfind(b"\n")
        return begin + newline + 1 if newline >= 0 or not begin else tail.size

    def keep_failed(self, paths: set[str]) -> None:
        """The others are gone."""
        for path in self.failed.keys() - paths:
            del self.failed[path]
        self.ignored &= paths

    def log_missing(self, any_found: bool) -> None:
        if self._layer:
            return  # the first one says it
        absent = missing(self._config.patterns)
        for path in absent if self._config.once else ():
            log_event("file-missing", path=path)
            self.failed[path] = "not there"
        if not any_found and not (absent and self._config.once):
            log_event("nothing-matches", patterns=" ".join(self._config.patterns))
