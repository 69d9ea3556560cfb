"""The errors of the gateway, named for what the caller must do.

Three kinds, so that a caller can always tell what happened to its chunk:

* *rejected* (other 4xx): do not send it again as it is;
* *retry* (408, 429, 503): this attempt recorded nothing; the same request may be sent again, after ``Retry-After`` if
  there is one. An earlier attempt may have been recorded: deduplication sorts it out;
* *unknown* (500): recorded or not; send the same bytes again, deduplication sorts it out.
"""

from __future__ import annotations

from typing import Any, Final

# The one table of problem kinds: the stable last segment of ``type`` → (HTTP status, title). What each means and what
# the caller does: ops/docs/reference/problems.md, held equal by a test.
PROBLEMS: Final[dict[str, tuple[int, str]]] = {
    "bad-request": (400, "The request is malformed"),
    "unauthenticated": (401, "A known token is needed"),
    "forbidden": (403, "The token may not do this"),
    "not-found": (404, "There is no such resource"),
    "method-not-allowed": (405, "The resource does not take this method"),
    "timeout": (408, "The body did not arrive in time"),
    "unknown-topic": (404, "The topic does not exist"),
    "unknown-transaction": (404, "The transaction is not open"),
    "expired": (410, "The transaction was not committed in time"),
    "not-mirrored": (404, "No mirror writes the partition here"),
    "gap": (409, "Chunks before this one are missing"),
    "incomplete": (409, "Bytes of the file are missing"),
    "overlap": (409, "The chunk begins before what is recorded"),
    "conflict": (409, "The change contradicts what exists"),
    "superseded": (409, "A newer session exists"),
    "out-of-order": (409, "The seqnos inside the request do not rise"),
    "too-large": (413, "Over a limit of size"),
    "unsupported-media-type": (415, "The encoding or type of the body is not known"),
    "key-reused": (422, "The key belongs to another request"),
    "out-of-range": (416, "Outside of what is retained"),
    "quota": (429, "Over a quota"),
    "internal": (500, "An error inside the gateway"),
    "outcome-unknown": (500, "Whether it was recorded is not known yet"),
    "overloaded": (503, "Over a limit of the gateway"),
    "not-owner-yet": (503, "The lane is moving to another worker"),
    "behind": (503, "The mirror has not brought it yet"),
    "issuer-unavailable": (503, "The keys of the token's issuer cannot be had"),
    "kafka-unavailable": (503, "Kafka does not answer"),
    "source-in-use": (503, "Another token has a session of the source"),
    "topic-not-durable": (503, "The topic is too weak for exactly-once delivery"),
}


class Problem(Exception):
    """The answer to a request that failed, as an RFC 9457 problem document.

    ``extra`` holds what the caller needs to continue (``recorded_seqno``, limits, …); ``retry_after_s`` becomes a
    header. No parts of the answer: ``caller``, who was refused, where the gate knows it; ``ends_connection``: it is
    closed after the answer.
    """

    caller: str | None = None
    ends_connection = False

    def __init__(self, kind: str, detail: str, *, retry_after_s: float | None = None, **extra: Any) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.status, self.title = PROBLEMS[kind]
        self.detail = detail
        self.extra = extra
        if retry_after_s is None and self.status == 503:
            retry_after_s = 1
        self.retry_after_s = retry_after_s

    def document(self) -> dict[str, Any]:
        return {
            "type": f"https://logferry.invalid/problems/{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **self.extra,
        }


class LaneMoved(Problem):
    """The lane or session is another worker's, which can answer the same request even if it is recorded already."""


class LaneLost(Exception):
    """The group gave the lane to another worker; the outcome of requests in flight here is unknown."""


class LaneUnreadable(Exception):
    """A record of the lane's state topic cannot be read; the text names it and what can be done."""


class CannotListen(Exception):
    """The listen address is in use, or does not belong to this host."""

    def __init__(self, listen: str, reason: OSError) -> None:
        super().__init__(f"cannot listen on {listen}: {reason}")
        self.listen, self.reason = listen, reason


class WeakKafka(Exception):
    """Kafka's settings are too weak for exactly-once delivery; the text names each and how to accept it."""
