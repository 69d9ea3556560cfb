"""A reader's requests, and what a response means: it is good, it is to be retried, or the caller must hear of it."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any, NamedTuple

from logferry.client.errors import OutOfRange, Rejected, Superseded
from logferry.client.reading.decode import best_decoder
from logferry.client.reading.subscription import ReaderOptions
from logferry.client.transport.backoff import RETRY_S, pause_s
from logferry.client.transport.cluster import ANSWER_TIMEOUT_S, USER_AGENT, GatewayCluster
from logferry.client.transport.connections import Connections, NoResponse, Reply
from logferry.client.transport.dialer import Dialer
from logferry.client.transport.responses import NextStep, next_step, problem_kind, read_answer

_ROOM_BYTES = 64 << 20  # above what was asked for: the largest chunk, and its encoding


class RetryLater(Exception):
    """The gateway cannot answer now, or did not. ``after_s``: the shortest pause that it asked for."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s

    def pause_s(self, failures: int) -> float:
        return max(pause_s(failures, RETRY_S), self.after_s * random.uniform(1.0, 1.2))


# ---- requests ------------------------------------------------------------------------------------------------


class ReaderRequest(NamedTuple):
    """One attempt, at the gateway ``base``."""

    cluster: GatewayCluster
    base: str
    path: str
    headers: dict[str, str]
    body: bytes | None = None

    @property
    def url(self) -> str:
        return self.base + self.path

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    def failed(self, error: object) -> RetryLater:
        """No response came: the next attempt goes to another gateway."""
        self.cluster.failed(self.base)
        return RetryLater(str(error))

    def answered(self, reply: Reply) -> Reply:
        if reply.status == 503:
            self.cluster.failed(self.base)
        return reply

    def refused(self, reply: Reply) -> Exception:
        """The error of a stream that the gateway did not open."""
        error = error_of(reply)
        if isinstance(error, RetryLater):
            self.cluster.failed(self.base)
        return error


def reader_request(
    options: ReaderOptions, path: str, body: bytes | None = None, media_type: str = "", gzip: bool = False
) -> ReaderRequest:
    """A GET, or a POST of ``body``. ``media_type``: asked for; empty: JSON alone is expected."""
    base = options.cluster.current_url()
    headers = {"User-Agent": USER_AGENT, **options.cluster.authorization(base)}
    headers["Accept-Encoding"] = "gzip" if gzip else "identity"
    if media_type:
        headers["Accept"] = media_type
    if body is not None:
        headers["Content-Type"] = "application/json"
    return ReaderRequest(options.cluster, base, path, headers, body)


def page_request(options: ReaderOptions, path: str) -> ReaderRequest:
    """A request for chunks."""
    return reader_request(options, path, None, best_decoder().media_type, options.gzip)


class ReaderRequests:
    """The requests of one thread, over kept connections. Another thread may `cut` them: what is under way ends."""

    def __init__(self, options: ReaderOptions, dialer: Dialer) -> None:
        self._options = options
        self._connections = Connections(ANSWER_TIMEOUT_S, dialer, options.page_bytes + _ROOM_BYTES)
        self.cut, self.close = self._connections.cut, self._connections.close

    def ask(self, path: str, body: bytes | None = None, accept: bool = False) -> Reply:
        """GETs, or POSTs a ``body``; ``accept``: chunks. Raises `RetryLater` if no response comes."""
        request = page_request(self._options, path) if accept else reader_request(self._options, path, body)
        try:
            reply = self._connections.exchange(request.url, request.headers, request.body, request.method)
        except NoResponse as error:
            raise request.failed(error) from None
        return request.answered(reply)


# ---- responses -----------------------------------------------------------------------------------------------


def content_of(reply: Reply) -> bytes:
    """The body of a good response, decompressed. Raises `RetryLater`, or an error for the caller."""
    if reply.status != 200:
        raise error_of(reply)
    if reply.headers.get("content-encoding") == "gzip":
        return zlib.decompress(reply.body, 16 + zlib.MAX_WBITS)
    return reply.body


def document_of(reply: Reply) -> dict[str, Any]:
    """The JSON object of a good response. Raises as `content_of` does."""
    try:
        found = json.loads(content_of(reply))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RetryLater(f"not a gateway's answer: {reply.body[:200]!r}")
    return found


def error_of(reply: Reply) -> Exception:
    """The error that a response stands for which is not good."""
    answer = read_answer(reply, opens=False)
    if next_step(answer) in (NextStep.WAIT, NextStep.AGAIN, NextStep.ADVANCE):
        return RetryLater(f"{reply.status} {answer.type}: {answer.detail}", answer.retry_after_s)
    try:
        return error_of_problem(json.loads(reply.body))
    except ValueError:
        return Rejected(f"{reply.status}: {answer.detail}", answer.type, reply.status)


def error_of_problem(document: Any) -> Exception:
    """The error of a problem document: that of a response, or of a stream's last frame."""
    if not isinstance(document, dict):
        return RetryLater(f"not a gateway's problem: {document!r}")
    kind, status = problem_kind(document), document.get("status")
    text = f"{kind or status}: {document.get('detail') or document.get('title')}"
    if kind == "out-of-range" and "first" in document:
        partition = str(document.get("topic", "")), int(document.get("partition", -1))
        return OutOfRange(text, *partition, document["first"], document["next"])
    if not isinstance(status, int) or status >= 500 or status in (408, 429):
        return RetryLater(text)
    return (Superseded if kind == "superseded" else Rejected)(text, kind, status)
