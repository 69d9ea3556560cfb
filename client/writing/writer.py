"""`Writer`: the session of a source, for programs. The decisions are `Window`'s; here are its threads.

Each of the ``in_flight`` threads carries one request at a time over a connection of its own. All that is shared is
under one lock, and no request is made under it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Callable

from logferry.client.errors import Closed, Full, Unknown
from logferry.client.gateways import ANSWER_TIMEOUT_S, cluster_of
from logferry.client.transport.connections import Connections, NoAnswer
from logferry.client.transport.dialer import Dialer, proxies_of
from logferry.client.transport.redirects import Outcome
from logferry.client.writing.requests import Target, target
from logferry.client.writing.send_window import Job, Limits, Window

LEFT_BY_ERROR_S = 5.0
_JOIN_S = 1.0


class Writer:
    """Writes chunks of one source, each recorded once and in order, whatever is retried. Safe to share among threads.

    * Nothing is sent before `open`, which entering a ``with`` block, the first `write` and `recorded_seqno` call. It
      shuts out every older writer of the source.
    * Leaving the ``with`` block waits until all is recorded; when it is left by an error, for 5 s at most.
    * After a `Rejected` or `Superseded` every call raises it again; see there for what is recorded.
    * A process that forks must open writers of its own; using the parent's raises `Closed`.

    ``urls``: of one data centre's workers, the preferred one first. ``topic``: without the data centre.
    ``partition_key``: sources that share it share the partition; it is part of the source's name. ``attributes``: of
    every chunk. ``gzip``: on the way; for slow links. ``buffer_bytes``: of all that waits to be recorded.
    ``in_flight``: requests under way at once.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        topic: str,
        source_id: str,
        *,
        partition_key: str | None = None,
        token: str | None = None,
        attributes: Mapping[str, str] | None = None,
        gzip: bool = False,
        ca_file: str | None = None,
        batch_bytes: int = 1 << 20,
        buffer_bytes: int = 16 << 20,
        in_flight: int = 4,
    ) -> None:
        """Raises ValueError, and OSError for a ``ca_file`` that cannot be used."""
        self._attributes = dict(attributes or {})
        self._target = target(cluster_of(urls, token), topic, source_id, partition_key, gzip, self._attributes)
        self._dialer = Dialer(ca_file, proxies=proxies_of(os.environ))
        self._window = Window(Limits(batch_bytes, buffer_bytes=buffer_bytes, in_flight=in_flight))
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._carriers: list[_Carrier] = []
        self._is_closed = False
        self._pid = os.getpid()

    def __enter__(self) -> Writer:
        try:
            self.open()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(LEFT_BY_ERROR_S)
        except Exception:  # noqa: BLE001  the error that is on its way already says more
            return

    def open(self, timeout_s: float | None = None) -> None:
        """Opens the session; does nothing where it is open. Raises `Rejected`, and `Unknown` after ``timeout_s``."""
        deadline = _deadline(timeout_s)
        self._check_process()
        with self._lock:
            self._open(deadline)

    @property
    def recorded_seqno(self) -> int | None:
        """Everything up to here is recorded: as the gateway said when the session was opened, and acknowledged since.

        None: nothing of the source is recorded.
        """
        self._check_process()
        with self._lock:
            if self._window.session is None and not self._is_closed and self._window.failure is None:
                self._open(None)
            return self._window.recorded

    def write(
        self,
        data: bytes,
        seqno: int | None = None,
        *,
        created_ms: int | None = None,
        attributes: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Puts one chunk into the buffer, and returns its seqno; `flush` says when it is recorded.

        ``seqno``: above that of the chunk before; None: one more than it, or than `recorded_seqno` (the first of all is
        1). One that is recorded already is a duplicate, and nothing is doubled. ``created_ms``: Unix time, None: now.

        Waits while the buffer is full; after ``timeout_s`` raises `Full`, and the chunk was not taken. Raises
        ValueError and TypeError for what can be no chunk.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data: bytes are needed, not {type(data).__name__}; text wants .encode()")
        deadline = _deadline(timeout_s)
        data = bytes(data)
        more = self._attributes if not attributes else {**self._attributes, **attributes}
        self._check_process()
        with self._lock:
            try:
                self._open(deadline)
            except Unknown as unknown:
                raise Full(str(unknown)) from None
            while not self._window.has_room(len(data)):
                if not self._wait(deadline):
                    raise Full(f"no room for {len(data)} bytes within {timeout_s} s; {self._window.told()}")
            self._check()
            seqno = self._window.put(data, seqno, _now_ms() if created_ms is None else created_ms, more)
            if self._window.is_wanting:
                self._work.notify()
            return seqno

    def flush(self, timeout_s: float | None = None) -> None:
        """Returns when everything that was written before is recorded. Raises `Unknown` after ``timeout_s``."""
        deadline = _deadline(timeout_s)
        self._check_process()
        with self._lock:
            self._flush(deadline)

    def close(self, timeout_s: float | None = None) -> None:
        """`flush`, and the end. Raises what `flush` does: then what is not recorded is given up. Calling it again is
        safe."""
        deadline = _deadline(timeout_s)
        self._check_process()
        try:
            with self._lock:
                try:
                    if not self._is_closed:
                        self._flush(deadline)
                finally:
                    self._is_closed = True  # before any thread begins another request, of which nobody was told
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._is_closed = True
            self._work.notify_all()
            self._progress.notify_all()
        for carrier in self._carriers:
            carrier.cut()
        for thread in self._threads:
            thread.join(_JOIN_S)

    # ---- under the lock --------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._is_closed:
            raise Closed(f"the writer of {self._target.source_id} is closed")
        error = self._window.error()
        if error is not None:
            raise error

    def _wait(self, deadline: float | None) -> bool:
        """False: the time is over. Raises what has ended the writer meanwhile."""
        self._check()
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        self._progress.wait(left)
        self._check()
        return True

    def _open(self, deadline: float | None) -> None:
        self._check()
        if not self._threads:
            self._start()
        while self._window.session is None:
            if not self._wait(deadline):
                raise self._window.unknown("the session could not be opened in time")

    def _flush(self, deadline: float | None) -> None:
        self._check()
        wanted = self._window.put_count
        while self._window.settled_count < wanted:
            if not self._wait(deadline):
                raise self._window.unknown("not everything was recorded in time")

    def _start(self) -> None:
        for number in range(self._window.limits.in_flight):
            carrier = _Carrier(self._target, Connections(ANSWER_TIMEOUT_S, self._dialer))
            name = f"logferry-writer-{number}"
            thread = threading.Thread(target=self._carry, args=(carrier,), name=name, daemon=True)
            self._carriers.append(carrier)
            self._threads.append(thread)
            thread.start()

    # ---- in the threads --------------------------------------------------------------------------------------

    def _carry(self, carrier: _Carrier) -> None:
        try:
            while True:
                with self._lock:
                    job = self._next()
                if job is None:
                    return
                outcome = carrier.perform(job, partial(self._sent, job))
                with self._lock:
                    self._window.take(job, outcome, time.monotonic())
                    self._progress.notify_all()
                    self._work.notify_all()
        except Exception as error:  # noqa: BLE001  a defect: whoever waits must hear of it
            with self._lock:
                self._window.break_off(repr(error))
                self._progress.notify_all()
        finally:
            carrier.close()

    def _sent(self, job: Job) -> None:
        with self._lock:
            self._window.sent(job)
            self._work.notify()

    def _next(self) -> Job | None:
        """None: the writer is closed."""
        while not self._is_closed:
            now = time.monotonic()
            job = self._window.next_job(now)
            if job is not None:
                return job
            due = self._window.due()
            self._work.wait(None if due is None else max(due - now, 0.0))
        return None

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Closed("the process was forked since: open a writer of its own, of another source")


class _Carrier:
    """Carries out the requests of one thread."""

    def __init__(self, target: Target, connections: Connections) -> None:
        self._target, self._connections = target, connections
        self.cut: Callable[[], None] = connections.cut
        self.close: Callable[[], None] = connections.close

    def perform(self, job: Job, sent: Callable[[], None]) -> Outcome:
        """Never raises for what the network or the gateway does: that is in the outcome."""
        trip, headers, body = self._target.request(job)
        while True:
            try:
                reply = self._connections.exchange(trip.url, {**headers, **trip.authorization()}, body, sent=sent)
            except NoAnswer as error:
                return trip.unanswered(str(error))
            outcome = trip.answered(reply)
            if outcome is not None:
                return self._target.learned(job, outcome)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _now_ms() -> int:
    return int(time.time() * 1000)
