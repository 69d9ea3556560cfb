"""The program on the page for clients of the HTTP interface, as a process, against what gateways may answer."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

_PAGE = Path(__file__).parents[2] / "ops" / "docs" / "guides" / "http-client.md"
_TOPIC = "/v1/topics/orders"


class Answers(http.server.BaseHTTPRequestHandler):
    """One source in one of two partitions; the other one has no leader at first. ``chunks``: seqnos and data."""

    protocol_version = "HTTP/1.1"
    chunks: ClassVar[list[tuple[int, bytes]]] = []
    leaderless = 2
    busy = 1

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        recorded = self.chunks[-1][0] if self.chunks else None
        if parts.path == f"{_TOPIC}/sources/web1%2Fhttp-client/session":
            self._answer(200, {"session": 7, "recorded_seqno": recorded})
            return
        query = {name: int(value) for name, (value,) in parse_qs(parts.query).items()}
        assert (query["session"], query["prev"]) == (7, recorded or 0)
        if self.busy:
            Answers.busy -= 1
            self._answer(503, {"type": "https://h/problems/overloaded"})
            return
        self.chunks.append((query["seqno"], body))
        self._answer(200, {"recorded_seqno": query["seqno"]})

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == _TOPIC:
            ends = [(0, 0, 2 * len(self.chunks)), (1, None, None) if self.leaderless else (1, 0, 0)]
            Answers.leaderless = max(self.leaderless - 1, 0)
            offsets = [dict(zip(("partition", "first", "next"), end, strict=True)) for end in ends]
            self._answer(200, {"topic": "dc1.orders", "offsets": offsets})
            return
        assert parts.path == "/v1/topics/dc1.orders/partitions/0/chunks", parts.path
        at = int(parse_qs(parts.query)["offset"][0]) // 2
        row = {"source_id": "web1/http-client", "data": self.chunks[at][1].decode()}
        self._answer(200, row, {"X-Next-Offset": str(2 * at + 2)})

    def _answer(self, status: int, document: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(document).encode() + b"\n"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_client_waits_for_a_partition_that_has_no_leader(tmp_path: Path) -> None:
    """Its offsets are null."""
    program, file = tmp_path / "http_client.py", tmp_path / "lines.log"
    [code] = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    program.write_text(code, encoding="utf-8")
    file.write_bytes("".join(f"line {number} ä\n" for number in range(50_000)).encode())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            command = [sys.executable, str(program), str(file), f"http://127.0.0.1:{server.server_address[1]}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        finally:
            server.shutdown()
            thread.join()
    assert done.returncode == 0, done.stderr
    size = file.stat().st_size
    assert done.stdout.splitlines() == [f"recorded up to byte {size}", f"read {size} bytes of it"]
    assert b"".join(data for _, data in Answers.chunks) == file.read_bytes()
    assert len(Answers.chunks) > 2
