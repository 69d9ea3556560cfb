"""`Writer`: the session of a source, for programs. `WriterCore` decides; here are the threads.

Each of the ``in_flight`` threads of a `Writer` carries one request at a time over a
connection of its own. One lock guards all that they share, and no request is made under it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from logferry.client.errors import LogferryError
from logferry.client.events import log_event
from logferry.client.transport.cluster import ANSWER_TIMEOUT_S, USER_AGENT, Token, cluster_of, deadline_of
from logferry.client.transport.connections import Connections, Dialer, TlsFiles, proxies_of
from logferry.client.transport.source_request import SourceAddress
from logferry.client.writing.send_window import ChunkReceipt, Limits, SendJob
from logferry.client.writing.writer_core import ChunkOptions, Promise, Waits, WriterCore, chunk_bytes
from logferry.gateway.contract.names import check_attributes, check_source_id, check_topic

if TYPE_CHECKING:
    from concurrent.futures import Future

LEFT_BY_ERROR_S = 5.0  # so long a block that an error leaves waits for its chunks
_JOIN_S = 1.0


class WriterFace(ABC):
    """The arguments of `Writer` and `AsyncWriter`."""

    def __init__(
        self,
        urls: str | Iterable[str],
        topic: str,
        source_id: str,
        *,
        partition_key: str | None = None,
        token: Token = None,
        attributes: Mapping[str, str] | None = None,
        gzip: bool = False,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        batch_bytes: int = 1 << 20,
        buffer_bytes: int = 16 << 20,
        in_flight: int = 4,
    ) -> None:
        """Raises ValueError, also for names that the gateway would refuse, and what `_prepare` does."""
        limits = Limits(batch_bytes, buffer_bytes=buffer_bytes, in_flight=in_flight)
        key = None if partition_key is None else check_source_id(partition_key, "partition_key")
        names = check_topic(topic), check_source_id(source_id, "source_id"), key
        address = SourceAddress(cluster_of(urls, token), USER_AGENT, *names)
        self._core = WriterCore(address, check_attributes(dict(attributes or {})), gzip, limits)
        self._prepare(TlsFiles(ca_file, cert_file, key_file))

    @abstractmethod
    def _prepare(self, files: TlsFiles) -> None:
        """The face's own parts."""


_started: weakref.WeakSet[Writer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Chunks of writers that the program did not close are still sent, within a few seconds."""
    for writer in list(_started):
        writer._end_unclosed()


class Writer(WriterFace):
    """Writes chunks of one source: each is recorded once and in order, however often it is sent. Thread-safe.

    * Nothing is sent before `open`. Entering a ``with`` block, the first `write` and `recorded_seqno` call it. Opening
      fences off every older writer of the source.
    * Leaving the ``with`` block waits until all chunks are recorded; an exception limits the wait to 5 s.
    * The writer itself handles 503, 429, lost connections, failover between URLs and moves of the source to another
      worker. It raises `Rejected` and `Superseded`, and every later call raises the same error again: see there for
      what is recorded.
    * A writer that is not closed at the end of the process still sends for up to 5 s, with a `ResourceWarning` and a
      line in the log of `logferry.client`. Chunks that are not recorded by then are lost.
    * While nothing works, a warning is logged after 5 s and then each minute. Without ``timeout_s`` the calls wait
      without limit, also for a URL that is wrong.
    * A forked process must open writers of its own: those of its parent raise `Closed`.

    ``urls``: workers of one data centre, the preferred one first. ``topic``: without the data centre. ``source_id``: 1
    to 512 bytes of UTF-8. ``partition_key``: sources that share it share a partition; it is part of the source's
    identity. ``token``: one that may write the topic, or a function that returns it, asked before each request: it
    should keep the token, and not wait for the network. ``attributes``: of every chunk. ``gzip``: compress requests,
    for slow links. ``ca_file``: a PEM file with the authority of the gateways' certificates; None: the system's.
    ``cert_file``, ``key_file``: PEM files with the certificate that the writer shows, and its key. ``batch_bytes``: of
    one request, unless a single chunk is larger. ``buffer_bytes``: of all chunks that are not recorded yet.
    ``in_flight``: concurrent requests.
    """

    def _prepare(self, files: TlsFiles) -> None:
        """Raises OSError if a file cannot be used."""
        self._dialer = Dialer(files.ca_file, (), proxies_of(os.environ), files.cert_file, files.key_file)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._connections: list[Connections] = []
        self.ends_with_process = True

    def __enter__(self) -> Writer:
        try:
            self.open()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        else:
            with suppress(Exception):  # the error that is on its way already says more
                self.close(LEFT_BY_ERROR_S)

    def open(self, timeout_s: float | None = None) -> None:
        """Opens the session. Does nothing if it is open: calling it again is safe.

        Raises `Rejected`, and `Unknown` after ``timeout_s`` (None: waits without limit).
        """
        deadline = deadline_of(timeout_s)
        with self._own_lock():
            self._open(deadline)

    @property
    def recorded_seqno(self) -> int | None:
        """Every chunk up to this seqno is recorded; None: nothing of the source is. Opens the session if need be."""
        with self._own_lock():
            window = self._core.window
            if window.session is None and not self._core.is_closed and window.failure is None:
                self._open(None)
            return window.recorded

    def write(
        self,
        data: bytes,
        seqno: int | None = None,
        *,
        created_ms: int | None = None,
        attributes: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Puts one chunk into the buffer and returns its seqno. The chunk is recorded when `flush` returns.

        ``seqno``: above that of the chunk before; None: one above it, or above `recorded_seqno` (the first of all is
        1). A seqno that is recorded already is a duplicate: writing it again is safe. ``created_ms``: Unix time in
        milliseconds; None: now. ``attributes``: of this chunk, besides those of the writer.

        Waits while the buffer is full. Raises `Full` after ``timeout_s``: the chunk was not taken. Raises ValueError
        and TypeError for data that cannot be a chunk.
        """
        return self._put(data, ChunkOptions(seqno, created_ms, attributes), timeout_s, None)

    def submit(
        self,
        data: bytes,
        seqno: int | None = None,
        *,
        created_ms: int | None = None,
        attributes: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Future[ChunkReceipt]:
        """As `write`, but returns a future of the chunk's `ChunkReceipt`: its seqno, and where it is recorded.

        The future raises the error that ended the writer before the chunk was recorded. It cannot be cancelled.
        """
        from concurrent.futures import Future  # takes memory, and few programs use it

        promise: Future[ChunkReceipt] = Future()
        promise.set_running_or_notify_cancel()
        self._put(data, ChunkOptions(seqno, created_ms, attributes), timeout_s, promise)
        return promise

    def flush(self, timeout_s: float | None = None) -> None:
        """Returns when every chunk written before is recorded. Calling it again is safe.

        Raises `Unknown` after ``timeout_s``; the writer still sends what is left.
        """
        deadline = deadline_of(timeout_s)
        with self._own_lock():
            self._wait(self._core.flushing(deadline))

    def close(self, timeout_s: float | None = None) -> None:
        """Flushes and ends the writer. Calling it again is safe.

        Raises what `flush` raises: then the writer gives up the chunks that are not recorded.
        """
        deadline = deadline_of(timeout_s)
        own_lock = self._own_lock()
        try:
            with own_lock:
                try:
                    if not self._core.is_closed:
                        self._wait(self._core.flushing(deadline))
                finally:
                    self._core.is_closed = True  # before a thread begins another request, unknown to the caller
        finally:
            self._end()

    def _end_unclosed(self) -> None:
        """At the end of the process."""
        if not self._core.process.is_here or not self.ends_with_process or self._core.is_closed:
            return
        unrecorded = self._core.unrecorded
        with suppress(LogferryError):
            self.close(LEFT_BY_ERROR_S)
        if unrecorded:
            lost, name = self._core.unrecorded, self._core.address.source_id
            log_event("writer-unclosed", source=name, waiting=unrecorded, unrecorded=lost)
            text = f"the writer of {name} was not closed: {lost} of its chunks may be lost; call close() or use `with`"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)

    def _end(self) -> None:
        if not self._core.process.is_here:
            return  # its lock, connections and threads are those of the parent
        _started.discard(self)
        with self._lock:
            self._core.is_closed = True
            self._work.notify_all()
            self._progress.notify_all()
        for connections in self._connections:
            connections.cut()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._keep_promises()

    def _put(self, data: bytes, options: ChunkOptions, timeout_s: float | None, promise: Promise | None) -> int:
        data = chunk_bytes(data)
        deadline = deadline_of(timeout_s)
        with self._own_lock():
            self._start()
            self._wait(self._core.making_room(data, deadline, timeout_s))
            seqno = self._core.put(data, options, promise)
            if self._core.window.has_work:
                self._work.notify()
            return seqno

    def _keep_promises(self) -> None:
        """Not under the lock."""
        with self._lock:
            kept = self._core.kept_promises()
        for promise, result in kept:
            if isinstance(result, LogferryError):
                promise.set_exception(result)
            else:
                promise.set_result(result)

    # ---- under the lock --------------------------------------------------------------------------------------

    def _wait(self, waits: Waits) -> None:
        for seconds in waits:
            self._progress.wait(seconds)

    def _open(self, deadline: float | None) -> None:
        self._start()
        self._wait(self._core.opening(deadline))

    def _start(self) -> None:
        self._core.check()
        if not self._threads:
            _started.add(self)
        for number in range(0 if self._threads else self._core.window.limits.in_flight):
            connections = Connections(ANSWER_TIMEOUT_S, self._dialer)
            name = f"logferry-writer-{number}"
            thread = threading.Thread(target=self._carry, args=(connections,), name=name, daemon=True)
            self._connections.append(connections)
            self._threads.append(thread)
            thread.start()

    # ---- in the threads --------------------------------------------------------------------------------------

    def _carry(self, connections: Connections) -> None:
        try:
            while True:
                with self._lock:
                    job = self._next()
                if job is None:
                    return
                began = time.monotonic()
                send = partial(connections.exchange, sent=partial(self._sent, job))
                outcome = self._core.request(job).follow(send)
                self._core.note(outcome, began)
                with self._lock:
                    self._core.window.take(job, outcome, time.monotonic())
                    self._progress.notify_all()
                    self._work.notify_all()
                self._keep_promises()
        except Exception as error:  # noqa: BLE001  a defect: the caller that waits must hear of it
            with self._lock:
                self._core.window.break_off(repr(error))
                self._progress.notify_all()
            self._keep_promises()
        finally:
            connections.close()

    def _sent(self, job: SendJob) -> None:
        with self._lock:
            self._core.window.sent(job)
            self._work.notify()

    def _next(self) -> SendJob | None:
        """None: the writer is closed."""
        while not self._core.is_closed:
            now = time.monotonic()
            job = self._core.window.next_job(now)
            if job is not None:
                return job
            due = self._core.window.due()
            self._work.wait(None if due is None else max(due - now, 0.0))
        return None

    def _own_lock(self) -> threading.Lock:
        self._core.process.check()
        return self._lock
