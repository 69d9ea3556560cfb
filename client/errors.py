"""The errors of `Writer` and `Reader`, named for what the caller must do."""

from __future__ import annotations

import os


class LogferryError(Exception):
    """The base of all errors of `logferry.client`."""


class Rejected(LogferryError):
    """The gateway rejects the request, and a retry will not help: correct the cause that the text names.

    ``kind``: the problem kind (``forbidden``, ``too-large``, ``gap``, …); ``status``: of HTTP. From a writer: all
    chunks up to ``recorded_seqno`` are recorded; the outcome of those above it and up to ``unknown_to`` (None: there
    are none) is unknown; those above are not recorded. The writer has ended: open another one.
    """

    def __init__(
        self,
        text: str,
        kind: str = "",
        status: int = 0,
        recorded_seqno: int | None = None,
        unknown_to: int | None = None,
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.status = status
        self.recorded_seqno = recorded_seqno
        self.unknown_to = unknown_to


class Superseded(Rejected):
    """Another writer or reader has taken over.

    From a writer: another session of the source was opened, or the gateway has lost the state of the source (it
    expired, or the topic was recreated); ``recorded_seqno`` and ``unknown_to`` as in `Rejected`. From a commit: another
    reader of the consumer has the partition, or the session has ended; chunks that were not committed come again.
    """


class OutOfRange(Rejected):
    """The position is outside the retained offsets, ``first`` to ``next`` of ``topic`` and ``partition``.

    Retention has deleted chunks: resume at ``first``, and account for the gap.
    """

    def __init__(self, text: str, topic: str, partition: int, first: int, next: int) -> None:
        super().__init__(text, "out-of-range", 416)
        self.topic, self.partition, self.first, self.next = topic, partition, first, next


class Unknown(LogferryError, TimeoutError):
    """The caller's timeout ended before the outcome was known. Retries continue, unless `close` raised it.

    All chunks up to ``recorded_seqno`` are recorded; those above it and up to ``unknown_to`` may be. Calling again is
    safe.
    """

    def __init__(self, text: str, recorded_seqno: int | None = None, unknown_to: int | None = None) -> None:
        super().__init__(text)
        self.recorded_seqno = recorded_seqno
        self.unknown_to = unknown_to


class Full(LogferryError, TimeoutError):
    """The buffer had no room within the caller's timeout: the chunk was not taken. Writing it again is safe."""


class Closed(LogferryError):
    """The writer or reader is closed, or belongs to the process that this one was forked from: open another one."""


class OwnProcess:
    """The process that made a writer or reader; its connections, threads and tasks are not in one forked since."""

    def __init__(self, remedy: str) -> None:
        self._pid, self._remedy = os.getpid(), remedy

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises `Closed`. Call it before a lock is taken: a thread of the parent may hold it."""
        if not self.is_here:
            raise Closed(f"the process was forked since: open {self._remedy}")
