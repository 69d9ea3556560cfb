"""Reading one incarnation of a file, through a descriptor that stays open after renames and removal.

Invariants
* ``position`` is the end of the acknowledged bytes: reading begins there.
* ``mark`` holds the bytes just before ``position``; ``head`` covers the first `HEAD_BYTES` of everything that was ever
  handed out for sending (see `cover`). Every read verifies both: so a file that was truncated and rewritten
  (``copytruncate``, ``>``) is noticed even when it has grown past ``position``.

`FileChanged` means that the file no longer holds this incarnation. Then a new incarnation begins. Bytes that were never
read are lost, as they are for every reader of a file that is truncated.
"""

from __future__ import annotations

import os
import resource
import stat
from typing import Protocol

from logferry.client.events import log_event
from logferry.client.files.discover import FileKey
from logferry.client.files.identity import HEAD_BYTES, MARK_BYTES, MARKS_BACK, Fingerprint, born_ns, fingerprint, grown

LOOK_PAUSE_SHARE = 0.02
LONGEST_LOOK_PAUSE_S = 1.0


class FileChanged(Exception):
    """The file holds something else now; the text says how that was noticed."""


class ByteSource(Protocol):
    """The bytes of a source: its file, or what was kept of an incarnation that is gone."""

    position: int
    mark: bytes

    @property
    def end(self) -> int:
        """How far there are bytes now."""

    def read(self, limit: int) -> bytes:
        """At most ``limit`` bytes from ``position`` on."""

    def before(self, limit: int) -> bytes:
        """At most ``limit`` bytes before ``position``; fewer if no more are available."""

    def advance(self, data: bytes | memoryview) -> None:
        """``data``, which was read at ``position``, is acknowledged."""
        self.mark = grown(self.mark, data)
        self.position += len(data)

    def go_to(self, position: int) -> None:
        """Moves to the gateway's position. Raises `FileChanged` if there are no such bytes."""

    def close(self) -> None:
        """Ends reading. Closing again is safe."""
        return

    def is_last(self, now: float, idle_s: float) -> bool:
        """No more bytes are expected soon: a line without its newline need not wait."""
        return True


class FileTail(ByteSource):
    """A followed file. ``once``: it is read up to its size at opening."""

    def __init__(self, path: str, fd: int, now: float, once: bool = False) -> None:
        facts = os.fstat(fd)
        self.path = path
        self.key: FileKey = (facts.st_dev, facts.st_ino)
        self.born_ns = born_ns(fd)
        self.head = fingerprint(os.pread(fd, HEAD_BYTES, 0))
        self.position = 0
        self.mark = b""
        self.away_since: float | None = None
        self.size = self.largest_size = facts.st_size
        self.changed_at = self.looked_at = now
        self.next_look = now
        self.deleted_bytes = 0  # on the disk, freed when this is closed
        self._fd = fd
        self._mtime_ns = facts.st_mtime_ns
        self._unverified = True
        self._limit = facts.st_size if once else None

    @classmethod
    def open(cls, path: str, now: float, once: bool = False) -> FileTail | None:
        """None when ``path`` is not a regular file (any more). OSError when it may not be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return cls(path, fd, now, once)
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def renewed(self, now: float) -> FileTail:
        """The same file from its beginning, as a new incarnation. Do not use this one afterwards."""
        tail = FileTail(self.path, self._fd, now, self._limit is not None)
        tail.away_since = self.away_since
        return tail

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def may_be_armed(self) -> bool:
        """Its changes may be events of inotify."""
        return True

    def fileno(self) -> int:
        return self._fd

    @property
    def begin(self) -> int:
        """Where a new source of the file begins."""
        return 0

    @property
    def end(self) -> int:
        return self.size if self._limit is None else min(self.size, self._limit)

    def look(self, now: float) -> bool:
        """Updates size and time; whether they changed. Raises `FileChanged` if bytes before the position were cut or
        rewritten.

        A file that has been quiet for long is checked less often, down to once in `LONGEST_LOOK_PAUSE_S`.
        """
        if now < self.next_look:
            return False
        is_changed = False
        self.next_look = now + min((now - self.changed_at) * LOOK_PAUSE_SHARE, LONGEST_LOOK_PAUSE_S)
        facts = os.fstat(self._fd)
        self.looked_at = now
        self.deleted_bytes = 0 if facts.st_nlink else facts.st_blocks * 512
        if (facts.st_size, facts.st_mtime_ns) != (self.size, self._mtime_ns):
            self.size, self._mtime_ns, self.changed_at = facts.st_size, facts.st_mtime_ns, now
            self.next_look = now
            self._unverified = is_changed = True
        if self._unverified and self.size <= self.position:  # if there is more to read, `read` verifies
            reason = self.differs(self.head, self.position, fingerprint(self.mark))
            if reason:
                raise FileChanged(reason)
            self._unverified = False
        self.largest_size = self.size
        return is_changed

    def differs(self, head: Fingerprint, position: int, mark: Fingerprint) -> str:
        """Why this is not the incarnation with this head and mark; empty when it is."""
        size = os.fstat(self._fd).st_size
        if size < position:
            return f"truncated: it holds {size} bytes, {position} were sent"
        if fingerprint(self.pread(head.length, 0)) != head:
            return f"its first {head.length} bytes are not what they were"
        if fingerprint(self.pread(mark.length, position - mark.length)) != mark:
            return f"the {mark.length} bytes before position {position} are not what they were"
        return ""

    def real_path(self) -> str:
        """Of the open file, so that nobody can turn a link between a check and the opening."""
        try:
            return os.readlink(f"/proc/self/fd/{self._fd}").removesuffix(" (deleted)")  # noqa: PTH115
        except OSError:
            return os.path.realpath(self.path)

    def is_intact(self) -> bool:
        """It still holds what was sent of it."""
        return not self.differs(self.head, self.position, fingerprint(self.mark))

    def pread(self, size: int, position: int) -> bytes:
        """The bytes there now, whatever was sent."""
        return os.pread(self._fd, size, position)

    def earlier_marks(self) -> tuple[tuple[int, str], ...]:
        """Positions beyond the head, each with the digest of the `MARK_BYTES` before it; the nearest one first."""
        places = [self.position - far for far in MARKS_BACK if self.position - far >= HEAD_BYTES]
        return tuple((at, fingerprint(self.pread(MARK_BYTES, at - MARK_BYTES)).digest) for at in places)

    def read(self, limit: int) -> bytes:
        """Raises `FileChanged` if the bytes before ``position`` are not those that were acknowledged.

        Both head and mark are verified: lines of equal length and end make a mark that matches by chance.
        """
        wanted = min(limit, max(self.end - self.position, 0))
        data = os.pread(self._fd, wanted, self.position)  # first: what is verified afterwards is no older
        before = len(self.mark)
        if os.pread(self._fd, before, self.position - before) != self.mark:
            raise FileChanged(f"the {before} bytes before position {self.position} are not what they were")
        if fingerprint(os.pread(self._fd, self.head.length, 0)) != self.head:
            raise FileChanged(f"its first {self.head.length} bytes are not what they were")
        return data

    def before(self, limit: int) -> bytes:
        begin = max(self.position - limit, 0)
        return os.pread(self._fd, self.position - begin, begin)

    def cover(self, data: bytes | memoryview) -> bool:
        """Extends ``head`` over ``data``, read at ``position`` and about to be sent; True if it grew.

        Raises `FileChanged` if the head of the file is not that of ``data``.
        """
        if self.head.length >= min(HEAD_BYTES, self.position + len(data)):
            return False
        raw = os.pread(self._fd, HEAD_BYTES, 0)
        new = raw[self.position :]
        if fingerprint(raw[: self.head.length]) != self.head or data[: len(new)] != new[: len(data)]:
            raise FileChanged(f"its first {len(raw)} bytes were changed while they were read")
        self.head = fingerprint(raw)
        return True

    def go_to(self, position: int) -> None:
        size = os.fstat(self._fd).st_size
        if position > size:
            raise FileChanged(f"the gateway has recorded {position} bytes of it, it holds {size}")
        begin = max(position - MARK_BYTES, 0)
        self.mark = os.pread(self._fd, position - begin, begin)
        self.position = position

    def begin_at(self, position: int) -> int:
        """Goes there. 0 if the file was truncated meanwhile: then it begins again."""
        try:
            self.go_to(position)
        except FileChanged:
            return 0
        return position

    def is_last(self, now: float, idle_s: float) -> bool:
        return self._limit is not None or now - self.changed_at >= idle_s

    def is_finished(self, now: float, timeout_s: float) -> bool:
        """Renamed or removed, sent to its end, and not written to for a time."""
        quiet = self.away_since is not None and now - max(self.away_since, self.changed_at) >= timeout_s
        return quiet and self.position >= self.size


class BufferedRemainder(ByteSource):
    """Bytes of an incarnation that is gone, which were read and are not acknowledged; held in memory."""

    def __init__(self, start: int, data: bytes, mark: bytes) -> None:
        self.position = start
        self.mark = mark
        self._start = start
        self._start_mark = mark
        self._data = data

    @property
    def end(self) -> int:
        return self._start + len(self._data)

    def read(self, limit: int) -> bytes:
        begin = self.position - self._start
        return self._data[begin : begin + limit]

    def before(self, limit: int) -> bytes:
        return self.mark[-limit:]

    def go_to(self, position: int) -> None:
        if not self._start <= position <= self.end:
            raise FileChanged(f"the gateway is at {position}, kept are {self._start} to {self.end}")
        self.mark = grown(self._start_mark, self._data[: position - self._start])
        self.position = position


def raise_file_limit() -> None:
    """Every followed file stays open, so that a rotated one can be read to its end."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        log_event("file-limit", reason=error)
