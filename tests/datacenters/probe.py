"""A program that writes or reads, and notes what it sees: one JSON document a line.

    python -m tests.datacenters.probe write URLS TOKEN_FILE CA_FILE SOURCE
    python -m tests.datacenters.probe read URLS TOKEN_FILE CA_FILE TOPIC

URLS with commas. The writer sends a line and waits until it is recorded, again and again:
``{"at_ms", "took_ms"}``. The reader reads a topic from its beginning: ``{"at_ms", "age_ms", "chunks", "bytes",
"breaks"}`` for the chunks of each tenth of a second, with the age of the oldest; ``breaks`` are chunks that did not
follow the one before of their source. SIGTERM ends it.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from logferry.client import Reader, Rejected, Unknown, Writer

from tests.datacenters.plan import TOPIC

_PAUSE_S: Final = 0.1
_WRITES_S: Final = 0.25
_TRY_S: Final = 1.0
_TOGETHER_MS: Final = 100.0


def _write(urls: list[str], token: str, ca_file: str, source: str, stopping: threading.Event) -> None:
    number = 0
    with Writer(urls, TOPIC, source, token=token, ca_file=ca_file) as writer:
        while not stopping.is_set():
            stamp = time.strftime("%d/%b/%Y:%H:%M:%S +0000", time.gmtime())
            number += 1
            began = time.time()
            writer.write(f'192.0.2.1 - - [{stamp}] "GET /probe/{number} HTTP/1.1" 200 1 "-" "probe"\n'.encode())
            writer.flush()
            _note(at_ms=began * 1000, took_ms=(time.time() - began) * 1000)
            stopping.wait(_WRITES_S)


def _read(urls: list[str], token: str, ca_file: str, topic: str, stopping: threading.Event) -> None:
    last: dict[str, int] = {}
    chunks = size = breaks = 0
    oldest, noted_ms = 0.0, 0.0
    while not stopping.is_set():
        with Reader(urls, topic, token=token, ca_file=ca_file) as reader:
            while not stopping.is_set():
                chunk = reader.read(_PAUSE_S)
                now_ms = time.time() * 1000
                if chunk is not None:
                    breaks += chunk.source_id in last and chunk.prev != last[chunk.source_id]
                    last[chunk.source_id] = chunk.seqno
                    oldest = max(oldest, now_ms - (chunk.created_ms or now_ms))
                    chunks, size = chunks + 1, size + len(chunk.data)
                if chunks and (chunk is None or now_ms - noted_ms >= _TOGETHER_MS):
                    _note(at_ms=now_ms, age_ms=oldest, chunks=chunks, bytes=size, breaks=breaks)
                    chunks = size = breaks = 0
                    oldest, noted_ms = 0.0, now_ms


def _note(**facts: Any) -> None:
    print(json.dumps({name: round(value, 1) for name, value in facts.items()}), flush=True)


def main() -> None:
    kind, urls, token_file, ca_file, name = sys.argv[1:]
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    token = Path(token_file).read_text(encoding="ascii").strip()
    act = {"write": _write, "read": _read}[kind]
    while not stopping.is_set():
        # The copy of a topic is not there at first.
        with suppress(Rejected, Unknown):
            act(urls.split(","), token, ca_file, name, stopping)
            return
        stopping.wait(_TRY_S)


if __name__ == "__main__":
    main()
