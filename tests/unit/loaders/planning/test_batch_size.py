"""How much a batch reads, and when a run ends: none is empty, none grows without proof, limits hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.loaders.planning.plan import BatchSizer, Limits

MIB = 1 << 20


def test_a_backlog_is_cut_by_what_was_seen():
    sizes = BatchSizer(max_records=50_000, batch_bytes=64 * MIB)
    assert sizes.next_offsets() == 256, "of chunks of 256 KiB, as long as nothing is known"
    sizes.saw(256, 256 * 64 * 1024)
    assert sizes.next_offsets() == 1024
    sizes.saw(1024, 1024 * 1024)
    assert sizes.next_offsets() == 64 * MIB // ((64 * 1024 + 1024) // 2)
    sizes.saw(10, 0)
    assert sizes.next_offsets() == 80, "one batch of little is no proof"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**12)), max_size=20), st.integers(1, 10**6))
def test_a_batch_is_never_empty_and_never_too_large(seen: list[tuple[int, int]], max_records: int):
    sizes = BatchSizer(max_records, 1 << 16)
    for offsets, size in seen:
        sizes.saw(offsets, size)
        assert 1 <= sizes.next_offsets() <= max_records


LIMITS = {
    "offsets": (Limits(offsets=100), "the limit of 100 records"),
    "bytes": (Limits(bytes=5000), "the limit of 5,000 bytes"),
    "seconds": (Limits(seconds=30), "the limit of 30 s"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits(case: str):
    limits, said = LIMITS[case]
    clock = [1000.0]
    sizes = BatchSizer(60, 1 << 20, limits, lambda: clock[0], started=1000.0, average=100)
    assert sizes.reached() is None
    assert sizes.next_offsets() == (50 if case == "bytes" else 60)
    sizes.saw(30, 3000)
    sizes.saw(30, 0)
    clock[0] += 20
    assert sizes.reached() is None
    assert sizes.next_offsets() == {"offsets": 40, "bytes": 40}.get(case, 60)
    sizes.saw(40, 2000)
    clock[0] += 10
    assert (sizes.reached() or "").startswith(said)
    assert sizes.next_offsets() >= 1


def test_a_stop_bounds_the_run():
    stopped: list[bool] = []
    sizes = BatchSizer(60, 1 << 20, is_stopped=lambda: bool(stopped))
    assert sizes.reached() is None
    stopped.append(True)
    assert sizes.reached() == "stopped"
