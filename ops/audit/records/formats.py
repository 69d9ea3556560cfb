"""The stored formats that the audit judges: chunks and the states of sources, by ops/docs/reference/record-format.md.

Written from that page for the audit alone, as `batches`: an error of the gateway's decoder must not hide one of its
encoder. Pure.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple
from zlib import crc32

from logferry.ops.audit.records.batches import StoredRecord

_I64: Final = struct.Struct(">q")
_LAST_MS: Final = 253_402_300_799_999  # the end of the year 9999

# Version, flags, partition, topic id, recorded, base, session, written_ms.
_STATE: Final = struct.Struct(">BBI16sqqqq")
_HEARTBEAT_BYTES: Final = 33
_RECORDED, _BASE, _HEARTBEAT, _TOKEN, _APPENDED = 1, 2, 4, 8, 16
# The first byte of the key of a receipt: what was recorded for a request without seqnos.
RECEIPT: Final = b"r"
# Of a file that is not committed yet, or was of late; its chunks have a state of their own.
UPLOAD: Final = b"u"
_FENCE: Final = b"fence"
# The number of lanes: version, lanes, those before, epoch. And of the header of a tombstone whose state moved.
LANES: Final = b"lanes"
_LANES: Final = struct.Struct(">BIIQ")
MOVED: Final = "moved"


class NotAChunk(ValueError):
    """A record that no gateway wrote."""


class StoredChunk(NamedTuple):
    """``recorded_us``, ``created_us``: as the columns of a row: microseconds since 1970. ``attributes``: sorted."""

    source_id: str
    seqno: int
    prev: int | None
    created_us: int | None
    recorded_us: int
    attributes: tuple[tuple[str, str], ...]
    data: bytes


def stored_chunk(record: StoredRecord) -> StoredChunk:
    """Of two headers of one name the last one counts. Raises NotAChunk."""
    if record.key is None or record.value is None:
        raise NotAChunk("record: no key or no value; another program wrote it")
    numbers: dict[str, bytes | None] = {}
    attributes: dict[str, str] = {}
    name = "key"
    try:
        source_id = record.key.decode()
        for name, content in record.headers:
            if name.startswith("a."):
                attributes[name[2:]] = (b"\xff" if content is None else content).decode()
            elif name in ("seqno", "prev", "created"):
                numbers[name] = content
    except UnicodeDecodeError:
        what = f"the key {record.key!r}" if name == "key" else f"header {name!r}"
        raise NotAChunk(f"record: {what} is not UTF-8; another program wrote it") from None
    if "seqno" not in numbers:
        raise NotAChunk("record: no seqno header; it was not written by a gateway")
    for name, content in numbers.items():
        if content is None or len(content) != _I64.size:
            raise NotAChunk(f"record: header {name!r} is not 8 bytes long; another program wrote it")
    seqno = _I64.unpack(numbers["seqno"] or b"")[0]
    prev, created = (_I64.unpack(raw)[0] if (raw := numbers.get(of)) else None for of in ("prev", "created"))
    if seqno < 0 or (prev is not None and prev < 0):
        raise NotAChunk(f"record: seqno {seqno} or prev {prev} is negative; another program wrote it")
    created_us = created * 1000 if created is not None and 0 <= created <= _LAST_MS else None
    pairs = tuple(sorted(attributes.items()))
    return StoredChunk(source_id, seqno, prev, created_us, record.timestamp_ms * 1000, pairs, record.value)


class StoredSource(NamedTuple):
    """The identity of a source. ``topic``: the full name."""

    topic: str
    partition_key: str | None
    source_id: str

    def lane(self, lanes: int) -> int:
        """The lane that may write the source."""
        key = self.source_id if self.partition_key is None else self.partition_key
        return crc32(key.encode()) % lanes


class StoredState(NamedTuple):
    """The part of a source's state that the log can confirm."""

    topic_id: bytes
    partition: int
    recorded: int | None
    base: int | None


def stored_lanes(raw: bytes) -> tuple[int, int]:
    """The epoch of a number of lanes, and the number. Raises ValueError."""
    if len(raw) != _LANES.size or raw[0] != 1:
        raise ValueError(f"number of lanes {raw.hex()} cannot be decoded")
    _, lanes, _before, epoch = _LANES.unpack(raw)
    return epoch, lanes


def source_key(raw: bytes) -> StoredSource | None:
    """The source of a state, or of a receipt. None: the key of a fence, of no source. Raises ValueError."""
    if raw == _FENCE:
        return None
    if raw[:1] == RECEIPT:
        # The source's state key follows, and after a NUL the hash of the request's key.
        raw = raw[1:].rpartition(b"\0")[0]
    kind, parts = raw[:1], raw[1:].decode().split("\0")
    if kind == b"s" and len(parts) == 2:
        return StoredSource(parts[0], None, parts[1])
    if kind == b"k" and len(parts) == 3:
        return StoredSource(parts[0], parts[1], parts[2])
    raise ValueError(f"state key {raw!r} cannot be decoded")


def stored_state(raw: bytes) -> StoredState:
    """Raises ValueError: another version, an unknown flag, or a length that the flags do not explain."""
    if raw[:1] != b"\x01":
        raise ValueError(f"state of version {raw[:1].hex()}; only version 01 is known")
    flags = raw[1] if len(raw) > 1 else 0
    end = _STATE.size + _HEARTBEAT_BYTES * bool(flags & _HEARTBEAT)
    is_long = len(raw) > end if flags & _TOKEN else len(raw) == end
    if flags > _RECORDED | _BASE | _HEARTBEAT | _TOKEN | _APPENDED or not is_long:
        raise ValueError(f"state of {len(raw)} bytes with flags {flags:02x}")
    raw[end:].decode()
    _, _, partition, topic_id, recorded, base, number, _ = _STATE.unpack_from(raw)
    if flags & _APPENDED and not number:
        raise ValueError(f"state of {len(raw)} bytes with flags {flags:02x} and no number of a transaction")
    return StoredState(topic_id, partition, recorded if flags & _RECORDED else None, base if flags & _BASE else None)
