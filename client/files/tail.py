"""Reading one incarnation of a file, through a descriptor that stays open after renames and removal.

Invariants
* ``position`` is the end of the acknowledged bytes. Reading begins there, or at a `ReadPlace` behind what was read and
  is not acknowledged yet.
* ``mark`` holds the bytes just before ``position``; ``head`` covers the first `HEAD_BYTES` of everything that was ever
  handed out for sending (see `cover`). Every read verifies both: so a file that was truncated and rewritten
  (``copytruncate``, ``>``) is noticed even when it has grown past ``position``.
* The descriptor of a file that was sent and is quiet may be given up (`give_up`). Whatever needs the bytes takes it
  again (`take`), and only of a file with the same device, inode and time of birth. Where no birth is known, the content
  must be the same unless the file is where it was: there it may have been truncated, which every read notices.

`FileChanged` means that the file no longer holds this incarnation. Then a new incarnation begins. Bytes that were never
read are lost, as they are for every reader of a file that is truncated.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple, Protocol

from logferry.client.files.discover import FileKey, file_key, file_system_is_on, find_moved, leads_to, one_of
from logferry.client.files.identity import HEAD_BYTES, MARK_BYTES, MARKS_BACK, Fingerprint, born_ns, fingerprint, grown

LOOK_PAUSE_SHARE = 0.02
LONGEST_LOOK_PAUSE_S = 1.0


class FileChanged(Exception):
    """The file holds something else now; the text says how that was noticed."""


class ReadPlace(NamedTuple):
    """Where to read. ``mark``: the bytes before it."""

    position: int
    mark: bytes


class ByteSource(Protocol):
    """The bytes of a source: its file, or what was kept of an incarnation that is gone."""

    __slots__ = ()
    position: int
    mark: bytes

    @property
    def end(self) -> int:
        """How far there are bytes now."""

    @property
    def place(self) -> ReadPlace:
        return ReadPlace(self.position, self.mark)

    def read(self, limit: int, place: ReadPlace | None = None) -> bytes:
        """At most ``limit`` bytes from ``place`` on; None: from ``position`` on."""

    def before(self, limit: int, place: ReadPlace | None = None) -> bytes:
        """At most ``limit`` bytes before ``place``; fewer if no more are available."""

    def advance(self, data: bytes | memoryview) -> None:
        """``data``, which was read at ``position``, is acknowledged."""
        self.mark = grown(self.mark, data)  # type: ignore[misc]  # the classes have it
        self.position += len(data)  # type: ignore[misc]

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

    __slots__ = (
        *("_ctime_ns", "_fd", "_limit", "_misses", "_mtime_ns", "_place", "_taken_at", "_unverified", "away_since"),
        *("born_ns", "changed_at", "deleted_bytes", "head", "is_deleted", "is_missing", "is_unwritten", "key"),
        *("largest_size", "looked_at", "mark", "next_look", "path", "position", "size"),
    )

    def __init__(self, path: str, fd: int, now: float, once: bool = False) -> None:
        facts = os.fstat(fd)
        self.path = path
        self.key: FileKey = file_key(facts)
        self.born_ns = born_ns(fd)
        self.head = fingerprint(os.pread(fd, HEAD_BYTES, 0))
        self.position, self.mark = 0, b""
        self.away_since: float | None = None
        self.size = self.largest_size = facts.st_size
        self.changed_at = self.looked_at = self.next_look = self._taken_at = now
        self.deleted_bytes = 0  # on the disk, freed when this is closed
        self.is_deleted = False
        self.is_missing = False  # it was given up, and is no longer where it was
        self.is_unwritten = False  # it was given up, and an event says that nothing was written until it was removed
        self._fd = fd
        self._place, self._misses = "", 0  # where it was when it was given up
        self._mtime_ns = facts.st_mtime_ns
        self._ctime_ns = one_of(facts.st_ctime_ns, self._mtime_ns)
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
        tail = FileTail(self.path, self.fileno(), now, self._limit is not None)
        tail.away_since = self.away_since
        return tail

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def may_be_armed(self) -> bool:
        """Its changes may be events of inotify."""
        return not self.is_missing

    @property
    def is_open(self) -> bool:
        """It has its descriptor: so no other file can have its inode."""
        return self._fd >= 0

    @property
    def watch_path(self) -> bytes:
        """Leads to the file while this is open, or rests where it was."""
        return b"/proc/self/fd/%d" % self._fd if self._fd >= 0 else os.fsencode(self._place)

    def fileno(self) -> int:
        """Takes the descriptor again if it was given up. Raises FileNotFoundError if the file is gone."""
        if self._fd < 0 and not self._find():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._place)
        return self._fd

    # ---- without its descriptor --------------------------------------------------------------------------

    def is_inactive(self, now: float, close_s: float) -> bool:
        """Sent to its end, and for ``close_s`` nothing of it changed or was needed; never if that is 0."""
        return 0 < close_s <= now - max(self.changed_at, self._taken_at) and self.position >= self.size

    def give_up(self) -> None:
        """Closes the descriptor until it is needed again, if the file can be found then."""
        place = self.real_path()
        if leads_to(place, self.key):
            self._place, self.is_unwritten = place, False
            self.close()

    def is_there(self) -> bool:
        """It is open, or is now, and stays so for a while. Else it could not be opened, or ``is_missing``."""
        try:
            return self._fd >= 0 or self._find()
        except OSError:
            return False

    def _find(self) -> bool:
        """Opens it where it was, or under another name in that folder."""
        if self._place and not self.take(self._place):
            moved = find_moved(self._place, self.key)
            self.is_missing = moved is None or not self.take(moved)
        return self._fd >= 0

    def take(self, path: str) -> bool | None:
        """Continues with the file at ``path`` if that is this one. False: another file has its inode, so it was
        removed; None: there is no such file.
        """
        found = None if self._fd >= 0 else FileTail.open(path, self.looked_at)
        if found is None:
            return True if self._fd >= 0 else None
        try:
            if found.key != self.key:
                return None
            if not self._is_same(found):
                return False
            self._fd, found._fd = found._fd, -1
        finally:
            found.close()
        self._taken_at, self._unverified = self.looked_at, True
        self.is_missing, self._misses = False, 0
        return True

    def _is_same(self, found: FileTail) -> bool:
        if self.born_ns and found.born_ns:
            return self.born_ns == found.born_ns
        if found.path == self._place and self.away_since is None:
            return True
        return self.head.length > 0 and not found.differs(self.head, self.position, fingerprint(self.mark))

    def _rests(self) -> bool:
        """It was given up, and nothing changed since then, or it is not where it was."""
        if self._fd >= 0:
            return False
        try:
            facts = os.stat(self._place)  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            self.is_missing = True
            return True
        known = (*self.key, self.size, self._mtime_ns, self._ctime_ns)
        if (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns) == known:
            self.is_missing = False
            return True
        self.is_missing = not self.take(self._place)
        return self.is_missing

    def misses(self, moved: str | None) -> int:
        """To be called when a search did not show it. ``moved``: a file with its inode in the folder where it was.

        So many searches in a row did not find it while it was given up. 0: it is open; or its file system is not there,
        which may be mounted again.
        """
        try:
            if not self._rests() or not self.is_missing or (moved is not None and self.take(moved)):
                return 0
        except OSError:
            return 0
        self._misses = self._misses + 1 if file_system_is_on(self._place, self.key[0]) else 0
        return self._misses

    # ---- looks and reads ---------------------------------------------------------------------------------

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
        if self._rests():
            self.looked_at = self.looked_at if self.is_missing else now
            return False
        facts = os.fstat(self._fd)
        self.looked_at, self.is_deleted = now, not facts.st_nlink
        self.deleted_bytes = facts.st_blocks * 512 if self.is_deleted else 0
        if (facts.st_size, facts.st_mtime_ns) != (self.size, self._mtime_ns):
            self.size, self._mtime_ns, self.changed_at = facts.st_size, facts.st_mtime_ns, now
            self.next_look = now
            self._unverified = is_changed = True
        self._ctime_ns = one_of(facts.st_ctime_ns, self._mtime_ns)
        if self._unverified and self.size <= self.position:  # if there is more to read, `read` verifies
            reason = self.differs(self.head, self.position, fingerprint(self.mark))
            if reason:
                raise FileChanged(reason)
            self._unverified = False
        self.largest_size = self.size
        return is_changed

    def differs(self, head: Fingerprint, position: int, mark: Fingerprint) -> str:
        """Why this is not the incarnation with this head and mark; empty when it is."""
        size = os.fstat(self.fileno()).st_size
        if size < position:
            return f"truncated: it holds {size} bytes, {position} were sent"
        if fingerprint(self.pread(head.length, 0)) != head:
            return f"its first {head.length} bytes are not what they were"
        if fingerprint(self.pread(mark.length, position - mark.length)) != mark:
            return f"the {mark.length} bytes before position {position} are not what they were"
        return ""

    def real_path(self) -> str:
        """Of the open file, so that nobody can turn a link between a check and the opening."""
        if self._fd < 0:
            return self._place
        try:
            return os.readlink(f"/proc/self/fd/{self._fd}").removesuffix(" (deleted)")  # noqa: PTH115
        except OSError:
            return os.path.realpath(self.path)

    def is_intact(self) -> bool:
        """It still holds what was sent of it."""
        return not self.differs(self.head, self.position, fingerprint(self.mark))

    def pread(self, size: int, position: int) -> bytes:
        """The bytes there now, whatever was sent."""
        return os.pread(self.fileno(), size, position)

    def earlier_marks(self) -> tuple[tuple[int, str], ...]:
        """Positions beyond the head, each with the digest of the `MARK_BYTES` before it; the nearest one first."""
        places = [self.position - far for far in MARKS_BACK if self.position - far >= HEAD_BYTES]
        return tuple((at, fingerprint(self.pread(MARK_BYTES, at - MARK_BYTES)).digest) for at in places)

    def read(self, limit: int, place: ReadPlace | None = None) -> bytes:
        """Raises `FileChanged` if the bytes before ``place`` are not those that were read there.

        Both head and mark are verified: lines of equal length and end make a mark that matches by chance.
        """
        position, mark = place or self.place
        wanted = min(limit, max(self.end - position, 0))
        data = os.pread(self.fileno(), wanted, position)  # first: what is verified afterwards is no older
        before = len(mark)
        if os.pread(self._fd, before, position - before) != mark:
            raise FileChanged(f"the {before} bytes before position {position} are not what they were")
        if fingerprint(os.pread(self._fd, self.head.length, 0)) != self.head:
            raise FileChanged(f"its first {self.head.length} bytes are not what they were")
        return data

    def before(self, limit: int, place: ReadPlace | None = None) -> bytes:
        position, _ = place or self.place
        begin = max(position - limit, 0)
        return self.pread(position - begin, begin)

    def cover(self, data: bytes | memoryview, start: int | None = None) -> bool:
        """Extends ``head`` over ``data``, read at ``start`` (None: at ``position``) and about to be sent; True if it
        grew.

        Raises `FileChanged` if the head of the file is not that of ``data``.
        """
        start = self.position if start is None else start
        if self.head.length >= min(HEAD_BYTES, start + len(data)):
            return False
        raw = self.pread(HEAD_BYTES, 0)
        new = raw[start:]
        if fingerprint(raw[: self.head.length]) != self.head or data[: len(new)] != new[: len(data)]:
            raise FileChanged(f"its first {len(raw)} bytes were changed while they were read")
        self.head = fingerprint(raw)
        return True

    def go_to(self, position: int) -> None:
        size = os.fstat(self.fileno()).st_size
        if position > size:
            raise FileChanged(f"the gateway has recorded {position} bytes of it, it holds {size}")
        begin = max(position - MARK_BYTES, 0)
        self.mark = self.pread(position - begin, begin)
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
        """Renamed or removed, sent to its end, and not written to for a time. One that is missing may come again."""
        quiet = self.away_since is not None and now - max(self.away_since, self.changed_at) >= timeout_s
        return quiet and self.position >= self.size and not self.is_missing


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

    def read(self, limit: int, place: ReadPlace | None = None) -> bytes:
        begin = (place or self.place).position - self._start
        return self._data[begin : begin + limit]

    def before(self, limit: int, place: ReadPlace | None = None) -> bytes:
        return (place or self.place).mark[-limit:]

    def go_to(self, position: int) -> None:
        if not self._start <= position <= self.end:
            raise FileChanged(f"the gateway is at {position}, kept are {self._start} to {self.end}")
        self.mark = grown(self._start_mark, self._data[: position - self._start])
        self.position = position
