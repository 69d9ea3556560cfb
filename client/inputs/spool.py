"""The spool of an input: one growing file, which the push-client follows like any other; what was sent is freed.

Invariants
* A position in the file never changes its bytes, so it is the seqno of what is sent, over every restart. Space is freed
  by holes in the file (``fallocate``, punch hole), not by removing files. Its first block stays: the head of the file
  is part of its identity.
* Bytes are visible to the sender only after ``fdatasync``. So a gateway never has more than the disk has after a power
  failure, and what was sent needs no other proof.
* A spool of whole lines is cut to its last whole line when it is opened: a write was torn, and nothing of it was
  visible. So the last line is the last record that will ever be sent, and an input may continue behind it.
* A hole is punched only where the stored checkpoint says so (``since``): nothing before that is ever read again.
* One client at a time: the state folder is locked.

``put`` takes bytes into memory, at most `PENDING_BYTES`; a thread writes them. What it has not written when the client
is killed is lost, unless the input reads it again.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

from logferry.client.events import log_event
from logferry.client.files.checkpoint import StateUnusable
from logferry.client.files.discover import FileKey
from logferry.client.files.tail import FileTail

WRITE_BYTES = 1 << 20  # before each fdatasync; no record is longer
PENDING_BYTES = 4 << 20
GATHER_S = 0.1
RETRY_S = 1.0
KEPT_BYTES = 4 << 20  # before the acknowledged position: a line, earlier marks, the last record
STEP_BYTES = 4 << 20
BLOCK_BYTES = 4096
RENEW_BYTES = 1 << 40  # a file system bounds the size of a file, holes included: ext4 at 16 TiB
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class Spool:
    """``path``: of the file; ``limit``: bytes that may wait in it. ``of_lines``: only whole lines are put into it.

    ``end``: up to here it is on the disk; ``freed``: up to here a hole begins behind the first block. ``on_room`` is
    called by other threads, when there may be room again. ``error``: why the disk takes nothing; empty: it does.
    """

    def __init__(self, path: Path, limit: int, of_lines: bool) -> None:
        self.path = path
        self.limit = limit
        self.of_lines = of_lines
        self.end = self.freed = 0
        self.error = ""
        self.is_over = False  # nothing more will be put
        self.on_room: Callable[[], None] = lambda: None
        self.key: FileKey = (0, 0)
        self._fd = -1
        self._target = 0
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"spool-{path.name}", daemon=True)

    def open(self) -> None:
        """Raises `StateUnusable` where the folder or the file cannot be used, or is that of another user."""
        try:
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
            self._check_owner(self.path.parent.lstat(), stat.S_ISDIR)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._fd = os.open(self.path, flags, 0o600)
            facts = os.fstat(self._fd)
            self._check_owner(facts, stat.S_ISREG)
            self.key = facts.st_dev, facts.st_ino
            self._recover()
            os.fsync(self._fd)
            _sync_folder(self.path)
        except (OSError, StateUnusable) as error:
            self._close_file()
            if isinstance(error, StateUnusable):
                raise
            raise StateUnusable(f"{self.path}: {error.strerror}") from None
        self._thread.start()

    def _check_owner(self, facts: os.stat_result, is_kind: Callable[[int], bool]) -> None:
        if not is_kind(facts.st_mode) or facts.st_uid != os.geteuid():
            raise StateUnusable(f"{self.path}: the file or its folder is of another kind, or of another user")

    def _recover(self) -> None:
        size = os.fstat(self._fd).st_size
        _punch(self._fd, size, BLOCK_BYTES)  # nothing is there: only to see whether it can be done
        if size > BLOCK_BYTES:
            with suppress(OSError):  # nothing but a hole behind the first block
                data = os.lseek(self._fd, BLOCK_BYTES, os.SEEK_DATA)
                self.freed = data if data > BLOCK_BYTES else 0
        self.end = size
        if self.of_lines and size:
            begin = max(size - 2 * WRITE_BYTES, self.freed)
            rest = os.pread(self._fd, size - begin, begin)
            whole = rest.partition(b"\0")[0].rfind(b"\n") + 1  # a power failure may leave zeros
            self.end = begin + whole
        if self.end < size:
            log_event("spool-cut", path=self.path, position=self.end, bytes=size - self.end)
            os.ftruncate(self._fd, self.end)

    # ---- for the input -----------------------------------------------------------------------------------

    def put(self, data: bytes) -> bool:
        """Takes the bytes, or has no room: then it takes nothing."""
        with self._changed:
            if not self._has_room(len(data)):
                return False
            self._pending.append(data)
            self._pending_bytes += len(data)
            self._changed.notify_all()
            return True

    def put_when_room(self, data: bytes) -> bool:
        """Waits for room; False: the client ends, and the bytes were not taken."""
        while not self.put(data):
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._has_room(len(data)))
                if self._is_closing:
                    return False
        return True

    def _has_room(self, size: int) -> bool:
        in_file = self.end + self._pending_bytes + size - self.freed
        return in_file <= self.limit and self._pending_bytes + size <= PENDING_BYTES

    def ends_with_newline(self) -> bool:
        with self._changed:
            return os.pread(self._fd, 1, self.end - 1) == b"\n"

    def last_line(self) -> bytes:
        """The last record, without its newline: of the file, or what `note` kept of one before it; empty: none."""
        with self._changed:
            begin = max(self.end - 2 * WRITE_BYTES, self.freed)
            lines = os.pread(self._fd, self.end - begin, begin)
        if lines:
            return lines[:-1].rpartition(b"\n")[2]
        try:
            return self._note_path.read_bytes()
        except FileNotFoundError:
            return b""

    def note(self, line: bytes) -> None:
        """Durable: what `last_line` is while the file is empty."""
        temporary = self._note_path.with_name(self._note_path.name + ".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(self._note_path)
        _sync_folder(self.path)

    @property
    def _note_path(self) -> Path:
        return self.path.with_name(self.path.name + ".last")

    # ---- for the sender ----------------------------------------------------------------------------------

    def tail(self, now: float) -> SpoolTail:
        """The file as the sender follows it. Raises OSError."""
        return SpoolTail(str(self.path), os.dup(self._fd), now, spool=self)

    @property
    def begin(self) -> int:
        """Where a new source begins: behind the hole, at a whole line. What lies before was recorded under another."""
        if not self.freed:
            return 0
        found = os.pread(self._fd, WRITE_BYTES, self.freed).find(b"\n")
        return min(self.freed + found + 1, self.end)

    @property
    def used_bytes(self) -> int:
        """How much of the limit is used; also by the last `KEPT_BYTES` that were sent."""
        return self.end + self._pending_bytes - self.freed

    @property
    def is_empty(self) -> bool:
        """Everything that was put is on the disk."""
        return not self._pending_bytes

    def free_to(self, acknowledged: int) -> int:
        """Plans a hole. Returns the position up to which nothing may be read again, once that is stored; 0: none."""
        target = (acknowledged - KEPT_BYTES) // STEP_BYTES * STEP_BYTES
        self._target = target if target > self.freed else 0
        return self._target

    def free(self, acknowledged: int) -> None:
        """Punches the hole that `free_to` planned, or empties a file that grew to `RENEW_BYTES` and was sent."""
        target, self._target = self._target, 0
        with suppress(OSError):  # a full disk: tried again after the next save
            if target:
                _punch(self._fd, BLOCK_BYTES, target - BLOCK_BYTES)
                with self._changed:
                    self.freed = target
                    self._changed.notify_all()
                self.on_room()
            if acknowledged >= RENEW_BYTES:
                self._renew(acknowledged)

    def _renew(self, acknowledged: int) -> None:
        if self.of_lines and acknowledged == self.end:
            self.note(self.last_line())
        with self._changed:
            if acknowledged == self.end:
                log_event("spool-renewed", path=self.path, position=self.end)
                os.ftruncate(self._fd, 0)
                self.end = self.freed = 0
                self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Writes what was put. Closing again is safe."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._close_file()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # ---- the thread that writes --------------------------------------------------------------------------

    def _work(self) -> None:
        while (data := self._next()) is not None:
            try:
                self._write(data)
            except OSError as error:
                if not self.error:
                    log_event("spool-write-failed", path=self.path, reason=error.strerror)
                self.error = error.strerror or "unwritable"
                with self._changed:
                    if self._is_closing:
                        return
                    self._changed.wait_for(lambda: self._is_closing, RETRY_S)
                continue
            self.error = ""
            with self._changed:
                self.end += len(data)
                self._pending_bytes -= len(data)
                left = len(data)
                while left:
                    left -= len(self._pending.popleft())
                self._changed.notify_all()
            self.on_room()

    def _next(self) -> bytes | None:
        """What to write now; None: nothing more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or (self._pending and self.end < RENEW_BYTES))
            if not self._pending:
                return None
            self._changed.wait_for(lambda: self._is_closing or self._pending_bytes >= WRITE_BYTES, GATHER_S)
            taken: list[bytes] = []
            size = 0
            for data in self._pending:
                if taken and size + len(data) > WRITE_BYTES:
                    break
                taken.append(data)
                size += len(data)
            return b"".join(taken)

    def _write(self, data: bytes) -> None:
        """Raises OSError; then the file is as it was, or longer than ``end``, which is written again."""
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, memoryview(data)[done:], self.end + done)
            os.fdatasync(self._fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self.end)
            raise
        if not os.fstat(self._fd).st_nlink:
            raise OSError(errno.ENOENT, "the spool was removed: restart the client")


class SpoolTail(FileTail):
    """The spool as a followed file: it ends where it is on the disk."""

    def __init__(self, path: str, fd: int, now: float, once: bool = False, *, spool: Spool) -> None:
        super().__init__(path, fd, now)
        self.spool = spool
        self._seen = spool.end

    @property
    def begin(self) -> int:
        return self.spool.begin

    @property
    def may_be_armed(self) -> bool:
        """No: an event comes before the bytes are on the disk; `Inputs.news` comes after it."""
        return False

    @property
    def end(self) -> int:
        return self.spool.end

    def renewed(self, now: float) -> FileTail:
        return SpoolTail(self.path, self._fd, now, spool=self.spool)

    def look(self, now: float) -> bool:
        is_changed, seen = super().look(now), self._seen
        self._seen = self.spool.end
        if self._seen != seen:
            self.changed_at = self.next_look = now
        return is_changed or self._seen != seen

    def is_last(self, now: float, idle_s: float) -> bool:
        return (self.spool.is_over and self.spool.is_empty) or super().is_last(now, idle_s)


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _punch(fd: int, begin: int, size: int) -> None:
    """Raises OSError."""
    punch = _fallocate()
    if punch is None:
        raise OSError(errno.ENOSYS, "this system cannot free the beginning of a file")
    if punch(fd, _KEEP_SIZE | _PUNCH_HOLE, begin, size):
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, f"the file system cannot free the beginning of a file: {os.strerror(number)}")


def _fallocate() -> Any:
    """fallocate(2), which `os` does not offer; None if there is none."""
    try:
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
        call = getattr(library, "fallocate64", None) or library.fallocate
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    except (ImportError, MemoryError, OSError, AttributeError):
        return None
    return call
