"""Searching for files: all of them from time to time, and at once where inotify says that something appeared."""

from __future__ import annotations

import time
from collections.abc import Iterable

from logferry.client.agent.config import Config, FileGroup
from logferry.client.files.discover import FileKey, find_by_entry, folders_of, rests_of
from logferry.client.files.inotify import Hints

# Searching takes at most this share of the time, however many files there are.
SHARE = 0.02
# Where events tell what appears, all is searched after this time, or later if it takes long.
HINTED_S = (10.0, 60.0)
HINTED_SHARE = 0.001


class Search:
    def __init__(self, config: Config, hints: Hints) -> None:
        self._entries = [(files.patterns, files.exclude, files.link_roots) for files in config.files]
        self._config = config
        self._hints = hints
        self._next = self._soonest = 0.0
        self._is_told = False
        self._began_s = 0.0

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def all(self, now: float) -> dict[FileKey, tuple[str, FileGroup]]:
        """Every file that a pattern shows, with its path. What appears meanwhile is told: the folders come first."""
        self._began_s = time.perf_counter()
        hints = self._hints
        self._is_told = not hints.unusable and hints.watch_folders(folders_of(self._config.patterns), now)
        return self.below(None)

    def below(self, path: str | None) -> dict[FileKey, tuple[str, FileGroup]]:
        found = find_by_entry(self._entries, self._config.state_dir, path)
        return {key: (name, self._config.files[number]) for key, (name, number) in found.items()}

    def appeared(self, path: str, now: float) -> dict[FileKey, tuple[str, FileGroup]]:
        """What patterns show of a file or folder that was created, or was renamed to this."""
        are_told = [self._hints.watch_folder(each, now) for each in folders_of(self._config.patterns, path)]
        if not all(are_told):
            self.soon()
        return self.below(path)

    def gone(self, paths: Iterable[str]) -> None:
        if any(rests_of(pattern, path) for path in paths for pattern in self._config.patterns):
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
