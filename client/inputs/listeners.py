"""The sockets of a syslog input, from their addresses: ``tcp://``, ``tls://``, ``udp://HOST:PORT``, ``unix:///PATH``."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from typing import NamedTuple
from urllib.parse import urlsplit

_BACKLOG = 512
_UDP_BUFFER_BYTES = 8 << 20


class ListenAddress(NamedTuple):
    """``kind``: tcp, tls, udp or unix; of the last one, ``host`` is the path."""

    kind: str
    host: str
    port: int = 0

    @classmethod
    def of(cls, text: str) -> ListenAddress:
        """Raises ValueError."""
        url = urlsplit(text)
        if url.scheme == "unix" and not url.netloc and url.path.startswith("/"):
            return cls("unix", url.path)
        if url.scheme in ("tcp", "tls", "udp") and url.hostname and url.port is not None and not url.path:
            return cls(url.scheme, url.hostname, url.port)
        raise ValueError(f"{text!r} is not tcp://HOST:PORT, tls://HOST:PORT, udp://HOST:PORT or unix:///PATH")

    def listen(self) -> socket.socket:
        """Raises OSError."""
        if self.kind == "unix":
            return _unix_socket(self.host)
        kind = socket.SOCK_DGRAM if self.kind == "udp" else socket.SOCK_STREAM
        family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=kind, flags=socket.AI_PASSIVE)[0]
        found = socket.socket(family, kind)
        try:
            found.setblocking(False)
            if kind == socket.SOCK_STREAM:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            else:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UDP_BUFFER_BYTES)
            found.bind(address)
            if kind == socket.SOCK_STREAM:
                found.listen(_BACKLOG)
        except BaseException:
            found.close()
            raise
        return found


def _unix_socket(path: str) -> socket.socket:
    """Any user may write into it, as into ``/dev/log``: who may reach it, the rights of its folder say."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        found.setblocking(False)
        _remove_stale(path)
        found.bind(path)
        os.chmod(path, 0o666)  # noqa: PTH101
    except BaseException:
        found.close()
        raise
    return found


def _remove_stale(path: str) -> None:
    """Of an earlier process of the same user. Raises OSError if it is in use, or is something else."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISSOCK(facts.st_mode) and facts.st_uid == os.geteuid():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)  # noqa: PTH108
                return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


class Certificates(NamedTuple):
    """Files in PEM. ``client_ca``: senders must show a certificate of it; None: they need none."""

    cert: str
    key: str
    client_ca: str | None = None

    def context(self) -> ssl.SSLContext:
        """Raises OSError, also for what is no certificate (ssl.SSLError)."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.client_ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert, self.key)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context
