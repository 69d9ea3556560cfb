"""What the gateway sends to readers → chunks: MessagePack where the package msgpack is installed, else NDJSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from logferry.gateway.contract.chunk import MSGPACK, NDJSON

_LARGEST_BYTES = 1 << 30


class Chunk(NamedTuple):
    """A chunk as it was recorded; the fields in the order of the interface's rows.

    ``topic``: in full, with the data centre. ``created_ms``, ``recorded_ms``: Unix time at the source and the gateway.
    """

    dc: str
    topic: str
    partition: int
    offset: int
    source_id: str
    seqno: int
    prev: int | None
    created_ms: int | None
    recorded_ms: int
    attributes: Mapping[str, str]
    data: bytes

    def lines(self) -> list[bytes]:
        """Without their newlines. What stands after the last newline is a line only if it is something."""
        lines = self.data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        return lines


class Line(NamedTuple):
    """A line of a chunk. It is identified by topic, ``source_id``, ``seqno`` and ``number`` (from 0), as in a table.

    ``data``: without the newline. Where the push-client had to cut a line, ``split`` says which piece this is:
    ``first``, ``middle``, ``last``, or ``open`` for a file's last line that had no newline yet; None: it is whole.
    """

    source_id: str
    seqno: int
    number: int
    data: bytes
    chunk: Chunk

    @property
    def split(self) -> str | None:
        return self.chunk.attributes.get("split")


class Decoder(Protocol):
    """A format: ``media_type`` is asked for; `feed` takes bytes as they come and gives the values that are whole."""

    media_type: str

    def feed(self, data: bytes) -> Iterator[Any]: ...


class Packed:
    """MessagePack. Raises ImportError where msgpack is not installed."""

    media_type = MSGPACK

    def __init__(self) -> None:
        import msgpack

        self._unpacker = msgpack.Unpacker(max_buffer_size=_LARGEST_BYTES)

    def feed(self, data: bytes) -> Iterator[Any]:
        self._unpacker.feed(data)
        yield from self._unpacker


class Lines:
    """NDJSON."""

    media_type = NDJSON

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[Any]:
        first, *rest = data.split(b"\n")
        self._parts.append(first)
        if not rest:
            return
        yield json.loads(b"".join(self._parts))
        for line in rest[:-1]:
            yield json.loads(line)
        self._parts = [rest[-1]]


def decoder() -> Decoder:
    """The faster of those that can be used."""
    try:
        return Packed()
    except ImportError:
        return Lines()


def chunk_of(row: Any) -> Chunk:
    """The chunk of a row: an array, or an object of either format. Raises ValueError, KeyError or TypeError."""
    if isinstance(row, list):
        return Chunk(*row)
    if not isinstance(row, dict):
        raise TypeError(f"not a chunk: {row!r}")
    data = row.get("data")
    if data is None:
        data = base64.b64decode(row["data_base64"])
    elif isinstance(data, str):
        data = data.encode()
    return Chunk(
        row["dc"],
        row["topic"],
        row["partition"],
        row["offset"],
        row["source_id"],
        row["seqno"],
        row["prev"],
        row["created_ms"],
        row["recorded_ms"],
        row["attributes"],
        data,
    )
