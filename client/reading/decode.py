"""The gateway's responses to readers → chunks: MessagePack if the package msgpack is installed, else NDJSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from logferry.gateway.contract.chunk import MSGPACK, NDJSON

_LARGEST_BYTES = 1 << 30


class ReceivedChunk(NamedTuple):
    """A chunk as it was recorded. The fields are in the order of the interface's rows.

    ``topic``: in full, with the data centre. ``created_ms``, ``recorded_ms``: Unix time in milliseconds, at the source
    and at the gateway. Topic, partition and offset identify the record; ``source_id`` and ``seqno`` the chunk.
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
        """The lines, without their newlines. Bytes after the last newline are a line, too."""
        return self.data.removesuffix(b"\n").split(b"\n") if self.data else []


Chunk = ReceivedChunk  # the name that programs import
_BEFORE_DATA = itemgetter(*ReceivedChunk._fields[:-1])


class Line(NamedTuple):
    """A line of a chunk. Topic, ``source_id``, ``seqno`` and ``number`` (from 0) identify it, as in a table.

    ``data``: without the newline. If the push-client had to split the line, ``split`` names the piece: ``first``,
    ``middle``, ``last``, or ``open`` for a file's last line that had no newline yet; None: the line is whole.
    """

    source_id: str
    seqno: int
    number: int
    data: bytes
    chunk: ReceivedChunk

    @property
    def split(self) -> str | None:
        return self.chunk.attributes.get("split")


class MsgpackDecoder:
    """MessagePack: `feed` takes bytes as they come and yields the whole values. Raises ImportError without msgpack."""

    media_type = MSGPACK

    def __init__(self) -> None:
        import msgpack

        self._unpacker = msgpack.Unpacker(max_buffer_size=_LARGEST_BYTES)

    def feed(self, data: bytes) -> Iterator[Any]:
        self._unpacker.feed(data)
        yield from self._unpacker


class NdjsonDecoder:
    """NDJSON, in the same way."""

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


def best_decoder() -> MsgpackDecoder | NdjsonDecoder:
    """The fastest format that is available."""
    try:
        return MsgpackDecoder()
    except ImportError:
        return NdjsonDecoder()


def decode_chunk(row: Any) -> ReceivedChunk:
    """The chunk of a row: an array, or an object of either format. Raises ValueError, KeyError or TypeError."""
    if isinstance(row, list):
        return ReceivedChunk(*row)
    if not isinstance(row, dict):
        raise TypeError(f"not a chunk: {row!r}")
    data = row.get("data")
    if data is None:
        data = base64.b64decode(row["data_base64"])
    elif isinstance(data, str):
        data = data.encode()
    return ReceivedChunk._make((*_BEFORE_DATA(row), data))
