"""Requests of one of a reader's threads to whichever gateway is tried now."""

from __future__ import annotations

from logferry.client.gateways import ANSWER_TIMEOUT_S
from logferry.client.reading.decode import decoder
from logferry.client.reading.requests import Again
from logferry.client.reading.subscription import Wanted
from logferry.client.transport.connections import Connections, NoAnswer, Reply
from logferry.client.transport.dialer import Dialer

_ROOM_BYTES = 64 << 20  # above what was asked for: the largest chunk, and its encoding


class Link:
    """Its connections are kept. `cut` may be called from another thread: it ends what is under way."""

    def __init__(self, wanted: Wanted, dialer: Dialer) -> None:
        self._wanted = wanted
        self._connections = Connections(ANSWER_TIMEOUT_S, dialer, wanted.page_bytes + _ROOM_BYTES)
        self.cut, self.close = self._connections.cut, self._connections.close

    def ask(self, path: str, body: bytes | None = None, accept: bool = False) -> Reply:
        """GETs, or POSTs a ``body``; ``accept``: chunks. Raises `Again` where there is no answer."""
        base = self._wanted.cluster.given()
        headers = self._wanted.headers(base, decoder().media_type if accept else "")
        if accept and self._wanted.gzip:
            headers["Accept-Encoding"] = "gzip"
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            reply = self._connections.exchange(base + path, headers, body, "GET" if body is None else "POST")
        except NoAnswer as error:
            self._wanted.cluster.failed(base)
            raise Again(str(error)) from None
        if reply.status == 503:
            self._wanted.cluster.failed(base)
        return reply
