"""Reading one incarnation of a file, through a descriptor that stays open whatever happens to its name.

Invariants
* ``position`` is the end of what was acknowledged: bytes before it are done with, reading begins there.
* ``mark`` holds the bytes just before ``position``; ``head`` covers the first `HEAD_BYTES` of all that was ever
  handed out for sending (see `cover`). Every read looks at both again: a file that was truncated and written
  anew (``copytruncate``, ``>``) is noticed even when it has grown past ``position``.

`Changed` means: what lies in the file now is not what this incarnation held. Then a new incarnation begins,
and bytes that were never read are lost, as they are for every reader of a file that is truncated.
"""

from __future__ import annotations

import os
import stat
from typing import Protocol

from logferry.client.files.discover import FileKey
from logferry.client.files.fingerprint import HEAD_BYTES, MARK_BYTES, Fingerprint, born_ns, differs, grown, of

LOOK_PAUSE_SHARE = 0.02
LONGEST_LOOK_PAUSE_S = 1.0


class Changed(Exception):
    """The file holds something else now; the text says how that was seen."""


class Reading(Protocol):
    """Where a source's bytes come from: the file, or what was kept of an incarnation that is gone."""

    position: int
    mark: bytes

    @property
    def end(self) -> int:
        """How far there are bytes now."""

    def read(self, limit: int) -> bytes:
        """At most ``limit`` bytes from ``position`` on."""

    def before(self, limit: int) -> bytes:
        """At most ``limit`` bytes before ``position``; fewer where no more are at hand."""

    def advance(self, data: bytes | memoryview) -> None:
        """``data``, which was read at ``position``, is acknowledged."""

    def go_to(self, position: int) -> None:
        """Goes to where the gateway is. Raises `Changed` when that is not a place in here."""

    def close(self) -> None:
        """It is not read any more; closing again is harmless."""

    def is_last(self, now: float, idle_s: float) -> bool:
        """Nothing is to be expected after ``end`` soon: a line without its newline need not wait."""


class Tail:
    """A file that is followed. ``limit``: read no further (for ``--once``: its size when it was opened)."""

    def __init__(self, path: str, fd: int, now: float, once: bool = False) -> None:
        facts = os.fstat(fd)
        self.path = path
        self.key: FileKey = (facts.st_dev, facts.st_ino)
        self.born_ns = born_ns(fd)
        self.head = of(os.pread(fd, HEAD_BYTES, 0))
        self.position = 0
        self.mark = b""
        self.away_since: float | None = None
        self.size = self.largest_size = facts.st_size
        self.changed_at = self.looked_at = now
        self._next_look = now
        self.deleted_bytes = 0  # on the disk, freed when this is closed
        self._fd = fd
        self._mtime_ns = facts.st_mtime_ns
        self._unverified = True
        self._limit = facts.st_size if once else None

    @classmethod
    def open(cls, path: str, now: float, once: bool = False) -> Tail | None:
        """None when ``path`` is not a regular file (any more). OSError when it may not be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return None
        return cls(path, fd, now, once)

    def renewed(self, now: float) -> Tail:
        """The same file from its beginning, as a new incarnation; this one must not be used any more."""
        tail = Tail(self.path, self._fd, now, self._limit is not None)
        tail.away_since = self.away_since
        return tail

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def end(self) -> int:
        return self.size if self._limit is None else min(self.size, self._limit)

    def look(self, now: float) -> None:
        """Takes note of size and time. Raises `Changed` when the file was cut or written anew behind us.

        A file that has been quiet for long is looked at less often, down to once in `LONGEST_LOOK_PAUSE_S`.
        """
        if now < self._next_look:
            return
        self._next_look = now + min((now - self.changed_at) * LOOK_PAUSE_SHARE, LONGEST_LOOK_PAUSE_S)
        facts = os.fstat(self._fd)
        self.looked_at = now
        self.deleted_bytes = 0 if facts.st_nlink else facts.st_blocks * 512
        if (facts.st_size, facts.st_mtime_ns) != (self.size, self._mtime_ns):
            self.size, self._mtime_ns, self.changed_at = facts.st_size, facts.st_mtime_ns, now
            self._next_look = now
            self._unverified = True
        if self._unverified and self.size <= self.position:  # where there is more to read, `read` verifies
            self.verify()
            self._unverified = False
        self.largest_size = self.size

    def verify(self) -> None:
        reason = differs(self._fd, self.head, self.position, of(self.mark))
        if reason:
            raise Changed(reason)

    def differs(self, head: Fingerprint, position: int, mark: Fingerprint) -> str:
        """Why this is not the incarnation that a checkpoint knows; empty when it is."""
        return differs(self._fd, head, position, mark)

    def read(self, limit: int) -> bytes:
        """Raises `Changed` when the file is not that of which the bytes before ``position`` were acknowledged.

        Head and mark are both looked at: lines of equal length and end make a mark that fits by chance.
        """
        wanted = min(limit, max(self.end - self.position, 0))
        data = os.pread(self._fd, wanted, self.position)  # first: what is looked at afterwards is no older
        before = len(self.mark)
        if os.pread(self._fd, before, self.position - before) != self.mark:
            raise Changed(f"the {before} bytes before position {self.position} are not what they were")
        if of(os.pread(self._fd, self.head.length, 0)) != self.head:
            raise Changed(f"its first {self.head.length} bytes are not what they were")
        return data

    def before(self, limit: int) -> bytes:
        begin = max(self.position - limit, 0)
        return os.pread(self._fd, self.position - begin, begin)

    def cover(self, data: bytes | memoryview) -> bool:
        """Extends ``head`` over ``data``, read at ``position`` and about to be sent; True if it grew.

        Raises `Changed` when the head of the file is not that of the bytes in hand.
        """
        if self.head.length >= min(HEAD_BYTES, self.position + len(data)):
            return False
        raw = os.pread(self._fd, HEAD_BYTES, 0)
        new = raw[self.position :]
        if of(raw[: self.head.length]) != self.head or data[: len(new)] != new[: len(data)]:
            raise Changed(f"its first {len(raw)} bytes were changed while they were read")
        self.head = of(raw)
        return True

    def advance(self, data: bytes | memoryview) -> None:
        self.mark = grown(self.mark, data)
        self.position += len(data)

    def go_to(self, position: int) -> None:
        size = os.fstat(self._fd).st_size
        if position > size:
            raise Changed(f"the gateway has recorded {position} bytes of it, it holds {size}")
        begin = max(position - MARK_BYTES, 0)
        self.mark = os.pread(self._fd, position - begin, begin)
        self.position = position

    def is_last(self, now: float, idle_s: float) -> bool:
        return self._limit is not None or now - self.changed_at >= idle_s

    def is_finished(self, now: float, rotated_s: float) -> bool:
        """Renamed or removed, sent to its end, and not written to for a time."""
        quiet = self.away_since is not None and now - max(self.away_since, self.changed_at) >= rotated_s
        return quiet and self.position >= self.size


class Remains:
    """What was read of an incarnation that is gone and is not acknowledged yet; held in memory, and no more."""

    def __init__(self, start: int, data: bytes, mark: bytes) -> None:
        self.position = start
        self.mark = mark
        self._start = start
        self._start_mark = mark
        self._data = data

    def close(self) -> None:
        pass

    @property
    def end(self) -> int:
        return self._start + len(self._data)

    def read(self, limit: int) -> bytes:
        begin = self.position - self._start
        return self._data[begin : begin + limit]

    def before(self, limit: int) -> bytes:
        return self.mark[-limit:]

    def advance(self, data: bytes | memoryview) -> None:
        self.mark = grown(self.mark, data)
        self.position += len(data)

    def go_to(self, position: int) -> None:
        if not self._start <= position <= self.end:
            raise Changed(f"the gateway is at {position}, kept are {self._start} to {self.end}")
        self.mark = grown(self._start_mark, self._data[: position - self._start])
        self.position = position

    def is_last(self, now: float, idle_s: float) -> bool:
        return True
