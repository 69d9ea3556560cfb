"""The entries of a write-ahead log of HBase, read from its bytes. Pure.

A file (``ProtobufLogWriter`` and ``AsyncProtobufLogWriter`` of HBase 2) is::

    "PWAL" | WALHeader | entry ... | trailer
    entry: WALKey, then as many KeyValues as its ``following_kv_count``, each with its length in front
    trailer: an empty WALTrailer, its length as 4 bytes, "LAWP"

A message has its length in front. A file that is open, or whose server died, has no trailer, and may end anywhere.
An entry is given once all of its bytes are there, and never a part of one.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from logferry.client.hbase import messages
from logferry.client.hbase.cells import MARK_FAMILY
from logferry.client.hbase.messages import ForeignBytes
from logferry.gateway.contract.names import MAX_SEQNO

MAGIC: Final = b"PWAL"
END_MAGIC: Final = b"LAWP"
_TRAILER: Final = bytes(4) + END_MAGIC
_CODEC: Final = "org.apache.hadoop.hbase.regionserver.wal.WALCellCodec"
_WRITERS: Final = ("", "ProtobufLogWriter", "AsyncProtobufLogWriter")
_REGION_EVENT: Final = b"HBASE::REGION_EVENT"
_INT: Final = struct.Struct(">i")
_SMALLEST_CELL_BYTES: Final = 20
# What is larger is no message of HBase.
_MOST_KEY_BYTES: Final = 1 << 24
_CLOSED: Final = 1


class LogEntry(NamedTuple):
    """``end``: where the next one begins. ``cells``: a block of ``cell_count`` cells."""

    region: str
    table: str
    sequence_id: int
    write_time: int
    cell_count: int
    cells: memoryview
    end: int


class LogEnd(NamedTuple):
    """The trailer: the file is complete, and no entry is missing before ``end``."""

    end: int


class RegionEvent(NamedTuple):
    """A mark in the log. ``sequence_id``: of a region that is opened, at least 1 above all that it had before.
    ``name``: TABLE,START,ID.ENCODED. of the region.
    """

    is_close: bool
    sequence_id: int
    name: bytes


def end_of_header(data: memoryview) -> int | None:
    """Where the entries begin; None: the header is not whole yet. Raises ForeignBytes for a file of another kind."""
    start = bytes(data[: len(MAGIC)])
    if not MAGIC.startswith(start):
        old = " (a SequenceFile: HBase before 0.96)" if start.startswith(b"SEQ") else ""
        raise ForeignBytes(f"begins with {start!r}, and not with {MAGIC!r}{old}: it is no log of HBase 2")
    found = _delimited(data, len(MAGIC), "WALHeader")
    if found is None:
        return None
    body, end = found
    header = messages.parse("WALHeader", body)
    _check(header)
    return end


def _check(header: Any) -> None:
    writer, codec = (name.decode("utf-8", "replace") for name in (header.writer_cls_name, header.cell_codec_cls_name))
    if header.encryption_key or any(name.rpartition(".")[2].startswith("Secure") for name in (writer, codec)):
        raise ForeignBytes("it is encrypted (hbase.regionserver.wal.encryption of the region servers)")
    if header.has_compression or header.has_value_compression or header.has_tag_compression:
        name = "value.enablecompression" if header.has_value_compression else "enablecompression"
        raise ForeignBytes(f"it is compressed (hbase.regionserver.wal.{name} of the region servers)")
    if codec not in ("", _CODEC):
        raise ForeignBytes(f"its cells are written by {codec!r} (hbase.regionserver.wal.codec)")
    if writer.rpartition(".")[2] not in _WRITERS:
        raise ForeignBytes(f"it is written by {writer!r}")


def entry_at(data: memoryview, at: int) -> LogEntry | LogEnd | None:
    """What begins at ``at``, the end of the header or of an entry; None: it is not whole yet. Raises ForeignBytes for
    bytes that no further ones make an entry.
    """
    if at < len(data) and not data[at]:  # no WALKey is empty
        trailer = bytes(data[at : at + len(_TRAILER)])
        if not _TRAILER.startswith(trailer):
            raise ForeignBytes(f"there is no entry at byte {at}, but {trailer.hex()}")
        return LogEnd(at + len(_TRAILER)) if trailer == _TRAILER else None
    found = _delimited(data, at, "WALKey")
    if found is None:
        return None
    body, start = found
    key = messages.parse("WALKey", body)
    if not key.encoded_region_name or not key.table_name or not key.HasField("log_sequence_number"):
        raise ForeignBytes(f"the entry at byte {at} names no region, table or sequence id")
    if key.log_sequence_number > MAX_SEQNO:
        raise ForeignBytes(f"the entry at byte {at} has the sequence id {key.log_sequence_number}")
    end = _end_of_cells(data, start, key.following_kv_count)
    if end is None:
        return None
    return LogEntry(
        key.encoded_region_name.decode("ascii", "replace"),
        key.table_name.decode("utf-8", "replace"),
        key.log_sequence_number,
        key.write_time,
        key.following_kv_count,
        data[start:end],
        end,
    )


def _end_of_cells(data: memoryview, at: int, count: int) -> int | None:
    length, size = len(data), _INT.size
    for _ in range(count):
        if at + size > length:
            return None
        (cell_size,) = _INT.unpack_from(data, at)
        if cell_size < _SMALLEST_CELL_BYTES:
            raise ForeignBytes(f"the cell at byte {at} says that it has {cell_size} bytes")
        at += size + cell_size
    return at if at <= length else None


def is_mark(entry: LogEntry) -> bool:
    """Whether it holds no change of a table: HBase writes marks of one cell into its log."""
    cells = entry.cells
    if entry.cell_count != 1:
        return entry.cell_count == 0
    row_end = _row_end(cells)
    return bytes(cells[row_end : row_end + 1 + len(MARK_FAMILY)]) == bytes([len(MARK_FAMILY)]) + MARK_FAMILY


def _row_end(cells: memoryview) -> int:
    return 14 + int.from_bytes(cells[12:14], "big")


def region_event(entry: LogEntry) -> RegionEvent | None:
    """None: the entry is no mark of a region that is opened or closed. Raises ForeignBytes."""
    cells = entry.cells
    if not entry.cell_count or not is_mark(entry):
        return None
    qualifier = _row_end(cells) + 1 + len(MARK_FAMILY)
    if bytes(cells[qualifier : qualifier + len(_REGION_EVENT)]) != _REGION_EVENT:
        return None
    key_size, value_size = struct.unpack_from(">ii", cells, 4)
    value = cells[12 + key_size : 12 + key_size + value_size]
    found = messages.parse("RegionEventDescriptor", value)
    return RegionEvent(found.event_type == _CLOSED, found.log_sequence_number, found.region_name)


def _delimited(data: memoryview, at: int, what: str) -> tuple[memoryview, int] | None:
    """The message with its length in front, and where it ends; None: it is not whole yet. Raises ForeignBytes."""
    size = shift = 0
    start = at
    while True:
        if at >= len(data):
            return None
        byte = data[at]
        size |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
        if shift > 28:
            raise ForeignBytes(f"the length of the {what} at byte {start} is not a number")
    if size > _MOST_KEY_BYTES:
        raise ForeignBytes(f"the {what} at byte {start} says that it has {size} bytes")
    return (data[at : at + size], at + size) if at + size <= len(data) else None
