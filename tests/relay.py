"""A relay of TCP connections that can be cut at any moment, in threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit

_PATIENCE_S = 60


class Relay:
    """``with Relay(url) as relay``: ``relay.url`` leads there; `cut` ends every connection that is open."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Condition()

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut(wait=False)

    def cut(self, wait: bool = True) -> int:
        """How many ends were cut; it waits for some that can be."""
        with self._lock:
            while wait and not self._open:
                assert self._lock.wait(_PATIENCE_S), "nobody has connected"
            found, self._open = self._open, set()
        for end in found:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        return len(found)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._open |= {near, far}
                    self._lock.notify_all()
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {one, other}
        one.close()
