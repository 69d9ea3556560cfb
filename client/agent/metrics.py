"""Metrics for Prometheus on the loopback interface (``--metrics-port``); not loaded without that option.

The main thread renders the page every second. A request gets the last page and touches nothing of the client.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterable, Mapping

from logferry.client.agent.heartbeat import SourceStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SUMS = {
    "files": "Files that the client follows.",
    "lag_bytes": "Bytes in the followed files that no gateway has acknowledged yet.",
    "behind_seconds": "Seconds for which the slowest file has not been sent to its end.",
    "files_in_trouble": "Files whose last request or read failed.",
}


def render(
    rows: Iterable[SourceStatus], unreadable: int, facts: Mapping[str, tuple[str, str, float]], here: str
) -> str:
    """``facts``: name → type, help and value. ``here``: the data centre that the client writes to."""
    topics: dict[str, dict[str, float]] = {}
    for row in rows:
        sums = topics.setdefault(row.topic, dict.fromkeys(_SUMS, 0.0))
        sums["files"] += 1
        sums["lag_bytes"] += row.lag_bytes
        sums["behind_seconds"] = max(sums["behind_seconds"], row.behind_s)
        sums["files_in_trouble"] += bool(row.error)
    lines = []
    for name, help_ in _SUMS.items():
        lines += _head(name, "gauge", help_)
        lines += [f'logferry_push_{name}{{topic="{topic}"}} {sums[name]:g}' for topic, sums in sorted(topics.items())]
    for name, (kind, help_, value) in facts.items():
        lines += [*_head(name, kind, help_), f"logferry_push_{name} {value:.15g}"]
    lines += _head("files_unreadable", "gauge", "Files that match a pattern and cannot be opened.")
    lines += [f"logferry_push_files_unreadable {unreadable}"]
    lines += [*_head("data_centre", "gauge", "1 for the data centre that the client writes to.")]
    lines += [f'logferry_push_data_centre{{name="{_escaped(here)}"}} 1']
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, help_: str) -> list[str]:
    return [f"# HELP logferry_push_{name} {help_}", f"# TYPE logferry_push_{name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class MetricsPage:
    """The page, and the thread that serves it at ``http://127.0.0.1:<port>/metrics``. OSError for a port in use."""

    def __init__(self, port: int) -> None:
        self.text = ""
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/metrics"
                body = page.text.encode() if found else b"only /metrics is served here\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
