"""A partition on its way: the position and the epoch that it is fetched by, and what makes it stand still."""

from __future__ import annotations

from logferry.gateway.contract.offset_history import Progress
from logferry.gateway.kafka.fetch_request import NO_ERROR, Found, Wanted
from logferry.mirror.copy.partition import MirroredPartition
from unit.test_moving import control, encoded, record


def partition() -> MirroredPartition:
    return MirroredPartition(
        topic="dc1.t",
        number=0,
        dc="dc1",
        source_id=b"s" * 16,
        local_id=b"l" * 16,
        partition_bytes=1 << 20,
        progress=None,
    )


def found(
    records: bytes, end: int, *, aborted: list[tuple[int, int]] | None = None, diverged: int | None = None
) -> Found:
    return Found(b"s" * 16, 0, NO_ERROR, end, end, 0, aborted or [], memoryview(records), diverged)


def test_the_epoch_is_that_of_the_last_batch_passed_be_it_a_control_batch() -> None:
    """A broker was started again between the records and their marker: the next fetch names the newer epoch."""
    moving = partition()
    raw = encoded(0, [record(0), record(1)], producer=7)
    marker = bytearray(control(2, 7, commit=True))
    marker[12:16] = (2).to_bytes(4)
    moving.take(found(raw + bytes(marker), 3))
    assert moving.wanted() == Wanted(3, 2, 1 << 20)


def test_the_epoch_of_what_was_aborted_counts_too() -> None:
    moving = partition()
    raw = encoded(0, [record(0), record(1)], producer=7, epoch=5)
    moving.take(found(raw, 3, aborted=[(7, 0)]))
    assert (moving.wanted(), list(moving.waiting)) == (Wanted(2, 5, 1 << 20), [])


def test_a_log_that_was_cut_back_stops_it_and_says_so_once() -> None:
    told: list[str] = []
    moving = partition()
    moving.on_stop = lambda p: told.append(p.stop.kind if p.stop else "")
    moving.take(found(b"", 0, diverged=0))
    assert (moving.state, told, moving.wanted()) == ("stopped", ["cut-back"], None)


def test_what_is_drawn_takes_the_markers_behind_it_along() -> None:
    moving = partition()
    raw = encoded(0, [record(0), record(1)], producer=7)
    moving.take(found(raw + control(2, 7, commit=True), 3))
    moving.draw(1 << 20)
    assert moving.drawn_to == (3, 0)


def test_a_marker_that_comes_later_is_told_of_once_there_is_something_before_it() -> None:
    told: list[int] = []
    moving = partition()
    moving.on_passed = lambda p: told.append(p.position)
    moving.take(found(encoded(0, [record(0), record(1)], producer=7), 2))
    [batch] = moving.draw(1 << 20)
    assert moving.drawn_to == (2, 0)
    moving.take(found(control(2, 7, commit=True), 3))
    assert (told, moving.passed) == ([], None)  # what is under way is committed first
    moving.under_way = False
    moving.progress = Progress(b"s" * 16, b"l" * 16, 2, 2, batch.base, 0, batch.crc, batch.last_ms, 0, ())
    assert moving.passed == (3, 0)
    moving.take(found(control(3, 8, commit=False), 4))
    assert (told, moving.passed) == ([4], (4, 0))
