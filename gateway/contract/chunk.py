"""What stays the same between writers, gateway, Kafka, mirror and loaders: names, hashes, headers, wire.

Standard library only and Python 3.9+, because the push-client carries this file with it. Everything here
outlives a process, so it changes only by adding: the golden bytes in ``tests/unit/test_contract.py`` hold it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

MAX_SEQNO = 2**63 - 1
MAX_SOURCE_ID_BYTES = 512
MAX_ATTRIBUTES = 64
MAX_ATTRIBUTE_VALUE_BYTES = 4096

HEADER_SEQNO = "seqno"
HEADER_PREV = "prev"
HEADER_CREATED = "created"
ATTRIBUTE_PREFIX = "a."

MSGPACK = "application/vnd.msgpack"
NDJSON = "application/x-ndjson"

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,200}\Z")
_DC = re.compile(r"[a-z0-9-]{1,32}\Z")
_ATTRIBUTE = re.compile(r"[a-z0-9._-]{1,64}\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_I64 = struct.Struct(">q")

Headers = list[tuple[str, bytes]]


class Malformed(ValueError):
    """A name, number or frame that breaks the contract; the text says what and where."""


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


class Cursor(NamedTuple):
    """A reader's position, valid in every data centre: the next record's offset in the original partition."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        topic, _, rest = text.partition(":")
        partition, _, offset = rest.partition(":")
        if not (partition.isascii() and partition.isdigit() and offset.isascii() and offset.isdigit()):
            raise Malformed(f"cursor: {text!r} is not <dc>.<topic>:<partition>:<offset>")
        if len(partition) > 10 or len(offset) > 19 or int(offset) > MAX_SEQNO:
            raise Malformed(f"cursor: {text!r} has a number that is too large")
        return cls(topic, int(partition), int(offset))


# ---- names -----------------------------------------------------------------------------------------------


def check_topic(topic: str) -> str:
    """A topic without its data centre, as writers name it."""
    if not _TOPIC.match(topic) or topic in (".", ".."):
        raise Malformed(f"topic: {topic!r} is not 1 to 200 of a-z A-Z 0-9 . _ -")
    return topic


def check_dc(dc: str) -> str:
    if not _DC.match(dc):
        raise Malformed(f"dc: {dc!r} is not 1 to 32 of a-z 0-9 -")
    return dc


def check_source_id(source_id: str, what: str = "sourceId") -> str:
    """1 to 512 bytes of UTF-8 without control characters; ``.`` and ``..`` are refused: paths eat them."""
    try:
        size = len(source_id.encode())
    except UnicodeEncodeError:
        raise Malformed(f"{what}: not UTF-8") from None
    if not 1 <= size <= MAX_SOURCE_ID_BYTES:
        raise Malformed(f"{what}: {size} bytes, allowed are 1 to {MAX_SOURCE_ID_BYTES}")
    if _CONTROL.search(source_id):
        raise Malformed(f"{what}: holds control characters")
    if source_id in (".", ".."):
        raise Malformed(f"{what}: . and .. are not allowed")
    return source_id


def check_attributes(attributes: dict[str, str]) -> dict[str, str]:
    if len(attributes) > MAX_ATTRIBUTES:
        raise Malformed(f"attributes: {len(attributes)}, allowed are {MAX_ATTRIBUTES}")
    for name, value in attributes.items():
        if not isinstance(name, str) or not _ATTRIBUTE.match(name):
            raise Malformed(f"attributes: the name {name!r} is not 1 to 64 of a-z 0-9 . _ -")
        if not isinstance(value, str):
            raise Malformed(f"attributes: the value of {name!r} is not text")
        if len(value.encode("utf-8", "surrogatepass")) > MAX_ATTRIBUTE_VALUE_BYTES:
            raise Malformed(f"attributes: the value of {name!r} is over {MAX_ATTRIBUTE_VALUE_BYTES} bytes")
    return attributes


def full_topic(dc: str, topic: str) -> str:
    """The Kafka topic of what was written to ``topic`` in ``dc``; the same name in every data centre."""
    return f"{dc}.{topic}"


def split_topic(full: str) -> tuple[str, str]:
    """``dc1.nginx`` → ``("dc1", "nginx")``. A dc has no dot, so the first one parts them."""
    dc, dot, topic = full.partition(".")
    if not dot or not _DC.match(dc) or not _TOPIC.match(topic):
        raise Malformed(f"topic: {full!r} is not <dc>.<topic>")
    return dc, topic


# ---- where a source goes ---------------------------------------------------------------------------------


def key_hash(key: str) -> int:
    """H of the design: stable over versions and languages (CRC-32 of the UTF-8 bytes)."""
    return zlib.crc32(key.encode())


def lane_of(key: str, lanes: int) -> int:
    return key_hash(key) % lanes


def partition_of(key: str, partitions: int) -> int:
    """Where a key seen for the first time is pinned; afterwards the pin decides, not this."""
    return key_hash(key) % partitions


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
    """What goes before so many bytes of data, whatever ``chunk`` itself holds: for who sends them without a copy."""
    return b"".join(
        (
            b"\x95",
            _pack_int(chunk.seqno),
            _pack_int(chunk.prev),
            _pack_int(chunk.created_ms),
            _pack_map(chunk.attributes),
            _pack_head(size, 0xC4),
        )
    )


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
