"""`LogferryHandler`: Python's logging as a source. It never blocks the program and never breaks it.

* `emit` formats the record and puts it into a bounded queue; a thread of the handler writes from there. Records that do
  not fit are counted. When the gateway works again, a line with their number takes their place in the stream.
* A forked process begins with an empty queue and a source of its own; the parent sends what the parent queued.
* Records that the handler's own threads, or its formatter, log are ignored: they would cause an endless loop.
* When another writer takes the source over, the handler continues as a new source.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from logferry.client.errors import LogferryError, Rejected, Superseded
from logferry.client.files.identity import printable
from logferry.client.transport.cluster import Token, pause_s
from logferry.client.writing.writer import Writer


class QueuedLines(NamedTuple):
    """Lines of so many ``records``, the first from ``created_ms``; or a gap: ``lost`` records are missing here."""

    data: bytes
    records: int
    created_ms: int
    lost: int = 0


class LogQueue:
    """At most ``most_records``, and about ``most_bytes``. Every record and every gap is settled in the end."""

    def __init__(self, most_records: int, most_bytes: int) -> None:
        self._most_records, self._most_bytes = most_records, most_bytes
        self._entries: deque[tuple[bytes, int, int]] = deque()  # a line, its time, 0; or b"", 0, the records of a gap
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
                lost = self._entries[-1][2] if self._entries else 0
                if lost:
                    self._entries[-1] = b"", 0, lost + 1
                elif not self._is_closed:
                    self._begun += 1
                    self._entries.append((b"", 0, 1))
                return False
            self._entries.append((line, created_ms, 0))
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
            _, created_ms, lost = self._entries[0]
            if lost:
                self._entries.popleft()
                return QueuedLines(b"", 1, 0, lost)
            found: list[bytes] = []
            size = 0
            while self._entries and not self._entries[0][2]:
                if found and size + len(self._entries[0][0]) > most_bytes:
                    break
                found.append(self._entries.popleft()[0])
                size += len(found[-1])
            self._bytes -= size
            return QueuedLines(b"".join(found), len(found), created_ms)

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
                self._entries.appendleft((b"", 0, records))
                self._came.notify()
            self._went.notify_all()

    def wait_settled(self, timeout_s: float) -> bool:
        """Until all that was put before is settled. False: not in time."""
        with self._lock:
            wanted = self._begun
            return self._went.wait_for(lambda: self._settled >= wanted, timeout_s)

    def close(self) -> None:
        """From now on `put` takes nothing."""
        with self._lock:
            self._is_closed = True
            self._came.notify_all()
            self._went.notify_all()


CHUNK_BYTES = 64 << 10
_BUFFER_BYTES = 4 << 20
_AGAIN_S = (1.0, 60.0)
_OWN_THREADS = "logferry-"
_handlers: weakref.WeakSet[LogferryHandler] = weakref.WeakSet()


class LogferryHandler(logging.Handler):
    """Writes a line for each record, as the formatter makes it, in chunks of about 64 KiB. Thread-safe.

    Every record is recorded once and in order, or counted as missing. The handler never raises from `emit`: it prints
    one line on standard error while it cannot deliver (see ``logging.raiseExceptions``).

    ``source_id``: must be unique to this process; None: made of host, program and process id. ``queue_records``,
    ``queue_bytes``: limits of what waits while the gateway takes nothing. ``close_timeout_s``: the longest time that
    `flush` and the end of the process wait for the gateway. The other arguments are those of `Writer`.

    It can be named in a logging configuration: ``"class": "logferry.client.LogferryHandler"``.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        topic: str,
        source_id: str | None = None,
        *,
        level: int | str = logging.NOTSET,
        token: Token = None,
        attributes: Mapping[str, str] | None = None,
        gzip: bool = False,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        queue_records: int = 10_000,
        queue_bytes: int = 8 << 20,
        close_timeout_s: float = 5.0,
    ) -> None:
        """Raises ValueError, and OSError if a file cannot be used. Sends nothing yet."""
        super().__init__(level)
        self._new_writer = partial(
            Writer, [urls] if isinstance(urls, str) else list(urls), topic, token=token,
            attributes=dict(attributes or {}), gzip=gzip, ca_file=ca_file, cert_file=cert_file, key_file=key_file,
            buffer_bytes=_BUFFER_BYTES, in_flight=1,
        )  # fmt: skip
        self._limits = queue_records, queue_bytes
        self._close_timeout_s = close_timeout_s
        self._given_id = source_id
        self._emitting = threading.local()
        self._begin(_source_id() if source_id is None else source_id)
        self._new_writer(source_id=self._source_id)  # checks the arguments now, in the program's own thread
        _handlers.add(self)

    def _begin(self, source_id: str) -> None:
        self._source_id = source_id
        self._waiting = LogQueue(*self._limits)
        self._thread: threading.Thread | None = None
        self._writer: Writer | None = None
        self._starting = threading.Lock()
        self._has_ended = threading.Event()
        self._flush_failed_at = -math.inf

    @property
    def source_id(self) -> str:
        """The source that the handler writes now."""
        return self._source_id

    # ---- in the program's threads ----------------------------------------------------------------------------

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record. Never raises, and never waits for the network."""
        if getattr(self._emitting, "now", False) or threading.current_thread().name.startswith(_OWN_THREADS):
            return
        self._emitting.now = True
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
            self._waiting.put(line, int(record.created * 1000))
            self._start()
        except Exception:  # noqa: BLE001  as every handler: logging decides what becomes of it
            self.handleError(record)
        finally:
            self._emitting.now = False

    def _start(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=f"{_OWN_THREADS}handler", daemon=True)
                    thread.start()
                    self._thread = thread

    def flush(self) -> None:
        """Waits until every emitted record is recorded, at most ``close_timeout_s``. Calling it again is safe."""
        if self._thread is None or self._thread is threading.current_thread():
            return
        if not self._waiting.wait_settled(self._close_timeout_s):
            self._flush_failed_at = time.monotonic()

    def close(self) -> None:
        """Flushes and ends the handler; gives up what is not recorded by then. Calling it again is safe."""
        if time.monotonic() - self._flush_failed_at > self._close_timeout_s:  # logging.shutdown has flushed just now
            self.flush()
        self._waiting.close()
        self._has_ended.set()
        writer = self._writer
        if writer is not None:
            _end(writer)
        super().close()

    def after_fork(self) -> None:
        """In the new process: sends nothing of the parent's, and waits for none of its locks."""
        base = self._source_id if self._given_id is None else self._given_id
        self._begin(_source_id() if self._given_id is None else f"{base}:{os.getpid()}")
        self._emitting = threading.local()

    # ---- in the handler's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        """One writer after the other, each until it fails."""
        failures = 0
        while not self._has_ended.is_set():
            self._writer = writer = self._new_writer(source_id=self._source_id)
            writer.ends_with_process = False  # logging ends the handlers, later
            sent = _Sent(self._waiting)
            try:
                self._write(writer, sent)
                return
            except LogferryError as error:
                sent.settle(error.recorded_seqno if isinstance(error, Rejected) else None)
                failures = 1 if sent.has_settled else failures + 1
                if isinstance(error, Superseded):
                    self._source_id = f"{self._source_id.partition('~')[0]}~{secrets.token_hex(4)}"
                self._complain(error)
            finally:
                self._waiting.lose(sent.records)
                _end(writer)
            self._has_ended.wait(pause_s(failures, _AGAIN_S))

    def _write(self, writer: Writer, sent: _Sent) -> None:
        """Until the handler is closed. Raises LogferryError."""
        while True:
            gathered = self._waiting.take(CHUNK_BYTES, 0.0 if sent.records else None)
            if gathered is not None:
                sent.give(writer, self._data(gathered), gathered)
                sent.settle(writer.recorded_seqno)
            elif sent.records:
                writer.flush()
                sent.settle(writer.recorded_seqno)
            else:
                return

    def _data(self, gathered: QueuedLines) -> bytes:
        if not gathered.lost:
            return gathered.data
        many = "1 log record is" if gathered.lost == 1 else f"{gathered.lost} log records are"
        text = f"{many} missing here, which could not be delivered"
        record = logging.LogRecord("logferry", logging.WARNING, __file__, 0, text, None, None)
        return self.format(record).encode("utf-8", "backslashreplace") + b"\n"

    def _complain(self, error: LogferryError) -> None:
        if logging.raiseExceptions and sys.stderr is not None and not self._has_ended.is_set():
            with suppress(OSError, ValueError):
                print(f"logferry: log records are not delivered: {error}", file=sys.stderr)


class _Sent:
    """Chunks given to a writer whose outcome is not known yet: their seqnos and numbers of records."""

    def __init__(self, waiting: LogQueue) -> None:
        self._waiting = waiting
        self._chunks: deque[tuple[int, int]] = deque()
        self.records = 0
        self.has_settled = False

    def give(self, writer: Writer, data: bytes, gathered: QueuedLines) -> None:
        """Raises LogferryError; the records count as sent then, too."""
        self.records += gathered.records
        self._chunks.append((writer.write(data, created_ms=gathered.created_ms or None), gathered.records))

    def settle(self, recorded: int | None) -> None:
        """Those up to ``recorded`` are recorded."""
        while self._chunks and recorded is not None and self._chunks[0][0] <= recorded:
            _, records = self._chunks.popleft()
            self.records -= records
            self._waiting.settle(records)
            self.has_settled = True


def _end(writer: Writer) -> None:
    with suppress(LogferryError):
        writer.close(0.0)


def _source_id() -> str:
    program = os.path.basename(sys.argv[0] if sys.argv else "") or "python"  # noqa: PTH119
    return printable(f"{socket.gethostname()}:{program}:{os.getpid()}")[:200]


def _after_fork() -> None:
    for handler in list(_handlers):
        handler.after_fork()


os.register_at_fork(after_in_child=_after_fork)
