"""A replay passes the markers of old transactions by thousands: what it finds is the same as without that."""

from __future__ import annotations

import random
import time

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.kafka.record_batch import (
    BATCH_HEAD,
    BATCH_TAIL,
    CODECS,
    HEADER_BYTES,
    Stamp,
    batches,
    committed_records,
    without_markers,
)

_COMMIT = bytes([32, 0, 0, 0, 8, 0, 0, 0, 1, 12, 0, 0, 0, 0, 0, 1, 0])


def at_offset(offset: int, batch: bytes) -> bytes:
    return offset.to_bytes(8, "big") + batch[8:]


def marker(offset: int, *, is_empty: bool = False) -> bytes:
    """Of a commit. Compaction may leave one without its record."""
    body = b"" if is_empty else _COMMIT
    tail = BATCH_TAIL.pack(0x30, 0, 1, 1, 7, 1, -1, not is_empty)
    checksum = crc32c(body, crc32c(tail))
    return BATCH_HEAD.pack(offset, HEADER_BYTES - 12 + len(body), 1, 2, checksum) + tail + body


def states(offset: int, count: int) -> bytes:
    [batch] = batches([(b"k%d" % n, b"v" * n, []) for n in range(count)], 1 << 20, 5, CODECS["none"])
    return at_offset(offset, b"".join(batch.pieces(Stamp(7, 1, 0))))


KINDS = st.sampled_from(["marker", "empty", "states", "hole"])


@given(st.lists(st.tuples(KINDS, st.integers(1, 200)), max_size=12), st.integers(0, 60), st.integers(0, 100))
def test_the_records_and_the_next_offset_are_the_same(runs: list[tuple[str, int]], cut: int, start: int) -> None:
    offset, raw = 0, b""
    for kind, count in runs:
        if kind == "states":
            raw += states(offset, min(count, 20))
            offset += min(count, 20)
        elif kind == "hole":
            offset += count
        else:
            raw += b"".join(marker(offset + n, is_empty=kind == "empty") for n in range(count))
            offset += count
    raw = raw[: len(raw) - cut] if cut else raw
    # One that was aborted behind all of it makes it pass each marker by itself.
    one_by_one = committed_records(raw, [(99, 1 << 40)], start)
    assert committed_records(raw, [], start) == one_by_one


def test_a_run_of_markers_is_left_out_whole() -> None:
    raw = states(0, 3) + b"".join(map(marker, range(3, 5003))) + states(5003, 2)
    kept, passed = without_markers(raw, 0)
    assert (kept, passed) == (states(0, 3) + states(5003, 2), 5003)
    assert without_markers(kept, 0) == (kept, 0)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_batches_end(seed: int) -> None:
    rng = random.Random(seed)
    raw = b"".join(map(marker, range(50)))
    damaged = bytearray(raw)
    for _ in range(20):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    without_markers(bytes(damaged), 0)
    without_markers(rng.randbytes(5000), 0)


def test_many_markers_cost_a_fraction_of_what_each_by_itself_costs() -> None:
    raw = b"".join(map(marker, range(20_000)))

    def took_s(aborted: list[tuple[int, int]]) -> float:
        began_s = time.process_time()
        committed_records(raw, aborted, 0)
        return time.process_time() - began_s

    assert min(took_s([]) for _ in range(5)) < 0.6 * min(took_s([(99, 1 << 40)]) for _ in range(5))
