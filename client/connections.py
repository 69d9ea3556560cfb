"""One HTTP request and its answer over a connection that is kept; nothing of the gateway's meaning is here."""

from __future__ import annotations

import http.client
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from logferry.client.dial import Dialer

MOST_CONNECTIONS = 8
ANSWER_TIMEOUT_S = 30.0
LARGEST_ANSWER_BYTES = 1 << 20


class NoAnswer(Exception):
    """No whole answer came: the request was not sent, or was, or was even carried out."""


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class Connections:
    """Kept connections of one thread, at most `MOST_CONNECTIONS`, the one used longest ago goes first."""

    def __init__(self, answer_timeout_s: float = ANSWER_TIMEOUT_S, dialer: Dialer | None = None) -> None:
        self._answer_timeout_s = answer_timeout_s
        self._dialer = dialer or Dialer()
        self._kept: dict[str, http.client.HTTPConnection] = {}

    def exchange(self, url: str, headers: dict[str, str], body: bytes) -> Reply:
        """POSTs ``body``. Raises `NoAnswer`.

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
                    return self._once(origin, kept, target, headers, body)
                except (ConnectionError, http.client.BadStatusLine):
                    pass  # closed by the other side while it was idle
            return self._once(origin, self._dialer.connection(parts), target, headers, body)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no such host name
            raise NoAnswer(f"{url.partition('/v1/')[0]}: {_words(error)}") from error

    def close(self) -> None:
        for connection in self._kept.values():
            connection.close()
        self._kept.clear()

    def _once(
        self,
        origin: str,
        connection: http.client.HTTPConnection,
        target: str,
        headers: dict[str, str],
        body: bytes,
    ) -> Reply:
        keep = False
        try:
            if connection.sock is None:
                connection.connect()
            if isinstance(connection.sock, socket.socket):
                connection.sock.settimeout(self._answer_timeout_s)
            cut_off = self._send(connection, target, headers, body)
            reply, keep = self._receive(connection)
            keep = keep and not cut_off
        finally:
            if keep:
                self._keep(origin, connection)
            else:
                connection.close()
        return reply

    def _send(self, connection: http.client.HTTPConnection, target: str, headers: dict[str, str], body: bytes) -> bool:
        """True when the other side stopped listening: its answer, say 413, may be there all the same."""
        try:
            connection.request("POST", target, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            return True
        return False

    def _receive(self, connection: http.client.HTTPConnection) -> tuple[Reply, bool]:
        with connection.getresponse() as response:
            body = response.read(LARGEST_ANSWER_BYTES + 1)
            if len(body) > LARGEST_ANSWER_BYTES:
                raise http.client.HTTPException(f"an answer of more than {LARGEST_ANSWER_BYTES} bytes")
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, body), not response.will_close

    def _keep(self, origin: str, connection: http.client.HTTPConnection) -> None:
        self._kept[origin] = connection
        if len(self._kept) > MOST_CONNECTIONS:
            oldest = next(iter(self._kept))
            self._kept.pop(oldest).close()


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
