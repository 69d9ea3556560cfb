"""Log records that wait for the thread that writes them: bounded, and what found no place is counted.

The count stands where the records are missing. No I/O. Only `take` and `wait_settled` wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple


class Gathered(NamedTuple):
    """What `take` gives: the lines of ``records``, the first from ``created_ms``; or that so many are ``lost`` here."""

    data: bytes
    records: int
    created_ms: int
    lost: int = 0


class _Gap:
    def __init__(self, records: int) -> None:
        self.records = records


class Waiting:
    """At most ``most_records``, and about ``most_bytes``. Every `put` and every gap is settled in the end."""

    def __init__(self, most_records: int, most_bytes: int) -> None:
        self._most_records, self._most_bytes = most_records, most_bytes
        self._entries: deque[tuple[bytes, int] | _Gap] = deque()
        self._bytes = 0
        self._begun = 0
        self._settled = 0
        self._is_closed = False
        # Reentrant: a signal's handler may log, too, and it runs in whatever thread it finds.
        self._lock = threading.RLock()
        self._came = threading.Condition(self._lock)
        self._went = threading.Condition(self._lock)

    def put(self, line: bytes, created_ms: int) -> bool:
        """False: there was no place, and it counts as lost."""
        with self._lock:
            if self._is_closed or len(self._entries) >= self._most_records or self._bytes > self._most_bytes:
                last = self._entries[-1] if self._entries else None
                if isinstance(last, _Gap):
                    last.records += 1
                elif not self._is_closed:
                    self._begun += 1
                    self._entries.append(_Gap(1))
                return False
            self._entries.append((line, created_ms))
            self._bytes += len(line)
            self._begun += 1
            self._came.notify()
            return True

    def take(self, most_bytes: int, timeout_s: float | None = None) -> Gathered | None:
        """Lines of about so many bytes, in order; waits until there are some. None: closed, or none came in time."""
        with self._lock:
            if not self._entries and not self._is_closed:
                self._came.wait(timeout_s)
            if not self._entries:
                return None
            first = self._entries[0]
            if isinstance(first, _Gap):
                self._entries.popleft()
                return Gathered(b"", 1, 0, first.records)
            found: list[bytes] = []
            size = 0
            while self._entries:
                entry = self._entries[0]
                if isinstance(entry, _Gap) or (found and size + len(entry[0]) > most_bytes):
                    break
                found.append(entry[0])
                size += len(entry[0])
                self._entries.popleft()
            self._bytes -= size
            return Gathered(b"".join(found), len(found), first[1])

    def settle(self, records: int) -> None:
        """So many of what was taken are recorded."""
        with self._lock:
            self._settled += records
            self._went.notify_all()

    def lose(self, records: int) -> None:
        """So many of what was taken are lost, before what waits now."""
        with self._lock:
            self._settled += records
            if records and not self._is_closed:
                self._begun += 1
                self._entries.appendleft(_Gap(records))
                self._came.notify()
            self._went.notify_all()

    def wait_settled(self, timeout_s: float) -> bool:
        """Until all that was put before is settled; False: not in time."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            wanted = self._begun
            while self._settled < wanted:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._went.wait(left)
            return True

    def close(self) -> None:
        """Nothing is taken in any more."""
        with self._lock:
            self._is_closed = True
            self._came.notify_all()
            self._went.notify_all()
