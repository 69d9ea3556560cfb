"""The tail of `logferry query` over a gateway: what a refusal means for the exit status."""

from __future__ import annotations

import argparse
import http.server
import json
import threading
from typing import Any

import pytest
from logferry.loaders.planning.plan import Range
from logferry.ops.cli.problems import CommandError
from logferry.ops.commands.tail_http import HttpTail


class _Forbids(http.server.BaseHTTPRequestHandler):
    """A token may list a topic that it may not read."""

    def do_GET(self) -> None:
        problem = {"type": "https://logferry.example/problems/forbidden", "status": 403, "detail": "no right to read"}
        body = json.dumps(problem).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_topic_that_may_not_be_read_is_a_refusal():
    with http.server.HTTPServer(("127.0.0.1", 0), _Forbids) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        tail = HttpTail(argparse.Namespace(url=url, token_file=None, ca_file=None))
        with pytest.raises(CommandError, match=r"no right to read.*--no-tail") as refused:
            list(tail.chunks([Range("dc1.a", 0, "id", 0, 3)]))
        server.shutdown()
    assert refused.value.exit_status == 1
