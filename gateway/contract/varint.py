"""Numbers of variable length, seven bits a byte, the low ones first; signed ones in zigzag order. Pure.

Kafka's record batches and flexible requests (KIP-482) use them, and the mirror's own states.
"""

from __future__ import annotations

Bytes = bytes | bytearray | memoryview


def varint(number: int) -> bytes:
    """Raises ValueError for a negative number."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(raw: Bytes, at: int) -> tuple[int, int]:
    """The number and the position after it. Raises IndexError when it is cut off."""
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def read_tags(raw: memoryview, at: int) -> tuple[dict[int, memoryview], int]:
    """The tagged fields of a flexible request or answer, and the position after them."""
    count, at = read_varint(raw, at)
    tags = {}
    for _ in range(count):
        tag, at = read_varint(raw, at)
        size, at = read_varint(raw, at)
        tags[tag] = raw[at : at + size]
        at += size
    return tags, at


def zigzag(number: int) -> bytes:
    """Of a signed number."""
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def read_zigzag(raw: Bytes, at: int) -> tuple[int, int]:
    """The signed number and the position after it. Raises IndexError when it is cut off."""
    value, at = read_varint(raw, at)
    return (value >> 1) ^ -(value & 1), at
