"""How long lines wait in all, from the file to the reader: also while nobody is there to make chunks of them.

A chunk's own time of creation is when the push-client cut it; what lies in a file while the client is dead has no such
time yet. So the sizes of the files are noted as they grow, and the position of each chunk says when its last byte was
written.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

from logferry.ops.demo.readers import Seen

FileKey = tuple[int, int]


class Growth:
    """When each file was seen to have reached which size. A file is its inode: it may be renamed meanwhile."""

    def __init__(self) -> None:
        self._at_ms: dict[FileKey, list[float]] = {}
        self._sizes: dict[FileKey, list[int]] = {}

    def note(self, paths: Iterable[Path], now_ms: float) -> None:
        for path in paths:
            try:
                facts = path.stat()
            except FileNotFoundError:  # it is being renamed
                continue
            sizes = self._sizes.setdefault(_key(facts), [])
            if not sizes or facts.st_size > sizes[-1]:
                sizes.append(facts.st_size)
                self._at_ms.setdefault(_key(facts), []).append(now_ms)

    def waits_ms(self, path: Path, seen: Seen) -> list[float]:
        """For each chunk of the source that is this file: from when its end was seen in the file until it was read.

        Too short by the time between two notes at most. Chunks beyond the last note are left out.
        """
        key = _key(path.stat())
        sizes, at_ms = self._sizes.get(key, []), self._at_ms.get(key, [])
        found = ((bisect_left(sizes, position), read_ms) for position, read_ms in seen.arrivals)
        return [max(0.0, read_ms - at_ms[index]) for index, read_ms in found if index < len(sizes)]


def _key(facts: os.stat_result) -> FileKey:
    return facts.st_dev, facts.st_ino
