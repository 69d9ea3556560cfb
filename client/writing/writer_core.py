"""What `Writer` and `AsyncWriter` share: arguments, waits and errors. `SendWindow` decides what is sent.

The methods ending in ``ing`` are generators: each value is how long to wait for progress (None: without limit) before
the next step. The two faces differ in the way they wait, and in nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from logferry.client.errors import Closed, Full, Unknown
from logferry.client.transport.backoff import TroubleLog, left_s
from logferry.client.transport.cluster import USER_AGENT, cluster_of
from logferry.client.transport.responses import NextStep, next_step
from logferry.client.transport.source_request import Outcome, SourceAddress, SourceRequest
from logferry.client.writing.send_window import Limits, SendJob, SendWindow
from logferry.gateway.contract.names import check_attributes, check_source_id, check_topic

LEFT_BY_ERROR_S = 5.0  # so long a block that an error leaves waits for its chunks
Waits = Iterator["float | None"]


class WriterCore:
    """One session of a source. Not locked: the faces see to it that one thread or task uses it at a time."""

    def __init__(
        self,
        urls: str | Iterable[str],
        topic: str,
        source_id: str,
        partition_key: str | None,
        token: str | None,
        attributes: Mapping[str, str] | None,
        gzip: bool,
        limits: Limits,
    ) -> None:
        """Raises ValueError, also for names that the gateway would refuse."""
        key = None if partition_key is None else check_source_id(partition_key, "partition_key")
        names = check_topic(topic), check_source_id(source_id, "source_id"), key
        self._address = SourceAddress(cluster_of(urls, token), USER_AGENT, *names)
        self._gzip = gzip
        self._attributes = check_attributes(dict(attributes or {}))
        self.window = SendWindow(limits)
        self.is_closed = False
        self._trouble = TroubleLog(f"writer of {source_id}")

    @property
    def source_id(self) -> str:
        return self._address.source_id

    def check(self) -> None:
        """Raises `Closed`, or the error that ended the writer."""
        if self.is_closed:
            raise Closed(f"the writer of {self.source_id} is closed: open another one")
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

    def put(self, data: bytes, seqno: int | None, created_ms: int | None, attributes: Mapping[str, str] | None) -> int:
        """Takes a chunk for which there is room; returns its seqno. Raises ValueError."""
        now_ms = int(time.time() * 1000) if created_ms is None else created_ms
        merged = self._attributes if not attributes else {**self._attributes, **attributes}
        return self.window.put(data, seqno, now_ms, merged)

    def flushing(self, deadline: float | None) -> Waits:
        """Until everything that was put before is recorded. Raises `Unknown` at the deadline."""
        self.check()
        wanted = self.window.put_count
        while self.window.settled_count < wanted:
            yield self._left(deadline, "not everything was recorded in time")
            self.check()

    def request(self, job: SendJob) -> SourceRequest:
        if job.batch is None:
            return SourceRequest(self._address, "session")
        body: list[bytes | memoryview] = [job.batch.body()]
        return SourceRequest(
            self._address, "chunks", job.session, body, gzip=self._gzip, direct=job.direct, owner=job.url
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
