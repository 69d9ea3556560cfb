"""Committed records out of a fetched partition. Pure: bytes and the list of aborted transactions in, records out.

Our own, because the position after the last record must be exact (control batches and aborted data take offsets,
ranges have holes), and because a compacted topic may hold a control batch without records, at which a stock
consumer stops for ever: a lane could never be replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords


class CorruptBatch(Exception):
    """A batch whose checksum is wrong."""


class KafkaRecord(NamedTuple):
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


class Fetched(NamedTuple):
    """What one fetch brought. ``next_offset``: where the next one starts, past everything that was skipped.

    ``last_stable``: the end for readers of committed records. ``log_start``: the first offset that is retained.
    """

    records: list[KafkaRecord]
    next_offset: int
    last_stable: int
    log_start: int

    @property
    def at_end(self) -> bool:
        return self.next_offset >= self.last_stable


def committed_records(
    raw: bytes, aborted: Iterable[tuple[int, int]], offset: int, stop_bytes: int | None = None
) -> tuple[list[KafkaRecord], int]:
    """The committed records from ``offset`` on, and the offset after them.

    ``aborted``: (producer id, first offset) of the aborted transactions in the range, as the fetch answered.
    ``stop_bytes``: stop after the record that reaches it; at least one record is returned if there is one.
    """
    pending = sorted(aborted, key=lambda transaction: transaction[1])
    open_aborts: set[int] = set()
    found: list[KafkaRecord] = []
    size, position = 0, offset
    batches = MemoryRecords(raw)
    while batches.has_next():
        batch = batches.next_batch()
        while pending and pending[0][1] <= batch.base_offset:
            open_aborts.add(pending.pop(0)[0])
        if batch.is_control_batch:
            # Most end a commit, and there are many; who reads the states of a lane passes them all.
            if batch.producer_id in open_aborts and _ends_abort(batch):
                open_aborts.discard(batch.producer_id)
            position = max(position, batch.next_offset)
            continue
        if batch.is_transactional and batch.producer_id in open_aborts:
            position = max(position, batch.next_offset)
            continue
        if not batch.validate_crc():
            raise CorruptBatch(f"the batch at offset {batch.base_offset} has a wrong checksum")
        for record in batch:
            if record.offset < offset:
                continue
            found.append(KafkaRecord(record.offset, record.timestamp, record.key, record.value, record.headers))
            size += len(record.value or b"") + len(record.key or b"")
            if stop_bytes is not None and size >= stop_bytes:
                return found, record.offset + 1
        position = max(position, batch.next_offset)
    return found, position


def _ends_abort(batch: Iterable[object]) -> bool:
    """A control batch that compaction emptied says nothing; it ends whatever its producer had open."""
    for record in batch:
        return bool(ControlRecord.parse(record.key) == ABORT_MARKER)  # type: ignore[attr-defined]
    return True
