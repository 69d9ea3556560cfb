"""Files of HBase's write-ahead log, made by hand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logferry.client.hbase import messages
from logferry.client.hbase.cells import MARK_FAMILY, HBaseCell, packed
from logferry.client.hbase.messages import delimited

TRAILER = struct.pack(">i", 0) + b"LAWP"
_CLASSES = "org.apache.hadoop.hbase.regionserver.wal"


def header(**fields: Any) -> bytes:
    names = {
        "writer_cls_name": f"{_CLASSES}.AsyncProtobufLogWriter".encode(),
        "cell_codec_cls_name": f"{_CLASSES}.WALCellCodec".encode(),
        "has_compression": False,
    }
    return b"PWAL" + delimited(messages.new("WALHeader", **{**names, **fields}))


def entry(
    region: str,
    sequence_id: int,
    cells: Sequence[HBaseCell],
    table: str = "orders",
    write_time: int = 1_700_000_000_000,
) -> bytes:
    key = messages.new(
        "WALKey",
        encoded_region_name=region.encode(),
        table_name=table.encode(),
        log_sequence_number=sequence_id,
        write_time=write_time,
        following_kv_count=len(cells),
    )
    return delimited(key) + b"".join(map(packed, cells))


def mark(
    region: str, sequence_id: int, is_close: bool = False, opened: int | None = None, name: bytes = b"", **more: Any
) -> bytes:
    """That a region is opened or closed."""
    event = messages.new(
        "RegionEventDescriptor",
        event_type=int(is_close),
        encoded_region_name=region.encode(),
        log_sequence_number=sequence_id if opened is None else opened,
        region_name=name,
    )
    qualifier = b"HBASE::REGION_EVENT::REGION_" + (b"CLOSE" if is_close else b"OPEN")
    cell = HBaseCell(b"", MARK_FAMILY, qualifier, 7, "put", event.SerializeToString())
    return entry(region, sequence_id, [cell], **more)


def write_log(folder: Path, log: str, number: int, *parts: bytes) -> Path:
    """A file with a header. ``log``: as ``HOST%2CPORT%2CSTART``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{log}.{number}"
    path.write_bytes(header() + b"".join(parts))
    return path
