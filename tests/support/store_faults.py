"""A relay before a server of objects that refuses, loses answers and cuts uploads, as a test says. It runs in the
process that uses the store: code that holds the interpreter while it waits for the store would never end. For that,
`relay_process` is a process of its own, with one fault.

with FaultyStore(endpoint) as store:
    store.fail(LOST_ANSWER, "PUT", r"_delta_log/.*json", times=1)
"""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

# The store is busy; it fails; it does the work and says nothing; the connection breaks in mid-request.
BUSY, FAILS, LOST_ANSWER, CUT = "busy", "fails", "lost answer", "cut"
# It refuses the keys from a moment on, or fails; a client repeats the latter for a minute.
DENIED: Final = "denied"
KINDS: Final = (BUSY, FAILS, LOST_ANSWER, CUT)
_ERRORS: Final = {BUSY: (503, "SlowDown"), FAILS: (500, "InternalError"), DENIED: (403, "AccessDenied")}
_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Fault(NamedTuple):
    kind: str
    method: str
    path: re.Pattern[str]


class FaultyStore:
    """``requests``: (method, path, fault or nothing) of all so far. ``url``: the relay's."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self.target = (parts.hostname or "", parts.port or 80)
        self.requests: list[tuple[str, str, str]] = []
        self._faults: list[Fault] = []
        self._from: tuple[str, int, int] = ("", 0, 0)
        self._lock = threading.Lock()
        store = self

        class Handler(_Handler):
            relay = store

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultyStore:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, kind: str, method: str, path: str, times: int = 1) -> None:
        """The next so many requests like this."""
        with self._lock:
            self._faults += [Fault(kind, method, re.compile(path))] * times

    def strike(self, kind: str, number: int, times: int = 1) -> None:
        """The request of this number from now on, and those after it. Nothing of before holds any more."""
        with self._lock:
            self._faults.clear()
            first = len(self.requests) + number
            self._from = (kind, first, first + times)

    def heal(self) -> None:
        self.strike("", 0, 0)

    def struck(self) -> list[str]:
        return [fault for _, _, fault in self.requests if fault]

    def next_fault(self, method: str, path: str) -> str:
        plain = unquote(path)
        with self._lock:
            found = next((f for f in self._faults if f.method == method and f.path.search(plain)), None)
            if found is not None:
                self._faults.remove(found)
            kind = "" if found is None else found.kind
            if self._from[1] <= len(self.requests) < self._from[2]:
                kind = self._from[0]
            self.requests.append((method, plain, kind))
        return kind


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    relay: FaultyStore

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _serve(self) -> None:
        kind = self.relay.next_fault(self.command, self.path)
        if kind != CUT:
            body = self._body()
        if kind == CUT:
            self._drop()
        elif kind in _ERRORS:
            status, code = _ERRORS[kind]
            self._answer(status, {}, f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode())
        else:
            connection = http.client.HTTPConnection(*self.relay.target, timeout=60)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            reply = connection.getresponse()
            content = reply.read()
            connection.close()
            if kind == LOST_ANSWER:
                self._drop()
            else:
                self._answer(reply.status, dict(reply.getheaders()), content)

    def _body(self) -> bytes:
        """As it was sent, the frames of its chunks included."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while True:
            parts.append(self.rfile.readline())
            size = int(parts[-1].split(b";")[0], 16)
            if not size:
                break
            parts.append(self.rfile.read(size + 2))
        parts.append(self.rfile.readline())
        while parts[-1].strip():
            parts.append(self.rfile.readline())
        return b"".join(parts)

    def _drop(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        length = headers.get("Content-Length", headers.get("content-length"))
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve


@contextmanager
def relay_process(endpoint: str, kind: str, method: str, path: str) -> Iterator[str]:
    """Its URL. The first request like this must have met the fault when the block ends."""
    command = [sys.executable, "-m", __name__, endpoint, kind, method, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            struck, _ = process.communicate()
    assert struck.split("\n")[:-1] == [kind], struck


def main() -> None:
    """The relay's process, until its input ends."""
    endpoint, *fault = sys.argv[1:]
    with FaultyStore(endpoint) as store:
        store.fail(fault[0], fault[1], fault[2])
        print(store.url, flush=True)
        sys.stdin.read()
        print(*store.struck(), sep="\n")


if __name__ == "__main__":
    main()
