"""``http://HOST:PORT/metrics``: a page for Prometheus, and the thread that serves it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """``text``: the page as of now, called in a thread for each request; empty where there is none. Raises OSError for
    a port in use, and for a host that is none of this machine.
    """

    def __init__(self, port: int, text: Callable[[], str], host: str = "127.0.0.1") -> None:
        import http.server  # takes memory, and few clients serve a page
        import socketserver

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/metrics"
                page = text() if found else "only /metrics is served here\n"
                body = (page or "the client has not answered yet\n").encode()
                self.send_response((200 if page else 503) if found else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

        # Not `HTTPServer`: it asks the DNS for its own name.
        class Server(socketserver.TCPServer):
            address_family = found[0]
            allow_reuse_address = True

        self._server = Server(found[4], Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
