"""MessagePack for the fake gateway, by the standard library alone: what requests and answers hold."""

from __future__ import annotations

import struct
from typing import Any

# Tags with a length of 1, 2 or 4 bytes behind them.
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_NUMBERS = {0xCA + place: f">{kind}" for place, kind in enumerate("fdBHIQbhiq")}
_PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}


def packed(value: Any) -> bytes:
    """None, whole numbers, text, bytes, lists and maps of them."""
    if value is None:
        return b"\xc0"
    if isinstance(value, int):
        return struct.pack(">BQ", 0xCF, value) if value >= 0 else struct.pack(">Bq", 0xD3, value)
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xC6, len(value)) + value
    if isinstance(value, str):
        raw = value.encode()
        return struct.pack(">BI", 0xDB, len(raw)) + raw
    if isinstance(value, dict):
        parts = [packed(one) for item in value.items() for one in item]
        return struct.pack(">BI", 0xDF, len(value)) + b"".join(parts)
    return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(packed, value))


def unpacked(data: bytes, at: int) -> tuple[Any, int]:
    """The value that begins at ``at``, and where it ends. Raises ValueError or TypeError."""
    tag, at = _taken(data, at, 1)[0], at + 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 0x100, at
    if tag in _PLAIN:
        return _PLAIN[tag], at
    if tag in _NUMBERS:
        size = struct.calcsize(_NUMBERS[tag])
        return struct.unpack(_NUMBERS[tag], _taken(data, at, size))[0], at + size
    if tag in _SIZED:
        size = int.from_bytes(_taken(data, at, _SIZED[tag]), "big")
        at += _SIZED[tag]
    elif tag < 0xC0:
        size = tag & (0x1F if tag >= 0xA0 else 0x0F)
    else:
        raise ValueError(f"no value begins with the byte 0x{tag:02x}")
    if tag in (0xC4, 0xC5, 0xC6):
        return _taken(data, at, size), at + size
    if tag in (0xD9, 0xDA, 0xDB) or 0xA0 <= tag < 0xC0:
        return _taken(data, at, size).decode(), at + size
    is_map = tag in (0xDE, 0xDF) or tag < 0x90
    items: list[Any] = []
    for _ in range(size * (2 if is_map else 1)):
        item, at = unpacked(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2])) if is_map else items), at


def _taken(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise ValueError("cut off")
    return data[at : at + size]
