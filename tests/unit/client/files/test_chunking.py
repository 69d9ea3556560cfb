"""Cutting bytes into chunks: nothing changed, whole lines, pieces of long lines marked."""

from __future__ import annotations

import io
import re
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.client.files.chunking import (
    SMALLEST_CHUNK_BYTES,
    FileBatch,
    Limits,
    Piece,
    cut,
    is_inside,
    line_so_far,
    starts_record,
)
from logferry.gateway.contract.chunk import Chunk

LIMITS = Limits(chunk_bytes=8, line_bytes=16, request_bytes=64)


def pieces(data: bytes, mid_line: bool = False, flush: bool = False) -> list[tuple[bytes, str | None]]:
    return [(data[p.begin : p.end], p.split) for p in cut(data, mid_line, LIMITS, flush)]


@pytest.mark.parametrize(
    ("data", "mid_line", "flush", "expected"),
    [
        (b"", False, True, []),
        (b"a\nb\nc\n", False, False, [(b"a\nb\nc\n", None)]),
        (b"aaa\nbbb\nccc\n", False, False, [(b"aaa\nbbb\n", None), (b"ccc\n", None)]),
        (b"aaa\nbb", False, False, [(b"aaa\n", None)]),
        (b"aaa\nbb", False, True, [(b"aaa\n", None), (b"bb", "open")]),
        (b"aaaaaaaaaa\nb\n", False, False, [(b"aaaaaaaaaa\n", None), (b"b\n", None)]),  # the chunk grows
        (b"a" * 15 + b"\n", False, False, [(b"a" * 15 + b"\n", None)]),
        (b"a" * 15, False, False, []),
        (b"a" * 16, False, False, [(b"a" * 16, "first")]),
        (b"a" * 16 + b"\n", False, False, [(b"a" * 16, "first"), (b"\n", "last")]),
        (b"a" * 40 + b"\nb\n", False, False,
         [(b"a" * 16, "first"), (b"a" * 16, "middle"), (b"a" * 8 + b"\n", "last"), (b"b\n", None)]),
        (b"rest\nb\n", True, False, [(b"rest\n", "last"), (b"b\n", None)]),
        (b"rest", True, False, []),
        (b"rest", True, True, [(b"rest", "middle")]),
        (b"a\r\nb\r\n", False, False, [(b"a\r\nb\r\n", None)]),
        (b"\n\n\n", False, False, [(b"\n\n\n", None)]),
        (b"\xff\x00\n", False, False, [(b"\xff\x00\n", None)]),
    ],
)  # fmt: skip
def test_cut(data: bytes, mid_line: bool, flush: bool, expected: Any) -> None:
    assert pieces(data, mid_line, flush) == expected


TEXT = st.lists(st.sampled_from([b"\n", b"a", b"\xff", b"bbbbbbb", b"c" * 20]), max_size=30).map(b"".join)


@given(TEXT, st.booleans(), st.booleans())
def test_the_pieces_are_the_data_and_only_an_unfinished_line_is_left(data: Any, mid_line: Any, flush: Any) -> None:
    cuts = cut(data, mid_line, LIMITS, flush)
    position = 0
    for piece in cuts:
        assert piece.begin == position
        assert piece.end > piece.begin
        position = piece.end
    rest = data[position:]
    assert b"\n" not in rest
    assert len(rest) < LIMITS.line_bytes
    assert not (flush and rest)


# (it begins inside a line, it ends inside one) → how it may be marked
SPLITS: dict[tuple[bool, bool], set[str | None]] = {
    (False, False): {None},
    (False, True): {"first", "open"},
    (True, True): {"middle"},
    (True, False): {"last"},
}


@given(TEXT, st.booleans())
def test_split_says_where_a_chunk_begins_and_ends(data: Any, flush: Any) -> None:
    inside = False
    for text, split in pieces(data, flush=flush):
        begins_inside, inside = inside, not text.endswith(b"\n")
        assert split in SPLITS[begins_inside, inside]
        assert len(text) <= (LIMITS.chunk_bytes if text.count(b"\n") > 1 else LIMITS.line_bytes)
        if split:
            assert text.count(b"\n") == (split == "last")


@given(TEXT, st.integers(0, 60))
def test_cutting_in_two_steps_gives_the_same_bytes(data: Any, at: Any) -> None:
    """What is cut of the beginning, and of the rest from there on, is all."""
    first = cut(data[:at], False, LIMITS, flush=True)
    position = first[-1].end if first else 0
    mid_line = position > 0 and data[:position][-1:] != b"\n"
    second = cut(data[position:], mid_line, LIMITS, flush=True)
    assert position + (second[-1].end if second else 0) == len(data)


def sent(batch: FileBatch, skips: bool = False) -> list[Chunk]:
    """The chunks of its body."""
    rows = msgpack.Unpacker(io.BytesIO(b"".join(batch.body(skips))))
    return [Chunk(row[0], row[1], row[2], row[3] or {}, row[4]) for row in rows]


def test_the_first_chunk_behind_what_is_elsewhere_has_no_prev_and_says_where_it_begins() -> None:
    batch = FileBatch(100, b"aa\nbbb\n", (Piece(0, 3, None), Piece(3, 7, None)), 7, {"host": "h"})
    assert [(chunk.seqno, chunk.prev, chunk.attributes) for chunk in sent(batch, skips=True)] == [
        (103, None, {"host": "h", "resumed_at": "100"}),
        (107, 103, {"host": "h"}),
    ]


def test_a_batch_says_positions_and_split() -> None:
    batch = FileBatch(100, b"aa\nbbb", (Piece(0, 3, None), Piece(3, 6, "open")), 7, {"host": "h"})
    assert batch.end == 106
    assert [tuple(chunk) for chunk in sent(batch)] == [
        (103, 100, 7, {"host": "h"}, b"aa\n"),
        (106, 103, 7, {"host": "h", "split": "open"}, b"bbb"),
    ]


def test_limits_get_smaller_down_to_an_end() -> None:
    limits = Limits(256 << 10, 1 << 20, 2 << 20)
    steps = [limits]
    while steps[-1].smaller() != steps[-1]:
        steps.append(steps[-1].smaller())
        assert steps[-1].chunk_bytes <= steps[-1].line_bytes <= steps[-1].request_bytes
    assert steps[1] == Limits(256 << 10, 1 << 20, 1 << 20)
    assert steps[-1] == Limits(SMALLEST_CHUNK_BYTES, SMALLEST_CHUNK_BYTES, SMALLEST_CHUNK_BYTES)
    assert len(steps) < 20


RECORDS = LIMITS._replace(record_start=starts_record(r"\d"))


def records(data: bytes, before: bytes = b"", flush: bool = False) -> list[tuple[bytes, str | None]]:
    cuts = cut(data, is_inside(before, data, RECORDS), RECORDS, flush)
    return [(data[p.begin : p.end], p.split) for p in cuts]


@pytest.mark.parametrize(
    ("data", "before", "flush", "expected"),
    [
        (b"1\n a\n2\n", b"", False, [(b"1\n a\n", None)]),  # the second may continue
        (b"1\n a\n2\n", b"", True, [(b"1\n a\n", None), (b"2\n", None)]),
        (b"1\n2\n3\n4\n5\n6\n", b"", False, [(b"1\n2\n3\n4\n", None), (b"5\n", None)]),
        (b"1\n a\n2\n b\n3\n", b"", False, [(b"1\n a\n", None), (b"2\n b\n", None)]),
        (b"1\n a\n b\n c\n2\n", b"", False, [(b"1\n a\n b\n c\n", None)]),  # the chunk grows with it
        (b"1\n" + b" a\n" * 6 + b"2\n", b"", False, [(b"1\n" + b" a\n" * 4, "first"), (b" a\n" * 2, "last")]),
        (b"1\n" + b" a\n" * 12, b"", True,
         [(b"1\n" + b" a\n" * 4, "first"), (b" a\n" * 5, "middle"), (b" a\n" * 3, "last")]),
        (b" a\n1\n2\n", b"", False, [(b" a\n1\n", None)]),  # what is before the first record is one
        (b" a\n b\n1\n2\n", b"0\n", False, [(b" a\n b\n", "last"), (b"1\n", None)]),
        (b" a\n", b"0\n", False, []),
        (b" a\n", b"0\n", True, [(b" a\n", "last")]),
        (b"tail\n1\n2\n", b"0\n ", False, [(b"tail\n", "last"), (b"1\n", None)]),
        (b"1\n a", b"", True, [(b"1\n a", "open")]),
        (b"1\n ", b"", False, []),
        (b"1\n2", b"", False, []),  # "2" may be the beginning of a line that does not fit
        (b"x" * 40, b"", False, [(b"x" * 16, "first"), (b"x" * 16, "middle")]),
    ],
)  # fmt: skip
def test_records_stay_together(data: bytes, before: bytes, flush: bool, expected: Any) -> None:
    assert records(data, before, flush) == expected


RECORD_TEXT = st.lists(st.sampled_from([b"\n", b"1", b" a\n", b"bbb", b"2\n", b"c" * 20]), max_size=30).map(b"".join)


@given(RECORD_TEXT, st.sampled_from([b"", b"0\n", b"0"]), st.booleans())
def test_the_pieces_of_records_are_the_data(data: Any, before: Any, flush: Any) -> None:
    done = records(data, before, flush)
    assert data.startswith(b"".join(text for text, _ in done))
    rest = data[sum(len(text) for text, _ in done) :]
    assert len(rest) <= RECORDS.line_bytes
    assert not (flush and rest)
    for text, split in done:
        assert len(text) <= RECORDS.line_bytes
        if split is None:
            assert text.endswith(b"\n")
    for (text, _), (after, split) in zip(done, done[1:]):
        if split is None:  # it begins a record, and the one before was whole
            assert text.endswith(b"\n")
            assert re.match(rb"\d", after)


@given(RECORD_TEXT, st.integers(0, 60))
def test_records_that_come_in_two_parts_are_the_same_when_the_second_is_waited_for(data: Any, at: Any) -> None:
    first = records(data[:at])
    position = sum(len(text) for text, _ in first)
    rest = records(data[position:], data[:position], flush=True)
    assert b"".join(text for text, _ in first + rest) == data
    assert RECORDS.record_start is not None
    starts = {found.start() for found in RECORDS.record_start.finditer(data)}
    begins = [0]
    for text, _ in first + rest:
        begins.append(begins[-1] + len(text))
    for begin, (_, split) in zip(begins, first + rest):
        assert split is not None or begin == 0 or begin in starts


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no regular expression"):
        starts_record("(")


CUTTING = LIMITS._replace(cut_lines=True)


@pytest.mark.parametrize(
    ("data", "so_far", "expected"),
    [
        (b"a" * 16 + b"\nb\n", 0, [("first", None, b"a" * 16), ("last", None, b"\n"), (None, None, b"b\n")]),
        (b"a" * 40 + b"\nb\n", 0,
         [("first", None, b"a" * 16), ("middle", "16", b""), ("last", "8", b"\n"), (None, None, b"b\n")]),
        (b"a" * 20 + b"\nb\n", 16, [("middle", "16", b""), ("last", "4", b"\n"), (None, None, b"b\n")]),
        (b"a" * 4 + b"\nb\n", 15, [("last", None, b"aaaa\n"), (None, None, b"b\n")]),
    ],
)  # fmt: skip
def test_long_lines_can_be_cut(data: bytes, so_far: int, expected: Any) -> None:
    pieces = cut(data, so_far > 0, CUTTING, flush=False, line_so_far=so_far)
    chunks = sent(FileBatch(100, data, tuple(pieces), 7, {}))
    assert [(c.attributes.get("split"), c.attributes.get("cut"), c.data) for c in chunks] == expected
    assert [c.prev for c in chunks] == [100, *[c.seqno for c in chunks[:-1]]]
    assert chunks[-1].seqno == 100 + len(data)


@pytest.mark.parametrize(
    ("before", "lines", "in_records"),
    [(b"", 0, 0), (b"a\nbc", 2, 4), (b"1\nbc", 2, 4), (b"x\n1\n2\n a\nbc", 2, 7), (b"abc", 3, 3)],
)
def test_how_much_of_a_line_was_before(before: bytes, lines: int, in_records: int) -> None:
    assert (line_so_far(before, LIMITS), line_so_far(before, RECORDS)) == (lines, in_records)
