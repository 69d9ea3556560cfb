"""Kafka's record batches (format version 2, KIP-98) as a fetch returns them → committed records. Pure.

Written from the format for the audit alone: it judges the records of the gateway, whose own decoder must not decide.
Offsets have holes: control batches and aborted data take offsets, and compaction removes records. The position after
the last batch counts, not that of the last record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import cramjam
from crc32c import crc32c

# Base offset, length of the rest, leader epoch, format version, CRC-32C of all that follows it.
_HEAD: Final = struct.Struct(">qiibI")
# Attributes, last offset delta, first and last timestamp, producer id and epoch, base sequence, number of records.
_TAIL: Final = struct.Struct(">hiqqqhii")
_BEFORE_LENGTH: Final = 12
_RECORDS: Final = _HEAD.size + _TAIL.size
_CODEC, _APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20
# The key of a control record: version and type.
_MARKER: Final = struct.Struct(">hh")
_ABORT: Final = 0
_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_BYTES: Final = 16


class CorruptRecords(ValueError):
    """A batch whose checksum or records are damaged. Kafka returns the same bytes again."""


class StoredRecord(NamedTuple):
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class StoredRecords(NamedTuple):
    """The committed records of one fetch. ``next_offset``: after the last batch. ``last_stable``: the end for readers
    of committed records."""

    records: list[StoredRecord]
    next_offset: int
    last_stable: int


def committed_records(
    raw: bytes, aborted: Iterable[tuple[int, int]], offset: int
) -> tuple[list[StoredRecord], int, CorruptRecords | None]:
    """The committed records from ``offset`` on, the offset after them, and the damage that ends them, if any.

    ``aborted``: (producer id, first offset) of the aborted transactions in the range, as the fetch answered. A batch
    that is cut off at the end is the beginning of the next fetch.
    """
    pending = sorted(aborted, key=lambda transaction: transaction[1], reverse=True)
    undone: set[int] = set()
    found: list[StoredRecord] = []
    at, position = 0, offset
    while at + _RECORDS <= len(raw):
        base, length, _, version, checksum = _HEAD.unpack_from(raw, at)
        end = at + _BEFORE_LENGTH + length
        if at and end > len(raw):
            break  # Kafka cuts off any batch but the first
        try:
            if version != 2 or not at + _RECORDS <= end <= len(raw):
                raise CorruptRecords(f"format version {version}, length {length}")
            attributes, last_delta, first_ms, last_ms, producer, _, _, count = _TAIL.unpack_from(raw, at + _HEAD.size)
            while pending and pending[-1][1] <= base + last_delta:
                undone.add(pending.pop()[0])
            times = (last_ms, 0) if attributes & _APPEND_TIME else (first_ms, 1)
            if attributes & _CONTROL:
                if producer in undone and _ends_abort(raw[at + _RECORDS : end], count):
                    undone.discard(producer)
            elif not (attributes & _TRANSACTIONAL and producer in undone) and base + last_delta >= offset:
                # Its checksum covers what follows it.
                if crc32c(memoryview(raw)[at + _HEAD.size : end]) != checksum:
                    raise CorruptRecords("has a wrong checksum")
                body = _decompressed(attributes & _CODEC, raw[at + _RECORDS : end])
                for record in _decoded(body, count, base, *times):
                    if record.offset >= offset:
                        found.append(record)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - each codec has errors of its own
            what = str(error) if isinstance(error, CorruptRecords) else f"cannot be decoded: {error!r}"
            return found, position, CorruptRecords(f"the batch at offset {base}: {what}")
        position = max(position, base + last_delta + 1)
        at = end
    return found, position, None


def _ends_abort(body: bytes, count: int) -> bool:
    """A control batch that compaction emptied ends whatever its producer had open."""
    for record in _decoded(body, count, 0, 0, 0):
        return bool(_MARKER.unpack_from(record.key or b"")[1] == _ABORT)
    return True


def _decompressed(codec: int, body: bytes) -> bytes:
    if codec == 0:
        return body
    if codec == 1:
        return bytes(cramjam.gzip.decompress(body))
    if codec == 2:
        return _snappy(body)
    if codec == 3:
        return bytes(cramjam.lz4.decompress(body))
    if codec == 4:
        return bytes(cramjam.zstd.decompress(body))
    raise CorruptRecords(f"codec {codec} is not known")


def _snappy(body: bytes) -> bytes:
    """Java's clients write blocks, each with its size, after a header of their own; others one block."""
    if not body.startswith(_XERIAL):
        return bytes(cramjam.snappy.decompress_raw(body))
    parts, at = [], _XERIAL_BYTES
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        parts.append(bytes(cramjam.snappy.decompress_raw(body[at + 4 : at + 4 + size])))
        at += 4 + size
    return b"".join(parts)


def _decoded(body: bytes, count: int, base: int, time_ms: int, times: int) -> Iterator[StoredRecord]:
    """``times``: 0 where all records have the time of the batch, else 1."""
    at = 0
    for _ in range(count):
        length, at = _number(body, at)
        end = at + length
        delta_ms, at = _number(body, at + 1)
        delta, at = _number(body, at)
        key, at = _bytes(body, at)
        value, at = _bytes(body, at)
        many, at = _number(body, at)
        headers = []
        for _ in range(many):
            name, at = _bytes(body, at)
            content, at = _bytes(body, at)
            headers.append(((name or b"").decode("utf-8", "replace"), content))
        if at != end or end > len(body):
            raise CorruptRecords(f"a record ends at byte {at}, not at {end}")
        yield StoredRecord(base + delta, time_ms + delta_ms * times, key, value, headers)
    if at != len(body):
        raise CorruptRecords(f"{len(body) - at} bytes follow its last record")


def _number(raw: bytes, at: int) -> tuple[int, int]:
    """A signed number in zigzag order, seven bits a byte, the low ones first; and the position after it."""
    byte = raw[at]
    at += 1
    value = byte & 0x7F
    shift = 7
    while byte & 0x80:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    return (value >> 1) ^ -(value & 1), at


def _bytes(raw: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = _number(raw, at)
    if size < 0:
        return None, at
    if at + size > len(raw):
        raise CorruptRecords("a field is longer than its batch")
    return raw[at : at + size], at + size
