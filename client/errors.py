"""What `Writer` and `Reader` raise, named for what the caller must do."""

from __future__ import annotations


class LogferryError(Exception):
    """Everything of `logferry.client` that a caller can be told."""


class Rejected(LogferryError):
    """The gateway will not do it, and the same again will not help.

    ``kind``: the problem's type (``forbidden``, ``too-large``, ``gap``, …); ``status``: of HTTP. From a writer: all
    chunks up to ``recorded_seqno`` are recorded; of those above it and up to ``unknown_to`` (None: there are none) it
    is not known; those above are not. The writer is closed.
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
    """Somebody else has taken over.

    From a writer: another session of the source was opened, or what the gateway knew of the source is gone (it
    expired, or the topic was created anew); ``recorded_seqno`` and ``unknown_to`` as in `Rejected`. From a commit:
    another reader of the consumer has the partition, or the session has ended; what was not committed comes again.
    """


class OutOfRange(Rejected):
    """The position lies outside of what is retained: ``first`` to ``next`` of ``topic``, ``partition``."""

    def __init__(self, text: str, topic: str, partition: int, first: int, next: int) -> None:
        super().__init__(text, "out-of-range", 416)
        self.topic, self.partition, self.first, self.next = topic, partition, first, next


class Unknown(LogferryError, TimeoutError):
    """The caller's time was over before the outcome was known; trying goes on, unless it was `close` that raised it.

    All chunks up to ``recorded_seqno`` are recorded; those above it and up to ``unknown_to`` may be.
    """

    def __init__(self, text: str, recorded_seqno: int | None = None, unknown_to: int | None = None) -> None:
        super().__init__(text)
        self.recorded_seqno = recorded_seqno
        self.unknown_to = unknown_to


class Full(LogferryError, TimeoutError):
    """The buffer had no room within the caller's time: the chunk was not taken."""


class Closed(LogferryError):
    """The writer or reader is closed, or belongs to the process that this one was forked from."""
