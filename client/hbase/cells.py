"""Cells as HBase ships them: a block of KeyValues, each with its length in front. Pure.

The layout is that of HBase's ``KeyValue``, all numbers big-endian::

    length(4) | key length(4) value length(4) | row length(2) row, family length(1) family, qualifier,
    timestamp(8) type(1) | value | tags length(2) tags

The tags, and their length, are missing where a cell has none. A tag is length(2), type(1) and its data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from logferry.client.hbase.messages import ForeignBytes

CODECS = ("org.apache.hadoop.hbase.codec.KeyValueCodecWithTags", "org.apache.hadoop.hbase.codec.KeyValueCodec")
# The types of a cell that a client writes.
TYPES = {4: "put", 8: "delete", 10: "delete_family_version", 12: "delete_column", 14: "delete_family"}
# Deletes of all the columns of a family.
WHOLE_FAMILY = ("delete_family", "delete_family_version")
# The family of HBase's own marks in its log: flushes, compactions, bulk loads, regions opened.
MARK_FAMILY = b"METAFAMILY"
BULK_LOAD = b"HBASE::BULK_LOAD"

_HEAD = struct.Struct(">iii")
_TAIL = struct.Struct(">qB")
_SHORT = struct.Struct(">H")
_FIXED_KEY_BYTES = 2 + 1 + 8 + 1


class HBaseCell(NamedTuple):
    """One change. ``type``: of `TYPES`. ``tags``: type and data of each."""

    row: bytes
    family: bytes
    qualifier: bytes
    timestamp: int
    type: str
    value: bytes
    tags: tuple[tuple[int, bytes], ...] = ()


class CellBlock:
    """The cells of one request, taken in order. ``at``: where the next one begins."""

    def __init__(self, block: memoryview) -> None:
        self.block, self.at = block, 0

    def take(self, count: int) -> Iterator[HBaseCell]:
        """The next ``count`` cells. Raises ForeignBytes."""
        for _ in range(count):
            if self.at + _HEAD.size > len(self.block):
                raise ForeignBytes(f"the cell block ends at byte {len(self.block)}, inside or before a cell")
            size = _HEAD.unpack_from(self.block, self.at)[0]
            start, self.at = self.at + 4, self.at + 4 + size
            if size < 8 or self.at > len(self.block):
                raise ForeignBytes(f"the cell at byte {start - 4} of {len(self.block)} says that it has {size} bytes")
            yield cell_of(self.block[start : self.at], start)

    def next_block(self, count: int) -> memoryview:
        """The bytes of the next ``count`` cells, which are passed over. Raises ForeignBytes."""
        start = self.at
        for _ in self.take(count):
            pass
        return self.block[start : self.at]

    def check_end(self) -> None:
        """Raises ForeignBytes where cells are left that no entry claims."""
        if self.at != len(self.block):
            raise ForeignBytes(f"{len(self.block) - self.at} bytes of cells belong to no entry")


def cell_of(data: memoryview, at: int = 0) -> HBaseCell:
    """The KeyValue in the bytes, which begin at byte ``at`` of their block. Raises ForeignBytes."""
    key_size, value_size = struct.unpack_from(">ii", data)
    key_end = 8 + key_size
    value_end = key_end + value_size
    if key_size < _FIXED_KEY_BYTES or value_size < 0 or value_end > len(data):
        raise ForeignBytes(f"the cell at byte {at} has a key of {key_size} and a value of {value_size} bytes")
    row_end = 10 + _SHORT.unpack_from(data, 8)[0]
    if row_end >= key_end:
        raise ForeignBytes(f"the row of the cell at byte {at} reaches beyond its key")
    family_end = row_end + 1 + data[row_end]
    qualifier_end = key_end - _TAIL.size
    if family_end > qualifier_end:
        raise ForeignBytes(f"the family of the cell at byte {at} reaches beyond its key")
    timestamp, number = _TAIL.unpack_from(data, qualifier_end)
    kind = TYPES.get(number)
    if kind is None:
        raise ForeignBytes(f"the cell at byte {at} has the type {number}; known are {', '.join(map(str, TYPES))}")
    tags = _tags(data[value_end:], at) if value_end < len(data) else ()
    return HBaseCell(
        bytes(data[10:row_end]),
        bytes(data[row_end + 1 : family_end]),
        bytes(data[family_end:qualifier_end]),
        timestamp,
        kind,
        bytes(data[key_end:value_end]),
        tags,
    )


def _tags(data: memoryview, cell_at: int) -> tuple[tuple[int, bytes], ...]:
    if len(data) < 2 or _SHORT.unpack_from(data)[0] != len(data) - 2:
        raise ForeignBytes(f"the cell at byte {cell_at} has {len(data)} bytes after its value that are no tags")
    found, at = [], 2
    while at < len(data):
        size = _SHORT.unpack_from(data, at)[0] if at + 2 <= len(data) else 0
        if size < 1 or at + 2 + size > len(data):
            raise ForeignBytes(f"a tag of the cell at byte {cell_at} reaches beyond the tags")
        found.append((data[at + 2], bytes(data[at + 3 : at + 2 + size])))
        at += 2 + size
    return tuple(found)


def packed(cell: HBaseCell) -> bytes:
    """The cell as in a block, with its length."""
    number = next(number for number, name in TYPES.items() if name == cell.type)
    key = _SHORT.pack(len(cell.row)) + cell.row + bytes([len(cell.family)]) + cell.family + cell.qualifier
    key += _TAIL.pack(cell.timestamp, number)
    tags = b"".join(_SHORT.pack(len(data) + 1) + bytes([kind]) + data for kind, data in cell.tags)
    body = struct.pack(">ii", len(key), len(cell.value)) + key + cell.value
    body += _SHORT.pack(len(tags)) + tags if tags else b""
    return struct.pack(">i", len(body)) + body
