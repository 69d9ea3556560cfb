"""HTTP requests over kept connections. What a response means is in `source_request`.

Connections are direct or through a proxy, and over TLS verified by an authority, a pin, or both. A pin is the SHA-256
of the server's certificate (``openssl x509 -noout -fingerprint -sha256``). It is compared after the handshake and
before the first byte of a request, so that no other server sees the token. With pins and no authority the pin alone
decides; with both each has to match.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Union
from urllib.parse import SplitResult, unquote, urlsplit

from logferry.gateway.contract.names import is_this_host

CONNECT_TIMEOUT_S = 5.0
_PIN = re.compile(r"[0-9a-f]{64}\Z")


def check_pin(text: str) -> str:
    """64 hexadecimal digits, with or without colons and ``sha256:`` before them. Raises ValueError."""
    pin = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if not _PIN.match(pin):
        raise ValueError(f"{text!r} is not the SHA-256 of a certificate: 64 hexadecimal digits")
    return pin


class TlsFiles(NamedTuple):
    """PEM files. ``ca_file``: the authority of the gateways' certificates; None: the system's. ``cert_file``: the
    certificate that this client shows, with those of intermediate authorities; ``key_file``: its key, None: in the
    same file."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """Raises OSError or ssl.SSLError if a file cannot be used, ValueError for a key alone."""
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("key_file: its certificate is missing, cert_file")
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            # A key with a password would ask on the terminal.
            context.load_cert_chain(self.cert_file, self.key_file, password=lambda: b"")
        return context


class Dialer:
    """Makes connections, not yet connected; shared by all threads.

    ``proxies``: URLs by scheme, and under ``no`` the hosts that need no proxy, as `proxies_of` gives them; hosts of
    this machine never need one.
    """

    def __init__(
        self,
        ca_file: str | None = None,
        pins: Iterable[str] = (),
        proxies: Mapping[str, str] | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
    ) -> None:
        """Raises OSError or ssl.SSLError if a file cannot be used."""
        self._pins = frozenset(pins)
        self._proxies = dict(proxies or {})
        self.files = TlsFiles(ca_file, cert_file, key_file)
        self._context: ssl.SSLContext | None = None
        self.reload()

    def reload(self) -> None:
        """Reads the files again, for connections made from now on. Raises as the constructor does."""
        self._context = self._make_context() if any(self.files) else None

    def connection(self, url: SplitResult) -> http.client.HTTPConnection:
        """For requests to the origin of ``url``. Raises ValueError for an invalid URL or proxy."""
        proxy = self._proxy_of(url)
        host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        near, near_port = (host, port) if proxy is None else (proxy.hostname or "", proxy.port or 80)
        if url.scheme != "https":
            return http.client.HTTPConnection(near, near_port, timeout=CONNECT_TIMEOUT_S)
        if self._context is None:  # the system's authorities take time and memory: only if they are needed
            self._context = self._make_context()
        connection = _Pinned(near, near_port, timeout=CONNECT_TIMEOUT_S, context=self._context)
        connection.pins = self._pins
        if proxy is not None:
            connection.set_tunnel(host, port, headers=_proxy_authorization(proxy))
        return connection

    def request_to(self, url: SplitResult) -> tuple[str, dict[str, str]]:
        """The target of the request line, and the headers for a proxy that reads it."""
        target = (url.path or "/") + ("?" + url.query if url.query else "")
        proxy = self._proxy_of(url)
        if proxy is None or url.scheme == "https":
            return target, {}
        return f"http://{url.netloc}{target}", _proxy_authorization(proxy)

    def _make_context(self) -> ssl.SSLContext:
        context = self.files.context()
        if self._pins and self.files.ca_file is None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _proxy_of(self, url: SplitResult) -> SplitResult | None:
        given = self._proxies.get(url.scheme)
        if not given or is_this_host(url.hostname or "") or _is_near(url, self._proxies.get("no", "")):
            return None
        return urlsplit(given if "://" in given else f"http://{given}")


class _Pinned(http.client.HTTPSConnection):
    pins: frozenset[str] = frozenset()

    def connect(self) -> None:
        super().connect()
        if not self.pins:
            return
        import hashlib  # takes memory, and few clients use pins

        shown: Any = self.sock
        digest = hashlib.sha256(shown.getpeercert(binary_form=True) or b"").hexdigest()
        if digest not in self.pins:
            self.close()
            raise OSError(f"its certificate is sha256:{digest}, which is not among the pins")


def _is_near(url: SplitResult, no_proxy: str) -> bool:
    """Whether the host, host and port, or domain is in the list; ``*`` matches all."""
    host = (url.hostname or "").lower()
    for entry in no_proxy.lower().split(","):
        name = entry.strip().lstrip(".")
        if name and (name in ("*", host, f"{host}:{url.port}") or host.endswith("." + name)):
            return True
    return False


def _proxy_authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    raw = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": "Basic " + base64.b64encode(raw).decode()}


def proxies_of(environment: Mapping[str, str]) -> dict[str, str]:
    """``https_proxy``, ``http_proxy`` and ``no_proxy``, as curl reads them: ``HTTP_PROXY`` is ignored."""
    found = {
        "https": environment.get("https_proxy") or environment.get("HTTPS_PROXY"),
        "http": environment.get("http_proxy"),
        "no": environment.get("no_proxy") or environment.get("NO_PROXY"),
    }
    return {scheme: value for scheme, value in found.items() if value}


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
    """Kept connections of one thread, at most `MOST_CONNECTIONS`: the least recently used one is closed first.

    ``answer_timeout_s`` may be changed between requests.
    """

    def __init__(
        self,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        dialer: Dialer | None = None,
        largest_answer_bytes: int = LARGEST_ANSWER_BYTES,
    ) -> None:
        self.answer_timeout_s = answer_timeout_s
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
                connection.sock.settimeout(self.answer_timeout_s)
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
            if response.length:  # with a size, `read` returns what there is
                raise http.client.HTTPException(f"the response was cut off {response.length} bytes before its end")
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, body, time.time()), not response.will_close


def cut(connection: http.client.HTTPConnection | None) -> None:
    """Ends the wait of the thread that uses the connection; that thread closes it."""
    link = None if connection is None else connection.sock
    if link is not None:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
