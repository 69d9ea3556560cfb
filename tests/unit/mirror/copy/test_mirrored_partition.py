"""A partition on its way: the position and the epoch that it is fetched by, and what makes it stop."""

from __future__ import annotations

import pytest
from logferry.gateway.contract.mirror_state import MirrorCheckpoint
from logferry.gateway.kafka import error_codes
from logferry.gateway.kafka.record_requests import FetchedPartition, FetchPosition
from logferry.mirror.copy.partition import MirroredPartition

from tests.unit.mirror.copy.test_batch_rewrite import control, encoded, record


def partition() -> MirroredPartition:
    return MirroredPartition(
        topic="dc1.t",
        number=0,
        dc="dc1",
        source_id=b"s" * 16,
        local_id=b"l" * 16,
        partition_bytes=1 << 20,
        checkpoint=None,
        clock_ms=lambda: 0,
    )


def found(
    records: bytes, end: int, *, aborted: list[tuple[int, int]] | None = None, diverged: int | None = None
) -> FetchedPartition:
    return FetchedPartition(b"s" * 16, 0, error_codes.NONE, end, end, 0, aborted or [], memoryview(records), diverged)


def test_the_epoch_is_that_of_the_last_batch_passed_be_it_a_control_batch() -> None:
    """A broker was started again between the records and their marker: the next fetch names the newer epoch."""
    moving = partition()
    raw = encoded(0, [record(0), record(1)], producer=7)
    marker = bytearray(control(2, 7, commit=True))
    marker[12:16] = (2).to_bytes(4)
    moving.take(found(raw + bytes(marker), 3))
    assert moving.wanted() == FetchPosition(3, 2, 1 << 20)


def test_the_epoch_of_what_was_aborted_counts_too() -> None:
    moving = partition()
    raw = encoded(0, [record(0), record(1)], producer=7, epoch=5)
    moving.take(found(raw, 3, aborted=[(7, 0)]))
    assert (moving.wanted(), list(moving.waiting)) == (FetchPosition(2, 5, 1 << 20), [])


def test_a_log_that_was_cut_back_stops_it_and_says_so_once() -> None:
    told: list[str] = []
    moving = partition()
    moving.on_stop = lambda p: told.append(p.stop.kind if p.stop else "")
    moving.take(found(b"", 0, diverged=0))
    assert (moving.state, told, moving.wanted()) == ("stopped", ["log-truncated"], None)


def test_what_is_drawn_takes_the_markers_behind_it_along() -> None:
    moving = partition()
    raw = encoded(0, [record(0), record(1)], producer=7)
    moving.take(found(raw + control(2, 7, commit=True), 3))
    moving.take_batches(1 << 20)
    assert moving.taken_to == (3, 0)


def test_a_late_marker_is_reported_after_the_records_before_it() -> None:
    told: list[int] = []
    moving = partition()
    moving.on_passed = lambda p: told.append(p.position)
    moving.take(found(encoded(0, [record(0), record(1)], producer=7), 2))
    [batch] = moving.take_batches(1 << 20)
    assert moving.taken_to == (2, 0)
    moving.take(found(control(2, 7, commit=True), 3))
    assert (told, moving.passed) == ([], None)  # what is under way is committed first
    moving.under_way = False
    moving.checkpoint = MirrorCheckpoint(b"s" * 16, b"l" * 16, 2, 2, batch.base, 0, batch.crc, batch.last_ms, 0, ())
    assert moving.passed == (3, 0)
    moving.take(found(control(3, 8, commit=False), 4))
    assert (told, moving.passed) == ([4], (4, 0))


@pytest.mark.parametrize("aborted", [False, True])
def test_what_waits_keeps_no_more_memory_than_is_counted(*, aborted: bool) -> None:
    """One answer holds small batches of this partition among large ones: of others, or of aborted transactions."""
    small = encoded(0, [record(0)])
    large = encoded(1, [(1, 1, None, bytes(1 << 20), [])], producer=7)
    raw = memoryview(small + large)
    moving = partition()
    if aborted:
        moving.take(found(bytes(raw), 3, aborted=[(7, 1)]))
    else:
        part = FetchedPartition(b"s" * 16, 0, error_codes.NONE, 1, 1, 0, [], raw[: len(small)], None)
        moving.take(part)
    kept = {id(batch.body.obj): len(memoryview(batch.body.obj)) for batch in moving.waiting}
    assert sum(kept.values()) <= 2 * moving.waiting_bytes


def test_a_batch_that_is_most_of_an_answer_is_not_copied() -> None:
    moving = partition()
    raw = encoded(0, [(0, 1, None, bytes(1 << 20), [])])
    moving.take(found(raw, 1))
    assert moving.waiting[0].body.obj is raw


def test_records_removed_before_the_first_commit_are_not_passed_in_silence() -> None:
    """Offsets 0 and 1 were fetched and nothing is committed; retention removed the next ones."""
    moving = partition()
    moving.take(found(encoded(0, [record(0), record(1)]), 9))
    moving.out_of_range(5, 9)
    assert moving.stop is not None
    assert (moving.stop.kind, moving.position) == ("records-removed", 2)
    assert "3 offsets from 2 on" in moving.stop.detail


def test_a_retry_before_the_first_commit_passes_nothing_over() -> None:
    """Offsets 0 and 1 were fetched, and Kafka here took nothing; when it does, retention has removed 0 to 4."""
    moving = partition()
    moving.take(found(encoded(0, [record(0), record(1)]), 2))
    moving.halt("target-unavailable", "it has no leader")
    moving.stop = None
    moving.rewind()
    moving.out_of_range(5, 9)
    assert moving.stop is not None
    assert (moving.stop.kind, moving.position) == ("records-removed", 0)
    assert "5 offsets from 0 on" in moving.stop.detail


def test_records_removed_from_a_log_that_was_empty_when_its_copy_began_are_missed() -> None:
    moving = partition()
    moving.take(found(b"", 0))
    moving.out_of_range(5, 9)
    assert moving.stop is not None
    assert moving.stop.kind == "records-removed"


def test_a_retry_begins_where_the_copy_began() -> None:
    moving = partition()
    moving.out_of_range(5, 9)
    moving.take(found(encoded(5, [record(5)]), 9))
    moving.rewind()
    assert (moving.stop, moving.position) == (None, 5)


def test_markers_and_aborted_records_before_the_first_commit_are_no_loss() -> None:
    moving = partition()
    moving.take(
        found(encoded(0, [record(0), record(1)], producer=7) + control(2, 7, commit=False), 3, aborted=[(7, 0)])
    )
    moving.rewind()
    moving.out_of_range(3, 3)
    assert (moving.stop, moving.position) == (None, 3)


def test_an_original_that_is_older_than_its_mirror_begins_at_its_first_record() -> None:
    moving = partition()
    for first in (5, 7):
        moving.out_of_range(first, 9)
        assert (moving.stop, moving.position) == (None, first)


def test_the_loss_is_counted_from_what_was_fetched() -> None:
    moving = partition()
    moving.checkpoint = MirrorCheckpoint(b"s" * 16, b"l" * 16, 2, 2, -1, -1, 0, 0, 0, ())
    moving.rewind()
    moving.take(found(encoded(2, [record(2), record(3)]), 9))
    moving.out_of_range(7, 9)
    assert moving.stop is not None
    assert "3 offsets from 4 on" in moving.stop.detail
