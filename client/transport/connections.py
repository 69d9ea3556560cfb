"""HTTP requests over kept connections. What a response means is in `responses`."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple, Union
from urllib.parse import urlsplit

from logferry.client.transport.dialer import Dialer

MOST_CONNECTIONS = 8
ANSWER_TIMEOUT_S = 30.0
LARGEST_ANSWER_BYTES = 1 << 20


Body = Union[bytes, "list[bytes | memoryview]"]  # in parts: with a Content-Length
_Request = tuple[str, str, "Body | None", dict[str, str]]  # method, target, body, headers


class NoResponse(Exception):
    """No whole response came: the request may not have been sent, or may even have been carried out."""


class Reply(NamedTuple):
    """``received_s``: Unix time at which it came, for a ``Retry-After`` that is a date."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    received_s: float = 0.0


class Connections:
    """Kept connections of one thread, at most `MOST_CONNECTIONS`: the least recently used one is closed first."""

    def __init__(
        self,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        dialer: Dialer | None = None,
        largest_answer_bytes: int = LARGEST_ANSWER_BYTES,
    ) -> None:
        self._answer_timeout_s = answer_timeout_s
        self._dialer = dialer or Dialer()
        self._largest_answer_bytes = largest_answer_bytes
        self._kept: dict[str, http.client.HTTPConnection] = {}
        self._busy: http.client.HTTPConnection | None = None
        self._is_cut = False

    def exchange(
        self,
        url: str,
        headers: dict[str, str],
        body: Body | None,
        method: str = "POST",
        sent: Callable[[], None] | None = None,
    ) -> Reply:
        """Sends ``body``, calls ``sent`` when it has left, and waits for the response. Raises `NoResponse`.

        The request is sent a second time when a kept connection turns out to be closed, so it must be one that
        may be repeated; every request of this client is.
        """
        try:
            parts = urlsplit(url)
            origin = f"{parts.scheme}://{parts.netloc}"
            target, more = self._dialer.request_to(parts)
            request = (method, target, body, {**headers, **more})
            kept = self._kept.pop(origin, None)
            if kept is not None:
                try:
                    return self._once(origin, kept, request, sent)
                except (ConnectionError, http.client.BadStatusLine):
                    pass  # closed by the other side while it was idle
            return self._once(origin, self._dialer.connection(parts), request, sent)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no such host name
            words = "timed out" if isinstance(error, socket.timeout) else str(error) or type(error).__name__
            raise NoResponse(f"{url.partition('/v1/')[0]}: {words}") from error

    def cut(self) -> None:
        """From another thread: the request under way ends with `NoResponse`, and no other is sent."""
        self._is_cut = True
        cut(self._busy)

    def close(self) -> None:
        for connection in self._kept.values():
            connection.close()
        self._kept.clear()

    def _once(
        self, origin: str, connection: http.client.HTTPConnection, request: _Request, sent: Callable[[], None] | None
    ) -> Reply:
        keep = cut_off = False
        self._busy = connection
        try:
            if connection.sock is None and not self._is_cut:
                connection.connect()
            if isinstance(connection.sock, socket.socket):
                connection.sock.settimeout(self._answer_timeout_s)
            if self._is_cut:
                raise ConnectionAbortedError("closed by the caller")
            try:
                connection.request(*request)
            except (BrokenPipeError, ConnectionResetError):
                cut_off = True  # the other side stopped reading: its response, say 413, may be there all the same
            if sent is not None:
                sent()
            reply, keep = self._receive(connection)
            keep = keep and not cut_off
        finally:
            self._busy = None
            if keep:
                self._kept[origin] = connection
                if len(self._kept) > MOST_CONNECTIONS:
                    self._kept.pop(next(iter(self._kept))).close()
            else:
                connection.close()
        return reply

    def _receive(self, connection: http.client.HTTPConnection) -> tuple[Reply, bool]:
        with connection.getresponse() as response:
            body = response.read(self._largest_answer_bytes + 1)
            if len(body) > self._largest_answer_bytes:
                raise http.client.HTTPException(f"a response of more than {self._largest_answer_bytes} bytes")
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, body, time.time()), not response.will_close


def cut(connection: http.client.HTTPConnection | None) -> None:
    """Ends the wait of the thread that uses the connection; that thread closes it."""
    link = None if connection is None else connection.sock
    if link is not None:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


def gzipped(parts: Iterable[bytes | memoryview]) -> bytes:
    """At the fastest level: it saves bytes on the network, not on a disk."""
    squeeze = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return b"".join([*(squeeze.compress(part) for part in parts), squeeze.flush()])
