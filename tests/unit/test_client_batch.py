"""Cutting bytes into chunks: nothing changed, whole lines, pieces of long lines marked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.client.batch import SMALLEST_CHUNK_BYTES, Batch, Limits, Piece, cut

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
def test_cut(data, mid_line, flush, expected):
    assert pieces(data, mid_line, flush) == expected


TEXT = st.lists(st.sampled_from([b"\n", b"a", b"\xff", b"bbbbbbb", b"c" * 20]), max_size=30).map(b"".join)


@given(TEXT, st.booleans(), st.booleans())
def test_the_pieces_are_the_data_and_only_an_unfinished_line_is_left(data, mid_line, flush):
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


@given(TEXT, st.booleans())
def test_split_says_where_a_chunk_begins_and_ends(data, flush):
    inside = False
    for text, split in pieces(data, flush=flush):
        begins_inside, inside = inside, not text.endswith(b"\n")
        expected = {(False, False): {None}, (False, True): {"first", "open"}, (True, True): {"middle"},
                    (True, False): {"last"}}[begins_inside, inside]  # fmt: skip
        assert split in expected
        assert len(text) <= (LIMITS.chunk_bytes if text.count(b"\n") > 1 else LIMITS.line_bytes)
        if split:
            assert text.count(b"\n") == (split == "last")


@given(TEXT, st.integers(0, 60))
def test_cutting_in_two_steps_gives_the_same_bytes(data, at):
    """What is cut of the beginning, and of the rest from there on, is all."""
    first = cut(data[:at], False, LIMITS, flush=True)
    position = first[-1].end if first else 0
    mid_line = position > 0 and data[:position][-1:] != b"\n"
    second = cut(data[position:], mid_line, LIMITS, flush=True)
    assert position + (second[-1].end if second else 0) == len(data)


def test_a_batch_says_positions_and_split():
    batch = Batch(100, b"aa\nbbb", (Piece(0, 3, None), Piece(3, 6, "open")), 7, {"host": "h"})
    assert batch.end == 106
    assert [tuple(chunk) for chunk in batch.chunks()] == [
        (103, 100, 7, {"host": "h"}, b"aa\n"),
        (106, 103, 7, {"host": "h", "split": "open"}, b"bbb"),
    ]


def test_limits_get_smaller_down_to_an_end():
    limits = Limits(256 << 10, 1 << 20, 2 << 20)
    steps = [limits]
    while steps[-1].smaller() != steps[-1]:
        steps.append(steps[-1].smaller())
        assert steps[-1].chunk_bytes <= steps[-1].line_bytes <= steps[-1].request_bytes
    assert steps[1] == Limits(256 << 10, 1 << 20, 1 << 20)
    assert steps[-1] == Limits(*[SMALLEST_CHUNK_BYTES] * 3)
    assert len(steps) < 20
