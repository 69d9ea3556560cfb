"""Lines, their sums and the account between log and table: equal multisets settle, everything else does not."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.ops.audit.digests.sums import (
    ChunkAccount,
    ChunkLine,
    count_lines,
    first_difference,
    identity_of,
    lines_of,
    sum_of,
)

chunks = st.lists(st.sampled_from([b"", b"a", b"bc", b"\r", b"\xff\xfe", b"\xc3\xa9"]), max_size=8).flatmap(
    lambda parts: st.sampled_from([b"\n".join(parts), b"\n".join(parts) + b"\n"])
)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\n", [ChunkLine(0, b"a", True)]),
        (b"a", [ChunkLine(0, b"a", False)]),
        (b"a\r\n\nb", [ChunkLine(0, b"a\r", True), ChunkLine(1, b"", True), ChunkLine(2, b"b", False)]),
        (b"\n", [ChunkLine(0, b"", True)]),
    ],
)
def test_lines_of_a_chunk(data: bytes, lines: list[ChunkLine]):
    assert lines_of(data) == lines


@given(chunks)
def test_lines_are_the_chunk(data: bytes):
    lines = lines_of(data)
    assert b"".join(line.text + b"\n" * line.newline for line in lines) == data
    assert count_lines(data) == len(lines)


@given(chunks, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(data: bytes, order: random.Random):
    rows = lines_of(data)
    order.shuffle(rows)
    assert sum_of(rows) == sum_of(lines_of(data))


@given(chunks, st.lists(st.builds(ChunkLine, st.integers(0, 3), st.sampled_from([b"", b"a", b"bc"]), st.booleans())))
def test_an_account_settles_exactly_when_rows_and_lines_are_the_same(data: bytes, rows: list[ChunkLine]):
    account = ChunkAccount()
    account.expect(5, 1, sum_of(lines_of(data)))
    assert account.found(5, 1, sum_of(rows))
    assert (not list(account.unsettled())) == (Counter(rows) == Counter(lines_of(data)))


def test_rows_may_come_in_parts_and_chunks_in_any_order():
    account = ChunkAccount()
    one, two = lines_of(b"a\nb\nc\n"), lines_of(b"d\n")
    account.expect(3, 30, sum_of(one))
    account.expect(9, 90, sum_of(two))
    assert account.found(9, 90, sum_of(two))
    assert list(account.unsettled()) == [(3, 3)]
    for row in reversed(one):
        assert account.found(3, 30, sum_of([row]))
    assert list(account.unsettled()) == []


def test_rows_under_another_identity_do_not_settle():
    account = ChunkAccount()
    account.expect(3, identity_of("web1", 10), sum_of(lines_of(b"a\n")))
    assert account.found(3, identity_of("web1", 11), sum_of(lines_of(b"a\n")))
    assert list(account.unsettled()) == [(3, 0)]


@pytest.mark.parametrize("offset", [0, 2, 4])
def test_rows_at_an_offset_without_a_chunk(offset: int):
    account = ChunkAccount()
    account.expect(1, 1, sum_of(lines_of(b"a")))
    account.expect(3, 1, sum_of(lines_of(b"a")))
    assert not account.found(offset, 1, sum_of(lines_of(b"a")))
    assert list(account.unsettled()) == [(1, 1), (3, 1)]


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_first_difference(one: bytes, other: bytes):
    at = first_difference(one, other)
    assert one[:at] == other[:at]
    assert one[at : at + 1] != other[at : at + 1] or at == len(one) == len(other)
