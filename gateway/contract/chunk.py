"""Chunk: the unit of writing, its Kafka record and its MessagePack wire format.

Standard library only and Python 3.9+, because the push-client carries this file. These formats outlive a process, so
they change only by adding: the golden bytes in ``tests/unit/contract/test_contract.py`` hold them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from logferry.gateway.contract.names import Malformed

HEADER_SEQNO = "seqno"
HEADER_PREV = "prev"
HEADER_CREATED = "created"
ATTRIBUTE_PREFIX = "a."
# The attribute with the trace of the request that wrote the chunk; it makes no chunk another one.
TRACEPARENT = "traceparent"

MSGPACK = "application/vnd.msgpack"
NDJSON = "application/x-ndjson"
_I64 = struct.Struct(">q")

Headers = list[tuple[str, bytes]]


class Chunk(NamedTuple):
    """The unit of writing: bytes with their place in the source. For logs: whole lines.

    ``prev`` is the seqno of the chunk before this one in the source, None when the writer does not say.
    ``created_ms``: Unix time in milliseconds at the source; None asks the gateway to take its own clock.
    """

    seqno: int
    prev: int | None
    created_ms: int | None
    attributes: dict[str, str]
    data: bytes


# ---- the Kafka record of a chunk -------------------------------------------------------------------------


def record_headers(chunk: Chunk, now_ms: int = 0) -> Headers:
    """``now_ms`` stands in where the writer did not say when the chunk was created."""
    seqno, prev, created_ms, attributes, _ = chunk
    headers = [(HEADER_SEQNO, _I64.pack(seqno))]
    if prev is not None:
        headers.append((HEADER_PREV, _I64.pack(prev)))
    headers.append((HEADER_CREATED, _I64.pack(now_ms if created_ms is None else created_ms)))
    if attributes:
        headers.extend((ATTRIBUTE_PREFIX + name, value.encode()) for name, value in attributes.items())
    return headers


def chunk_of_record(value: bytes, headers: Iterable[tuple[str, bytes]]) -> Chunk:
    """The chunk that a record holds. Raises `Malformed` for a record that no gateway wrote."""
    seqno = prev = created = None
    attributes = {}
    try:
        for name, raw in headers:
            if name == HEADER_SEQNO:
                seqno = _I64.unpack(raw)[0]
            elif name == HEADER_PREV:
                prev = _I64.unpack(raw)[0]
            elif name == HEADER_CREATED:
                created = _I64.unpack(raw)[0]
            elif name.startswith(ATTRIBUTE_PREFIX):
                attributes[name[len(ATTRIBUTE_PREFIX) :]] = raw.decode()
    except (struct.error, UnicodeDecodeError, TypeError) as error:
        raise Malformed(f"record: header {name!r} cannot be read: {error}") from None
    if seqno is None:
        raise Malformed("record: no seqno header; it was not written by a gateway")
    return Chunk(seqno, prev, created, attributes, value)


# ---- the wire: a stream of MessagePack arrays [seqno, prev, created_ms, attributes, data] ----------------


def pack_chunk(chunk: Chunk) -> bytes:
    """One chunk as a MessagePack array; a request body is the concatenation of such arrays."""
    return pack_head(chunk, len(chunk.data)) + chunk.data


def pack_head(chunk: Chunk, size: int) -> bytes:
    """The bytes before ``size`` bytes of data, whatever ``chunk`` itself holds: to send the data without a copy."""
    return b"".join(
        (
            b"\x95",
            _pack_int(chunk.seqno),
            _pack_int(chunk.prev),
            _pack_int(chunk.created_ms),
            _pack_map(chunk.attributes),
            bin_head(size),
        )
    )


def bin_head(size: int) -> bytes:
    """The bytes before ``size`` bytes as a MessagePack bin."""
    return _pack_head(size, 0xC4)


def _pack_int(value: int | None) -> bytes:
    if value is None:
        return b"\xc0"
    if 0 <= value < 0x80:
        return bytes((value,))
    return b"\xcf" + struct.pack(">Q", value) if value >= 0 else b"\xd3" + struct.pack(">q", value)


def _pack_head(size: int, tag: int) -> bytes:
    """The head of bin (tag 0xc4) or str (tag 0xd9): 8, 16 or 32 bits of length."""
    if size < 1 << 8:
        return bytes((tag, size))
    if size < 1 << 16:
        return struct.pack(">BH", tag + 1, size)
    return struct.pack(">BI", tag + 2, size)


def _pack_str(text: str) -> bytes:
    raw = text.encode()
    return _pack_head(len(raw), 0xD9) + raw


def _pack_map(items: dict[str, str]) -> bytes:
    if not items:
        return b"\xc0"
    parts = [struct.pack(">BH", 0xDE, len(items))]
    for name, value in items.items():
        parts += (_pack_str(name), _pack_str(value))
    return b"".join(parts)
