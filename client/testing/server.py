"""The fake gateway's HTTP: a thread for each connection, all of them gone when the server has stopped."""

from __future__ import annotations

import http.server
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from logferry.client.testing.call import Answer, FakeCall


class _Cut(Exception):
    """The connection is to be cut."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeServer

    def _do(self) -> None:
        self._room: int | None = None
        headers = [(name.lower(), _utf8(value)) for name, value in self.headers.items()]
        try:
            answer, self._room = self.server.serve(self.command, FakeCall(_utf8(self.path), headers, self._body()))
            if answer is None:
                raise _Cut
            self._send(answer)
        except (_Cut, OSError, ValueError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _do

    def _body(self) -> bytes:
        """Raises ValueError for broken framing."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _send(self, answer: Answer) -> None:
        parts, body = answer.parts, b"" if self.command == "HEAD" else answer.body
        length = {"Transfer-Encoding": "chunked"} if parts else {"Content-Length": str(len(answer.body))}
        headers = {**answer.headers, **length, "Date": formatdate(usegmt=True)}
        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", *map(": ".join, headers.items())]
        head = "\r\n".join([*lines, "", ""]).encode()
        if parts is None:
            return self._write(head + body)
        try:
            self._write(head)
            for part in parts:
                if self._is_alone():
                    raise _Cut
                if part:
                    self._write(b"%x\r\n%s\r\n" % (len(part), part))
            self._write(b"0\r\n\r\n")
        finally:
            parts.close()
        return None

    def _is_alone(self) -> bool:
        """The caller has closed the connection."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    def _write(self, data: bytes) -> None:
        if self._room is None:
            self.wfile.write(data)
            return
        self.wfile.write(data[: self._room])
        self._room -= min(self._room, len(data))
        if not self._room:
            raise _Cut

    def log_message(self, *_: object) -> None:
        pass


def _utf8(text: str) -> str:
    return text.encode("latin-1").decode("utf-8", "surrogateescape")


class FakeServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, serve: Callable[[str, FakeCall], tuple[Answer | None, int | None]]) -> None:
        self.serve = serve
        self._connections: dict[threading.Thread, socket.socket] = {}
        super().__init__(("127.0.0.1", port), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.02,), name="logferry-fake-gateway", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        for thread, connection in self._connections.items():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        thread.start()
        alive = {one: connection for one, connection in self._connections.items() if one.is_alive()}
        self._connections = {**alive, thread: request}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that was cut is no error here."""
