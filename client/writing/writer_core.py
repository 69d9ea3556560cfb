"""What `Writer` and `AsyncWriter` share: everything but waits and I/O. `SendWindow` decides what is sent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from logferry.client.errors import Closed, Full, LogferryError, OwnProcess, Unknown
from logferry.client.transport.cluster import TroubleLog, left_s
from logferry.client.transport.source_request import NextStep, Outcome, SourceAddress, SourceRequest, next_step
from logferry.client.writing.send_window import ChunkReceipt, Limits, SendJob, SendWindow

Waits = Iterator["float | None"]
Promise = Any  # a future, of threads or of asyncio


class ChunkOptions(NamedTuple):
    """As in `Writer.write`."""

    seqno: int | None
    created_ms: int | None
    attributes: Mapping[str, str] | None


class WriterCore:
    """One session of a source. Not locked: the faces see to it that one thread or task uses it at a time.

    The methods ending in ``ing`` are generators: each value is how long to wait for progress (None: without limit)
    before the next step. The two faces differ in the way they wait, and in nothing else.
    """

    def __init__(self, address: SourceAddress, attributes: dict[str, str], gzip: bool, limits: Limits) -> None:
        self.address, self._attributes, self._encoding = address, attributes, "gzip" if gzip else "none"
        self.window = SendWindow(limits)
        self.process = OwnProcess("a writer of its own, for another source")
        self.is_closed = False
        self._trouble = TroubleLog(f"writer of {address.source_id}")
        self._promises: dict[Promise, int] = {}  # of chunks that are not recorded yet
        self._kept: list[tuple[Promise, ChunkReceipt | LogferryError]] = []

    def check(self) -> None:
        """Raises `Closed`, or the error that ended the writer."""
        if self.is_closed:
            raise Closed(f"the writer of {self.address.source_id} is closed: open another one")
        error = self.window.error()
        if error is not None:
            raise error

    def opening(self, deadline: float | None) -> Waits:
        """Until the session is open. Raises `Unknown` at the deadline."""
        self.check()
        while self.window.session is None:
            yield self._left(deadline, "the session could not be opened in time")
            self.check()

    def making_room(self, data: bytes, deadline: float | None, timeout_s: float | None) -> Waits:
        """Until the session is open and its buffer has room for the chunk. Raises `Full` at the deadline."""
        try:
            yield from self.opening(deadline)
        except Unknown as unknown:
            raise Full(str(unknown)) from None
        while not self.window.has_room(len(data)):
            left = left_s(deadline)
            if left is not None and left <= 0:
                raise Full(f"no room for {len(data)} bytes within {timeout_s} s; {self.window.progress()}")
            yield left
            self.check()

    def put(self, data: bytes, options: ChunkOptions, promise: Promise | None = None) -> int:
        """Takes a chunk for which there is room; returns its seqno. Raises ValueError.

        ``promise`` gets the receipt, or the error that ended the writer.
        """
        seqno, created_ms, attributes = options
        now_ms = int(time.time() * 1000) if created_ms is None else created_ms
        merged = self._attributes if not attributes else {**self._attributes, **attributes}
        heard = None if promise is None else partial(self._heard, promise)
        seqno = self.window.put(data, seqno, now_ms, merged, heard)
        if promise is not None:
            self._promises[promise] = seqno
        return seqno

    def _heard(self, promise: Promise, receipt: ChunkReceipt) -> None:
        self._promises.pop(promise, None)
        self._kept.append((promise, receipt))

    def kept_promises(self) -> list[tuple[Promise, ChunkReceipt | LogferryError]]:
        """What is to be set, by the face: outside of its lock, since a callback may use the writer."""
        error: LogferryError | None = self.window.error()
        if error is None and self.is_closed:
            error = self.window.unknown("the writer was closed")
        if error is not None:
            self.window.release_owed()
            self._kept += [(promise, error) for promise in self._promises]
            self._promises.clear()
        found, self._kept = self._kept, []
        return found

    def flushing(self, deadline: float | None) -> Waits:
        """Until everything that was put before is recorded. Raises `Unknown` at the deadline."""
        self.check()
        wanted = self.window.put_count
        while self.window.settled_count < wanted:
            yield self._left(deadline, "not everything was recorded in time")
            self.check()

    def request(self, job: SendJob) -> SourceRequest:
        if job.batch is None:
            return SourceRequest(self.address, "session")
        body: list[bytes | memoryview] = [job.batch.body()]
        return SourceRequest(
            self.address, "chunks", job.session, body, encoding=self._encoding, direct=job.direct, owner=job.url
        )

    def note(self, outcome: Outcome, began: float) -> None:
        """Logs that nothing works. Not under the lock: a handler of `logging` may use the writer."""
        if next_step(outcome.answer) in (NextStep.AGAIN, NextStep.WAIT):
            self._trouble.failed(began, outcome.answer)
        else:
            self._trouble.worked()

    @property
    def unrecorded(self) -> int:
        """How many chunks were put and are not recorded."""
        return self.window.put_count - self.window.settled_count

    def _left(self, deadline: float | None, what: str) -> float | None:
        left = left_s(deadline)
        if left is not None and left <= 0:
            raise self.window.unknown(what)
        return left


def chunk_bytes(data: object) -> bytes:
    """An unchanging copy of the argument of `write`. Raises TypeError."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data: bytes are needed, not {type(data).__name__}; text wants .encode()")
    return bytes(data)
