"""Sums of rows and ranges of offsets: what two sides are compared by."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from logferry.ops.audit.digests.sums import ANY_OFFSET, ChunkLine, Ranges, Tally, sum_of, weight_of
from pydantic import TypeAdapter

# (source, seqno, offset, line number, text)
row = st.tuples(
    st.sampled_from(["a", "b"]), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.sampled_from([b"", b"x"])
)
spans = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5)


def tally(rows: list[tuple[str, int, int, int, bytes]]) -> Tally:
    found = Tally()
    for source_id, seqno, offset, number, text in rows:
        found += sum_of([ChunkLine(number, text, True)]).weighed(weight_of(source_id, seqno, offset))
    return found


@given(st.lists(row, max_size=6), st.lists(row, max_size=6), st.randoms(use_true_random=False))
def test_equal_exactly_when_the_rows_are_the_same(
    one: list[tuple[str, int, int, int, bytes]],
    other: list[tuple[str, int, int, int, bytes]],
    order: random.Random,
):
    """A row under another source, seqno, offset or number is another row, and one that is there twice counts twice."""
    assert (tally(one) == tally(other)) == (Counter(one) == Counter(other))
    shuffled = list(one)
    order.shuffle(shuffled)
    assert tally(shuffled) == tally(one)


@given(st.lists(row, max_size=6), st.lists(row, max_size=6))
def test_sums_are_added_and_stored(
    one: list[tuple[str, int, int, int, bytes]], other: list[tuple[str, int, int, int, bytes]]
):
    both = tally(one) + tally(other)
    assert both == tally(one + other)
    stored = TypeAdapter(Tally)
    assert stored.validate_json(stored.dump_json(both)) == both
    assert bool(both) == bool(one + other)


def test_weights():
    assert weight_of("a", 1, 2) % 2 == 1, "an even one would forget a bit"
    assert len({weight_of(*one) for one in [("a", 1, 2), ("a", 2, 1), ("b", 1, 2), ("a", 1, ANY_OFFSET)]}) == 4
    assert weight_of(None, 1, 5) == weight_of("a", None, 5) != weight_of(None, None, 6)


@given(spans, spans)
def test_ranges(one: list[tuple[int, int]], other: list[tuple[int, int]]):
    a, b = Ranges(), Ranges()
    for low, high in one:
        a.add(low, high)
    for low, high in other:
        b.add(low, high)
    left, both = a.minus(b), a.plus(b)
    within = a.within(5, 15)
    for number in range(25):
        assert (number in left) == (number in a and number not in b)
        assert (number in both) == (number in a or number in b)
        assert (number in within) == (number in a and 5 <= number < 15)
