"""Record batches, as Kafka stores them: encoded once, compressed, and closed by their checksum. Pure.

Our own, because a batch is compressed by zstd at level 1 here: log lines get as small as at level 3, which is the
only one that aiokafka knows, in two thirds of the time. The format is version 2 of Kafka's record batch (KIP-98).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import cramjam
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode
from crc32c import crc32c
from logferry.gateway.contract.chunk import Headers
from logferry.gateway.lanes.transaction import Record

# Base offset, length, leader epoch, magic, checksum.
_HEAD: Final = struct.Struct(">qiibI")
# Attributes, last offset delta, first and last timestamp, producer id and epoch, base sequence, number of records.
_TAIL: Final = struct.Struct(">hiqqqhii")
# What the length does not count.
_BEFORE_LENGTH: Final = 12
_MAGIC: Final = 2
_TRANSACTIONAL: Final = 0x10
_NULL: Final = b"\x01"
# Attributes and timestamp delta of a record: none, all of a batch are of one time.
_PLAIN: Final = b"\0\0"
_ZSTD_LEVEL: Final = 1


class Codec(NamedTuple):
    """``number``: as in a batch's attributes."""

    number: int
    encode: Callable[[bytes], bytes]


CODECS: Final[dict[str, Codec]] = {
    "none": Codec(0, bytes),
    "gzip": Codec(1, gzip_encode),
    "snappy": Codec(2, snappy_encode),
    "lz4": Codec(3, lz4_encode),
    "zstd": Codec(4, lambda data: bytes(cramjam.zstd.compress(data, level=_ZSTD_LEVEL))),
}


class Stamp(NamedTuple):
    """Whose batch it is. ``sequence``: of its first record, among the producer's in the partition."""

    producer_id: int
    epoch: int
    sequence: int


class Batch(NamedTuple):
    """Records in their encoding. ``first``: the index of the first among all that were given; ``size``: of them."""

    first: int
    size: int
    records: bytes
    now_ms: int
    codec: Codec

    def pieces(self, stamp: Stamp) -> tuple[bytes, bytes]:
        """The batch as a part of a transaction."""
        number, body = 0, self.records
        if self.codec.number:
            packed = self.codec.encode(body)
            if len(packed) < len(body):
                number, body = self.codec.number, packed
        tail = _TAIL.pack(_TRANSACTIONAL | number, self.size - 1, self.now_ms, self.now_ms, *stamp, self.size)
        checksum = crc32c(body, crc32c(tail))
        length = _HEAD.size - _BEFORE_LENGTH + len(tail) + len(body)
        return _HEAD.pack(0, length, -1, _MAGIC, checksum) + tail, body

    def encode(self, stamp: Stamp) -> bytes:
        """The same in one."""
        return b"".join(self.pieces(stamp))


def batches(records: list[Record], limit_bytes: int, now_ms: int, codec: Codec) -> Iterator[Batch]:
    """The records in batches of at most so many bytes before compression; a larger record has one of its own.

    All have the one timestamp.
    """
    room = limit_bytes - _HEAD.size - _TAIL.size
    parts: list[bytes] = []
    first = size = 0
    for index, record in enumerate(records):
        encoded = _encoded(index - first, *record)
        length = sum(map(len, encoded))
        if parts and size + length > room:
            yield Batch(first, index - first, b"".join(parts), now_ms, codec)
            first, size, parts = index, 0, []
            encoded = _encoded(0, *record)
        parts += encoded
        size += length
    yield Batch(first, len(records) - first, b"".join(parts), now_ms, codec)


def _encoded(index: int, key: bytes, value: bytes | None, headers: Headers) -> tuple[bytes, ...]:
    """A record in parts: its length, what comes before the value, the value, and its headers."""
    announced = _NULL if value is None else _varint(len(value))
    before = b"".join((_PLAIN, _varint(index), _varint(len(key)), key, announced))
    parts = [_varint(len(headers))]
    for name, content in headers:
        parts += (_header_name(name), _varint(len(content)), content)
    data, after = value or b"", b"".join(parts)
    return _varint(len(before) + len(data) + len(after)), before, data, after


@lru_cache(maxsize=4096)
def _header_name(name: str) -> bytes:
    encoded = name.encode()
    return _varint(len(encoded)) + encoded


def _varint(number: int) -> bytes:
    """Of a number from 0 on, zigzag, seven bits a byte."""
    if number < len(_SMALL):
        return _SMALL[number]
    return _long_varint(number)


def _long_varint(number: int) -> bytes:
    rest, out = number << 1, bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


_SMALL: Final = tuple(map(_long_varint, range(4096)))
