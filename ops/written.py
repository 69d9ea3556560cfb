"""What ``logferry read`` writes: the formats of its output, and how far it is, on a terminal."""

from __future__ import annotations

import base64
import json
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

import msgpack
from logferry.client import Chunk
from rich.console import Console
from rich.status import Status

_TURN_S: Final = 0.2


def _text(chunk: Chunk) -> bytes:
    return chunk.data


def _ndjson(chunk: Chunk) -> bytes:
    """As the gateway writes it: data that is not UTF-8 is in base64, under a key of its own."""
    row: dict[str, Any] = chunk._asdict()
    data = row.pop("data")
    try:
        row["data"] = data.decode()
    except UnicodeDecodeError:
        row["data_base64"] = base64.b64encode(data).decode()
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _msgpack(chunk: Chunk) -> bytes:
    return bytes(msgpack.packb(list(chunk)))


FORMATS: Final[dict[str, Callable[[Chunk], bytes]]] = {"text": _text, "ndjson": _ndjson, "msgpack": _msgpack}


def is_cut(output: BinaryIO) -> bool:
    """Whether whoever read the pipe is gone: noticed without writing, so that ``| head`` ends at once."""
    poll = select.poll()
    poll.register(output.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class Progress:
    """Chunks, bytes and pace; shown where standard error is a terminal and standard output is not."""

    def __init__(self, status: Status | None, console: Console) -> None:
        self._status, self._console = status, console
        self._chunks = self._bytes = 0
        self._began = self._turned_at = time.monotonic()

    def count(self, chunk: Chunk) -> None:
        self._chunks += 1
        self._bytes += len(chunk.data)
        self.turn()

    def turn(self) -> None:
        """Shows it anew, if that is some time ago."""
        now = time.monotonic()
        if self._status is not None and now - self._turned_at >= _TURN_S:
            self._turned_at = now
            self._status.update(self._words(now))

    def end(self, where: Callable[[], str]) -> None:
        """``where``: asked on a terminal alone."""
        if self._status is not None:
            self._status.stop()
            self._console.print(f"{self._words(time.monotonic())}; next: {where()}", highlight=False, soft_wrap=True)

    def _words(self, now: float) -> str:
        took_s = max(now - self._began, 0.001)
        return f"{self._chunks:,} chunks, {self._bytes / 1e6:,.1f} MB, {self._bytes / 1e6 / took_s:,.1f} MB/s"


@contextmanager
def progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    if not console.is_terminal or sys.stdout.isatty():
        yield Progress(None, console)
        return
    with console.status("waiting for chunks") as status:
        yield Progress(status, console)
