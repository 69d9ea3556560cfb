"""A bounded queue of log records for the thread that writes them; records that do not fit are counted.

The count takes the place of the missing records. Only `take` and `wait_settled` wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple


class QueuedLines(NamedTuple):
    """Lines of so many ``records``, the first from ``created_ms``; or a gap: ``lost`` records are missing here."""

    data: bytes
    records: int
    created_ms: int
    lost: int = 0


class _Gap:
    def __init__(self, records: int) -> None:
        self.records = records


class LogQueue:
    """At most ``most_records``, and about ``most_bytes``. Every record and every gap is settled in the end."""

    def __init__(self, most_records: int, most_bytes: int) -> None:
        self._most_records, self._most_bytes = most_records, most_bytes
        self._entries: deque[tuple[bytes, int] | _Gap] = deque()
        self._bytes = 0
        self._begun = 0
        self._settled = 0
        self._is_closed = False
        # Reentrant: a signal handler may log, too, and it runs in any thread.
        self._lock = threading.RLock()
        self._came = threading.Condition(self._lock)
        self._went = threading.Condition(self._lock)

    def put(self, line: bytes, created_ms: int) -> bool:
        """False: there was no room, and the record counts as lost."""
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

    def take(self, most_bytes: int, timeout_s: float | None = None) -> QueuedLines | None:
        """About so many bytes of lines, in order; waits until there are some. None: closed, or none came in time."""
        with self._lock:
            if not self._entries and not self._is_closed:
                self._came.wait(timeout_s)
            if not self._entries:
                return None
            first = self._entries[0]
            if isinstance(first, _Gap):
                self._entries.popleft()
                return QueuedLines(b"", 1, 0, first.records)
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
            return QueuedLines(b"".join(found), len(found), first[1])

    def settle(self, records: int) -> None:
        """So many of the taken records are recorded."""
        with self._lock:
            self._settled += records
            self._went.notify_all()

    def lose(self, records: int) -> None:
        """So many of the taken records are lost: a gap before those that wait now."""
        with self._lock:
            self._settled += records
            if records and not self._is_closed:
                self._begun += 1
                self._entries.appendleft(_Gap(records))
                self._came.notify()
            self._went.notify_all()

    def wait_settled(self, timeout_s: float) -> bool:
        """Until all that was put before is settled. False: not in time."""
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
        """From now on `put` takes nothing."""
        with self._lock:
            self._is_closed = True
            self._came.notify_all()
            self._went.notify_all()
