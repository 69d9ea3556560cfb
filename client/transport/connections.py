"""One HTTP request and its answer over a connection that is kept; nothing of the gateway's meaning is here."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable
from typing import NamedTuple, Union
from urllib.parse import urlsplit

from logferry.client.transport.dialer import Dialer

MOST_CONNECTIONS = 8
ANSWER_TIMEOUT_S = 30.0
LARGEST_ANSWER_BYTES = 1 << 20


Body = Union[bytes, "list[bytes | memoryview]"]  # in parts: with a Content-Length


class NoAnswer(Exception):
    """No whole answer came: the request was not sent, or was, or was even carried out."""


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class Connections:
    """Kept connections of one thread, at most `MOST_CONNECTIONS`, the one used longest ago goes first."""

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
        """Sends ``body``, calls ``sent`` when it is on its way, and waits for the answer. Raises `NoAnswer`.

        The request goes a second time when a kept connection turns out to be closed, so it must be one that
        may be repeated; every request of this client is.
        """
        try:
            parts = urlsplit(url)
            origin = f"{parts.scheme}://{parts.netloc}"
            target, more = self._dialer.request_to(parts)
            headers = {**headers, **more}
            kept = self._kept.pop(origin, None)
            if kept is not None:
                try:
                    return self._once(origin, kept, method, target, headers, body, sent)
                except (ConnectionError, http.client.BadStatusLine):
                    pass  # closed by the other side while it was idle
            return self._once(origin, self._dialer.connection(parts), method, target, headers, body, sent)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no such host name
            raise NoAnswer(f"{url.partition('/v1/')[0]}: {_words(error)}") from error

    def cut(self) -> None:
        """From another thread: what is under way ends with `NoAnswer`, and nothing is sent any more."""
        self._is_cut = True
        cut(self._busy)

    def close(self) -> None:
        for connection in self._kept.values():
            connection.close()
        self._kept.clear()

    def _once(
        self,
        origin: str,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: dict[str, str],
        body: Body | None,
        sent: Callable[[], None] | None,
    ) -> Reply:
        keep = False
        self._busy = connection
        try:
            if connection.sock is None and not self._is_cut:
                connection.connect()
            if isinstance(connection.sock, socket.socket):
                connection.sock.settimeout(self._answer_timeout_s)
            if self._is_cut:
                raise ConnectionAbortedError("given up")
            cut_off = self._send(connection, method, target, headers, body)
            if sent is not None:
                sent()
            reply, keep = self._receive(connection)
            keep = keep and not cut_off
        finally:
            self._busy = None
            if keep:
                self._keep(origin, connection)
            else:
                connection.close()
        return reply

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: dict[str, str],
        body: Body | None,
    ) -> bool:
        """True when the other side stopped listening: its answer, say 413, may be there all the same."""
        try:
            connection.request(method, target, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            return True
        return False

    def _receive(self, connection: http.client.HTTPConnection) -> tuple[Reply, bool]:
        with connection.getresponse() as response:
            body = response.read(self._largest_answer_bytes + 1)
            if len(body) > self._largest_answer_bytes:
                raise http.client.HTTPException(f"an answer of more than {self._largest_answer_bytes} bytes")
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, body), not response.will_close

    def _keep(self, origin: str, connection: http.client.HTTPConnection) -> None:
        self._kept[origin] = connection
        if len(self._kept) > MOST_CONNECTIONS:
            oldest = next(iter(self._kept))
            self._kept.pop(oldest).close()


def cut(connection: http.client.HTTPConnection | None) -> None:
    """Ends the waiting of the thread that uses it; that one closes it."""
    link = None if connection is None else connection.sock
    if link is not None:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


def _words(error: Exception) -> str:
    if isinstance(error, socket.timeout):
        return "timed out"
    return str(error) or type(error).__name__


def origin_of(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None for what is not an http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, port
