"""The data of the benchmarks: access-log lines from a seed, in chunks of whole lines."""

from __future__ import annotations

import random
from pathlib import Path

_PATHS = ("/", "/index.html", "/search", "/api/v1/items", "/static/app.js", "/static/app.css", "/login", "/korzina")
_AGENTS = (
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0 Safari/537.36",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) AppleWebKit/605.1.15 Version/17.5 Mobile/15E148",
    "curl/8.5.0",
)


def access_line(rng: random.Random, second: int) -> str:
    """One line in the combined format."""
    ip = ".".join(str(rng.randrange(1, 255)) for _ in range(4))
    path = f"{rng.choice(_PATHS)}?id={rng.randrange(10**9)}&s={rng.getrandbits(64):x}"
    size, status = rng.randrange(200, 90_000), rng.choice((200, 200, 200, 200, 304, 404, 500))
    stamp = f"21/Nov/2026:{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d} +0000"
    return f'{ip} - - [{stamp}] "GET {path} HTTP/1.1" {status} {size} "-" "{rng.choice(_AGENTS)}"\n'


def chunks(count: int, size_bytes: int, seed: int = 1) -> list[bytes]:
    """``count`` chunks of whole lines, each as large as fits into ``size_bytes``."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        lines, size = [], 0
        while True:
            line = access_line(rng, number).encode()
            if size + len(line) > size_bytes:
                break
            lines.append(line)
            size += len(line)
        found.append(b"".join(lines) or access_line(rng, number).encode()[:size_bytes])
    return found


def payload_file(path: Path, payloads: list[bytes], delimiter: bytes) -> Path:
    """The chunks as a file for Kafka's own performance tools."""
    path.write_bytes(delimiter.join(payloads))
    return path
